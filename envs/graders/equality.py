"""Whether an answer is the right one: the one place that decides what is equal. The gold's kind decides how.

Of the kinds below the first that the gold is counts: an exact spelling, a literal (base, date, time, version, address,
identifier), a number, a choice, a set, a list (brackets or bare, in order), an equation, an expression, a text. Numbers
are compared exactly: a decimal is as long as it shows. math-verify is asked about expressions alone, and only where it
reads what stands there.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from nanoskyrl.envs.graders import grade_math
from nanoskyrl.envs.graders.answers import as_number, leading_number, normalize, same_text
from nanoskyrl.envs.graders.grade_math import (
    brackets,
    is_mathematical,
    over_budget,
    split_at,
    split_noun,
    split_percent,
    split_unit,
)
from nanoskyrl.envs.graders.literals import BASE, DOTTED, literal
from nanoskyrl.envs.graders.reading import choice_in, peeled
from nanoskyrl.envs.graders.workers import WorkerDied, Workers, WorkerTimeout

POOL = Workers(quiet=True)
"""For libraries that may never come back; they print what they do not understand."""
MAX_TEXT = 20_000
"""Characters of an answer that is compared as text."""

SPELLING, NUMBER, CHOICE, SET, LIST, EQUATION, EXPRESSION, TEXT = (
    "spelling", "number", "choice", "set", "list", "equation", "expression", "text",
)  # fmt: skip

_AROUND = re.compile(r" ?([=+*/^<>-]) ?")
_NAME = re.compile(r"(?:\\?[a-zA-Z]+(?:_\{?\w{1,3}\}?)?(?:\([a-zA-Z]\))?'?|[a-zA-Z ]{1,30})")
_EQUALS = re.compile(r"(?<![<>!\\:=])=(?!=)")
_LATEX_FRACTION = re.compile(r"([+-]?)\s*(\d*)\s*\\frac\{([+-]?)(\d+)\}\{(\d+)\}")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne|in|approx|equiv|lt|gt)(?![a-z])")
_UNION = re.compile(r"\\(?:cup|cap|setminus|mid)|\\ne(?![a-z])")
_JOINED = re.compile(r",?\s+(?:and|or|und|et|y)\s+|\s*\\(?:text|mathrm)\{\s*(?:and|or)\s*\}\s*|\$\s*(?:and|or)?\s*\$")
_NUMBERS = re.compile(r"[+-]?\d+(?:\.\d+)?(?:\s+[+-]?\d+(?:\.\d+)?)+")
_LETTER_GOLD = re.compile(r"\W{0,3}([A-Z])\W{0,3}")
_TRUTH = re.compile(r"(yes|no|true|false)\b(?:\s*[,;:!–—-]|\.(?!\s*\d)|\s+(?:because|since|as|it|they|he|she)\b|$)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a grader says."""

    correct: bool | None
    """None: it could not be judged, because the grader was killed or died."""
    why: str
    """`right`, or what is wrong, or `timeout` or `died` where there is no verdict."""
    taken: str | None = field(default=None, compare=False)
    """The answer that was looked at."""
    form: str | None = field(default=None, compare=False)
    """How the reply states it."""
    kind: str | None = field(default=None, compare=False)
    """What decided whether it is equal."""


RIGHT, WRONG = Verdict(True, "right"), Verdict(False, "another answer")


def compare(gold: str, answer: str, *, seconds: float) -> Verdict:
    """Return whether an answer is the gold one.

    Args:
        gold: The right answer, as a data set writes it.
        answer: What was stated; markup around it does not count.
        seconds: What a library may take for the whole of it.
    """
    deadline = time.monotonic() + seconds
    return _same(gold, answer, lambda: deadline - time.monotonic())


Left = Callable[[], float]


