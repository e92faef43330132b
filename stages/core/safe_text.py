"""What others wrote, before it is stored or shown: our keys are struck out, and no character steers a terminal.

Keys are the values of environment variables whose names say so, those that were named with `keep_secret`, passwords
in addresses, and what headers of authorization hold, whoever repeats them.
"""

import base64
import os
import re
from typing import Any
from urllib.parse import quote

STRUCK = "[key]"
HEADERS = ("authorization", "proxy-authorization", "x-api-key", "api-key")
LEAST, LEAST_NAMED = 8, 4
"""Characters of a value that can be a key: by its variable's name, and where it was named."""
NAMES = re.compile(
    r"(^|_)(API|ACCESS)?(KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PASS|PAT|CREDENTIALS?)(_|\d|$)",
    re.IGNORECASE,
)
NO_KEYS = frozenset({"none", "null", "true", "false", "empty", "dummy"})
SHAPES = (
    (re.compile(r"(?<=://)[^/\s:@'\"]*:[^/\s@'\"]+(?=@)"), STRUCK),
    (
        re.compile(
            r"(?i)(\b(?:proxy-)?authorization|\bx-api-key|\bapi-key)(['\"]?\s*[:=,]\s*(?:b?['\"])?)"
            rf"(?!(?:(?:bearer|basic|token)\s+)?{re.escape(STRUCK)})"  # what is struck out stays as it is
            r"((?:bearer|basic|token)\s+)?[^\s'\",;)}\]]{4,}"
        ),
        rf"\1\2\3{STRUCK}",
    ),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{16,}"), rf"\1{STRUCK}"),
    (re.compile(r"(?i)([?&](?:api[_-]?key|access[_-]?token|token|key|secret|password)=)[^&\s'\"]{4,}"), rf"\1{STRUCK}"),
)
HINTS = ("authorization", "api-key", "bearer ", "basic ", "key=", "token=", "secret=", "password=")
"""Without one of them, in small letters, or `://`, no shape can match: most texts are looked at no further."""
STEERS = re.compile(
    # C0 but tab and newline, DEL and C1; marks that reorder or hide what stands beside them; lone surrogates.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that do something else than show themselves."""


class _Keys:
    """The keys of this process: found in its environment once, and those that were named."""

    values: set[str] | None = None
    pattern: re.Pattern[str] | None = None


def keep_secret(value: str | None) -> None:
    """Name a key that is in a variable of any name, or in none."""
    if value and len(value) >= LEAST_NAMED and value.lower() not in NO_KEYS and value not in (_Keys.values or ()):
        _learn({value})


def struck(text: str) -> str:
    """Return a text without our keys; do so before it is cut, or half a key stays."""
    if _Keys.values is None:
        _learn({value for name, value in os.environ.items() if _is_key(name, value)})
    if _Keys.pattern is not None:
        text = _Keys.pattern.sub(STRUCK, text)
    small = text.lower()
    if "://" in text or any(hint in small for hint in HINTS):
        for shape, instead in SHAPES:
            text = shape.sub(instead, text)
    return text


def struck_values(value: Any) -> Any:
    """Return plain values in which no text holds a key of ours; a header's value is struck out whatever it is."""
    if isinstance(value, dict):
        return {
            key: STRUCK if isinstance(item, str) and str(key).lower() in HEADERS else struck_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [struck_values(item) for item in value]
    return struck(value) if isinstance(value, str) else value


def printable(text: str) -> str:
    """Return a text whose characters that would steer a terminal are escapes such as `\\x1b`; lines and tabs stay."""
    return STEERS.sub(_escape, text)


def one_line(text: str) -> str:
    """Return the same as one line without runs of white space, for a cell of a table."""
    return printable(" ".join(text.split()))


def shortened(text: str, most: int = 60) -> str:
    """Return a text, cut with `...` behind it where it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


def _escape(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def _is_key(name: str, value: str) -> bool:
    return len(value) >= LEAST and NAMES.search(name) is not None and value.lower() not in NO_KEYS


def _learn(values: set[str]) -> None:
    """Match these, too: as they are, as addresses write them, and in base64."""
    if _Keys.values is None:
        values = values | {value for name, value in os.environ.items() if _is_key(name, value)}
    _Keys.values = (_Keys.values or set()) | values
    forms = {
        form
        for value in _Keys.values
        for form in (
            value,
            quote(value, safe=""),
            base64.b64encode(value.encode("utf-8", "replace")).decode().rstrip("="),
        )
    }
    if forms:
        _Keys.pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))
