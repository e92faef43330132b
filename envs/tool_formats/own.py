"""Our own protocol: how tools are described where a chat template has no place for them, in one text for all.

The calls are JSON in `<tool_call>` tags, which `hermes.py` reads; results are shown in `<tool_response>` tags.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoskyrl.envs.tool_formats.base import TOOL_CALL, TOOL_CALL_END, ParsedCall, ToolFormat, Tools, own_call
from nanoskyrl.envs.tool_formats.hermes import read

TOOLS_PROMPT = """You may call these tools:
<tools>
{schemas}
</tools>
To call one, write {call}"""


def write(name: str, args: Mapping[str, Any]) -> str:
    """Return a call in our own tags."""
    return own_call(ParsedCall(name, dict(args)))


OWN = ToolFormat(read=read, write=write)


def tools_in_words(tools: Tools, form: ToolFormat = OWN) -> str:
    """Return what tells a policy of its tools, and how a call is written."""
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = f'{TOOL_CALL}{{"tool": NAME, "args": {{...}}}}{TOOL_CALL_END}'
    return TOOLS_PROMPT.format(schemas=schemas, call=call if form is OWN else form.write("NAME", {"ARGUMENT": "VALUE"}))


def with_tools_told(
    messages: Sequence[Mapping[str, Any]], tools: Tools, form: ToolFormat = OWN
) -> list[dict[str, Any]]:
    """Return a conversation whose system message tells of the tools."""
    words = tools_in_words(tools, form)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n{words}"}, *map(dict, messages[1:])]
    return [{"role": "system", "content": words}, *map(dict, messages)]


def result_in_words(content: str) -> str:
    """Return what a tool said as the user's message."""
    return f"<tool_response>\n{content}\n</tool_response>"


def calls_in_words(content: str | None, calls: Sequence[Mapping[str, Any]], form: ToolFormat = OWN) -> str:
    """Return a message with `tool_calls` apart as one text.

    Args:
        content: What was said beside the calls; None: nothing.
        calls: As a conversation holds them, arguments as an object.
        form: How they are written.
    """
    written = (form.write(call["function"]["name"], call["function"]["arguments"]) for call in calls)
    return "\n".join([*([content] if content else []), *written])
