"""Turns made of several messages, each with a recipient: gpt-oss' harmony, Muse Glimmer's ATEM.

A turn begins behind `<|start|>assistant`, so its first header is only what follows. What goes to a channel for
reasoning becomes reasoning, what goes to the user words, and what goes to a tool a call.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanoskyrl.envs.tool_formats.base import (
    Finder,
    FoundCall,
    ParsedCall,
    Piece,
    ToolFormat,
    Tools,
    json_call,
    malformed,
    thought,
)
from nanoskyrl.envs.tool_formats.tagged import Tags, tagged_calls

_START, _BODY = "<|start|>assistant", "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return|eom|eot)\|>|(?=<\|start\|>)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass(frozen=True, slots=True)
class _Said:
    """One message of a turn."""

    to: str | None
    channel: str | None
    body: str
    body_end: int
    """Where the turn's text continues behind the body."""


def _messages(text: str) -> Iterator[_Said | str]:
    """Yield the messages of a turn; text without a header is yielded as it is."""
    position = 0
    while position < len(text):
        start = text.find(_BODY, position)
        if start < 0:
            rest = text[position:].removeprefix(_START)
            if rest.strip():
                yield rest
            return
        header = text[position:start]
        end = _ENDS.search(text, start + len(_BODY))
        body_end = end.start() if end else len(text)
        to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        yield _Said(to and to[1], channel and channel[1], text[start + len(_BODY) : body_end], body_end)
        position = end.end() if end else len(text)


# gpt-oss


def read_harmony(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn in which calls go to `functions.NAME`."""
    pieces: list[Piece] = []
    for said in _messages(text):
        if isinstance(said, str):
            pieces.append(said)
        elif said.to is not None and said.to not in ("assistant", "user"):
            pieces.append(FoundCall(json_call(said.to.removeprefix("functions."), said.body), said.body_end))
        else:
            pieces.append(thought(said.body) if said.channel == "analysis" else said.body)
    return pieces


def write_harmony(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as gpt-oss writes it."""
    return f" to=functions.{name}<|channel|>commentary json{_BODY}{json.dumps(dict(args), ensure_ascii=False)}"


# Muse Glimmer

_CALLS, _CALLS_END = "<atem:function_calls>", "</atem:function_calls>"
_INVOCATIONS = Tags(
    re.compile(r'\s*<atem:invoke name="([^"<>\n]+)">'), re.compile(r'\s*<atem:parameter name="([^"<>\n]+)">'),
    re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter |</atem:invoke>))"), "</atem:parameter>", "</atem:invoke>",
)  # fmt: skip


def read_atem(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn in which calls are in `<atem:function_calls>`."""
    pieces: list[Piece] = []
    for said in _messages(text):
        if isinstance(said, str):
            pieces.append(said)
        elif said.to == "self":
            pieces.append(thought(said.body))
        elif said.to in (None, "user"):
            pieces.append(said.body)
        else:
            pieces += [FoundCall(call, said.body_end) for call in _invoked(said.body, tools)]
    return pieces


def _invoked(body: str, tools: Tools) -> list[ParsedCall]:
    start = body.find(_CALLS)
    if start < 0:
        return [malformed(f"there is no {_CALLS}")]
    calls, position, wrong = tagged_calls(Finder(body), start + len(_CALLS), _INVOCATIONS, tools)
    if not wrong and not (calls and body[position:].lstrip().startswith(_CALLS_END)):
        wrong = f"the calls do not end with {_CALLS_END}"
    return [*calls, malformed(wrong)] if wrong else calls


def write_atem(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as Muse Glimmer writes it."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in args.items()}
    inside = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items())
    return f' to={name}{_BODY}{_CALLS}\n<atem:invoke name="{name}">\n{inside}</atem:invoke>\n{_CALLS_END}'


HARMONY = ToolFormat(read=read_harmony, write=write_harmony, channels=True)
ATEM = ToolFormat(read=read_atem, write=write_atem, channels=True)
