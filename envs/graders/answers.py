"""Spelling and numbers: one writing for answers that mean the same, and the value of those that are numbers.

Folded are Unicode's composed and decomposed letters, invisible characters, quotes, dashes, full-width signs and the
digits of every script. NFKC on the whole is not used: it turns 5² into 52.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

MAX_LENGTH = 200
"""Longer answers are compared as text only: nobody writes such a number by hand."""
MAX_EXPONENT = 1000
"""Of scientific notation; numbers beyond are compared as text."""

_INVISIBLE = dict.fromkeys(
    [0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), *range(0x2066, 0x206A), 0xFEFF]
)
_SIGNS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-"),
    **dict.fromkeys("\u2018\u2019\u201a\u02bc\u2032\u00b4", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u2033", '"'),
    "\u066b": ".", "\u066c": ",", "\u2044": "/", "\u066a": "%",
}  # fmt: skip
_FOLDED = str.maketrans({**_SIGNS, **_INVISIBLE})
_SPACE = "[ '_\u00a0\u2009\u202f]"

_GROUPED = re.compile(rf"[+-]?\d{{1,3}}(?:(?:,|{_SPACE})\d{{3}})+(?:\.\d+)?")
_LOOSELY_GROUPED = (  # lakhs, points for thousands, a comma for decimals
    (re.compile(r"[+-]?\d{1,2}(?:,\d\d)+,\d{3}(?:\.\d+)?"), ",", "."),
    (re.compile(r"[+-]?\d{1,3}(?:\.\d{3})+,\d+"), ".", ","),
    (re.compile(r"[+-]?\d{1,3}(?:\.\d{3}){2,}"), ".", ","),
    (re.compile(r"[+-]?\d{1,3}(?:[ \u00a0\u202f']\d{3})+,\d+"), " '\u00a0\u202f", ","),
    (re.compile(r"[+-]?\d+,(?:\d{1,2}|\d{4,})"), "", ","),
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)")
_SCIENTIFIC = re.compile(
    r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s?(?:e\s?|\s?(?:[*x×·]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?\(?)([+-]?\d{1,4})\)?\}?"
)
_POWER_OF_TEN = re.compile(r"([+-]?)10\^\{?([+-]?\d{1,4})\}?")
_FRACTION = re.compile(r"([+-]?\d+)\s?/\s?(\d+)")
_MIXED = re.compile(r"([+-]?)(\d+)(?:\s|-)(\d+)\s?/\s?(\d+)")
_WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MAGNITUDE = re.compile(r"(.+?)\s(dozen|hundred|thousand|million|billion|trillion)s?")
_CURRENCY = re.compile(r"^([+-]?)\s?(?:us\s?\$|[$€£¥₹₩₽]|rs\.?\s|usd\s|eur\s)\s?")
_LEADING = re.compile(r"([+-]?\s?(?:\d[\d.,/' _\u2009\u202f]*|\.\d+)(?:e[+-]?\d+)?)\s?(.*)", re.DOTALL)
_NO_NOUN = frozenset({
    "of", "out", "or", "to", "and", "x", "times", "plus", "minus", "by", "per", "is", "are", "was", "were", "isn",
    "not", "no", "but", "if", "than", "less", "more", "greater", "with", "over", "divided", "multiplied", "modulo",
    "mod", "equals", "through", "until", "e", "th", "st", "nd", "rd",
})  # fmt: skip
_CIRCUMSTANCE = re.compile(
    r"[^\W\d_]+(?:[\s-][^\W\d_]+){0,4}\s(?:in|for|from|after|within|at|on|during|every|each|per|since|between|among|by)\s"
    r"(?:\w+\s){0,2}[$€£]?\d"
)
_EXCLAIMED = re.compile(r"(?=.*[^\W\d_]{3})[^\W\d_][^\W\d_' .-]*!{1,3}")
_ARTICLE = re.compile(r"^(?:the|an?)\s+(?=\S)")


def folded(text: str) -> str:
    """Return a text in one writing of its characters; letters keep their case."""
    if text.isascii():
        return text
    text = unicodedata.normalize("NFC", text.translate(_FOLDED))
    return "".join(c if c.isascii() else _one(c) for c in text)


def _one(char: str) -> str:
    if "\uff01" <= char <= "\uff5e":
        return unicodedata.normalize("NFKC", char)
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    if unicodedata.decomposition(char).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", char).replace("\u2044", "/")
    return char


def normalize(text: str) -> str:
    """Return the answer in one spelling, for comparing."""
    text = " ".join(folded(text).split()).casefold()
    return text.removesuffix(".").rstrip()


def as_number(text: str, *, loose: bool = False) -> Fraction | None:
    """Return the number this spells, or None.

    Args:
        text: An answer.
        loose: Also read lakhs, decimal commas and points for thousands, which a gold that is a list may look like.
    """
    text = _CURRENCY.sub(r"\1", normalize(text))
    if len(text) > MAX_LENGTH:
        return None
    text = re.sub(r"^([+-])\s", r"\1", text)
    if found := _MAGNITUDE.fullmatch(text):
        number = as_number(found[1], loose=loose)
        return None if number is None else number * (12 if found[2] == "dozen" else 10 ** _WORDS[found[2]])
    if _GROUPED.fullmatch(text):
        text = re.sub(rf",|{_SPACE}", "", text)
    if _NUMBER.fullmatch(text):
        return _plain(text)
    if found := _SCIENTIFIC.fullmatch(text):
        exponent = int(found[2])
        return _plain(found[1]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if (found := _POWER_OF_TEN.fullmatch(text)) and abs(int(found[2])) <= MAX_EXPONENT:
        return (-1 if found[1] == "-" else 1) * Fraction(10) ** int(found[2])
    if (found := _FRACTION.fullmatch(text)) and int(found[2]):
        return Fraction(int(found[1]), int(found[2]))
    if (found := _MIXED.fullmatch(text)) and int(found[3]) < int(found[4]):
        return (-1 if found[1] == "-" else 1) * (int(found[2]) + Fraction(int(found[3]), int(found[4])))
    if loose:
        for pattern, groups, point in _LOOSELY_GROUPED:
            if pattern.fullmatch(text):
                return _plain("".join(c for c in text if c not in groups).replace(point, "."))
    return None


def _plain(text: str) -> Fraction:
    return Fraction(text.rstrip(".") or "0")


def leading_number(text: str) -> Fraction | None:
    """Return the number that a text is, or begins with where it counts something: `18 eggs in 3 days`; else None."""
    text = _CURRENCY.sub(r"\1", normalize(text).replace("\\$", "$").replace("\\%", "%"))
    if len(text) > MAX_LENGTH:
        return None
    if (number := as_number(text.rstrip("% "), loose=True)) is not None:
        return number
    found = _LEADING.fullmatch(text)
    if found is None or not is_noun(found[2]):
        return None
    head = found[1].rstrip(" ,.")
    scaled = _MAGNITUDE.fullmatch(f"{head} {found[2].partition(' ')[0]}")
    return as_number(scaled[0] if scaled else head, loose=True)


def is_noun(text: str) -> bool:
    """Say whether what follows a number counts it and does not change it: `eggs in 3 days`, and not `of 20`."""
    text = text.strip().lstrip("%€$£°").strip(" .,;!")
    if not text:
        return True
    word = re.match(r"[^\W\d_]+", text)
    if word is None or not any(c.isdigit() for c in text):
        return word is not None and word[0] not in _NO_NOUN
    if word[0] in _NO_NOUN or re.search(r"[=+*/<>^\\]|\d\s?-|\b(?:or|and|plus|minus|times)\b", text):
        return False
    return _CIRCUMSTANCE.match(text) is not None  # and not another count, as in `5 feet 3 inches`


@lru_cache(maxsize=4096)  # attempts at one prompt often give one answer
def same_answer(found: str | None, wanted: str) -> bool:
    """Say whether an answer is the wanted one by spelling or as a number; None is never right."""
    if found is None:
        return False
    if found.strip() == wanted.strip():
        return True
    numbers = as_number(wanted), as_number(found)
    if numbers != (None, None):
        return numbers[0] == numbers[1]
    return same_text(found, wanted)


def same_text(found: str, wanted: str) -> bool:
    """Say whether two texts are one but for spelling, quotes and a leading article."""
    return _words(found) == _words(wanted)


def _words(text: str) -> str:
    text = normalize(text)
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'`":
        text = text[1:-1].strip().removesuffix(".")
    if _EXCLAIMED.fullmatch(text):
        text = text.rstrip("!")
    return _ARTICLE.sub("", text)
