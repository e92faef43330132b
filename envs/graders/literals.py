"""Answers that look like mathematics and are none: literals of a base, dates, times, versions, addresses, identifiers.

Each is read into a value in one writing; two are equal where kind and value are. None is ever calculated with.
"""

import datetime
import ipaddress
import re
from dataclasses import dataclass

from nanoskyrl.envs.graders.answers import folded

MAX_LENGTH = 200
"""Longer texts are no literals."""

BASE, DATE, TIME, DOTTED, ADDRESS, RATIO, CODE, IDENTIFIER = (
    "literal of a base", "date", "time", "version", "address", "ratio", "numbers with hyphens", "identifier",
)  # fmt: skip
WEAK = (RATIO, CODE)
"""Only as a gold: an answer `3-5` may be an expression."""

_PREFIXED = re.compile(r"([+-]?)0([xob])([0-9a-f_]+)", re.IGNORECASE)
_BASES = {"x": 16, "o": 8, "b": 2}
_SUBSCRIPT = re.compile(
    r"\(?([0-9a-z]+)\)?\s?(?:_\s?\{?\s?(?:(?:\\text|\\mathrm)\{)?\s?([a-z0-9]+)\s?\}{0,2}|"
    r"\(base (\w+)\)|,? (?:in )?base (\w+))",
    re.IGNORECASE,
)
_BASE_NAMES = {"two": 2, "bin": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "oct": 8,
               "nine": 9, "ten": 10, "dec": 10, "twelve": 12, "sixteen": 16, "hex": 16}  # fmt: skip
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUBSCRIPTED = re.compile(r"([0-9a-z])([₀-₉]+)$", re.IGNORECASE)

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s)?"
_YEAR_FIRST = re.compile(r"(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?:[t ]00:00(?::00)?z?)?", re.IGNORECASE)
_MONTH_FIRST = re.compile(rf"{_WEEKDAY}{_MONTH}\s{_DAY}(?:,?\s(?P<year>\d{{3,4}}))?", re.IGNORECASE)
_DAY_FIRST = re.compile(
    rf"{_WEEKDAY}(?:the )?{_DAY}(?: of)?[\s-]{_MONTH}(?:,?[\s-](?P<year>\d{{3,4}}))?",
    re.IGNORECASE,
)
_NUMERIC_DATE = re.compile(r"(\d{1,2})([-/.])(\d{1,2})\2(\d{2,4})")
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::(\d{2}(?:\.\d+)?))?\s?([ap]\.?\s?m\.?)?", re.IGNORECASE)
_DOTTED = re.compile(r"v?(\d+(?:\.\d+){2,}(?:[-+.]?[0-9a-z]+){0,8})", re.IGNORECASE)
_NET = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}(?:[:/]\d{1,5})?")
_MAC = re.compile(r"[0-9a-f]{2}([:-])(?:[0-9a-f]{2}\1){4}[0-9a-f]{2}|[0-9a-f]{4}(?:\.[0-9a-f]{4}){2}", re.IGNORECASE)
_UUID = re.compile(r"\{?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\}?", re.IGNORECASE)
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s?:\s?\d+(?:\.\d+)?)+")
_CODE = re.compile(r"\+?\d+(?:-\d+)+|\+?\(?\d{2,4}\)?[ -]\d{3}-\d{4}")
_ALNUM = re.compile(r"[A-Za-z0-9]+")
_COMPOUND = re.compile(r"#?[A-Za-z0-9]+(?:[-_./:@#][A-Za-z0-9]+)*")
_FUNCTION = re.compile(r"(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|inf|e)\d*", re.IGNORECASE)
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d*)?e[+-]?\d+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Literal:
    """A text that is to be compared and not calculated with."""

    kind: str
    value: tuple[object, ...]


def literal(text: str, *, gold: bool = False) -> Literal | None:
    """Return the literal that a text is, or None.

    Args:
        text: Without markup and LaTeX's wrappers.
        gold: Whether it is the right answer: only then numbers with hyphens or colons are no expressions.
    """
    if len(text) > MAX_LENGTH:
        return None
    text = _SUBSCRIPTED.sub(lambda found: f"{found[1]}_{found[2].translate(_SUBSCRIPTS)}", text.strip())
    text = " ".join(folded(text).split())
    text = text if text.endswith(("m.", "M.")) else text.removesuffix(".")
    for read in (_base, _address, _date, _time, _dotted, _ratio, _code, _identifier):
        found = read(text)
        if found is not None:
            return None if found.kind in WEAK and not gold else found
    return None


