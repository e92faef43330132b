"""What a policy's text says: its tool calls and its final answer.

A call is found by its opening tag, read as JSON from there, and ended by its closing
tag. A regular expression over the whole would be wrong: arguments hold braces, and may
hold the closing tag. Nothing here raises, whatever the text.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
ANSWER, ANSWER_END = "<answer>", "</answer>"

NAME_KEYS = ("tool", "name")
ARGUMENT_KEYS = ("args", "arguments", "params", "parameters")

MAX_DEPTH = 64
"""Arguments nested deeper are malformed: no tool takes them, and storing them would exceed Python's stack."""

_MARKS = re.compile(f"{re.escape(TOOL_CALL)}|<think>|```")
_ANSWER = re.compile(f"{ANSWER}((?:(?!</?answer>).)*){ANSWER_END}", re.DOTALL)
_ENDS = {"<think>": "</think>", "```": "```"}


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)  # type: ignore[return-value]


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as written; `error` names the kind of mistake, and `detail` says it to the policy."""

    tool: str | None
    args: dict[str, Any] | None
    error: str | None = None
    detail: str = ""


def tool_calls(text: str) -> list[ParsedCall]:
    """Return every call in the text, in order, the malformed ones with their error."""
    return [piece for piece in _pieces(text) if isinstance(piece, ParsedCall)]


def final_answer(text: str) -> str | None:
    """Return the last answer in tags, stripped, or None if there is none.

    Reasoning, code fences and the insides of tool calls do not answer. A missing closing
    tag is no answer: the text may have been cut.
    """
    answers = [found[1] for piece in _pieces(text) if isinstance(piece, str) for found in _ANSWER.finditer(piece)]
    return answers[-1].strip() if answers else None


def words_of(text: str) -> str:
    """Return a text without its calls, reasoning and code fences, which are talked about and not said."""
    return "\n".join(piece for piece in _pieces(text) if isinstance(piece, str))


def restore_stop(text: str, stop_strings: Iterable[str]) -> str:
    """Return text with the closing tag back that an endpoint cut off, because it was a stop string.

    Only a tag that is open at the end is closed: endpoints do not say whether a stop string ended the text.
    """
    for stop in stop_strings:
        opening = stop.replace("</", "<", 1)
        if stop.startswith("</") and text.rfind(opening) > text.rfind(stop):
            return text + stop
    return text


def _pieces(text: str) -> Iterator[str | ParsedCall]:
    """Yield the text from left to right as plain words and calls, without reasoning and code fences.

    What stands in reasoning or a fence is talked about, not done. A fence inside a call's
    JSON belongs to the call, and a call inside a fence to the fence: whichever opens first.
    """
    opened = text.find("<think>")
    closed = text.find("</think>")
    # Some templates open the reasoning in the prompt, so the text begins inside it.
    position = closed + len("</think>") if closed >= 0 and (opened < 0 or closed < opened) else 0
    while mark := _MARKS.search(text, position):
        yield text[position : mark.start()]
        if mark[0] == TOOL_CALL:
            call, position = _call_at(text, mark.end())
            yield call
        else:
            end = text.find(_ENDS[mark[0]], mark.end())
            position = len(text) if end < 0 else end + len(_ENDS[mark[0]])
    yield text[position:]


def _call_at(text: str, start: int) -> tuple[ParsedCall, int]:
    """Read the call whose opening tag ends at `start`; return it and where to go on."""
    begin = start
    while begin < len(text) and text[begin].isspace():
        begin += 1
    try:
        value, end = _decoded(text, begin)
    except (ValueError, RecursionError) as error:
        return _malformed(f"the call is not valid JSON: {_what(error)}"), _after_broken_call(text, start)
    if _deeper_than(value, MAX_DEPTH):
        return _malformed("the call is nested too deeply"), _after_broken_call(text, end)
    close = end
    while close < len(text) and text[close].isspace():
        close += 1
    if not text.startswith(TOOL_CALL_END, close):
        return _malformed(f"the call does not end with {TOOL_CALL_END}"), _after_broken_call(text, end)
    return _as_call(value), close + len(TOOL_CALL_END)


def _decoded(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value that begins here, and where it ends; raises as the decoder does.

    An error of the decoder counts the lines of all that it was given: many broken calls would take quadratic time.
    """
    size = 1 << 10
    while True:
        try:
            value, end = _DECODER.raw_decode(text[begin : begin + size])
            # A number may go on behind the window.
            if end < size or begin + size >= len(text):
                return value, begin + end
        except ValueError as error:
            place = getattr(error, "pos", 0)
            cut = place > size - 16 or "Unterminated" in str(error)
            if begin + size >= len(text) or not cut:
                raise
        size *= 4


def json_object(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON object that a text is, or None and what is wrong, by the rules for arguments of calls."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return None, f"it is not valid JSON: {_what(error)}"
    if _deeper_than(value, MAX_DEPTH):
        return None, "it is nested too deeply"
    return (value, "") if isinstance(value, dict) else (None, "it must be a JSON object")


def _malformed(detail: str) -> ParsedCall:
    return ParsedCall(None, None, "malformed", detail)


def _what(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))


def _after_broken_call(text: str, start: int) -> int:
    """Return where to go on after a call that cannot be read: its closing tag, or the next opening one."""
    following = text.find(TOOL_CALL, start)
    end = text.find(TOOL_CALL_END, start, following if following >= 0 else len(text))
    if end >= 0:
        return end + len(TOOL_CALL_END)
    return following if following >= 0 else len(text)


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _as_call(value: Any) -> ParsedCall:
    if not isinstance(value, dict):
        return _malformed("the call must be a JSON object")
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    if not isinstance(name, str):
        return _malformed('the call has no "tool" with a name')
    args = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if not isinstance(args, dict):
        return ParsedCall(name, None, "bad_arguments", '"args" must be a JSON object')
    return ParsedCall(name, args)
