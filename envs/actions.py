"""What a policy's text says: its tool calls and its final answer.

A call is found by its opening tag, read as JSON from there, and ended by its closing
tag. A regular expression over the whole would be wrong: arguments hold braces, and may
hold the closing tag. Nothing here raises, whatever the text.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
ANSWER, ANSWER_END = "<answer>", "</answer>"

NAME_KEYS = ("tool", "name")
ARGUMENT_KEYS = ("args", "arguments", "params", "parameters")

_SKIPPED = re.compile(r"<think>.*?(?:</think>|\Z)|```.*?(?:```|\Z)", re.DOTALL)
"""Reasoning and code fences: what stands there is talked about, not done."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as written; `error` names the kind of mistake, and `detail` says it to the policy."""

    tool: str | None
    args: dict[str, Any] | None
    error: str | None = None
    detail: str = ""


def visible(text: str) -> str:
    """Return the text without reasoning and code fences."""
    return _SKIPPED.sub(" ", text)


def tool_calls(text: str) -> list[ParsedCall]:
    """Return every call in the text, in order, the malformed ones with their error."""
    text = visible(text)
    calls = []
    position = text.find(TOOL_CALL)
    while position >= 0:
        call, position = _call_at(text, position + len(TOOL_CALL))
        calls.append(call)
        position = text.find(TOOL_CALL, position)
    return calls


def _call_at(text: str, start: int) -> tuple[ParsedCall, int]:
    """Read the call whose opening tag ends at `start`; return it and where to go on."""
    begin = start
    while begin < len(text) and text[begin].isspace():
        begin += 1
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        after = text.find(TOOL_CALL_END, start)
        detail = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", "cannot be read")
        return ParsedCall(
            None, None, "malformed", f"the call is not valid JSON: {detail}"
        ), after if after >= 0 else start
    rest = text[end:].lstrip()
    if not rest.startswith(TOOL_CALL_END):
        return ParsedCall(None, None, "malformed", f"the call does not end with {TOOL_CALL_END}"), end
    return _as_call(value), end


def _as_call(value: Any) -> ParsedCall:
    if not isinstance(value, dict):
        return ParsedCall(None, None, "malformed", "the call must be a JSON object")
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    if not isinstance(name, str):
        return ParsedCall(None, None, "malformed", 'the call has no "tool" with a name')
    args = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if not isinstance(args, dict):
        return ParsedCall(name, None, "bad_arguments", '"args" must be a JSON object')
    return ParsedCall(name, args)


def final_answer(text: str) -> str | None:
    """Return the last answer in tags, stripped, or None if there is none.

    Reasoning, code fences and the insides of tool calls do not answer. A missing closing
    tag is no answer: the text may have been cut.
    """
    text = visible(text)
    text = re.sub(re.escape(TOOL_CALL) + r".*?(?:" + re.escape(TOOL_CALL_END) + r"|\Z)", " ", text, flags=re.DOTALL)
    end = text.rfind(ANSWER_END)
    if end < 0:
        return None
    start = text.rfind(ANSWER, 0, end)
    return None if start < 0 else text[start + len(ANSWER) : end].strip()
