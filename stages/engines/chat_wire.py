"""A conversation as a chat endpoint takes it, and its reply as environments read it.

Environments speak text: a call is `<tool_call>{...}</tool_call>`. An endpoint with tools of
its own (`native`) has calls apart from the text, with ids that the results name; one
without (`text`) gets a text that says how to call, the same as in training.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.actions import TOOL_CALL, TOOL_CALL_END, tool_calls
from nanoskyrl.envs.base import Message
from nanoskyrl.envs.messages import with_text_arguments
from nanoskyrl.envs.tool_formats.own import calls_in_words, result_in_words, with_tools_told


def to_wire(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], mode: str) -> list[dict[str, Any]]:
    """Return the messages to send."""
    if not tools:
        return [with_text_arguments(message) for message in messages]
    if mode == "text":
        return [_in_words(message) for message in with_tools_told(messages, tools)]
    return _with_ids(messages)


def _in_words(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": result_in_words(message["content"])}
    if calls := message.get("tool_calls"):
        return {"role": message["role"], "content": calls_in_words(message.get("content"), calls)}
    return dict(message)


def _with_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Give each call an id and each result the id of its call, in order; a result of none goes as the user's word."""
    sent: list[dict[str, Any]] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = [
                {"id": call.get("id", f"call_{place}_{index}"), "type": "function", "function": call["function"]}
                for index, call in enumerate(message.get("tool_calls") or _written(message["content"]))
            ]
            waiting = [call["id"] for call in calls]
            sent.append(with_text_arguments({**message, **({"tool_calls": calls} if calls else {})}))
        elif message["role"] == "tool" and waiting:
            own = message.get("tool_call_id")
            waiting.remove(found := own if own in waiting else waiting[0])
            sent.append({**message, "tool_call_id": found})
        elif message["role"] == "tool":
            sent.append({"role": "user", "content": message["content"]})
        else:
            sent.append(dict(message))
    return sent


def _written(content: str) -> list[dict[str, Any]]:
    """Return the calls that are in a text."""
    return [
        {"function": {"name": call.tool, "arguments": call.args}} for call in tool_calls(content) if call.error is None
    ]


def text_of(content: str | None, calls: Sequence[tuple[str, str]]) -> str:
    """Return a reply as one text, its calls in tags.

    Args:
        content: What the model said; None: nothing.
        calls: Name and arguments (JSON text, as the model wrote it) of each call.
    """
    pieces = [content] if content else []
    # Arguments that are no JSON stay as they are: the parser of actions says what is wrong with them.
    pieces += [
        f'{TOOL_CALL}{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}{TOOL_CALL_END}'
        for name, arguments in calls
    ]
    return "\n".join(pieces)
