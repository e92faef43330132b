import json

import pytest
from hypothesis import given, strategies as st

from nanoskyrl.envs.actions import final_answer, json_object, restore_stop, tool_calls

CALL = '<tool_call>{"tool": "f", "args": {"x": 1}}</tool_call>'

# The pieces that matter to a parser, in any order, with any text between: lone surrogates and NUL too.
PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<think>", "</think>", "```", CALL,
        "<answer>5</answer>", '{"tool": "f", "args": ', "{", "}", "[", "]", '"', "\\", "\\u", ":", ",", "null", "NaN",
        "1e999", " ", "\n", "\0", "\ud800",
    ]
)  # fmt: skip
WRITTEN = st.lists(PIECES | st.text(st.characters(), max_size=4), max_size=30).map("".join)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", "{", '}"']),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=8,
)


def written(value):
    return f"<tool_call>{json.dumps(value)}</tool_call>"


def errors(text):
    return [call.error for call in tool_calls(text)]


# Calls


@pytest.mark.parametrize("name", ["tool", "name"])
@pytest.mark.parametrize("arguments", ["args", "arguments", "params", "parameters"])
def test_a_call_may_be_spelt_in_every_usual_way(name, arguments):
    (call,) = tool_calls(written({name: "calculator", arguments: {"expression": "1+1"}}))
    assert (call.tool, call.args, call.error) == ("calculator", {"expression": "1+1"}, None)


def test_a_call_without_arguments_has_none():
    (call,) = tool_calls(written({"tool": "look"}))
    assert (call.tool, call.args, call.error) == ("look", {}, None)


def test_nested_braces_belong_to_the_call():
    (call,) = tool_calls('<tool_call>{"tool": "f", "args": {"a": {"b": {"c": [{}, {"d": 1}]}}}}</tool_call>')
    assert call.args == {"a": {"b": {"c": [{}, {"d": 1}]}}}


def test_a_closing_tag_inside_a_string_does_not_end_the_call():
    (call,) = tool_calls('<tool_call>{"tool": "f", "args": {"q": "what is </tool_call>?"}}</tool_call>')
    assert call.args == {"q": "what is </tool_call>?"}


def test_a_call_inside_a_string_is_no_call():
    (call,) = tool_calls(written({"tool": "f", "args": {"q": CALL}}))
    assert call.args == {"q": CALL}


@given(st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=4))
def test_any_arguments_are_read_as_they_were_written(args):
    (call,) = tool_calls(f"I will look. {written({'tool': 'f', 'args': args})} Done.")
    assert (call.tool, call.args, call.error) == ("f", args, None)


def test_space_and_line_breaks_around_the_object_mean_nothing():
    (call,) = tool_calls('<tool_call>\n\t {"tool": "f",\n "args": {}}\r\n </tool_call>')
    assert (call.tool, call.args, call.error) == ("f", {}, None)


def test_several_calls_keep_their_order():
    text = "".join(written({"tool": name, "args": {}}) for name in "abc")
    assert [call.tool for call in tool_calls(f"first {text} last")] == ["a", "b", "c"]


def test_a_call_after_a_malformed_one_is_still_read():
    calls = tool_calls(f"<tool_call>oops</tool_call> {CALL} <tool_call>[1]</tool_call> {CALL}")
    assert [(call.tool, call.error) for call in calls] == [
        (None, "malformed"), ("f", None), (None, "malformed"), ("f", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"tool": "f", "args": {"x": 1',
        '<tool_call>{"tool": "f", "args": {"x": "1',
        '<tool_call>{"tool": "f", "args": {"x": 1}</tool_call>',
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>f(x=1)</tool_call>",
        "<tool_call>{'tool': 'f', 'args': {}}</tool_call>",
        '<tool_call>{"tool": "f", "args": {"x": 01}}</tool_call>',
        "<tool_call>\0</tool_call>",
        "<tool_call>\ud800</tool_call>",
    ],
)
def test_cut_or_broken_json_is_one_malformed_call_that_says_so(text):
    (call,) = tool_calls(text)
    assert (call.tool, call.args, call.error) == (None, None, "malformed")
    assert "not valid JSON" in call.detail


@pytest.mark.parametrize("after", ["", " and then", " }", " </tool_cal", ' {"tool": "g"}', ' "</tool_call>'])
def test_a_missing_closing_tag_is_malformed(after):
    (call,) = tool_calls('<tool_call>{"tool": "f", "args": {}}' + after)
    assert (call.error, call.tool) == ("malformed", None)
    assert "does not end with </tool_call>" in call.detail


@pytest.mark.parametrize("junk", ["}", "junk", ", {}", "\0", "<answer>5</answer>"])
def test_junk_between_the_object_and_the_closing_tag_is_malformed(junk):
    (call,) = tool_calls('<tool_call>{"tool": "f", "args": {}}' + junk + "</tool_call>")
    assert call.error == "malformed"


def test_a_call_that_was_not_closed_does_not_swallow_the_next():
    calls = tool_calls('<tool_call>{"tool": "f", "args": {}} ' + CALL)
    assert [(call.tool, call.error) for call in calls] == [(None, "malformed"), ("f", None)]


@pytest.mark.parametrize("args", [[], [1], "x", 5, True, "[1]", '"{}"', '{"a": NaN}'])
def test_arguments_that_are_no_object_are_told_apart_from_broken_json(args):
    (call,) = tool_calls(written({"tool": "f", "args": args}))
    assert (call.tool, call.args, call.error) == ("f", None, "bad_arguments")
    assert '"args" must be a JSON object' in call.detail


ARGS = {"expression": "2*3"}


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ('{"name": "calculator", "arguments": "{\\"expression\\": \\"2*3\\"}"}', [ARGS]),
        ('{"name": "calculator", "parameters": "{\\"expression\\": \\"2*3\\"}"}', [ARGS]),
        ('{"name": "calculator", "parameters": {"expression": "2*3"}}', [ARGS]),
        ('{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2*3"}}}', [ARGS]),
        ('{"function": {"name": "calculator", "arguments": "{\\"expression\\": \\"2*3\\"}"}, "id": "x"}', [ARGS]),
        ('{"name": "calculator", "arguments": null}', [{}]),
        ('{"name": "calculator", "arguments": ""}', [{}]),
        ('{"name": "calculator", "arguments": "null"}', [{}]),
        ('{"type": "function", "function": {"name": "calculator", "arguments": null}}', [{}]),
        ('[{"name": "calculator", "arguments": {"expression": "2*3"}}]', [ARGS]),
        (
            '[{"tool": "calculator"}, {"function": {"name": "calculator", "arguments": {"expression": "2*3"}}}]',
            [{}, ARGS],
        ),
        ('```json\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n```', [ARGS]),
        (
            '\n```\n[{"name": "calculator", "arguments": {"expression": "2*3"}}, {"name": "calculator"}]\n```\n',
            [ARGS, {}],
        ),
        ('```json\n{"name": "calculator", "arguments": {"expression": "2*3"}}```', [ARGS]),
    ],
)
def test_a_call_is_read_in_the_spellings_of_apis_and_of_other_models(written, calls):
    found = tool_calls(f"I look. <tool_call>{written}</tool_call> Done.")
    assert [(call.tool, call.args, call.error) for call in found] == [("calculator", args, None) for args in calls]


def test_one_bad_call_of_a_list_takes_none_of_the_others_with_it():
    found = tool_calls('<tool_call>[{"tool": "f"}, 5, {"tool": "g", "args": [1]}]</tool_call>')
    assert [(call.tool, call.error) for call in found] == [("f", None), (None, "malformed"), ("g", "bad_arguments")]


@pytest.mark.parametrize("value", [[], "f", 5, None, True, [5], [[{"tool": "f"}]]])
def test_a_call_that_is_no_object_is_malformed(value):
    assert errors(written(value)) == ["malformed"]


@pytest.mark.parametrize("value", [{}, {"args": {}}, {"tool": None}, {"tool": 5, "args": {}}, {"function": "f"}])
def test_a_call_without_a_name_is_malformed(value):
    assert errors(written(value)) == ["malformed"]


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{CALL}\n```",
        f"```json\n{CALL}",
        f"<think>I could write {CALL}</think>",
        f"<think>I could write {CALL}",
        f"Like this: ```{CALL}``` and <think>{CALL}</think>.",
    ],
)
def test_calls_in_code_fences_and_reasoning_are_not_made(text):
    assert tool_calls(text) == []


