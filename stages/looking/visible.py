"""Text of a policy's for a terminal: what would steer it is written out, and never sent."""

import re

STEERS = re.compile(
    # C0 but tab and newline, DEL and C1; marks that reorder or hide what stands beside them; lone surrogates.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that do something else than show themselves."""


def visible(text: str) -> str:
    """Return text whose control characters are escapes such as `\\x1b`; lines and tabs stay."""
    return STEERS.sub(_escape, text)


def one_line(text: str) -> str:
    """Return text as one line without runs of white space, for a cell of a table."""
    return visible(" ".join(text.split()))


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
