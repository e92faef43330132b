"""`<tool_call>` tags around a JSON object: Hermes', Qwen 2.5's and Qwen 3's format, and our own protocol.

A call is found by its opening tag, read as JSON from there, and ended by its closing tag. A regular expression over
the whole would be wrong: arguments hold braces, and may hold the closing tag.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from nanoskyrl.envs.tool_formats.base import (
    ASIDES,
    DECODER,
    MAX_DEPTH,
    TOOL_CALL,
    TOOL_CALL_END,
    JsonText,
    ParsedCall,
    Piece,
    ToolFormat,
    Tools,
    after_broken_call,
    after_space,
    as_calls,
    deeper_than,
    malformed,
    scan,
    what,
)

_FENCE = re.compile(r"```[^\n`]*\n\s*")
_MARKS = (TOOL_CALL, "</think>", *ASIDES)
"""Where none of these stands, all of a text is words."""


def read(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn, the malformed calls with their error."""
    if not any(mark in text for mark in _MARKS):  # most turns of those who answer at once
        return [text] if text else []
    held = JsonText(text)
    return scan(text, re.escape(TOOL_CALL), lambda mark: _calls_at(held, mark.end()))


def _calls_at(text: str, start: int) -> tuple[list[ParsedCall], int]:
    """Read the calls whose opening tag ends at `start`; return them and where to continue."""
    begin = after_space(text, start)
    fence = _FENCE.match(text, begin)
    try:
        value, end = DECODER.raw_decode(text, fence.end() if fence else begin)
    except (ValueError, RecursionError) as error:
        return [malformed(f"the call is not valid JSON: {what(error)}")], after_broken_call(text, start)
    if deeper_than(value, MAX_DEPTH):
        return [malformed("the call is nested too deeply")], after_broken_call(text, end)
    close = after_space(text, end)
    if fence and text.startswith("```", close):
        close = after_space(text, close + 3)
    if not text.startswith(TOOL_CALL_END, close):
        return [malformed(f"the call does not end with {TOOL_CALL_END}")], after_broken_call(text, end)
    return as_calls(value), close + len(TOOL_CALL_END)


def write(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as Hermes and Qwen write it."""
    body = json.dumps({"name": name, "arguments": dict(args)}, ensure_ascii=False)
    return f"{TOOL_CALL}\n{body}\n{TOOL_CALL_END}"


HERMES = ToolFormat(read=read, write=write)
