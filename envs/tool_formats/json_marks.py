"""JSON behind marks other than tags: Llama 3's bare object, Mistral's `[TOOL_CALLS]` and DeepSeek's blocks."""

import json
import re
from collections.abc import Mapping
from typing import Any

from nanoskyrl.envs.tool_formats.base import (
    ARGUMENT_KEYS,
    DECODER,
    MAX_DEPTH,
    Finder,
    JsonText,
    ParsedCall,
    Piece,
    ToolFormat,
    Tools,
    after_space,
    as_call,
    as_calls,
    deeper_than,
    json_call,
    malformed,
    scan,
    what,
)

# Llama 3

_LLAMA_KEYS = {"type", "function", "name", "id", *ARGUMENT_KEYS}


def read_llama(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn in which an object with `name` and `parameters` begins a line."""
    stuck, held = False, JsonText(text)

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int] | None:
        nonlocal stuck
        if stuck:  # nested too deeply: so is all that begins inside
            return None
        try:
            value, end = DECODER.raw_decode(held, mark.end())
        except RecursionError:
            stuck = True
            return [malformed("the call is not valid JSON: it is nested too deeply")], len(text)
        except ValueError as error:
            line = text.find("\n", mark.end())
            end = len(text) if line < 0 else line
            return [malformed(f"the call is not valid JSON: {what(error)}")], end
        if not _is_llama_call(value):
            return None
        if deeper_than(value, MAX_DEPTH):
            return [malformed("the call is nested too deeply")], end
        return [as_call(value)], end

    return scan(text, r'(?:(?m:^)[ \t]*|;[ \t]*|<\|python_tag\|>\s*)(?=\{\s*"(?:name|type|function)")', read)


def _is_llama_call(value: Any) -> bool:
    """Say whether an object is a call; a call and an answer in JSON begin the same way."""
    if not isinstance(value, dict) or not value.keys() <= _LLAMA_KEYS:
        return False
    return isinstance(value.get("function"), dict) or bool(value.keys() & set(ARGUMENT_KEYS))


def write_llama(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as Llama 3 writes it."""
    return json.dumps({"name": name, "parameters": dict(args)}, ensure_ascii=False)


# Mistral

_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def read_mistral(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn with `[TOOL_CALLS]`, before a list of objects or before a name and its arguments."""
    held = JsonText(text)

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        start = mark.end()
        named = _NAMED.match(text, start)
        begin = named.end() if named else after_space(text, start)
        try:
            value, end = DECODER.raw_decode(held, begin)
        except (ValueError, RecursionError) as error:
            following = text.find("[TOOL_CALLS]", start)
            end = len(text) if following < 0 else following
            return [malformed(f"the call is not valid JSON: {what(error)}")], end
        if deeper_than(value, MAX_DEPTH):
            return [malformed("the call is nested too deeply")], end
        if named is None:
            return as_calls(value), end
        return [ParsedCall(named[1], value)], end

    return scan(text, r"\[TOOL_CALLS\]", read)


def write_mistral(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as Mistral's models write it."""
    return f"[TOOL_CALLS][{json.dumps({'name': name, 'arguments': dict(args)}, ensure_ascii=False)}]"


# DeepSeek

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*([^\n`]*?)\s*\n```(?:json)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


def read_deepseek(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn with blocks of `type`, name and fenced JSON, or of name and JSON."""

    finder, next_mark = Finder(text), re.compile(f"{_BEGIN}|{_END}")

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        calls: list[ParsedCall] = []
        position = mark.end()
        while text.startswith(_BEGIN, at := after_space(text, position)):
            start = at + len(_BEGIN)
            end = finder.find(next_mark, start)
            if end is None or end[0] == _BEGIN:
                calls.append(malformed(f"the call does not end with {_END}"))
                position = len(text) if end is None else end.start()
                continue
            calls.append(_block(text[start : end.start()]))
            position = end.end()
        if text.startswith(_ALL_END, at := after_space(text, position)):
            position = at + len(_ALL_END)
        return calls or [malformed(f"there is no call behind {_ALL_BEGIN}")], position

    return scan(text, f"{_ALL_BEGIN}|(?={_BEGIN})", read)


def _block(inside: str) -> ParsedCall:
    before, separator, after = inside.partition(_SEPARATOR)
    if not separator:
        return malformed(f"the call has no {_SEPARATOR}")
    fenced = _FENCED.fullmatch(after)
    # V3 and R1 write a type, a name and fenced JSON, V3.1 a name and JSON.
    name, written = (fenced[1], fenced[2]) if fenced else (before, after)
    return json_call(name.strip(), written) if name.strip() else malformed("the call has no name")


def write_deepseek(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as DeepSeek-V3 writes it."""
    body = f"```json\n{json.dumps(dict(args), ensure_ascii=False)}\n```"
    return f"{_ALL_BEGIN}{_BEGIN}function{_SEPARATOR}{name}\n{body}{_END}{_ALL_END}"


LLAMA_JSON = ToolFormat(read=read_llama, write=write_llama, offered_only=True)
MISTRAL = ToolFormat(read=read_mistral, write=write_mistral)
DEEPSEEK = ToolFormat(read=read_deepseek, write=write_deepseek)
