r"""What a reply states: the one place that finds an answer in a text, for rewards, benchmarks and `skyrl grade`.

Reasoning is dropped first, then tool calls and code fences. In what is left the first of these forms that is there
counts, and of one form the last: `<answer>` tags, a box, `####`, an answer line ("Answer: 5", "the answer is 5").
An answer may hold a later form (`#### \boxed{18}`), and loses its markup. Every step takes time in proportion to the
text: patterns look at one line, and repeat nothing without a bound.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nanoskyrl.envs.actions import final_answer, words_of

Marks = Sequence[Sequence[str]]
REASONING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
)
"""What opens and closes reasoning, unless a setting says otherwise."""

TAGS, BOX, HASHES, LINE, LETTER, WHOLE = "tags", "box", "####", "answer line", "letter", "whole text"
FORMS = (TAGS, BOX, HASHES, LINE)
"""In the order in which they count."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,5}(?:\{|(?<=\s)([^\s{}$\\]+))")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_HEADING = re.compile(
    r"\W*(?:step|solution|explanation|analysis|conclusion|part|case|calculation|verification|check|given|problem|"
    r"question|approach|summary|results?|note|reasoning|(?:the )?(?:final |correct )?answer)\b",
    re.IGNORECASE,
)
_NAMES = (
    "answer|ans|antwort|réponse|reponse|respuesta|resposta|risposta|ответ|答案|答え|答|回答|解答|정답|답|उत्तर|الجواب|"
    "الإجابة|jibu|คำตอบ|উত্তর|సమాధానం|đáp án|jawaban|cevap|odpowiedź|odpověď|antwoord|svar|vastaus|απάντηση"
)
_ADJECTIVES = (
    r"(?:(?:the|my|our|so|thus|hence|therefore|and|final|exact|correct|right|numerical|short|la|die|der|a|最终|最終|"
    r"окончательный|endgültige),?\s{0,3}){0,5}"
)
_TAIL = r"(?:\s+(?:finale?|final|correcta?|correcte))?"
_LINE = re.compile(
    rf"[\s*_#>•\-]{{0,12}}{_ADJECTIVES}(?:{_NAMES}){_TAIL}(?:\s?\([^()]{{0,40}}\))?[\s*_]{{0,8}}(?:[:：=]|\s[—–-]\s|(\bis\b):?)(.*)",
    re.IGNORECASE,
)
_TITLE = re.compile(
    rf"[\s*_#>]{{0,12}}{_ADJECTIVES}(?:{_NAMES}){_TAIL}[\s*_]{{0,8}}[:：]?[\s*_]{{0,8}}$", re.IGNORECASE
)
_SAID = re.compile(
    r"\b(?:(?:the|my|our|your|its|final|correct|exact|right|numerical)\s{1,3}){1,3}answer"
    r"(?:\s(?:to|for|of|in)\b[^.:\n]{0,80}?)?[*_]{0,3}\s{0,3}(?:\b(?:is|are|was|will be|would be|should be|must be|"
    r"equals)\b|=|:)(?:\s{0,3}(?:then|thus|therefore|simply|clearly|indeed|exactly|just|option|choice)\b,?)?"
    r"\s{0,3}[:：]?|"
    rf"\b(?:{_NAMES})\s?[:：=]|(?:{_NAMES}){_TAIL}\s{{0,3}}(?:是|为|為|は|은|는|est|es|ist|lautet|é|è|jest|är|er|adalah|هي|هو|คือ)(?![a-zà-ÿ])\s{{0,3}}[:：]?",
    re.IGNORECASE,
)
_LED = re.compile(
    r"\s{0,3}(?:then|thus|therefore|hence|simply|clearly|indeed|exactly|just|so|approximately|about)\b[,:]?\s",
    re.IGNORECASE,
)
_NO_STATEMENT = re.compile(
    r"\W*(?:correct|right|wrong|incorrect|found|obtained|given|shown|calculated|computed|derived|based|as follows|"
    r"verified|consistent|reasonable|confirmed|below|above|in the)\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[\w)}$\]%°*]{2})[.。](?=\s|$)|。|(?<=[\d$)}])[.](?=\s|$)")