def _base(text: str) -> Literal | None:
    if found := _PREFIXED.fullmatch(text):
        base, digits = _BASES[found[2].lower()], found[3].replace("_", "")
        sign = found[1]
    elif found := _SUBSCRIPT.fullmatch(text.removeprefix("-")):
        name = found[2] or found[3] or found[4]
        base = int(name) if name.isdecimal() and len(name) < 3 else _BASE_NAMES.get(name.lower(), 0)
        digits, sign = found[1], "-" if text.startswith("-") else ""
        if not 2 <= base <= 36 or (digits.isalpha() and (base <= 10 or len(digits) == 1)):  # x_1 is a symbol
            return None
    else:
        return None
    try:
        value = int(digits, base)
    except ValueError:  # a digit that the base has not
        return Literal(BASE, (base, text.casefold())) if digits.isdecimal() else None
    return Literal(BASE, (base, -value if sign == "-" else value))


def _address(text: str) -> Literal | None:
    if _MAC.fullmatch(text):
        return Literal(ADDRESS, ("mac", re.sub(r"[^0-9a-f]", "", text.lower())))
    if found := _UUID.fullmatch(text.lower().removeprefix("urn:uuid:")):
        return Literal(ADDRESS, ("uuid", found[1]))
    if _NET.fullmatch(text):
        return Literal(ADDRESS, ("ip", text))
    if text.count(":") >= 2 and len(text) <= 50:
        head, slash, width = text.partition("/")
        try:
            return Literal(ADDRESS, ("ip", f"{ipaddress.IPv6Address(head).compressed}{slash}{width}"))
        except ValueError:
            return None
    return None


def _date(text: str) -> Literal | None:
    year: str | None
    if found := _YEAR_FIRST.fullmatch(text):
        year, _, month, day = found.groups()
    elif found := _MONTH_FIRST.fullmatch(text) or _DAY_FIRST.fullmatch(text):
        day, year = found["day"], found["year"]
        month = str(_MONTHS.index(found["month"][:3].lower()) + 1)
    elif found := _NUMERIC_DATE.fullmatch(text):  # which is the month, nobody can know
        return Literal(DATE, ("as written", int(found[1]), int(found[3]), found[4]))
    else:
        return None
    try:
        datetime.date(int(year or 2000), int(month), int(day))
    except ValueError:
        return Literal(DATE, ("as written", text.casefold()))
    return Literal(DATE, (int(year) if year else None, int(month), int(day)))


def _time(text: str) -> Literal | None:
    found = _TIME.fullmatch(text)
    if found is None or (found[2] is None and found[4] is None):
        return None
    hour, minute, half = int(found[1]), int(found[2] or 0), (found[4] or "")[:1].lower()
    if minute > 59 or hour > (12 if half else 24):
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    seconds = float(found[3]) if found[3] else 0.0
    return Literal(TIME, (hour, minute, seconds))


def _dotted(text: str) -> Literal | None:
    found = _DOTTED.fullmatch(text)
    return Literal(DOTTED, (found[1].lower(),)) if found else None


def _ratio(text: str) -> Literal | None:
    return Literal(RATIO, tuple(part.strip() for part in text.split(":"))) if _RATIO.fullmatch(text) else None


def _code(text: str) -> Literal | None:
    if not _CODE.fullmatch(text):
        return None
    return Literal(CODE, (re.sub(r"[ ()]", "-", text).strip("-").replace("--", "-"),))


def _identifier(text: str) -> Literal | None:
    """Read letters and digits in one word, other than `2x` and `3e5`: a letter is followed by a digit, or a hyphen."""
    if not _COMPOUND.fullmatch(text) or _EXPONENT.fullmatch(text) or text.isdecimal():
        return None
    if _ALNUM.fullmatch(text):
        mixed = re.search(r"[A-Za-z]\d", text) and not _FUNCTION.fullmatch(text)
        return Literal(IDENTIFIER, (text.casefold(),)) if mixed else None
    parts = re.findall(r"[A-Za-z0-9]+", text)
    words = [part for part in parts if len(re.sub(r"\d", "", part)) >= 2 and not _FUNCTION.fullmatch(part)]
    mixed = [part for part in parts if re.search(r"[A-Za-z]\d", part) and not _FUNCTION.fullmatch(part)]
    has_digit = any(c.isdigit() for c in text)
    return Literal(IDENTIFIER, (text.casefold(),)) if (words or mixed) and has_digit else None
