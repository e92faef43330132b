"""The tools an environment can offer: typed Python functions in one registry.

A tool's JSON schema and the checking of its arguments come from its signature, by
pydantic. A call that cannot be carried out is answered with what is wrong, as text.
A function of the user's is a tool under the name `module:function`.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from nanoskyrl.envs.actions import ParsedCall
from nanoskyrl.envs.base import Message
from nanoskyrl.stages.core.errors import NanoskyrlError, SettingsError, did_you_mean, told_as
from nanoskyrl.stages.core.registry import load_attribute
from nanoskyrl.stages.core.trajectory import ToolCall

MAX_NAME_LENGTH = 40
MAX_RESULT_LENGTH = 2000
"""Of what went wrong, in characters."""


@dataclass(frozen=True)
class Tool:
    """A function, its name, and what the policy reads about it."""

    name: str
    function: Callable[..., Any]
    """Returns text, or what JSON can hold."""

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
        for value in parameters.setdefault("properties", {}).values():
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
            return ToolCall(tool=self.name, args=dict(args), result=_as_text(self._adapter(**args)), ok=True)
        except NanoskyrlError:  # a sandbox that does not work is no mistake of the policy's
            raise
        except ValidationError as error:
            first = error.errors()[0]
            detail = f"argument {'.'.join(map(str, first['loc'])) or '?'}: {first['msg'].lower()}"
            return ToolCall(tool=self.name, args=dict(args), result=detail, ok=False, error="bad_arguments")
        except ToolError as error:
            return ToolCall(tool=self.name, args=dict(args), result=str(error), ok=False, error="tool_error")
        except Exception as error:  # a user's function raises what it likes, and the policy may fix its call
            detail = f"{type(error).__name__}: {error}"[:MAX_RESULT_LENGTH]
            return ToolCall(tool=self.name, args=dict(args), result=detail, ok=False, error="tool_error")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class ToolError(Exception):
    """The tool cannot do this; the text is for the policy."""


TOOLS = {
    "calculator": "nanoskyrl.envs.worlds.tool_use.calculator:calculator",
    "search": "nanoskyrl.envs.worlds.tool_use.search:search",
    "wiki": "nanoskyrl.envs.worlds.tool_use.search:wiki",
    "python_exec": "nanoskyrl.envs.worlds.tool_use.python_exec:python_exec",
}
"""What is offered by these names where an environment brings no function of its own."""


def offer(names: tuple[str, ...], own: Mapping[str, Callable[..., Any]] | None = None) -> dict[str, Tool]:
    """Return the tools of these names, of which some are functions of the environment's own.

    Raises:
        SettingsError: there is no such tool, or two have one name, or a function's arguments have no JSON schema.
    """
    offered: dict[str, Tool] = {}
    for name in names:
        if name not in TOOLS and ":" not in name:
            raise SettingsError(
                f"unknown tool `{name}`",
                hint=did_you_mean(name, TOOLS) or f"Choose from {', '.join(TOOLS)}, or name `module:function`",
            )
        function = (own or {}).get(name) or load_attribute(TOOLS.get(name, name), what="tool")
        if inspect.iscoroutinefunction(function):
            raise SettingsError(f"tool `{name}` is a coroutine", hint="Write it as a plain function")
        tool = Tool(name.rpartition(":")[2], function)
        if tool.name in offered:
            raise SettingsError(f"two tools are called `{tool.name}`", hint="Rename one of the functions")
        with told_as(
            SettingsError,
            f"the arguments of tool `{name}` have no JSON schema",
            Exception,
            hint="Give each argument a simple type",
        ):  # pydantic's errors for types, and what a property of the user's raises
            _ = tool.schema
        offered[tool.name] = tool
    return offered


def mistake_in(call: ParsedCall, names: Collection[str]) -> ToolCall | None:
    """Return the record of a call that no tool needs to see, because it cannot be read or names none; else None."""
    if call.error is not None or call.tool is None or call.args is None:
        return ToolCall(tool=call.tool, args=call.args, result=call.detail, ok=False, error=call.error or "malformed")
    if call.tool not in names:
        detail = f"there is no tool {call.tool[:MAX_NAME_LENGTH]!r}; there is {', '.join(names)}"
        return ToolCall(tool=call.tool, args=call.args, result=detail, ok=False, error="unknown_tool")
    return None


def carry_out(call: ParsedCall, tools: Mapping[str, Tool]) -> ToolCall:
    """Run a call as the policy wrote it; every mistake becomes a result that says what is wrong."""
    return mistake_in(call, tools) or tools[call.tool or ""].call(call.args or {})


def too_many(written: int, most: int) -> list[ToolCall]:
    """Return the record of calls of one turn that are not carried out, if there are any."""
    detail = f"{written} calls in one turn; only {most} are carried out"
    return [ToolCall(tool=None, result=detail, ok=False, error="too_many_calls")] if written > most else []


def replies_to(calls: Sequence[ToolCall], role: str = "tool") -> list[Message]:
    """Return the observations that answer calls."""
    return [{"role": role, "content": call.result if call.ok else f"error: {call.result}"} for call in calls]


def carry_out_all(
    written: Sequence[ParsedCall], tools: Mapping[str, Tool], most: int
) -> tuple[list[ToolCall], list[Message]]:
    """Run up to `most` calls of one turn, and return them with the observations that answer them."""
    calls = [*(carry_out(call, tools) for call in written[:most]), *too_many(len(written), most)]
    return calls, replies_to(calls)
