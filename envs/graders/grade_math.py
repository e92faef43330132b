"""Mathematics: one writing of LaTeX, units, what math-verify can be asked, and what it says.

`equal` asks the library, in a worker process, because sympy does not always come back. The library reads what it does
not know as a product or leaves it out, so `readable` says beforehand whether it would read what stands there.
"""

import logging
import math
import re
from fractions import Fraction

from nanoskyrl.envs.graders.answers import folded, is_noun

MAX_LENGTH = 500
"""Of an answer that is compared as mathematics, unless the gold is longer than a quarter of it."""
MAX_DEPTH = 50
"""Of brackets in brackets: the parser takes for ever over more."""
MAX_DIGITS = 200
"""Of one number."""
MAX_EXPONENT = 10_000
MAX_POWER_OF_SUM = 1000
MAX_FACTORIAL = 1000

_WRAPPED = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|textsf|texttt|textrm|mathsf|mathtt|operatorname)\s*\{([^{}]*)\}"
)
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad\b|~|\\(?:left|right|displaystyle|limits|bigl?|bigr?)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:,|\{,\}|[ \u2009\u202f\u00a0'’])\d{3})+)(?![\d])")
_PERCENT = ("\\%", "%", "percent", "per cent", "pct")
_UNIT = re.compile(
    r"^([-+\d.,/\s\\{}a-z^()]*?[\d})])\s*([a-zA-Zµ°Ωℓ]+(?:\s?/\s?[a-z]+)?(?:\s?\^\s?\{?-?[1-4]\}?|[²³])?)\.?$"
)
_BRACES = re.compile(r"(?<!\\)\{,\}")
_SYMBOLS = {
    "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ",
    "√": "\\sqrt ", "×": "\\times ", "·": "\\cdot ", "÷": "/", "±": "\\pm ", "∈": "\\in ", "∅": "\\emptyset ",
    "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "ℝ": "\\mathbb{R}", "\\cfrac": "\\frac",
    "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\$": "$", "\\lbrace": "\\{", "\\rbrace": "\\}", "**": "^",
    "\\leq": "\\le", "\\geq": "\\ge", "\\varnothing": "\\emptyset", "bmatrix": "pmatrix", "^{\\prime}": "'",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_PLAIN_NAMES = re.compile(r"(?<![\\a-zA-Z])(pi|sqrt|infinity|inf|sin|cos|tan|log|ln|theta)(?![a-zA-Z])")
_SQRT = re.compile(r"\\sqrt\s*\(([^()]{1,60})\)")
_MATHEMATICAL = re.compile(r"[\d\\^_=<>≤≥√π∞∪∩]|^[a-zA-Z]$|^\W*[a-zA-Z]\W*[+*/-]\W*[a-zA-Z]\W*$")
_SUBSCRIPT = re.compile(r"(?<=[\\A-Za-z])_(?:\{[^{}]*\}|\w)")
_DEGREES = re.compile(r"\s?°\s?([CF]?)$", re.IGNORECASE)
_NOUN = re.compile(r"([-+]?\d[\d.,/]*)\s([a-z]{3,20})\.?")  # 12 Angry Men are no number
_LETTERS = re.compile(r"[A-Za-z]{2,}")
_COMMANDS = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh",
    "tanh", "max", "min", "gcd", "lcm",
})  # fmt: skip
_MAGNITUDES = ("dozen", "hundred", "thousand", "million", "billion", "trillion", "half", "percent")
_WORDS = frozenset({
    "or", "and", "to", "of", "in", "is", "by", "an", "as", "at", "be", "do", "go", "he", "if", "it", "me", "my", "no",
    "on", "so", "up", "us", "we", "the", "for", "not", "but", "all", "any",
})  # fmt: skip
_STRANGE = re.compile(r"[$@#?\"`&;:]|\d\s+\d|\d\s*_|[A-Za-z]\d|\d\.\d*\.|\.\.|[^\x00-\x7f]|\+\s*$|-\s*$|^\s*[*/=]")

UNITS = {
    "mm": "mm", "millimeter": "mm", "cm": "cm", "centimeter": "cm", "centimetre": "cm", "m": "m", "meter": "m",
    "metre": "m", "km": "km", "kilometer": "km", "kilometre": "km", "in": "in", "inch": "in", "inche": "in",
    "ft": "ft", "feet": "ft", "foot": "ft", "yd": "yard", "yard": "yard", "mile": "mile", "mi": "mile",
    "mg": "mg", "milligram": "mg", "g": "g", "gram": "g", "kg": "kg", "kilogram": "kg", "ton": "ton", "tonne": "ton",
    "s": "s", "sec": "s", "second": "s", "ms": "ms", "millisecond": "ms", "min": "min", "minute": "min", "h": "h",
    "hr": "h", "hour": "h", "day": "day", "week": "week", "month": "month", "year": "year", "yr": "year", "l": "l",
    "liter": "l", "litre": "l", "ml": "ml", "milliliter": "ml", "gallon": "gallon", "degree": "degree", "deg": "degree",
    "°": "degree", "rad": "rad", "radian": "rad", "dollar": "dollar", "usd": "dollar", "buck": "dollar",
    "cent": "cent", "euro": "euro", "eur": "euro", "gbp": "pound sterling", "yen": "yen", "jpy": "yen",
    "rupee": "rupee", "unit": "unit", "mph": "mph", "kmh": "kmh", "km/h": "kmh", "kph": "kmh", "m/s": "m/s",
    "km/s": "km/s", "pound": "pound", "lb": "pound", "ounce": "ounce", "oz": "ounce", "hz": "hz", "khz": "khz",
    "mhz": "mhz", "ghz": "ghz", "n": "N", "newton": "N", "j": "J", "joule": "J", "kj": "kJ", "w": "W", "watt": "W",
    "kw": "kW", "pa": "Pa", "kpa": "kPa", "v": "V", "volt": "V", "kb": "kB", "mb": "MB", "gb": "GB", "tb": "TB",
    "byte": "byte", "bit": "bit", "mol": "mol", "mole": "mol", "kelvin": "K",
}  # fmt: skip
SIGNS = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
"""Of money, before or behind a number."""


