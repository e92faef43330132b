"""Messages as conversations hold them: content is text, and calls stand apart from it.

People's rows and environments bring the shapes of several APIs. What they say is kept whole or refused, and never
lost in silence: text parts are joined, other parts refused; calls get their arguments as objects.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanoskyrl.envs.tool_formats.base import arguments_of

KEPT = ("name", "tool_call_id", "reasoning_content")
"""What may stand beside role, content and calls."""


def tidy_messages(messages: Any, *, pictures: bool = False) -> list[dict[str, Any]]:
    """Return messages as a conversation holds them.

    Args:
        messages: As people write them.
        pictures: Whether content with parts other than text may stay a list of parts, as endpoints take them.

    Raises:
        TypeError: one of them has no role or content that can be shown; says which, counting from 0.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"{messages!r} is no list of messages")
    return [_tidy(message, f"message {place}", pictures) for place, message in enumerate(messages)]


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text, as OpenAI's API and some templates want them."""
    if "tool_calls" not in message:
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _tidy(message: Any, place: str, pictures: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"{place}, {message!r}, is no message with role and content")
    calls = _calls(message.get("tool_calls"), place)
    content = message.get("content")
    if content is None and not calls:
        raise TypeError(f"{place} of role {message['role']} has no content")
    kept = pictures and isinstance(content, list) and not all(map(_is_text, content))
    text = content if kept or content is None else _text(content, place)
    found: dict[str, Any] = {"role": message["role"], "content": text}
    if calls:
        found["tool_calls"] = calls
    for key in KEPT:
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise TypeError(f"`{key}` of {place} is {message[key]!r}, which is no text")
            found[key] = message[key]
    return found


def _text(content: Any, place: str) -> str:
    """Return content as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise TypeError(f"the content of {place} is {content!r}, which is neither text nor a list of parts")
    return "".join(_part(part, place) for part in content)


def _part(part: Any, place: str) -> str:
    if _is_text(part):
        return part if isinstance(part, str) else part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TypeError(f"the content of {place} has a part of type {kind}, and only text can be shown")


def _is_text(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return isinstance(part, str)
    return part.get("type", "text") in ("text", "input_text", "output_text") and isinstance(part.get("text"), str)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return calls with a name and an object of arguments each."""
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise TypeError(f"`tool_calls` of {place} is {calls!r}, which is no list")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        args = arguments_of(_without_nulls(function.get("arguments"))) if isinstance(name, str) and function else None
        if args is None:
            raise TypeError(f"`tool_calls` of {place} has {call!r}, which names no function with arguments")
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**kept, "type": "function", "function": {"name": name, "arguments": args}})
    return found


def _without_nulls(arguments: Any) -> Any:
    """Return arguments without those that are null: a column of a Parquet file has every key in every row."""
    if not isinstance(arguments, Mapping):
        return arguments
    return {key: value for key, value in arguments.items() if value is not None}