def _same(gold: str, answer: str, left: Left) -> Verdict:
    if gold.strip() == answer.strip() and gold.strip():
        return _by(True, SPELLING)
    if len(answer) > max(MAX_TEXT, 4 * len(gold)):
        return Verdict(False, f"longer than {MAX_TEXT} characters", kind=SPELLING)
    gold, answer = (peeled(" ".join(text.split())) for text in (gold, answer))
    if _tight(gold) == _tight(answer):
        return _by(bool(answer), SPELLING)
    wanted, given = _unwrapped(gold), _unwrapped(answer)
    right, other = literal(wanted, gold=True), literal(_named_value(given), gold=True)
    grouped = right is not None and right.kind == DOTTED and as_number(wanted, loose=True) is not None
    if right is not None and not (grouped and as_number(given) is not None):  # 1.234.567 may be a number of Europe's
        return _by(right == other, right.kind)
    number = _number(gold)
    if number is not None:
        if reason := over_budget(gold, answer):
            return Verdict(False, reason, kind=NUMBER)
        return _same_number(number, answer, left)
    if (letter := _LETTER_GOLD.fullmatch(wanted)) and "=" not in given:
        chosen = choice_in(answer)
        if chosen or not is_mathematical(answer):
            return _by(chosen == letter[1] or same_text(given, wanted), CHOICE)
    if truth := _TRUTH.fullmatch(normalize(wanted)):
        said = _TRUTH.match(normalize(given))
        return _by(said is not None and said[1] == truth[1], TEXT)
    if same_text(given, wanted):
        return _by(True, TEXT)
    members = members_of(gold)
    if len(members) > 1 and not _is_one(gold):
        return _same_list(gold, answer, left)
    if not is_mathematical(gold):
        return _by(False, TEXT)
    return _same_expression(gold, answer, left)


def _tight(text: str) -> str:
    return _AROUND.sub(r"\1", normalize(text))


def _by(correct: bool, kind: str) -> Verdict:
    return replace(RIGHT if correct else WRONG, kind=kind)


def _unwrapped(text: str) -> str:
    r"""Return a text without LaTeX's wrappers and spaces: `\text{Evelyn}`, `3\text{:}20`."""
    text = grade_math._SPACES.sub(lambda found: " " if found[0] in ("\\ ", "~") else "", text)
    before = None
    while before != text:
        before, text = text, grade_math._WRAPPED.sub(r"\1", text)
    return peeled(text.replace("\\_", "_").replace("\\%", "%").replace("\\#", "#").replace("{:}", ":"))


def _named_value(text: str) -> str:
    """Return what a name is said to be, `x = 5`; any other text as it is."""
    sides = _EQUALS.split(text)
    return sides[1].strip() if len(sides) == 2 and _NAME.fullmatch(sides[0].strip()) else text


@dataclass(frozen=True, slots=True)
class Number:
    """A number, and what it counts."""

    value: Fraction
    percent: bool
    unit: str | None


def _number(text: str, *, loose: bool = False) -> Number | None:
    """Return the number that an answer is, or None."""
    if len(text) > 4 * grade_math.MAX_LENGTH:
        return None
    normal = grade_math.normalize(text)
    bare, percent = split_percent(normal)
    bare, unit = split_unit(bare)
    value = _value(bare, loose=loose)
    if value is None and unit is None:
        bare, unit = split_noun(bare)
        value = None if unit is None else _value(bare, loose=loose)
    return None if value is None else Number(value, percent, unit)


def _value(text: str, *, loose: bool = False) -> Fraction | None:
    if len(text) <= grade_math.MAX_DIGITS and (found := _LATEX_FRACTION.fullmatch(text)):
        sign, whole, inner, top, bottom = found.groups()
        if not int(bottom) or (whole and inner):
            return None
        value = int(whole or 0) + Fraction(int(top), int(bottom))
        return value if (sign == "-") == (inner == "-") else -value
    return as_number(text, loose=loose)


