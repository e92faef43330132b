"""Formats of tool calls: what each reads and writes, and that no text brings one down."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from nanoskyrl.envs.actions import final_answer, tool_calls
from nanoskyrl.envs.tool_formats.base import FoundCall, calls_in, in_own_tags
from nanoskyrl.stages.core.registry import TOOL_FORMATS, lookup

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"},
                    "list": {"anyOf": [{"type": "array"}, {"type": "null"}]}, "either": {"type": ["string", "null"]},
                },
            },
        },
    }
    for name in ("calculator", "look")
]  # fmt: skip
FORMATS = {name: lookup("tool_format", name) for name in TOOL_FORMATS}
ARGS = {"expression": "2*3"}
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
BLOCK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{}\n```<｜tool▁call▁end｜>"

WRITTEN = {
    "llama_json": [
        '{"name": "calculator", "parameters": {"expression": "2*3"}}',
        '<|python_tag|>{"name": "calculator", "parameters": {"expression": "2*3"}}',
        'I look.\n{"type": "function", "name": "calculator", "parameters": {"expression": "2*3"}}',
        '{"type": "function", "function": {"name": "calculator", "arguments": "{\\"expression\\": \\"2*3\\"}"}}',
        '{\n  "name": "calculator",\n  "arguments": {"expression": "2*3"}\n}',
    ],
    "qwen_xml": [
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n2*3\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=calculator><parameter=expression>2*3</parameter></function></tool_call>",
    ],
    "glm": [
        "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2*3</arg_value>\n</tool_call>",
        "<tool_call>calculator<arg_key>expression</arg_key><arg_value>2*3</arg_value></tool_call>",
    ],
    "deepseek": [
        DEEPSEEK.format(BLOCK.format('{"expression": "2*3"}')),
        BLOCK.format('{"expression": "2*3"}'),  # R1 leaves out what is around a single one
        DEEPSEEK.format('<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "2*3"}<｜tool▁call▁end｜>'),
    ],
    "mistral": [
        '[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "2*3"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS] [{"name": "calculator", "arguments": "{\\"expression\\": \\"2*3\\"}"}]',
        '[TOOL_CALLS]calculator[ARGS]{"expression": "2*3"}',
        '[TOOL_CALLS]calculator[CALL_ID]abcdefghi[ARGS]{"expression": "2*3"}',
        '[TOOL_CALLS]calculator{"expression": "2*3"}',
        '[THINK][TOOL_CALLS]look{}[/THINK][TOOL_CALLS]calculator[ARGS]{"expression": "2*3"}',
    ],
    "lfm2": [
        "<|tool_call_start|>[calculator(expression='2*3')]<|tool_call_end|>",
        '<|tool_call_start|>[calculator(expression = "2*3",)]<|tool_call_end|>I look.',
    ],
    "gemma4": [
        '<|tool_call>call:calculator{expression:<|"|>2*3<|"|>}<tool_call|>',
        '<|channel>thought\n<|tool_call>call:look{}<tool_call|>\n<channel|>'
        '<|tool_call>call:calculator{expression:<|"|>2*3<|"|>}<tool_call|>',
    ],
    "harmony": [
        '<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "2*3"}',
        '<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant<|channel|>commentary to=functions.calculator'
        ' <|constrain|>json<|message|>{"expression": "2*3"}<|call|>',
        ' to=functions.calculator<|channel|>commentary json<|message|>{"expression": "2*3"}<|call|>',
    ],
    "atem": [
        ' to=calculator<|message|><atem:function_calls>\n<atem:invoke name="calculator">\n'
        '<atem:parameter name="expression">2*3</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
    ],
}  # fmt: skip
"""As models write it."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRITTEN.items() for text in texts])
def test_a_call_is_read_as_models_write_it_and_environments_see_ours(name, text):
    pieces = FORMATS[name].read(text, TOOLS)
    assert [(call.tool, call.args, call.error) for call in calls_in(pieces)] == [("calculator", ARGS, None)]
    assert tool_calls(in_own_tags(pieces)) == calls_in(pieces)


