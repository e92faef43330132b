"""`<tool_call>` tags around arguments that are written without quotes: Qwen-Coder's and GLM's formats.

Values have no types of their own: what the tool's schema calls text stays as it is, the rest is read as JSON.
What is in the tags in neither way is left to whoever reads JSON in them.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoskyrl.envs.tool_formats.base import (
    TOOL_CALL,
    TOOL_CALL_END,
    Finder,
    ParsedCall,
    Piece,
    ToolFormat,
    Tools,
    after_broken_call,
    after_space,
    malformed,
    scan,
    typed,
)

_END = re.compile(rf"\s*{TOOL_CALL_END}")
_NAME = re.compile(r"\s*([^\s<>{}\[\]]+)")
_KEY = re.compile(r"\s*<arg_key>")
_KEY_END = re.compile(r"</arg_key>\s*<arg_value>")
_VALUE_END = re.compile(rf"</arg_value>(?=\s*(?:<arg_key>|{TOOL_CALL_END}))")


class Tags(NamedTuple):
    """What stands around a call and around each of its parameters."""

    call: re.Pattern[str]
    """Opens a call; its group is the tool."""
    parameter: re.Pattern[str]
    """Opens a parameter; its group is the name."""
    value_end: re.Pattern[str]
    """Ends a value, before another parameter or the end of the call."""
    parameter_end: str
    call_end: str


XML = Tags(  # line breaks set a value apart from its tags
    re.compile(r"\s*<function=([^<>\n]+)>"), re.compile(r"\s*<parameter=([^<>\n]+)>\n?"),
    re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))"), "</parameter>", "</function>",
)  # fmt: skip


def tagged_calls(finder: Finder, position: int, tags: Tags, tools: Tools) -> tuple[list[ParsedCall], int, str]:
    """Return the calls at a place, where the text continues, and what is wrong with the next one; empty: nothing."""
    text, calls = finder.text, list[ParsedCall]()
    while name := tags.call.match(text, position):
        position, args = name.end(), {}
        while key := tags.parameter.match(text, position):
            end = finder.find(tags.value_end, key.end())
            if end is None:
                return calls, position, f"a parameter does not end with {tags.parameter_end}"
            args[key[1]] = typed(text[key.end() : end.start()], name[1], key[1], tools)
            position = end.end()
        position = after_space(text, position)
        if not text.startswith(tags.call_end, position):
            return calls, position, f"the call does not end with {tags.call_end}"
        calls.append(ParsedCall(name[1], args))
        position += len(tags.call_end)
    return calls, position, ""


def read_xml(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn in which `<function=NAME>` and `<parameter=NAME>` are in the tags."""
    finder = Finder(text)
    return scan(text, rf"{TOOL_CALL}\s*(?=<function=)", lambda mark: _functions_at(finder, mark.end(), tools))


def _functions_at(finder: Finder, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    calls, position, wrong = tagged_calls(finder, start, XML, tools)
    if wrong:
        return [*calls, malformed(wrong)], after_broken_call(finder.text, start)
    closing = _END.match(finder.text, position)
    if closing is None or not calls:
        return [malformed(f"the call does not end with {TOOL_CALL_END}")], after_broken_call(finder.text, start)
    return calls, closing.end()


def write_xml(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as Qwen-Coder writes it."""
    inside = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in args.items())
    return f"{TOOL_CALL}\n<function={name}>\n{inside}</function>\n{TOOL_CALL_END}"


def read_glm(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn in which a name and pairs of `<arg_key>` and `<arg_value>` are in the tags."""
    opening = rf"{TOOL_CALL}(?=\s*[^\s<>{{}}\[\]]+\s*(?:<arg_key>|{TOOL_CALL_END}))"
    finder = Finder(text)
    return scan(text, opening, lambda mark: _pairs_at(finder, mark.end(), tools))


def _pairs_at(finder: Finder, start: int, tools: Tools) -> tuple[list[ParsedCall], int] | None:
    text = finder.text
    name = _NAME.match(text, start)
    if name is None:
        return None
    position, args = name.end(), {}
    while key := _KEY.match(text, position):
        key_end = finder.find(_KEY_END, key.end())
        end = key_end and finder.find(_VALUE_END, key_end.end())
        if key_end is None or end is None:
            return [malformed("an argument does not end with </arg_value>")], after_broken_call(text, start)
        argument = text[key.end() : key_end.start()].strip()
        args[argument] = typed(text[key_end.end() : end.start()], name[1], argument, tools)
        position = end.end()
    closing = _END.match(text, position)
    if closing is None:
        return [malformed(f"the call does not end with {TOOL_CALL_END}")], after_broken_call(text, start)
    return [ParsedCall(name[1], args)], closing.end()


def write_glm(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as GLM-4.5 writes it."""
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(value)}</arg_value>\n" for key, value in args.items()
    )
    return f"{TOOL_CALL}{name}\n{inside}{TOOL_CALL_END}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


QWEN_XML = ToolFormat(read=read_xml, write=write_xml)
GLM = ToolFormat(read=read_glm, write=write_glm)
