"""Whether an answer in words or digits is the right one.

Exact match after normalising spelling only: spaces, case, thousands separators, a
currency sign, Unicode minus and full-width digits, a trailing full stop, and decimals
against fractions of the same value.
"""

import re
import unicodedata
from fractions import Fraction

MAX_LENGTH = 200
"""Longer answers are compared as text only: nobody writes such a number by hand."""

MINUS = str.maketrans({"\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "-"})
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}([, '\u2009\u202f]\d{3})+(\.\d+)?$")
_CURRENCY = re.compile(r"^([+-]?)\s*[$€£]\s*")
_NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)$")
_LEADING = re.compile(r"^([+-]?[\d.,/' \u2009\u202f]*\d)\.?\D*$")
_FRACTION = re.compile(r"^([+-]?\d+)\s*/\s*(\d+)$")


def normalize(text: str) -> str:
    """Return the answer in one spelling, for comparing."""
    text = " ".join(fold_width(text.translate(MINUS)).split()).casefold()
    return text.removesuffix(".").rstrip()


def fold_width(text: str) -> str:
    """Return full-width signs as ASCII, and nothing else: NFKC on the whole would turn 5² into 52."""
    if text.isascii():
        return text
    return "".join(unicodedata.normalize("NFKC", c) if "\uff01" <= c <= "\uff5e" else c for c in text)


def as_number(text: str) -> Fraction | None:
    """Return the number this spells, or None."""
    text = _CURRENCY.sub(r"\1", normalize(text))
    if len(text) > MAX_LENGTH:
        return None
    if _THOUSANDS.match(text):
        text = re.sub(r"[, '\u2009\u202f]", "", text)
    if _NUMBER.match(text) and text.isascii():
        return Fraction(text.rstrip(".") if text.rstrip(".") not in ("", "+", "-") else "0")
    if (fraction := _FRACTION.match(text)) and text.isascii() and int(fraction[2]):
        return Fraction(int(fraction[1]), int(fraction[2]))
    return None


def leading_number(text: str) -> Fraction | None:
    """Return the number that a text is, or begins with where only words or a percent sign follow, else None."""
    found = _LEADING.match(_CURRENCY.sub(r"\1", normalize(text)))
    return as_number(found[1]) if found else as_number(text)


def same_answer(found: str | None, wanted: str) -> bool:
    """Say whether an answer is the wanted one; None is never right."""
    if found is None:
        return False
    if found.strip() == wanted.strip():
        return True
    number = as_number(wanted)
    if number is not None:
        return as_number(found) == number
    return normalize(found) == normalize(wanted)
