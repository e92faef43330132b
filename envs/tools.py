"""The tools an environment can offer: typed Python functions in one registry.

A tool's JSON schema and the checking of its arguments come from its signature, by
pydantic. A call that cannot be carried out is answered with what is wrong, as text.
"""

import ast
import inspect
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, cast

from nanoskyrl.envs.actions import ParsedCall
from nanoskyrl.envs.bm25 import Index, has_words
from nanoskyrl.stages.errors import SettingsError, did_you_mean
from nanoskyrl.stages.trajectory import ToolCall

MAX_EXPRESSION_LENGTH = 200
MAX_DIGITS = 1000
"""Results with more digits are refused: computing them would take longer than anyone waits."""
SEARCH_RESULTS = 3
MAX_NAME_LENGTH = 40


@dataclass(frozen=True)
class Tool:
    """A function, its name, and what the policy is told about it."""

    name: str
    function: Callable[..., str]

    @cached_property
    def _adapter(self) -> Any:
        from pydantic import ConfigDict, validate_call

        return validate_call(config=ConfigDict(extra="forbid"))(self.function)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool as `{"type": "function", "function": {name, description, parameters}}`."""
        from pydantic import TypeAdapter

        parameters = TypeAdapter(cast(Any, self.function)).json_schema()
        parameters.pop("title", None)
        parameters.pop("additionalProperties", None)
        for value in parameters["properties"].values():
            value.pop("title", None)
        description = (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")
        return {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }

    def call(self, args: Mapping[str, Any]) -> ToolCall:
        """Run the tool; what goes wrong comes back in the record."""
        from pydantic import ValidationError

        try:
            return ToolCall(tool=self.name, args=dict(args), result=self._adapter(**args), ok=True)
        except ValidationError as error:
            first = error.errors()[0]
            detail = f"argument {'.'.join(map(str, first['loc'])) or '?'}: {first['msg'].lower()}"
            return ToolCall(tool=self.name, args=dict(args), result=detail, ok=False, error="bad_arguments")
        except ToolError as error:
            return ToolCall(tool=self.name, args=dict(args), result=str(error), ok=False, error="tool_error")


class ToolError(Exception):
    """The tool cannot do this; the text is for the policy."""


def _limited(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def check(left: Any, right: Any) -> Any:
        if not all(isinstance(value, int | float) for value in (left, right)):
            raise ToolError("only numbers can be worked with")
        if function is operator.pow:
            if isinstance(left, float) or isinstance(right, float) or right < 0:
                left, right = float(left), float(right)
            elif abs(left) > 1 and right * math.log10(abs(left)) > MAX_DIGITS:
                raise ToolError("the result is too large")
        result = function(left, right)
        if isinstance(result, complex):
            raise ToolError("the result is not a real number")
        if isinstance(result, int) and result.bit_length() > MAX_DIGITS * 4:
            raise ToolError("the result is too large")
        return result

    return check


def _number(node: ast.Constant) -> int | float:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        raise ToolError("only numbers can be worked with")
    return node.value


def calculator(expression: str) -> str:
    """Work out an arithmetic expression with + - * / // % ** and brackets."""
    import simpleeval

    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_EXPRESSION_LENGTH} characters")
    binary = {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    }  # fmt: skip
    operators: dict[Any, Any] = {kind: _limited(function) for kind, function in binary.items()}
    operators |= {ast.USub: operator.neg, ast.UAdd: operator.pos}
    evaluator = simpleeval.SimpleEval(operators=operators, functions={}, names={})
    # Nothing but numbers and operators: attributes and methods of a number can hold a gigabyte.
    nodes: dict[Any, Any] = {kind: (evaluator.nodes or {})[kind] for kind in (ast.BinOp, ast.UnaryOp)}
    evaluator.nodes = {**nodes, ast.Constant: _number}
    try:
        value = evaluator.eval(expression, ast.parse(expression.strip(), mode="eval").body)
    except ToolError:
        raise
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    except Exception as error:  # the parser and the operators raise whatever they like
        raise ToolError(f"cannot work out this expression ({type(error).__name__})") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is too large")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def search(query: str) -> str:
    """Search a small encyclopedia and return the passages that fit best."""
    if not has_words(query):
        raise ToolError("the query has no words to look for")
    corpus = passages()
    hits = [corpus[i] for i in _index().find(query, SEARCH_RESULTS)]
    return "\n".join(f"{hit['title']}: {hit['text']}" for hit in hits) or "nothing found"


@cache
def passages() -> list[dict[str, str]]:
    """Return the corpus that ships with the package, as title and text."""
    text = resources.files("nanoskyrl.envs").joinpath("data/corpus.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def _index() -> Index:
    return Index([f"{p['title']} {p['text']}" for p in passages()])


TOOLS: dict[str, Callable[..., str]] = {"calculator": calculator, "search": search}


def offer(names: tuple[str, ...]) -> dict[str, Tool]:
    """Return the tools of these names.

    Raises:
        SettingsError: there is no such tool.
    """
    for name in names:
        if name not in TOOLS:
            raise SettingsError(
                f"unknown tool `{name}`", hint=did_you_mean(name, TOOLS) or f"Choose from {', '.join(TOOLS)}"
            )
    return {name: Tool(name, TOOLS[name]) for name in names}


def carry_out(call: ParsedCall, tools: Mapping[str, Tool]) -> ToolCall:
    """Run a call as the policy wrote it; every mistake becomes a result that says what is wrong."""
    if call.error is not None or call.tool is None or call.args is None:
        return ToolCall(tool=call.tool, args=call.args, result=call.detail, ok=False, error=call.error or "malformed")
    tool = tools.get(call.tool)
    if tool is None:
        detail = f"there is no tool {call.tool[:MAX_NAME_LENGTH]!r}; there is {', '.join(tools)}"
        return ToolCall(tool=call.tool, args=call.args, result=detail, ok=False, error="unknown_tool")
    return tool.call(call.args)