_ABBREVIATED = re.compile(r"\b(?:st|mr|mrs|ms|dr|jr|sr|vs|no|mt|ft|prof|gen|col|sgt|inc|co)$", re.IGNORECASE)
_REASON = re.compile(r",\s{1,3}(?:as|so|since|because|which|where|hence|thus)\s|\s(?:because|since)\s", re.IGNORECASE)
_MARKUP = ("**", "__", "*", "_", "`", '"', "“", "”", "$$", "$")
_BOLD = re.compile(r"(?<![\w)}])\*\*(?=\S)([^*\n]{1,200})(?<=\S)\*\*(?![\w({])")
_PAIRS = ((r"\(", r"\)"), (r"\[", r"\]"))
_PLAIN = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
_WRAPPER = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|textsf|texttt|textrm|bf|rm)\s*\{([^{}]*)\}")

_CHOICE = re.compile(
    r"\W{0,8}(?:(?:the\s|my\s)?(?:final\s|correct\s|right\s|best\s)?(?:answer|option|choice|letter)(?:\sis\b)?\s?[:：=]?\s?){0,3}"
    r"\W{0,8}?([A-Za-z])(?![A-Za-z0-9'’])\W{0,3}?(?:(?P<end>\s*$)|\s?(?P<mark>[.):：\]\-–—,;*/]+)\s*(?P<text>.*)|\s+(?P<word>.*))$",
    re.DOTALL | re.IGNORECASE,
)
_MORE = re.compile(r"\W*(?:(?:and|or|und|oder|et|y)\W{1,4})?\(?[A-Za-z]\)?(?![\w'’])", re.IGNORECASE)
_ONLY_LETTERS = re.compile(r"(?:[\W_]{0,4}(?:and|or)?[\W_]{0,4}[A-J](?![\w'’])){1,10}\W*")
_AFTER = re.compile(r"(?:is|because|since|as|which|seems|would|must|for)\b|\W*$", re.IGNORECASE)
_NAMED = re.compile(
    r"\b(?:choice|option)(?:\sis)?[\s:：=*_$\"'`(\[{\\]{0,12}(?:(?:text|mathrm|boxed)\{\(?)?([A-Z])(?![\w'’])|"
    r"(?<![\w'’])([A-Z])[)*]{0,3}\s(?:is|must be|seems)\s(?:the\s)?(?:only\s)?(?:correct|right|best)\b"
)
MAX_LINES = 2000
"""Of a reply, from its end, that are looked at for answer lines."""
MAX_LINE = 2000
"""Characters of a line that are looked at."""


@dataclass(frozen=True, slots=True)
class Stated:
    """An answer as a reply states it."""

    text: str
    """Without markup; empty where nothing is between the tags."""
    form: str
    """Which form it has: one of FORMS, or `letter`, or `whole text`."""


def without_reasoning(reply: str, marks: Marks = REASONING) -> str:
    """Return a reply without what was thought: all up to the last closing mark, and from an opening one left open.

    The opening mark may be in the prompt, so a closing one alone ends reasoning, too.
    """
    end = 0
    for _, closing in marks:
        if (place := reply.rfind(closing)) >= 0:
            end = max(end, place + len(closing))
    reply = reply[end:]
    for opening, _ in marks:
        if (place := reply.find(opening)) >= 0:
            reply = reply[:place]
    return reply


