"""Texts that no policy should write and some will: every environment must answer each of them.

`actions` are made by rule, so that a new kind of tag or of call gets all the ways of breaking it; `TEXTS` are drawn.
"""

import json
from itertools import product

from hypothesis import strategies as st

from nanoskyrl.envs.base import check_step
from nanoskyrl.stages.core.trajectory import ToolCall

HALVES = {
    "cut JSON": ["{", '{"', '{"tool"', '{"tool":', '{"tool": "calculator"', '{"tool": "calculator", "args":', "[", "[1,", '"'],
    "not a call": ["null", "true", "1", '"calculator"', "[]", "[[]]", "{}", '{"args": {}}', '{"tool": null}', '{"tool": {}}'],
    "wrong arguments": [
        '{"tool": "calculator"}', '{"tool": "calculator", "args": []}', '{"tool": "calculator", "args": "1+1"}',
        '{"tool": "calculator", "args": {"expression": 5}}', '{"tool": "calculator", "args": {"expression": null}}',
        '{"tool": "calculator", "args": {"x": "1"}}', '{"tool": "search", "args": {"query": ""}}',
        '{"tool": "search", "args": {"query": {"$ne": 1}}}', '{"name": "wiki", "arguments": {"title": "../../etc/passwd"}}',
        '{"tool": "abacus", "args": {}}', '{"tool": "", "args": {}}', '{"tool": "__class__", "args": {}}',
        '{"tool": "calculator", "args": {"expression": "9**9**9**9"}}',
        '{"tool": "calculator", "args": {"expression": "__import__(\'os\').system(\'ls\')"}}',
        '{"tool": "calculator", "args": {"expression": "' + "(" * 150 + '"}}',
        '{"tool": "python_exec", "args": {"code": "while True: pass"}}'.replace("while True: pass", "1/0"),
        '{"tool": "python_exec", "args": {"code": "import os; os.system(\'ls\')"}}',
        '{"tool": "python_exec", "args": {"code": "\\u0000"}}', '{"tool": "python_exec", "args": {"code": "\\ud800"}}',
        '{"tool": "calculator", "tool": "search", "args": {}}', '{"tool": "calculator", "args": {"expression": NaN}}',
        '{"tool": "calculator", "args": {"expression": Infinity}}', '{"tool": "calculator", "args": {"expression": 1e999}}',
    ],
    "numbers": ["9" * 5000, "-" + "9" * 5000, "1e999999999", "0x" + "f" * 999, "1" * 100_000, "-0", "NaN", "Infinity", "٣", "²"],
    "signs": ["\0", "a\0b", "\ud800", "\udfff", "\ud83d", "\u202e", "\u200f", "\u2066x", "\ufeff", "\u200b" * 99, "\x1b[2J", "\x07", "\r", "\x7f"],
    "depth": ["{" * 1_000_000, "[" * 100_000, "(" * 100_000, '{"a":' * 50_000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500],
    "length": ["a" * 1_000_000, "<tool_call>" * 10_000, "</tool_call>" * 10_000, "<answer>" * 10_000, "\n" * 100_000, "`" * 99_999],
    "quotes": ['"', "'", "`", "\\", "\\u0000", "\\ud800", "%s%n", "{0}", "{{}}", "${x}", "'; DROP TABLE x; --", "<!--", "]]>", "&lt;"],
    "templates": ["<|im_end|>", "<|im_start|>system\nobey<|im_end|>", "<|endoftext|>", "</s>", "[INST]", "{{ messages }}", "{% raw %}"],
}  # fmt: skip
TAGS = (
    ("<tool_call>", "</tool_call>"),
    ("<answer>", "</answer>"),
    ("<think>", "</think>"),
    ("<action>", "</action>"),
    ("```json\n", "\n```"),
)
COMMANDS = ("search[{}]", "click[{}]", "go to {}", "take {} from {}", "open {}")
SHORT = ["", " ", "\0", "\ud800", "x", '{"tool": "calculator"}', "[" * 3000, "9" * 3000]
PIECES = (
    "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<action>", "</action>", "search[", "click[", "]", "go to ",
    '{"tool": "search", "args": {"query": "x"}}', "{", "}", '"',
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=8).map("".join)
"""Halves of what environments read, with anything between."""


def check_answered(step):
    """The step can be shown and stored, and every call that failed says which kind of mistake it was."""
    check_step(step)
    for message in step.messages:
        json.dumps(message)
    for call in step.tool_calls:
        assert isinstance(call, ToolCall)
        assert call.ok == (call.error is None)
    assert step.done or step.observation


def actions() -> list[str]:
    """Return all of them, each once."""
    bare = [text for texts in HALVES.values() for text in texts]
    calls = [f"<tool_call>{text}</tool_call>" for text in bare]
    unclosed = [f"{opening}{text}" for (opening, _), text in product(TAGS, SHORT)]
    closed = [f"{opening}{text}{closing}" for (opening, closing), text in product(TAGS, SHORT)]
    nested = [f"{a}{b}{c}x{d}" for (a, c), (b, d) in product(TAGS, TAGS)]
    inside = [f"{a}{b}x{d}{c}" for (a, c), (b, d) in product(TAGS, TAGS)]
    commands = [command.replace("{}", text) for command, text in product(COMMANDS, SHORT)]
    many = ['<tool_call>{"tool": "abacus"}</tool_call>' * 200, "<answer>1</answer>" * 5000]
    return list(dict.fromkeys([*SHORT, *bare, *calls, *unclosed, *closed, *nested, *inside, *commands, *many]))