def _same_number(gold: Number, answer: str, left: Left) -> Verdict:
    """Compare with a number: the same value, a unit that does not differ, or an expression of that value."""
    given = _number(answer, loose=True)
    if given is None and (other := literal(_named_value(_unwrapped(answer)))) is not None:
        value = other.value[1] if other.kind == BASE else None
        return _by(isinstance(value, int) and value == gold.value and not gold.percent, NUMBER)
    if given is not None:
        if gold.unit and given.unit and gold.unit != given.unit:
            return Verdict(False, f"{given.unit}, not {gold.unit}", kind=NUMBER)
        return _by(_equal_numbers(gold, given), NUMBER)
    sides = _sides(answer)
    if sides is not None:
        verdicts = [_same_number(gold, side, left) for side in sides]
        return next((verdict for verdict in verdicts if not verdict.correct), _by(bool(verdicts), NUMBER))
    text = grade_math.normalize(answer)
    if len(members_of(answer)) > 1:
        return Verdict(False, f"{len(members_of(answer))} answers, not 1", kind=NUMBER)
    bare = split_unit(split_percent(text)[0])[0]
    top, bottom = gold.value.numerator, gold.value.denominator
    wanted = str(top) if bottom == 1 else f"\\frac{{{top}}}{{{bottom}}}"
    if is_mathematical(bare) and grade_math.readable(bare) and _one_letter(bare):
        if split_percent(text)[1] and not gold.percent:
            bare = f"\\frac{{{bare}}}{{100}}"
        return replace(_asked(wanted, bare, left), kind=NUMBER)
    # `18 eggs in 3 days` counts eggs; the gold says no unit that could differ.
    counted = leading_number(_unwrapped(text).replace("\\ ", " ")) if gold.unit is None and not gold.percent else None
    return _by(counted is not None and counted == gold.value, NUMBER)


def number_in(text: str) -> Fraction | None:
    """Return the number that an answer is, whatever it counts: `$18`, `x = 18`, `18 eggs in 3 days`, `5 + 13 = 18`."""
    if len(text) > grade_math.MAX_LENGTH:
        return None
    number = _number(text, loose=True)
    if number is not None:
        return number.value
    text = _unwrapped(text)
    sides = _sides(text)
    if sides is None:
        value = _value(grade_math.normalize(text).rstrip("%\\ "), loose=True)
        return leading_number(grade_math.normalize(text).replace("\\", "")) if value is None else value
    values = [number_in(side) for side in sides]
    return values[0] if len(set(values)) == 1 else None


def _one_letter(text: str) -> bool:
    """Say whether a text has no word in it that math-verify would multiply: `18 eggs` is no product."""
    return re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}", text.replace("pmatrix", "")) is None


def _equal_numbers(gold: Number, given: Number) -> bool:
    if gold.percent == given.percent:
        return gold.value == given.value
    if gold.percent:  # data sets drop the sign: 28% is 28 and 0.28
        return given.value in (gold.value, gold.value / 100)
    return given.value / 100 == gold.value


def _sides(text: str) -> list[str] | None:
    """Return the sides of an equation that are no names; None if it is no equation."""
    text = _unwrapped(text)
    sides = [side.strip() for side in _EQUALS.split(text.replace("\\approx", "="))]
    if len(sides) < 2 or len(sides) > 6 or not all(sides) or re.search(r"[=<>]", "".join(sides)):
        return None
    return [side for side in sides[:-1] if not _NAME.fullmatch(side)] + [sides[-1]]


def _is_one(text: str) -> bool:
    """Say whether commas in a text belong to one thing: a matrix, an inequality, a union of intervals."""
    text = grade_math.normalize(text)
    if "\\begin" in text or "\\pm" in text:
        return True
    return not brackets(text)[0] and _UNION.search(text) is not None


def members_of(text: str | Sequence[object]) -> list[str]:
    """Split at commas, semicolons and words between answers, that are in no bracket; outer brackets do not count."""
    if not isinstance(text, str):
        return [str(member) for member in text]
    if len(text) > MAX_TEXT:
        return [text]
    normal = grade_math.normalize(_JOINED.sub(" , ", text)).strip(" ,$")
    opening, _, inner = brackets(normal)
    plain = inner if opening else normal.replace("\\{", "{").replace("\\}", "}")
    members = [member for member in split_at(plain, ",;") if member]
    if len(members) == 1 and _NUMBERS.fullmatch(members[0]):
        members = members[0].split()
    return members


def _same_list(gold: str, answer: str, left: Left) -> Verdict:
    """Compare lists in order and with their brackets, and sets in any order."""
    around, other = brackets(grade_math.normalize(gold))[:2], brackets(grade_math.normalize(_named_value(answer)))[:2]
    if around == ("{", "}"):
        if other[0] and other != around:
            return _by(False, SET)
        found = members_of(_named_value(answer))
        return replace(same_members(members_of(gold), found, left, ordered=False), kind=SET)
    if _RELATION.search(grade_math.normalize(answer)) and around[0]:
        return _same_expression(gold, answer, left)
    wanted, given = members_of(gold), members_of(_named_value(answer))
    may_be_interval = len(wanted) == 2 and around[0] and other[0]
    if (other == ("{", "}") and around[0]) or (may_be_interval and other != around):
        return _by(False, LIST)
    return replace(same_members(wanted, given, left, ordered=True), kind=LIST)