def stated(reply: str, forms: Sequence[str] = FORMS, *, whole: bool = False, marks: Marks = REASONING) -> Stated | None:
    """Return the answer that a reply states, or None.

    Args:
        reply: What was written, reasoning and all.
        forms: Those that count.
        whole: Whether a reply without any of them is itself the answer.
        marks: What opens and closes reasoning.
    """
    said = without_reasoning(reply, marks)
    if TAGS in forms and (tagged := final_answer(said)) is not None and (tagged or len(forms) == 1):
        return Stated(_inner(tagged, TAGS), TAGS)
    words = words_of(said)
    for form in FORMS[1:]:
        for text in reversed(list(_FOUND[form](words)) if form in forms else []):
            if text is None:  # a box that is not closed: the reply was cut
                return None
            if text.strip():
                return Stated(_inner(text, form), form)
    if BOX in forms and words != said and "<tool_call>" not in said:  # LaTeX in a fence is no program
        boxes = list(_boxes(said))
        if boxes and boxes[-1]:
            return Stated(_inner(boxes[-1], BOX), BOX)
    return Stated(peeled(words), WHOLE) if whole and words.strip() else None


def _inner(text: str, form: str) -> str:
    """Return what an answer holds that is itself in a later form, without markup."""
    if _PLAIN.fullmatch(text):  # most answers, which hold neither
        return text
    for later in FORMS[FORMS.index(form) + 1 :]:
        if found := [one for one in _FOUND[later](text) if one and one.strip()]:
            return _inner(found[-1], later)
    return peeled(text)


