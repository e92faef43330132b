"""A conversation as a chat endpoint takes it, and its reply as environments read it.

Environments speak text: a call is `<tool_call>{...}</tool_call>`. An endpoint with tools of
its own (`native`) has calls apart from the text, with ids that the results name; one
without (`text`) is told in words how to call.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.actions import TOOL_CALL, TOOL_CALL_END, tool_calls
from nanoskyrl.envs.base import Message

TOOL_MODES = ("native", "text")


def to_wire(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], mode: str) -> list[dict[str, Any]]:
    """Return the messages to send; without tools they go as they are."""
    if not tools:
        return [dict(message) for message in messages]
    return _in_words(messages, tools) if mode == "text" else _with_ids(messages)


def _in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = (
        f"You have these tools:\n{schemas}\n"
        f'To call one, write {TOOL_CALL}{{"name": "...", "arguments": {{...}}}}{TOOL_CALL_END} and stop.'
    )
    sent = [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool"
        else dict(message)
        for message in messages
    ]
    if sent and sent[0]["role"] == "system":
        return [{"role": "system", "content": f"{sent[0]['content']}\n\n{told}"}, *sent[1:]]
    return [{"role": "system", "content": told}, *sent]


def _with_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Give each call an id and each result the id of its call, in order; a result of none goes as the user's word."""
    sent: list[dict[str, Any]] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = [
                {
                    "id": f"call_{place}_{index}",
                    "type": "function",
                    "function": {"name": call.tool, "arguments": json.dumps(call.args, ensure_ascii=False)},
                }
                for index, call in enumerate(tool_calls(str(message["content"])))
                if call.error is None
            ]
            waiting = [call["id"] for call in calls]
            sent.append({**message, **({"tool_calls": calls} if calls else {})})
        elif message["role"] == "tool" and waiting:
            sent.append({**message, "tool_call_id": waiting.pop(0)})
        elif message["role"] == "tool":
            sent.append({"role": "user", "content": message["content"]})
        else:
            sent.append(dict(message))
    return sent


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
