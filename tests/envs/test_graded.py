"""A thousand answers, each with its kind and the reason for which it is right or wrong."""

import json
from collections import Counter
from pathlib import Path

import pytest

from nanoskyrl.envs.actions import tool_calls
from nanoskyrl.envs.graders import equality, reading
from nanoskyrl.envs.graders.golds import golds_of
from nanoskyrl.envs.graders.grade_math import over_budget
from nanoskyrl.envs.graders.kinds import grade
from nanoskyrl.envs.graders.workers import WorkerTimeout
from nanoskyrl.stages.core.errors import InputError

ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "data/graded.jsonl").read_text("utf-8").split("\n") if line
]


def test_there_are_enough_of_both():
    assert min(Counter(row["right"] for row in ROWS).values()) >= 200
    assert len({row["reason"] for row in ROWS}) >= 40


@pytest.mark.parametrize("reason", dict.fromkeys(row["reason"] for row in ROWS))
def test_no_answer_is_graded_otherwise(reason):
    otherwise = [
        (row["kind"], row["gold"], row["pred"], verdict)
        for row in ROWS
        if row["reason"] == reason
        and (verdict := grade(row["kind"], row["gold"], row["pred"])).correct is not row["right"]
    ]
    assert otherwise == []


# What was taken


@pytest.mark.parametrize(
    ("reply", "text", "form"),
    [
        ("<answer>5</answer>\n#### 7", "5", "tags"), ("\\boxed{5}\n#### 7", "5", "box"),
        ("#### 7\nAnswer: 8", "7", "####"),
        ("Answer: 8", "8", "answer line"), ("8", "8", "whole text"), ("<answer>#### 7</answer>", "7", "tags"),
        ("Answer: the final answer is therefore 8.", "8", "answer line"),
        ("The answer is:\n\\[\n8\n\\]", "8", "answer line"),
        ("#### Step 1\nThe answer is 8.", "8", "answer line"), ("**Final Answer**\n\n\\(8\\)", "8", "answer line"),
        ("```\n\\boxed{8}\n```", "8", "box"), ("```\n\\boxed{7}\n```\nAnswer: 8", "8", "answer line"),
        ("The answer is St. Louis. It is big.", "St. Louis", "answer line"),
        ("The answer is 42, as shown above.", "42", "answer line"),
        ("The answer is correct.\n8", "The answer is correct.\n8", "whole text"),
    ],
)  # fmt: skip
def test_one_order_of_forms_holds_for_all(reply, text, form):
    found = reading.stated(reply, whole=True)
    assert found == reading.Stated(text, form)


def test_a_verdict_says_what_was_taken_and_as_what_it_was_compared():
    verdict = grade("number", "18", "<think>\\boxed{17}</think> #### **18** eggs")
    assert (verdict.correct, verdict.taken, verdict.form, verdict.kind) == (True, "18 eggs", "####", "number")
    verdict = grade("math", "0x1cb2", "\\boxed{0x1cb3}")
    assert (verdict.correct, verdict.taken, verdict.form, verdict.kind) == (False, "0x1cb3", "box", "literal of a base")


def test_the_marks_of_reasoning_are_a_setting():
    reply = "<scratch>\\boxed{4}</scratch> Answer: 5"
    assert grade("math", "4", reply).correct
    assert grade("math", "5", reply, marks=[("<scratch>", "</scratch>")]).correct


# Golds


@pytest.mark.parametrize("gold", [[], {}, {"label": "x"}, [None], [[]], {"target": []}, {"target": None}])
def test_a_gold_without_a_text_is_refused(gold):
    with pytest.raises(InputError, match="the gold answer"):
        grade("final_answer", gold, "<answer>x</answer>")


def test_the_texts_of_a_gold_keep_their_order():
    assert golds_of({"value": "NYC", "aliases": ["New York", "NYC", 7]}) == ["NYC", "New York", "7"]


# Time


@pytest.mark.parametrize(
    "reply",
    [
        "answer" + " " * 400_000 + "?", "answer is " * 40_000, "the answer to " + "a " * 200_000, "#### " * 100_000,
        "<think>" * 60_000, "```\n" * 100_000, "\\boxed{" * 60_000, "option " * 60_000, "**" * 200_000, "\n" * 400_000,
        "5" + " " * 400_000 + "x", "\\text{" * 60_000, "$" * 400_000, "Answer: " + "(" * 400_000, "1," * 200_000,
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
@pytest.mark.timeout(60)  # hours, where a step is quadratic
def test_a_long_reply_is_read_in_time_in_proportion_to_it(reply):
    for kind, gold in (("mcq", "A"), ("math", "x+1"), ("number", "7"), ("set", "x, y"), ("stated_answer", "Paris")):
        assert grade(kind, gold, reply[:120_000]).correct is False


@pytest.mark.parametrize("call", ["<tool_call>", '<tool_call>{"a": "'])
@pytest.mark.timeout(60)  # 137 s, where it was quadratic
def test_many_broken_calls_are_read_in_time_in_proportion_to_them(call):
    assert all(found.error for found in tool_calls(call * 100_000))


@pytest.mark.parametrize("size", [10, 1020, 1024, 1030, 5000, 20_000])
def test_a_call_is_read_whole_however_long_it_is(size):
    calls = tool_calls(
        f'<tool_call>{{"name": "f", "arguments": {{"x": "{"a" * size}", "n": 1{"0" * size}}}}}</tool_call>'
    )
    assert [call.error for call in calls] == [None] or size > 4000  # Python reads no integer of so many digits
    assert size > 4000 or calls[0].args == {"x": "a" * size, "n": 10**size}


BOMBS = [
    "9^{9^{9}}", "2^{2^{2^{2^{2^{2}}}}}", "10**10**10", "(x+1)^{99999}",
        "(((x+1)^{100})^{100})^{100}", "9!!!", "((9!)!)!", "99999999!", "1" * 1000,
    "1e999999999", "2^{99999999999}", "\\sqrt{" * 60 + "x" + "}" * 60, "x+" * 400 + "1", "9^9^9^9", "e^{e^{e^{9}}}",
]  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda text: text[:16])
def test_an_answer_over_the_budget_is_wrong_and_says_so(bomb, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the library was asked")

    monkeypatch.setattr(equality.POOL, "call", never)
    for gold in ("x+1", "42"):
        verdict = grade("math", gold, bomb)
        assert verdict.correct is False
        assert any(word in verdict.why for word in ("more than", "longer than", "deeper than"))


def test_a_gold_allows_what_it_needs_itself():
    assert over_budget("2^{20240}", "2^{20240}+1") is None
    assert over_budget("42", "2^{20240}+1") is not None


def test_the_limit_is_of_an_answer_and_not_of_its_members(monkeypatch):
    given = []

    def slow(*_, seconds):
        given.append(seconds)
        raise WorkerTimeout("no answer")

    monkeypatch.setattr(equality.POOL, "call", slow)
    assert grade("set", "x+1, y+1, z+1", "u+1, v+1, w+1", seconds=5).why == "timeout"
    assert len(given) == 9
    assert max(given) <= 5
    assert given == sorted(given, reverse=True)


def test_lengths_come_before_members(monkeypatch):
    monkeypatch.setattr(equality.POOL, "call", lambda *_, **__: pytest.fail("the library was asked"))
    assert grade("set", "x+1, y+1", ", ".join(f"x+{i}" for i in range(40))).why == "40 members, not 2"