def test_a_call_after_reasoning_and_fences_is_made():
    assert [call.tool for call in tool_calls(f"<think>{CALL} no</think>```x``` {CALL}")] == ["f"]


@pytest.mark.parametrize("text", ["", " ", "hello", "</tool_call>", '{"tool": "f", "args": {}}', "<tool_cal>{}"])
def test_text_without_an_opening_tag_calls_nothing(text):
    assert tool_calls(text) == []


@pytest.mark.parametrize("argument", ["```python\nprint(1)\n```", "a ``` b", "<think>", "<think>x</think>"])
def test_a_fence_inside_an_argument_belongs_to_the_argument(argument):
    (call,) = tool_calls(written({"tool": "run", "args": {"code": argument}}))
    assert call.args == {"code": argument}


@given(WRITTEN)
def test_no_text_raises_and_every_call_is_whole_or_says_what_is_wrong(text):
    for call in tool_calls(text):
        if call.error is None:
            assert isinstance(call.tool, str)
            assert isinstance(call.args, dict)
        else:
            assert call.error in ("malformed", "bad_arguments")
            assert call.detail
            assert call.args is None


@pytest.mark.parametrize(
    "text",
    [
        "{" * 10**6,
        "<tool_call>" * 90_000,
        "<tool_call>" + "{" * 10**6,
        "<tool_call>" + "[" * 10**6,
        "<tool_call>" + '{"a":' * 200_000,
        "<tool_call>" + " " * 10**6,
        '<tool_call>"' + "\\" * 10**6,
        "<tool_call>" + "9" * 10**6,
        "```" * 300_000,
        "<think>" * 150_000,
        "<answer>" * 120_000,
        "\0" * 10**6,
        CALL * 18_000,
    ],
    ids=lambda text: repr(text[:18]),
)
@pytest.mark.timeout(60)  # squares of a million steps take hours
def test_much_of_anything_is_read_in_seconds(text):
    tool_calls(text[:300_000])
    final_answer(text[:300_000])


# Answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("It is <answer> 42\n</answer>.", "42"),
        ("<answer>41</answer> no, <answer>42</answer>", "42"),
        ("<answer></answer>", ""),
        ("<answer>4 < 5</answer>", "4 < 5"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>41 <answer>42</answer>", "42"),
        ("<think>41</think><answer>42</answer>", "42"),
        (f"{CALL}<answer>42</answer>", "42"),
    ],
)
def test_the_last_answer_counts_without_its_spaces(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "<answer>42",
        "42</answer>",
        "</answer>42<answer>",
        "<Answer>42</Answer>",
        "<answer>42</ answer>",
        "```\n<answer>42</answer>\n```",
        "```\n<answer>42</answer>",
        "<think><answer>42</answer></think>",
        "<think><answer>42</answer>",
        '<tool_call>{"tool": "f", "args": {"q": "<answer>42</answer>"}}</tool_call>',
        '<tool_call>{"tool": "f", "args": {"q": "<answer>42</answer>',
    ],
)
def test_what_is_unclosed_or_said_in_passing_is_no_answer(text):
    assert final_answer(text) is None


def test_an_answer_in_passing_does_not_hide_the_real_one():
    text = "<answer>42</answer> ```<answer>1</answer>``` <think><answer>2</answer></think>"
    assert final_answer(text) == "42"


def test_an_unclosed_answer_does_not_hide_an_earlier_one():
    assert final_answer("<answer>42</answer> or rather <answer>4") == "42"


def test_an_answer_in_an_argument_after_a_closing_tag_is_no_answer():
    text = written({"tool": "search", "args": {"query": "</tool_call><answer>42</answer>"}})
    assert final_answer(text) is None


@pytest.mark.parametrize(
    "text",
    ["<answer>42</answer></answer>", "<answer>42</answer> I said </answer>", "<answer><answer>42</answer></answer>"],
)
def test_a_stray_closing_tag_is_no_part_of_the_answer(text):
    assert final_answer(text) == "42"


@given(WRITTEN)
def test_an_answer_is_stripped_and_stands_in_the_text(text):
    answer = final_answer(text)
    if answer is not None:
        assert answer == answer.strip()
        assert "<answer>" in text
        assert "</answer>" in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"x": 1}', {"x": 1}),
        (' {"x": "}"}\n', {"x": "}"}),
        ('{"x": 1} and more', None),
        ("[1]", None),
        ("", None),
        ('{"x": NaN}', None),
        ('{"x": 1e999}', None),
        ('{"a":' * 100 + "1" + "}" * 100, None),
        ("{" * 100_000, None),
    ],
)
def test_a_json_object_is_read_by_the_rules_of_arguments(text, found):
    value, why = json_object(text)
    assert value == found
    assert bool(why) == (found is None)


@pytest.mark.parametrize(
    ("text", "stops", "restored"),
    [
        ('<tool_call>{"tool": "x"}', ("</tool_call>",), '<tool_call>{"tool": "x"}</tool_call>'),
        ('<tool_call>{"tool": "x"}', ("</answer>",), '<tool_call>{"tool": "x"}'),
        ('<tool_call>{"tool": "x"}', (), '<tool_call>{"tool": "x"}'),
        ("<answer>1", ("</tool_call>", "</answer>"), "<answer>1</answer>"),
        ("<answer>1</answer>", ("</answer>",), "<answer>1</answer>"),
        ("<answer>1</answer><answer>2", ("</answer>",), "<answer>1</answer><answer>2</answer>"),
        ("no tags", ("</answer>", "Observation:"), "no tags"),
    ],
)
def test_a_closing_tag_comes_back_only_where_it_was_a_stop_string_and_is_missing(text, stops, restored):
    assert restore_stop(text, stops) == restored