def same_members(wanted: list[str], given: list[str], left: Left, *, ordered: bool) -> Verdict:
    """Compare members one by one, in order or in any; lengths come first.

    Without an order each wanted member must be given, once or more, and nothing else.
    """
    if not given:
        return Verdict(False, "no answer")
    if ordered:
        if len(wanted) != len(given):
            return Verdict(False, f"{len(given)} members, not {len(wanted)}")
        return _all(_same(one, other, left) for one, other in zip(wanted, given, strict=True))
    if max(map(len, given)) > MAX_TEXT:
        return Verdict(False, f"longer than {MAX_TEXT} characters")
    given = list({normalize(member): member for member in given}.values())
    wanted = list({normalize(member): member for member in wanted}.values())
    places = {normalize(member): i for i, member in enumerate(wanted)}
    if len(given) > 2 * len(wanted) + 2:  # some may be one member in two spellings
        return Verdict(False, f"{len(given)} members, not {len(wanted)}")
    found: set[int] = set()
    unsure: Verdict | None = None
    for member in given:
        if (place := places.get(normalize(member))) is not None:
            found.add(place)
            continue
        verdicts = [_same(one, member, left) for one in wanted]
        hits = {i for i, verdict in enumerate(verdicts) if verdict.correct}
        found |= hits
        if not hits:
            undecided = next((verdict for verdict in verdicts if verdict.correct is None), None)
            if undecided is None:
                return Verdict(False, f"`{member[:40]}` is no member")
            unsure = undecided
    if unsure is not None:
        return unsure
    return RIGHT if len(found) == len(wanted) else Verdict(False, f"{len(found)} members, not {len(wanted)}")


def _all(verdicts: Iterable[Verdict]) -> Verdict:
    """Return right where all are, else the first that is wrong, else the first without a verdict."""
    unsure = None
    for verdict in verdicts:
        if verdict.correct is False:
            return WRONG if verdict.why == "another answer" else verdict
        if verdict.correct is None:
            unsure = unsure or verdict
    return unsure or RIGHT


def _same_expression(gold: str, answer: str, left: Left) -> Verdict:
    kind = EQUATION if _EQUALS.search(gold) else EXPRESSION
    if reason := over_budget(gold, answer):
        return Verdict(False, reason, kind=kind)
    wanted, given = (split_unit(split_percent(grade_math.normalize(text))[0]) for text in (gold, answer))
    if wanted[1] and given[1] and wanted[1] != given[1]:
        return Verdict(False, f"{given[1]}, not {wanted[1]}", kind=kind)
    one, other = wanted[0].replace("°", "^\\circ"), given[0].replace("°", "^\\circ")
    if one == other:
        return _by(True, kind)
    if {brackets(one)[0], brackets(other)[0]} in ({"{", "("}, {"{", "["}):
        return _by(False, kind)
    if kind == EXPRESSION and (sides := _sides(other)) is not None and not _RELATION.search(one):
        return replace(_all([_same(gold, side, left) for side in sides]), kind=kind)
    if literal(_unwrapped(answer)) is not None or not grade_math.readable(one) or not grade_math.readable(other, gold):
        return _by(False, kind)
    if len(members_of(answer)) > 1 and not (_is_one(answer) or _is_one(gold) or brackets(other)[0]):
        return Verdict(False, f"{len(members_of(answer))} answers, not 1", kind=kind)
    return replace(_asked(one, other, left), kind=kind)


def _asked(gold: str, answer: str, left: Left) -> Verdict:
    """Ask math-verify, where it can be killed."""
    if reason := over_budget(gold, answer):
        return Verdict(False, reason)
    seconds = left()
    if seconds <= 0:
        return Verdict(None, "timeout")
    try:
        same = POOL.call("nanoskyrl.envs.graders.grade_math:equal", gold, answer, seconds=seconds)
    except WorkerTimeout:
        return Verdict(None, "timeout")
    except (WorkerDied, MemoryError, RecursionError):
        return Verdict(None, "died")
    return RIGHT if same else WRONG
