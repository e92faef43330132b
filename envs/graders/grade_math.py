"""Whether a mathematical answer is the right one, by math-verify behind a normalisation of our own.

What can be decided by spelling is decided here; the rest goes to `equal`, which `kinds.py` calls in a worker
process, because sympy does not always come back. Normalised are minus signs and dashes, full-width signs, thousands
separators, percent, units, and LaTeX that only spaces. NFKC is not used: it turns 5² into 52.
"""

import logging
import re
from fractions import Fraction

from nanoskyrl.envs.graders.answers import MINUS, as_number, fold_width, same_answer

MAX_LENGTH = 2000
"""Longer answers are compared as text only."""
MAX_DEPTH = 50

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textit)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\(?:left|right|displaystyle|limits)(?![A-Za-z])")
_OPENING, _CLOSING = ("$$", "$", "\\(", "\\["), ("$$", "$", "\\)", "\\]")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:,|\{,\}|[ \u2009\u202f\u00a0'’])\d{3})+)(?![\d])")
_PERCENT = ("\\%", "%", "percent")
_UNIT = re.compile(r"^([-+\d.,/\s\\{}a-z^()]*?[\d})])\s*([a-zA-Zµ°Ωℓ]+(?:\s*\^\s*\{?[23]\}?|[²³])?)\.?$")
_LIST = re.compile(r"^(?:\\\{|[\[({]).*(?:\\\}|[\])}])$", re.DOTALL)
_MATHEMATICAL = re.compile(r"[\d\\^_=<>≤≥√π∞∪∩]|^[a-zA-Z]$|^\W*[a-zA-Z]\W*[+*/-]\W*[a-zA-Z]\W*$")

UNITS = {
    "mm": "mm", "millimeter": "mm", "cm": "cm", "centimeter": "cm", "centimetre": "cm", "m": "m", "meter": "m",
    "metre": "m", "km": "km", "kilometer": "km", "kilometre": "km", "in": "in", "inch": "in", "inche": "in",
    "ft": "ft", "feet": "ft", "foot": "ft", "mile": "mile", "g": "g", "gram": "g", "kg": "kg", "kilogram": "kg",
    "s": "s", "sec": "s", "second": "s", "min": "min", "minute": "min", "h": "h", "hr": "h", "hour": "h", "day": "day",
    "week": "week", "year": "year", "l": "l", "liter": "l", "litre": "l", "ml": "ml", "degree": "degree",
    "°": "degree", "dollar": "dollar", "usd": "dollar", "cent": "cent", "euro": "euro", "eur": "euro", "unit": "unit",
    "mph": "mph", "kmh": "kmh", "pound": "pound", "lb": "pound", "ounce": "ounce", "oz": "ounce",
}  # fmt: skip


def last_box(text: str) -> str | None:
    r"""Return what the last `\boxed{...}` holds, or None if there is none or the last one is not closed."""
    opened = list(_BOX.finditer(text))
    if not opened:
        return None
    depth, start = 1, opened[-1].end()
    for i in range(start, len(text)):
        if text[i] in "{}" and text[i - 1] != "\\":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[start:i].strip()
    return None


def has_box(text: str) -> bool:
    """Say whether a box is opened anywhere, closed or not."""
    return _BOX.search(text) is not None


def normalize(text: str) -> str:
    """Return an answer in one spelling of LaTeX."""
    text = fold_width(text.translate(MINUS)).strip()
    text = _without_delimiters(text)
    text = _SPACES.sub(lambda found: " " if found[0] in ("\\ ", "~") else "", text)
    text = _WRAPPED.sub(lambda found: f" {found[1]} ", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\$", "$")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "°", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = text.replace("≤", "\\le ").replace("≥", "\\ge ").replace("π", "\\pi ").replace("∞", "\\infty ")
    text = text.replace("∪", "\\cup ").replace("√", "\\sqrt ").replace("×", "\\times ").replace("·", "\\cdot ")
    for power, digit in (("²", "2"), ("³", "3")):
        text = text.replace(power, f"^{{{digit}}}")
    text = re.sub(r"^\$\s*|(?<=[-+])\$\s*", "", text)
    text = " ".join(text.split()).rstrip(". ")
    if not _LIST.match(text):  # in a list, a comma separates: (1,234) is a pair
        text = _THOUSANDS.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)
    return text


def _without_delimiters(text: str) -> str:
    """Return what stands between the signs that open and close mathematics, if they are there."""
    opening = next((sign for sign in _OPENING if text.startswith(sign)), None)
    closing = next((sign for sign in _CLOSING if text.endswith(sign)), None)
    if opening is None or closing is None or len(text) < len(opening) + len(closing):
        return text
    return text[len(opening) : -len(closing)].strip()


def split_unit(text: str) -> tuple[str, str | None]:
    """Return a normalised answer without its unit, and the unit by its one name; None if there is none we know."""
    if text.endswith("°"):
        return text[:-1].strip(), "degree"
    found = _UNIT.match(text)
    if found is None:
        return text, None
    word = re.sub(r"[\s{}]", "", found[2]).replace("²", "^2").replace("³", "^3")
    name, _, power = word.partition("^")
    low = name.lower() if len(name) > 1 else name  # M is no metre
    unit = UNITS.get(low) or UNITS.get(low.removesuffix("s"))
    return (found[1].strip(), unit + power) if unit else (text, None)


def split_percent(text: str) -> tuple[str, bool]:
    """Return a normalised answer without its percent sign, and whether it had one."""
    sign = next((sign for sign in _PERCENT if text.lower().endswith(sign)), None)
    return (text, False) if sign is None else (text[: -len(sign)].strip(), True)


def shape(text: str) -> str:
    """Return what the brackets of a normalised answer say: a set, a tuple or interval, or neither."""
    if text.startswith("\\{"):
        return "set"
    return "tuple" if text[:1] in ("(", "[") and is_one_pair(text) and "," in text else ""


def is_one_pair(text: str) -> bool:
    """Say whether the first bracket is closed by the last one, as in (1, 2) and not in (x+1)(x-1)."""
    depth = 0
    text = text.replace("\\{", "{").replace("\\}", "}")
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return i > 0 and i == len(text) - 1
    return False


def is_mathematical(text: str) -> bool:
    """Say whether an answer is more than words: letters of a word are no symbols to be multiplied."""
    return _MATHEMATICAL.search(fold_width(text.translate(MINUS))) is not None


def is_balanced(text: str) -> bool:
    """Say whether braces close as they open, no deeper than anyone writes: the parser takes for ever over others."""
    depth = 0
    for sign in text:
        depth += (sign == "{") - (sign == "}")
        if not 0 <= depth <= MAX_DEPTH:
            return False
    return depth == 0


def decide(gold: str, found: str) -> bool | None:
    """Return the verdict where spelling settles it, else None: `equal` must look."""
    if same_answer(found, gold):
        return True
    if not is_mathematical(gold) or max(len(gold), len(found)) > MAX_LENGTH:
        return False
    wanted, given = normalize(gold), normalize(found)
    if not is_balanced(given):
        return False
    if wanted == given:
        return True
    (wanted, wanted_percent), (given, given_percent) = split_percent(wanted), split_percent(given)
    (wanted, wanted_unit), (given, given_unit) = split_unit(wanted), split_unit(given)
    if wanted_unit and given_unit and wanted_unit != given_unit:
        return False
    if {shape(wanted), shape(given)} == {"set", "tuple"}:
        return False
    left, right = _value(wanted, wanted_percent), _value(given, given_percent)
    if left is not None and right is not None:
        return left == right
    return None if wanted_percent == given_percent else False


def _value(text: str, percent: bool) -> Fraction | None:
    if fraction := re.fullmatch(r"([+-]?)\s*(\d*)\s*\\frac\{(\d+)\}\{(\d+)\}", text):
        sign, whole, top, bottom = fraction.groups()
        if not int(bottom) or len(text) > 200:
            return None
        value: Fraction | None = (int(whole or 0) + Fraction(int(top), int(bottom))) * (-1 if sign == "-" else 1)
    else:
        value = as_number(text)
    return value / 100 if value is not None and percent else value


def equal(gold: str, found: str) -> bool:
    """Compare two answers by math-verify. May never return: call it where it can be killed."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    config = [math_verify.LatexExtractionConfig()]

    def parsed(text: str) -> list:
        text, _ = split_unit(split_percent(normalize(text))[0])
        return math_verify.parse(f"${text}$", extraction_config=config, parsing_timeout=0)

    # An inequality and the interval that it describes are the same answer, whichever of them is the gold.
    return math_verify.verify(parsed(gold), parsed(found), allow_set_relation_comp=True, timeout_seconds=0, strict=True)
