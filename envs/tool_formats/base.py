"""What a format of tool calls is: how a policy writes calls, in the markup that its template taught it.

A format reads text into pieces: words, asides (reasoning and code fences, where nothing is done) and calls. Joined
again, with each call in our own tags, they are what an environment is given, so environments know one markup alone.
Nothing here raises, whatever the text.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
NAME_KEYS = ("tool", "name")
ARGUMENT_KEYS = ("args", "arguments", "params", "parameters")
MAX_DEPTH = 64
"""Arguments nested deeper are malformed: no tool takes them, and storing them would exceed Python's stack."""
ASIDES = {"<think>": "</think>", "[THINK]": "[/THINK]", "<|channel>": "<channel|>", "```": "```"}
"""What opens text that is thought or quoted, and what closes it."""

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools on offer."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as written; `error` names the kind of mistake, and `detail` says it to the policy."""

    tool: str | None
    args: dict[str, Any] | None
    error: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call, and where the text continues behind it and its closing marks."""

    call: ParsedCall
    end: int


@dataclass(frozen=True, slots=True)
class Aside:
    """Text in which nothing is done: a code fence, or reasoning."""

    text: str
    reasoning: str | None = None
    """What was thought, without the marks around it; None: a fence."""


Piece = str | Aside | FoundCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A markup of calls; `BUILTIN["tool_format"]` lists those that ship."""

    read: Callable[[str, Tools], list[Piece]]
    """Returns the pieces of a turn's text, in order; values without a type of their own get that of the schema."""
    write: Callable[[str, Mapping[str, Any]], str]
    """Returns one call as it is written; what a policy reads where its template has no place for tools."""
    channels: bool = False
    """Whether every turn has marks around it, also one without a call."""
    offered_only: bool = False
    """Whether a call looks like any other text, so that it is one only where tools are on offer."""


def malformed(detail: str) -> ParsedCall:
    """Return the record of a call that cannot be read."""
    return ParsedCall(None, None, "malformed", detail)


def own_call(call: ParsedCall) -> str:
    """Return a call in our own tags, a mistake with what is wrong."""
    said = {"args": call.args} if call.error is None else {"error": call.error, "detail": call.detail}
    return f"{TOOL_CALL}{json.dumps({'tool': call.tool, **said}, ensure_ascii=False)}{TOOL_CALL_END}"


def in_own_tags(pieces: Sequence[Piece]) -> str:
    """Return the pieces as the text that environments read."""
    return "".join(
        piece if isinstance(piece, str) else piece.text if isinstance(piece, Aside) else own_call(piece.call)
        for piece in pieces
    )


def calls_in(pieces: Sequence[Piece]) -> list[ParsedCall]:
    """Return the calls among the pieces."""
    return [piece.call for piece in pieces if isinstance(piece, FoundCall)]


# JSON


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)  # type: ignore[return-value]


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


class JsonText(str):
    """Text from which JSON is read at many places; json counts the lines before each mistake, which nobody asks for."""

    __slots__ = ()

    def count(self, *_: Any) -> int:
        """Return 0."""
        return 0

    def rfind(self, *_: Any) -> int:
        """Return -1."""
        return -1


def what(error: Exception) -> str:
    """Return what is wrong with a text that is no JSON."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))


def deeper_than(value: Any, depth: int) -> bool:
    """Say whether lists and objects are nested deeper than this."""
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


def json_object(text: str) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON object that a text is, or None and what is wrong, by the rules for arguments of calls."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return None, f"it is not valid JSON: {what(error)}"
    if deeper_than(value, MAX_DEPTH):
        return None, "it is nested too deeply"
    return (value, "") if isinstance(value, dict) else (None, "it must be a JSON object")


def arguments_of(value: Any) -> dict[str, Any] | None:
    """Return a call's arguments: an object, the JSON text of one as OpenAI's API sends it, or nothing; None: neither.

    An empty text and null are no arguments.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        if value.strip() == "null":
            return {}
        value = json_object(value)[0]
    return value if isinstance(value, dict) else None


def as_call(value: Any) -> ParsedCall:
    """Return the call that a JSON value stands for, in any of the usual spellings."""
    if not isinstance(value, dict):
        return malformed("the call must be a JSON object")
    if isinstance(value.get("function"), dict):  # {"type": "function", "function": {...}}
        value = value["function"]
    name = next((value[key] for key in NAME_KEYS if key in value), None)
    kind, detail = value.get("error"), value.get("detail")
    if kind in ("malformed", "bad_arguments") and isinstance(detail, str):  # what `own_call` writes of a mistake
        return ParsedCall(name if isinstance(name, str) else None, None, kind, detail)
    if not isinstance(name, str):
        return malformed('the call has no "tool" with a name')
    args = arguments_of(next((value[key] for key in ARGUMENT_KEYS if key in value), None))
    if args is None:
        return ParsedCall(name, None, "bad_arguments", '"args" must be a JSON object')
    return ParsedCall(name, args)


