"""Calls whose arguments are literals of a programming language: LFM2's list in Python, Gemma 4's objects.

The reader is our own: Python's parser can be brought down by nesting, and models write `true` and unescaped line
breaks where Python has neither.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from nanoskyrl.envs.tool_formats.base import (
    MAX_DEPTH,
    ParsedCall,
    Piece,
    ToolFormat,
    Tools,
    after_broken_call,
    after_space,
    malformed,
    scan,
)

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_QUOTED = {
    '"': re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL),
    "'": re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL),
    '<|"|>': re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL),
}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}


class _Literals:
    """Reads values from a place in a text on; ValueError says what is wrong."""

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def at(self, mark: str) -> bool:
        """Go past space, and past this mark if it comes next; say whether it did."""
        self.position = after_space(self.text, self.position)
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def need(self, mark: str) -> None:
        if not self.at(mark):
            raise ValueError(f"{mark} is missing")

    def word(self) -> str:
        self.at("")
        found = _WORD.match(self.text, self.position)
        if found is None:
            raise ValueError("a name is missing")
        self.position = found.end()
        return found[0]

    def value(self, depth: int = 0) -> Any:
        if depth >= MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        self.at("")
        for mark, pattern in _QUOTED.items():
            if self.text.startswith(mark, self.position):
                return self._quoted(mark, pattern)
        if self.at("["):
            return self._listed("]", lambda: self.value(depth + 1))
        if self.at("{"):
            return dict(self._listed("}", lambda: self.pair(":", depth + 1)))
        if number := _NUMBER.match(self.text, self.position):
            self.position = number.end()
            return self._number(number[0])
        name = self.word()
        if name not in _WORDS:
            raise ValueError(f"{name[:20]} is no value")
        return _WORDS[name]

    def pair(self, sign: str, depth: int = 0) -> tuple[str, Any]:
        """Read a key, bare or quoted, the sign behind it, and a value."""
        self.at("")
        quoted = next((mark for mark in _QUOTED if self.text.startswith(mark, self.position)), None)
        key = self._quoted(quoted, _QUOTED[quoted]) if quoted else self.word()
        self.need(sign)
        return key, self.value(depth)

    def listed_pairs(self, end: str, sign: str) -> dict[str, Any]:
        return dict(self._listed(end, lambda: self.pair(sign)))

    def _listed(self, end: str, read: Any) -> list[Any]:
        found: list[Any] = []
        while not self.at(end):
            if found:
                self.need(",")
                if self.at(end):  # a comma behind the last
                    break
            found.append(read())
        return found

    def _quoted(self, mark: str, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            raise ValueError("a text is not closed")
        self.position = found.end()
        return found[1] if mark == '<|"|>' else _ESCAPE.sub(_unescaped, found[1])

    def _number(self, text: str) -> int | float:
        if re.fullmatch(r"[-+]?\d+", text):
            return int(text)
        if not math.isfinite(value := float(text)):
            raise ValueError(f"{text[:20]} is no number")
        return value


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)


# LFM2: <|tool_call_start|>[name(key='value'), ...]<|tool_call_end|>

_LIST, _LIST_END = "<|tool_call_start|>", "<|tool_call_end|>"


def read_pythonic(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn with a list of calls as Python writes them."""

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        literals, calls = _Literals(text, mark.end()), []
        try:
            literals.need("[")
            while not literals.at("]"):
                if calls:
                    literals.need(",")
                name = literals.word()
                literals.need("(")
                calls.append(ParsedCall(name, literals.listed_pairs(")", "=")))
            literals.need(_LIST_END)
        except ValueError as error:
            return [malformed(f"the call is no list of calls: {error}")], after_broken_call(
                text, mark.end(), _LIST, _LIST_END
            )
        return calls or [malformed("the list of calls is empty")], literals.position

    return scan(text, re.escape(_LIST), read)


def write_pythonic(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as LFM2 writes it."""
    inside = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in args.items())
    return f"{_LIST}[{name}({inside})]{_LIST_END}"


# Gemma 4: <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>

_CALL, _CALL_END = "<|tool_call>", "<tool_call|>"


def read_gemma(text: str, tools: Tools = ()) -> list[Piece]:
    """Return the pieces of a turn with `call:NAME{...}` between Gemma 4's marks."""

    def read(mark: re.Match[str]) -> tuple[list[ParsedCall], int]:
        literals = _Literals(text, mark.end())
        try:
            literals.need("call:")
            name = literals.word()
            literals.need("{")
            call = ParsedCall(name, literals.listed_pairs("}", ":"))
            literals.need(_CALL_END)
        except ValueError as error:
            return [malformed(f"the call cannot be read: {error}")], after_broken_call(
                text, mark.end(), _CALL, _CALL_END
            )
        return [call], literals.position

    return scan(text, re.escape(_CALL), read)


def write_gemma(name: str, args: Mapping[str, Any]) -> str:
    """Return a call as Gemma 4 writes it."""
    return f"{_CALL}call:{name}{{{','.join(f'{key}:{_gemma(value)}' for key, value in args.items())}}}{_CALL_END}"


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma(item)}" for key, item in value.items()) + "}"
    return f"[{','.join(map(_gemma, value))}]" if isinstance(value, list) else json.dumps(value)


LFM2 = ToolFormat(read=read_pythonic, write=write_pythonic)
GEMMA4 = ToolFormat(read=read_gemma, write=write_gemma)