VALUES = {"expression": 'it\'s "2"\n{3} </x> \\n é', "n": 3, "on": False, "list": [1, {"a": None, "b": [True, -2.5e3]}]}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("args", [{}, ARGS, VALUES])
def test_what_a_format_writes_it_reads_again(name, args):
    form = FORMATS[name]
    (call,) = calls_in(form.read(form.write("calculator", args), TOOLS))
    assert (call.tool, call.args, call.error) == ("calculator", args, None)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony", "atem"}))
def test_several_calls_keep_their_order_and_the_words_around_them(name):
    form = FORMATS[name]
    text = f"First.\n{form.write('calculator', ARGS)}\n{form.write('look', {'n': 2})}\nLast."
    pieces = form.read(text, TOOLS)
    assert [(call.tool, call.args) for call in calls_in(pieces)] == [("calculator", ARGS), ("look", {"n": 2})]
    assert in_own_tags(pieces).startswith("First.\n<tool_call>")
    assert in_own_tags(pieces).endswith("</tool_call>\nLast.")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony", "atem"}))
def test_reasoning_and_fences_call_nothing(name):
    form = FORMATS[name]
    call = form.write("calculator", ARGS)
    for text in (f"<think>\n{call}\n</think>", f"```\n{call}\n```", f"\n{call}\n</think>", f"<think>{call}"):
        pieces = form.read(text, TOOLS)
        assert calls_in(pieces) == []
        assert in_own_tags(pieces) == text


def test_unquoted_values_get_the_types_of_the_schema():
    def read(value, argument="n"):
        text = f"<tool_call>calculator<arg_key>{argument}</arg_key><arg_value>{value}</arg_value></tool_call>"
        (call,) = calls_in(FORMATS["glm"].read(text, TOOLS))
        return call.args[argument]

    assert (read("3"), read(" 3 "), read("three"), read("[1, 2]", "list"), read("null", "list")) == (
        3, 3, "three", [1, 2], None,
    )  # fmt: skip
    assert (read("true", "on"), read("True", "on"), read("NaN")) == (True, True, "NaN")
    assert (read("3", "expression"), read("null", "either"), read("3", "unheard_of")) == ("3", "null", "3")
    assert read("[" * 100_000, "list") == "[" * 100_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama_json", '{"name": "calculator", "parameters": {"expression": "2*3"'),
        ("llama_json", '{"name": "calculator", "parameters": {"expression": 2*3}}'),
        ("qwen_xml", "<tool_call>\n<function=calculator>\n<parameter=expression>\n2*3\n</function>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=calculator>\n</tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=calculator>\n</function>"),
        ("glm", "<tool_call>calculator\n<arg_key>expression</arg_key>\n</tool_call>"),
        ("glm", "<tool_call>calculator<arg_key>expression</arg_key><arg_value>2*3</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{\n```<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator"),
        ("mistral", '[TOOL_CALLS][{"name": "calculator"'),
        ("mistral", "[TOOL_CALLS]calculator"),
        ("lfm2", "<|tool_call_start|>[calculator(expression=2*3)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[calculator('2*3')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>" + "[" * 1000),
        ("gemma4", '<|tool_call>call:calculator{expression:<|"|>2*3}<tool_call|>'),
        ("harmony", '<|channel|>commentary to=functions.calculator<|message|>{"expression"<|call|>'),
        ("atem", " to=calculator<|message|>2*3<|eot|>"),
        ("atem", ' to=calculator<|message|><atem:function_calls><atem:invoke name="calculator"><|eot|>'),
    ],
)
def test_a_broken_call_is_one_mistake_that_says_what_is_wrong_and_reaches_the_environment(name, text):
    pieces = FORMATS[name].read(text, TOOLS)
    (call,) = calls_in(pieces)
    assert (call.args, call.error) == (None, "malformed")
    assert call.detail
    assert tool_calls(in_own_tags(pieces)) == [call]