def as_calls(value: Any) -> list[ParsedCall]:
    """Return the calls of a JSON value that is one call, or a list of them."""
    return [as_call(each) for each in value] if isinstance(value, list) and value else [as_call(value)]


def json_call(name: str, text: str) -> ParsedCall:
    """Return the call of a tool that was named apart from its arguments, which are JSON text."""
    if not text.strip():
        return ParsedCall(name, {})
    value, why = json_object(text.strip())
    if value is None:
        kind = "bad_arguments" if why == "it must be a JSON object" else "malformed"
        return ParsedCall(name if kind == "bad_arguments" else None, None, kind, f"the arguments of the call: {why}")
    return ParsedCall(name, value)


def typed(text: str, tool: str, name: str, tools: Tools) -> Any:
    """Return an argument that was written without quotes: text where the schema says text, else the JSON that it is."""
    function = next((t["function"] for t in tools if t.get("function", {}).get("name") == tool), {})
    schema = function.get("parameters", {}).get("properties", {}).get(name)
    if not isinstance(schema, dict) or "string" in _kinds(schema):
        return text
    try:
        value = DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return text if deeper_than(value, MAX_DEPTH) else value


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows."""
    kinds = schema.get("type")
    found = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            found |= _kinds(each) if isinstance(each, dict) else set()
    return found


# Walking


class Finder:
    """Searches one text from many places, in time that grows with its length and not with its square."""

    def __init__(self, text: str) -> None:
        """Remember nothing yet."""
        self.text = text
        self._last: dict[re.Pattern[str], tuple[int, re.Match[str] | None]] = {}

    def find(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Return the first match at or behind a place."""
        since, found = self._last.get(pattern, (len(self.text) + 1, None))
        if start < since or (found is not None and found.start() < start):
            found = pattern.search(self.text, start)
            self._last[pattern] = start, found
        return found


def scan(text: str, opening: str, read: Callable[[re.Match[str]], tuple[list[ParsedCall], int] | None]) -> list[Piece]:
    """Return the pieces of a text whose calls begin with a mark.

    What is in reasoning or a fence is talked about, not done. A fence inside a call belongs to the call, and a
    call inside a fence to the fence: whichever opens first.

    Args:
        text: What a policy wrote in a turn.
        opening: A regular expression of the mark, without groups.
        read: Returns the calls behind a mark and where the text continues; None: it is no call.
    """
    marks = _marks(opening)
    pieces: list[Piece] = []
    opened, closed = text.find("<think>"), text.find("</think>")
    position = 0
    if closed >= 0 and (opened < 0 or closed < opened):  # the prompt has opened the reasoning
        position = closed + len("</think>")
        pieces.append(Aside(text[:position], text[:closed]))
    words = position
    while mark := marks.search(text, position):
        if mark["call"] is not None:
            found = read(mark)
            if found is None:
                position = max(mark.end(), mark.start() + 1)  # a mark may be a place without letters
                continue
            calls, position = found
            pieces += [text[words : mark.start()], *(FoundCall(call, position) for call in calls)]
        else:
            pieces.append(text[words : mark.start()])
            end = text.find(ASIDES[mark[0]], mark.end())
            position = len(text) if end < 0 else end + len(ASIDES[mark[0]])
            inside = text[mark.end() : position if end < 0 else end]
            pieces.append(_aside(text[mark.start() : position], mark[0], inside))
        words = position
    return [piece for piece in [*pieces, text[words:]] if piece != ""]


@cache  # of every turn of every row
def _marks(opening: str) -> re.Pattern[str]:
    """Return what finds the next call or aside."""
    return re.compile("|".join([f"(?P<call>{opening})", *map(re.escape, ASIDES)]))


def _aside(whole: str, mark: str, inside: str) -> Aside:
    if mark == "```":
        return Aside(whole)
    if mark == "<think>":
        return Aside(whole, inside)
    return thought(inside.removeprefix("thought\n"))


def thought(text: str) -> Aside:
    """Return reasoning in the tags that environments pass over."""
    return Aside(f"<think>{text}</think>", text)


_SPACE = re.compile(r"\s*")


def after_space(text: str, start: int) -> int:
    """Return where a text continues behind the space at a place."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def after_broken_call(text: str, start: int, opening: str = TOOL_CALL, closing: str = TOOL_CALL_END) -> int:
    """Return where to continue after a call that cannot be read: its closing mark, or the next opening one."""
    following = text.find(opening, start)
    end = text.find(closing, start, following if following >= 0 else len(text))
    if end >= 0:
        return end + len(closing)
    return following if following >= 0 else len(text)