def normalize(text: str) -> str:
    """Return an answer in one spelling of LaTeX."""
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", folded(text)).strip()
    text = _SPACES.sub(lambda found: " " if found[0] in ("\\ ", "~") else "", text)
    text = _WRAPPED.sub(lambda found: f" {found[1]} ", text)
    for one, other in _SYMBOLS.items():
        text = text.replace(one, other)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])", "°", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = _PLAIN_NAMES.sub(lambda found: "\\infty " if found[1].startswith("inf") else f"\\{found[1]} ", text)
    text = _SQRT.sub(r"\\sqrt{\1}", text)
    text = " ".join(text.split()).rstrip(". ")
    if not _is_bracketed(text):  # in a list, a comma separates: (1,234) is a pair
        text = _THOUSANDS.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)
    return _BRACES.sub(",", text)


def _is_bracketed(text: str) -> bool:
    return text.startswith(("(", "[", "{", "\\{")) and text.endswith((")", "]", "}"))


def split_unit(text: str) -> tuple[str, str | None]:
    """Return a normalised answer without its unit, and the unit by its one name; None if there is none we know."""
    for sign, name in SIGNS.items():
        bare = text.removeprefix("-").removeprefix("+").strip()
        if bare.startswith(sign):
            return text.replace(sign, "", 1).replace("- ", "-", 1).strip(), name
        if text.endswith(sign):
            return text[: -len(sign)].strip(), name
    if scale := _DEGREES.search(text):
        return text[: scale.start()].strip(), {"c": "celsius", "f": "fahrenheit", "": "degree"}[scale[1].lower()]
    found = _UNIT.match(text)
    if found is None:
        return text, None
    word = re.sub(r"[\s{}]", "", found[2]).replace("²", "^2").replace("³", "^3")
    name, _, power = word.partition("^")
    low = name.lower() if len(name) > 1 or name in "NJWV" else name  # M is no metre
    unit = UNITS.get(low if name not in "NJWV" else name.lower()) or UNITS.get(low.removesuffix("s"))
    if unit is None or (len(name) == 1 and name in "nvwj"):  # 2n is an expression
        return text, None
    return found[1].strip(), unit + (f"^{power}" if power else "")


def split_noun(text: str) -> tuple[str, str | None]:
    """Return a normalised answer without what it counts, and that noun; None if there is none: `10 apples`."""
    found = _NOUN.fullmatch(text)
    if found is None or not is_noun(found[2]) or found[2] in (*_FUNCTIONS, *_MAGNITUDES):
        return text, None
    return found[1], found[2].removesuffix("s")


def split_percent(text: str) -> tuple[str, bool]:
    """Return a normalised answer without its percent sign, and whether it had one."""
    sign = next((sign for sign in _PERCENT if text.lower().endswith(sign)), None)
    return (text, False) if sign is None else (text[: -len(sign)].strip(), True)


def brackets(text: str) -> tuple[str, str, str]:
    """Return the brackets around a normalised answer and what is in them; empty ones if there is no such pair."""
    inner = text.replace("\\{", "{").replace("\\}", "}")
    depth = 0
    for i, sign in enumerate(inner):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            if 0 < i == len(inner) - 1:
                return inner[0], inner[-1], inner[1:-1].strip()
            break
    return "", "", text


def split_at(text: str, separators: str) -> list[str]:
    """Split a text at signs that are in no bracket."""
    members, depth, start = [], 0, 0
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if sign in separators and depth == 0:
            members.append(text[start:i].strip())
            start = i + 1
    return [*members, text[start:].strip()]


def is_mathematical(text: str) -> bool:
    """Say whether an answer is more than words: letters of a word are no symbols to be multiplied."""
    return _MATHEMATICAL.search(folded(text)) is not None