def _boxes(text: str) -> Iterator[str | None]:
    """Yield the last box alone; None if it is not closed."""
    found = list(_BOX.finditer(text))
    if not found:
        return
    box = found[-1]
    if box[1] is not None:
        yield box[1]
        return
    depth, start = 1, box.end()
    for i in range(start, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                yield text[start:i]
                return
    yield None


def last_box(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` holds, or None if there is none or the last one is not closed."""
    found = next(_boxes(text), None)
    return found.strip() if found is not None else None


def _hashed(text: str) -> Iterator[str]:
    """Yield what follows each `####` on its line, or on the next one; headings of sections are none."""
    for piece in text.split("####")[1:]:
        line = piece.strip().partition("\n")[0]
        if line and not piece.startswith("#") and not _HEADING.match(line):
            yield line


def _answer_lines(text: str) -> Iterator[str]:
    """Yield what each line states as the answer, from the first to the last."""
    lines = text.split("\n")[-MAX_LINES:]
    for i, full in enumerate(lines):
        line = full[:MAX_LINE]
        found = _LINE.match(line)
        if found and not (found[1] and _NO_STATEMENT.match(found[2])):
            rest = found[2].strip(" *_\t\r")
            # "Answer:" may be a title, with the answer below.
            yield _sentence(_unled(rest) if rest else _next(lines, i))
        elif _TITLE.match(line) and line.strip():
            yield _sentence(_next(lines, i))
        else:
            for said in _SAID.finditer(line):
                rest = line[said.end() :]
                if not _NO_STATEMENT.match(rest):
                    yield _sentence(_unled(rest) if rest.strip(" *_:$\r") else _next(lines, i))


def _unled(text: str) -> str:
    """Return a statement without what leads to it once more: `The final answer is 5`, `therefore 5`."""
    for _ in range(3):
        found = _SAID.match(text.lstrip(" *_")) or _LED.match(text)
        if found is None:
            break
        text = found.string[found.end() :]
    return text


def _next(lines: list[str], i: int) -> str:
    return next((line[:MAX_LINE] for line in lines[i + 1 : i + 6] if line.strip(" *_\r$\\[]()`")), "")


def _sentence(text: str) -> str:
    """Return a text up to where its first sentence ends, or its reasons begin.

    A point in a number or behind an initial or `St` ends none.
    """
    for end in _SENTENCE_END.finditer(text):
        if not _ABBREVIATED.search(text[max(0, end.start() - 8) : end.start()]):
            text = text[: end.start()]
            break
    reason = _REASON.search(text, 1)
    return text[: reason.start()] if reason else text


_FOUND = {BOX: _boxes, HASHES: _hashed, LINE: _answer_lines}


def peeled(text: str) -> str:
    r"""Return an answer without the markup around it: spaces, `**`, quotes, `$`, `\(`."""
    before = None
    text = _BOLD.sub(r"\1", text.strip())
    while text != before:
        before = text
        for mark in _MARKUP:
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                inner = text[len(mark) : -len(mark)]
                if mark not in inner:  # `$9$ $7$` is two answers
                    text = inner.strip()
        for opening, closing in _PAIRS:
            if text.startswith(opening) and text.endswith(closing) and opening not in text[2:]:
                text = text[2:-2].strip()
        text = _lone_markup(text)
    return text


def _lone_markup(text: str) -> str:
    """Return a text without markup that was opened before it or closes after it: `34**` of `**Answer: 34**`."""
    for mark in ("**", "__"):
        if text.count(mark) == 1:
            text = text.removesuffix(mark).removeprefix(mark).strip()
    if text.endswith(".") and text[-2:-1] in ("$", "*", ")", "`", "}"):
        text = text[:-1].rstrip()
    return text


def last_fence(text: str) -> str | None:
    """Return what is in the last closed code fence, or None."""
    found = _FENCE.findall(text)
    return found[-1] if found else None


def choice_in(text: str, *, upper: bool = False) -> str | None:
    """Return the one letter that an answer chooses, upper case: `C`, `(c)`, `C. Paris`, `option C is right`.

    None where it begins with none; an empty text where it names several. Where an answer is only what a text begins
    with, it must be written in upper case.
    """
    before, text = None, text.strip()
    while text != before:
        before, text = text, _WRAPPER.sub(r" \1 ", text)
    text = peeled(" ".join(text.replace("\\ ", " ").replace("\\(", " ").replace("\\)", " ").replace("$", " ").split()))
    found = _CHOICE.match(text[:MAX_LINE])
    if found is None:
        return None
    letter, rest = found[1], found["text"] if found["text"] is not None else found["word"]
    if upper and not letter.isupper():
        return None
    if rest is None or not rest.strip(" .*)"):
        return letter.upper()
    if _ONLY_LETTERS.fullmatch(rest):
        return ""
    if (found["word"] is not None or found["mark"].startswith((",", ";", "/"))) and _MORE.match(rest):
        return ""
    if found["word"] is not None:
        if re.match(r"(?:and|or|&|/)\s", rest, re.IGNORECASE):
            return ""
        return letter if letter.isupper() and _AFTER.match(rest) else None
    if found["mark"][:1] in ",;-–—" and not letter.isupper():
        return None
    return letter.upper() if letter.isupper() or found["mark"][0] in ").:" else None


def chosen(reply: str, *, marks: Marks = REASONING) -> Stated | None:
    """Return the letter that a reply states as its answer, or None.

    It is what a stated answer begins with, or the whole text, or the last line alone, or else follows "choice" or
    "option". Elsewhere A and I are words.
    """
    answer = stated(reply, marks=marks)
    words = words_of(without_reasoning(reply, marks))
    if answer is not None:
        for text in _candidates(words, answer):
            letter = choice_in(text)
            if letter is not None:
                return Stated(letter, answer.form) if letter else None
        return None if answer.form != LINE else _named(words)
    lines = [line for line in words.split("\n") if line.strip()]
    for text in (words, lines[-1] if lines else ""):
        letter = choice_in(text, upper=True) if text is words else _alone(text)
        if letter:
            return Stated(letter, LETTER)
    return _named(words)


def _candidates(words: str, answer: Stated) -> Iterable[str]:
    """Return the answer, and before it other lines that state one: the last may only repeat it."""
    earlier = reversed(list(_answer_lines(words))) if answer.form == LINE else ()
    return [answer.text, *map(peeled, earlier)]


def _alone(line: str) -> str | None:
    letter = line.strip(" *_().$`[]\t\r")
    return letter if len(letter) == 1 and "A" <= letter <= "Z" else None


def _named(words: str) -> Stated | None:
    found = _NAMED.findall(words)
    letters = [one or other for one, other in found]
    return Stated(letters[-1], LETTER) if letters else None