def test_arguments_that_are_no_object_are_told_apart():
    pieces = FORMATS["harmony"].read("<|channel|>commentary to=functions.calculator<|message|>[1]", TOOLS)
    (call,) = tool_calls(in_own_tags(pieces))
    assert (call.tool, call.error) == ("calculator", "bad_arguments")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 5}', '{"name": "Bob"}', 'He said {"name": "x", "parameters": {}}', "{}", '["name"]',
        '{"name": 5, "type": "x"}\n{"name": "Bob"}',
    ],
)  # fmt: skip
def test_an_answer_in_json_is_no_call_of_llamas(text):
    assert calls_in(FORMATS["llama_json"].read(text, TOOLS)) == []


def test_channels_become_reasoning_and_words():
    thought = "<|channel|>analysis<|message|>Perhaps <answer>5</answer>.<|end|>"
    text = f"{thought}<|start|>assistant<|channel|>final<|message|><answer>6</answer>"
    assert final_answer(in_own_tags(FORMATS["harmony"].read(text, ()))) == "6"
    text = (
        " to=self<|message|>Perhaps <answer>5</answer>.<|eom|><|start|>assistant to=user<|message|><answer>6</answer>"
    )
    assert final_answer(in_own_tags(FORMATS["atem"].read(text, ()))) == "6"
    assert in_own_tags(FORMATS["harmony"].read("plain words", ())) == "plain words"


# Texts that nobody expects

PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "f", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "{", "}", "[", "]", '"', "'",
    '{"name": "f", "parameters": {}}', "<|python_tag|>", "\n", " ", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```json\n", "```", "<|tool_call_start|>",
    "<|tool_call_end|>", "f(", "x=", "1e999", ")", ",", "<|tool_call>", "<tool_call|>", "call:f{", "x:", '<|"|>', "\\",
    "\\u12", "<|channel|>", "<|message|>", "<|start|>assistant", " to=functions.f", " to=f", "<|end|>", "<|call|>",
    "<atem:function_calls>", '<atem:invoke name="f">', '<atem:parameter name="x">', "</atem:parameter>",
    "</atem:invoke>", "</atem:function_calls>", "<think>", "</think>", "\ud800", "\0", "-", "9" * 30,
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=24).map("".join))
def test_no_text_raises_in_any_format(text):
    for name, form in FORMATS.items():
        for piece in (pieces := form.read(text, TOOLS)):
            if isinstance(piece, FoundCall):
                call = piece.call
                assert (
                    (isinstance(call.tool, str) and isinstance(call.args, dict)) if call.error is None else call.detail
                )
                assert 0 < piece.end <= len(text)
        found = tool_calls(in_own_tags(pieces))
        if not FORMATS[name].channels:
            assert len(found) >= sum(isinstance(piece, FoundCall) for piece in pieces)
        json.dumps([call.args for call in calls_in(pieces)])


@pytest.mark.parametrize(
    "unit",
    [
        *PIECES, "<tool_call><function=f><parameter=x>", "<tool_call>f<arg_key>", '{"name": [\n', '{"name": 1}\n',
        "<tool_call>f<arg_key>x</arg_key><arg_value>", "<|tool_call_start|>[f(x='", '<|tool_call>call:f{x:<|"|>',
        "<|tool_call_start|>[f(x=[", '{"name": "f", "parameters": {}}\n', '[TOOL_CALLS][{"a":',
        ' to=f<|message|><atem:function_calls><atem:invoke name="f">',
    ],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_the_time_of_reading_grows_with_the_length(unit):
    # A reader that starts over at each mark would take hours for a megabyte, and one that stands still for ever.
    text = unit * (40_000 // len(unit))
    for form in FORMATS.values():
        form.read(text, TOOLS)