def over_budget(gold: str, text: str) -> str | None:
    """Return what an answer has too much of to be calculated with, or None; counted in its text alone.

    A gold that needs more allows its answers as much.
    """
    length = max(MAX_LENGTH, 4 * len(gold))
    if len(text) > length:
        return f"longer than {length} characters"
    if (depth := _depth(text)) is None or depth > MAX_DEPTH:
        return "brackets that do not match" if depth is None else f"brackets deeper than {MAX_DEPTH}"
    digits = max(MAX_DIGITS, _digits(gold))
    if _digits(text) > digits:
        return f"a number of more than {digits} digits"
    for what, count, most in (
        ("an exponent", _exponent, MAX_EXPONENT),
        ("a power of a sum", _power_of_sum, MAX_POWER_OF_SUM),
        ("a factorial", _factorial, MAX_FACTORIAL),
    ):
        limit = max(most, count(gold))
        if count(text) > limit:
            return f"{what} of more than {limit}"
    return None


def _depth(text: str) -> int | None:
    depth = most = 0
    for sign in text.replace("\\{", "").replace("\\}", ""):
        depth += (sign == "{") - (sign == "}")
        most = max(most, depth)
        if depth < 0:
            return None
    # Other brackets need not match: [1, 2) is an interval.
    return most + text.count("((((((((((") if depth == 0 else None


def _digits(text: str) -> int:
    return max((len(found) for found in re.findall(r"\d+", text)), default=0)


def _exponent(text: str) -> float:
    """Return the largest exponent, those of exponents multiplied out; a sum in one counts by its largest number."""
    most = max((float(digits) for digits in re.findall(r"\de[+-]?(\d{4,15})", text)), default=0.0)
    for found in re.finditer(r"\^", text):
        most = max(most, _value(_argument(text, found.end())))
    return most


def _value(exponent: str) -> float:
    numbers = [min(float(number[:12]), 1e12) for number in re.findall(r"\d+", exponent)] or [1.0]
    largest = max(numbers)
    if "!" in exponent:
        return 1e18
    if "^" not in exponent:
        return largest if len(numbers) == 1 or not re.search(r"[*(]|times|cdot", exponent) else largest ** len(numbers)
    levels = exponent.count("^")
    inner = max(_value(_argument(exponent, found.end())) for found in re.finditer(r"\^", exponent))
    return 1e18 if levels > 2 or inner * max(largest, 2.0) > 400 else min(1e18, max(largest, 2.0) ** inner)


def _argument(text: str, start: int) -> str:
    """Return what stands behind a `^`: a group in braces or brackets with what is raised behind it, or one sign."""
    rest = text[start : start + 200].lstrip()
    if rest[:1] not in ("{", "("):
        found = re.match(r"-?(?:\d+|.)(?:\^.{0,100})?", rest, re.DOTALL)
        return found[0] if found else ""
    depth = 0
    for i, sign in enumerate(rest):
        depth += (sign in "{(") - (sign in "})")
        if depth == 0:
            return rest[1:i] + (rest[i + 1 :] if rest[i + 1 : i + 2] == "^" else "")
    return rest


def _power_of_sum(text: str) -> float:
    """Return the product of all powers of brackets: one may be in another."""
    return math.prod(max(1.0, float(power)) for power in re.findall(r"[)}\]]\s*\^\s*\{?\s*(\d{1,9})", text))


def _factorial(text: str) -> float:
    if re.search(r"!\s*\)?\s*!\s*\)?\s*!|\)\s*!", text):
        return 1e9
    return max((float(number[:9]) for number in re.findall(r"(\d+)\}?\s*!", text)), default=0.0)


def readable(text: str, gold: str = "") -> bool:
    """Say whether math-verify reads all that is in a normalised text as what it shows."""
    plain = _COMMANDS.sub(r"\\", text).replace("pmatrix", "").replace("cases", "").replace("&", ",")
    if not text or _STRANGE.search(_SUBSCRIPT.sub("", plain)):
        return False
    if "!" in text and "!" not in gold and re.search(r"[a-zA-Z]", _COMMANDS.sub("", text)):
        return False  # x+1! is x+1, said loudly
    words = [word.lower() for word in _LETTERS.findall(plain)]
    return not any(word in _WORDS or (len(word) > 3 and word not in _FUNCTIONS) for word in words)


def exact(text: str) -> str:
    """Return a normalised text with its decimals as fractions: 1.41 is 141/100, and no root of two."""

    def fraction(found: re.Match[str]) -> str:
        value = Fraction(found[0] if found[0][0] != "." else f"0{found[0]}")
        top = str(value.numerator)
        return top if value.denominator == 1 else f"\\frac{{{top}}}{{{value.denominator}}}"

    return re.sub(r"\d*\.\d+|\d+\.(?!\d)", fraction, text)


def equal(gold: str, found: str) -> bool:
    """Compare two normalised answers by math-verify. May never return: call it where it can be killed."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    config = [math_verify.LatexExtractionConfig()]

    def parsed(text: str) -> list:
        return math_verify.parse(f"${exact(text)}$", extraction_config=config, parsing_timeout=0)

    # An inequality and the interval that it describes are the same answer, whichever of them is the gold.
    return math_verify.verify(
        parsed(gold), parsed(found), allow_set_relation_comp=True, timeout_seconds=0, strict=True, numeric_precision=30
    )
