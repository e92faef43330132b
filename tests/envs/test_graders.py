"""Right and wrong answers by kind; the motives are public bug reports, the cases our own."""

import json
import os
from typing import ClassVar

import pytest
from hypothesis import given, settings, strategies as st
from running import data_file

from nanoskyrl.envs.graders import kinds as graders
from nanoskyrl.envs.graders.kinds import KINDS, Verdict, grade
from nanoskyrl.envs.graders.workers import WorkerDied, Workers, WorkerTimeout
from nanoskyrl.envs.sandbox.base import FULL_PYTHON, available
from nanoskyrl.stages.core.errors import InputError, SettingsError

MATH_RIGHT = [
    # Fractions and decimals.
    (r"\frac{1}{2}", "0.5"), ("0.5", r"\frac{1}{2}"), (r"\dfrac{3}{4}", "3/4"), (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"1\frac{1}{2}", "1.5"), (r"\frac12", "1/2"), (r"\frac{2}{4}", r"\tfrac{1}{2}"), (r"\frac{1}{3}", "1/3"),
    # Separators of thousands.
    ("1234", "1,234"), ("1234567", r"1{,}234{,}567"), ("1234", r"1\,234"), ("12345", "12 345"), ("1234", "1\u202f234"),
    ("1,234.5", "1234.5"), (r"10{,}000", "10000"), ("1234", r"1,\!234"), ("1234", "1'234"),
    # Units.
    ("5", r"5\text{ cm}"), (r"5\text{ cm}", "5 cm"), ("5 cm", "5"), ("30", r"30^\circ"), (r"30^{\circ}", "30 degrees"),
    ("12 m^2", "12 m²"), ("$18", "18 dollars"), (r"\$18", "18"), ("2 hours", r"2\text{ h}"),
    # Intervals, inequalities, unions.
    ("x > 2", r"(2,\infty)"), (r"(2,\infty)", "x > 2"), (r"x \ge 2", "x ≥ 2"), ("2 < x < 5", "(2, 5)"),
    (r"(1,2)\cup(3,4)", r"(3,4) \cup (1,2)"), (r"[1,2)", r"\left[1, 2\right)"), (r"(-\infty, 3]", r"x \le 3"),
    # Sets and tuples.
    (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "(1, 2)"), (r"\{1,2,3\}", r"\left\{3, 1, 2\right\}"),
    # Boxes.
    ("42", r"so \boxed{42}"), ("42", r"\boxed{41}, no: \boxed{42}"), (r"\frac{1}{2}", r"\boxed{\frac{1}{2}}"),
    ("3", r"\fbox{3}"), (r"\boxed{7}", "7"), ("x^{2}", r"\boxed{x^{2}}"), ("5", r"\boxed{ \text{5} }"),
    # Percent.
    ("10%", r"10\%"), ("0.1", "10%"), ("10%", "10"), (r"10\%", r"\frac{1}{10}"), ("50 percent", "50%"),
    # Signs.
    ("-5", "\u22125"), ("-5", "\u20135"), ("-5", "\uff0d\uff15"), ("0", "-0"), ("-0.0", "0"), ("12", "\uff11\uff12"),
    ("+3", "3"), ("1.5", "\uff11\uff0e\uff15"),
    # Expressions.
    ("x^2+2x+1", "(x+1)^2"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), (r"2\pi", r"\pi \cdot 2"), ("2π", r"2\pi"),
    ("x = 3", "3"), ("3", "x=3"), (r"$\frac{1}{2}$", r"\(0.5\)"), ("5²", "25"), (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), (r"2^{10}", "1024"),
    # Words.
    ("Nairobi", "nairobi."), (r"\text{Evelyn}", "Evelyn"), ("no solution", "No solution"),
]  # fmt: skip
MATH_WRONG = [
    (r"\frac{1}{2}", "0.6"), (r"\frac{1}{3}", "0.33"), ("1234", "1,235"), ("1234", "12,34"), ("0.5", "5"),
    ("5 cm", "5 m"), (r"5\text{ kg}", "5 g"), ("12 m^2", "12 m^3"), ("12 m^2", "12 m"), ("30 degrees", "30 minutes"),
    ("10", "10%"), ("10%", "10.5"), ("1, 2", "2, 1"), ("10%", "0.01"), ("x > 2", r"[2,\infty)"), ("x > 2", "x < 2"), ("[1,2)", "(1,2)"),
    (r"(1,2)\cup(3,4)", "(1,4)"), (r"\{1,2\}", "(1,2)"), ("(1,2)", r"\{1,2\}"), ("(1,2)", "(2,1)"),
    (r"\{1,2\}", r"\{1,2,3\}"), ("42", r"\boxed{42}, or rather \boxed{41}"), ("1, 2", r"\boxed{1} and \boxed{2}"),
    ("42", r"\boxed{42"), (r"\frac{1}{2}", r"\boxed{\frac{1}{2}"), ("42", r"\boxed{42} or \boxed{4"), ("42", r"\boxed{}"),
    ("42", ""), ("52", "5²"), ("5²", "52"), ("-5", "5"), ("x+1", "x-1"), ("3", "x=4"), ("Nairobi", "Mombasa"),
    ("Nairobi", "iroNabi"), ("42", "the answer is not 41"), ("no solution", "0"), (r"(1,234)", "1234"), ("ab", "ba"),
    ("3", "3, 4"), ("1 234", "1, 234"), ("0", "\\infty"), ("42", "\ud800"), ("42", "\0"), ("42", "{" * 1500),
]  # fmt: skip
OTHERS = [
    ("number", "18", "#### 18", True), ("number", "18", "#### $18.00", True), ("number", "1,000", "so\n#### 1000", True),
    ("number", "18", "#### 17\n#### 18", True), ("number", "18", "#### 18 dollars", True), ("number", "-3", "#### −3", True),
    ("number", "a\n#### 5", "<answer>5</answer>", True), ("number", "5", r"\boxed{5}", True), ("number", "25", "25%", True),
    ("number", "18", "#### 18 of 20", False), ("number", "18", "18 + 2 = 20", False), ("number", "18", "#### ", False),
    ("number", "18", "18\n#### 19", False), ("number", "18", "eighteen", False), ("number", "5", r"\boxed{5", False),
    ("set", "1, 2, 3", "3, 1, 2", True), ("set", r"\{1, \frac{1}{2}\}", "{0.5, 1}", True), ("set", "a, b", "b, a", True),
    ("set", "1, 2", "1, 1, 2", True), ("set", "(1,2), (3,4)", "(3, 4), (1, 2)", True), ("set", "1, 2", "(2, 1)", True),
    ("set", "1, 2", "1", False), ("set", "1, 2", "1, 2, 3", False), ("set", "1, 2", "1, 3", False), ("set", "1", "", False),
    ("tuple", "(1, 2)", "(1,2)", True), ("tuple", "1, 2", "[1.0, 4/2]", True), ("tuple", "(1, 2)", "(2, 1)", False),
    ("tuple", "(1, 2)", "(1, 2, 3)", False), ("tuple", "(1, (2, 3))", "(1, (2, 3))", True), ("tuple", "(1,2)", "()", False),
    ("mcq", "B", "B", True), ("mcq", 1, "(B)", True), ("mcq", "B", "Answer: B", True), ("mcq", "B", "The answer is (B).", True),
    ("mcq", "C", "Answer: B\nNo, the answer is C", True), ("mcq", "D", r"\boxed{D}", True), ("mcq", 0, "**Answer: A**", True),
    ("mcq", "J", "<answer>J</answer>", True), ("mcq", "B", "b) is silly. Answer: B.", True), ("mcq", "I", "The answer is I.", True),
    ("mcq", "A", "A cat is an animal", False), ("mcq", "I", "The answer: I think it is C", False), ("mcq", 3, "Answer: C", False),
    ("mcq", "A", "The answer is a matter of taste", False), ("mcq", "B", "", False), ("mcq", "B", "I would say so", False),
    ("tool_call", {"name": "f", "arguments": {"x": 1}}, '<tool_call>{"tool": "f", "args": {"x": 1.0}}</tool_call>', True),
    ("tool_call", {"name": "f", "arguments": {}}, '<tool_call>{"name": "f"}</tool_call>', True),
    ("tool_call", {"name": "f", "arguments": {"x": {"a": "}"}}}, '<tool_call>{"name": "f", "arguments": {"x": {"a": "}"}}}</tool_call>', True),
    ("tool_call", {"name": "f", "arguments": {"x": "</tool_call>"}}, '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>', True),
    ("tool_call", [{"name": "f"}, {"name": "g"}], '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', True),
    ("tool_call", [{"name": "f"}, {"name": "g"}], '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call>', False),
    ("tool_call_set", [{"name": "f"}, {"name": "g"}], '<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "f"}</tool_call>', True),
    ("tool_call_set", [{"name": "f"}, {"name": "f", "arguments": {"x": 1}}], '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "f"}</tool_call>', True),
    ("tool_call_set", [{"name": "f"}, {"name": "g"}], '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>', False),
    ("tool_call_set", [{"name": "f"}], '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>', False),
    ("tool_call", [], "no tool is needed", True), ("tool_call", [], '<tool_call>{"name": "f"}</tool_call>', False),
    ("tool_call", {"name": "f", "arguments": {"x": 1}}, '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>', False),
    ("tool_call", {"name": "f", "arguments": {"x": 1}}, '<tool_call>{"name": "f", "arguments": {"x": true}}</tool_call>', False),
    ("tool_call", {"name": "f", "arguments": {"x": 1}}, '<tool_call>{"name": "f", "arguments": {"x": 1, "y": 2}}</tool_call>', False),
    ("tool_call", {"name": "f"}, '<tool_call>{"name": "g"}</tool_call>', False),
    ("tool_call", {"name": "f"}, '<tool_call>{"name": "f"', False), ("tool_call", {"name": "f"}, '<tool_call>{"name": "f"}', False),
    ("tool_call", {"name": "f"}, '<tool_call>{"name": "f"} junk</tool_call>', False),
    ("tool_call", {"name": "f"}, '<think><tool_call>{"name": "f"}</tool_call></think>', False),
    ("tool_call", {"name": "f"}, '```\n<tool_call>{"name": "f"}</tool_call>\n```', False),
    ("final_answer", "42", "<answer>42</answer>", True), ("final_answer", "42", "<answer>41</answer><answer>42</answer>", True),
    ("final_answer", r"\frac{1}{2}", "<answer>0.5</answer>", True), ("final_answer", "Paris", "<answer>paris</answer>", True),
    ("final_answer", "42", "42", False), ("final_answer", "42", "```\n<answer>42</answer>\n```", False),
    ("final_answer", "42", "<think><answer>42</answer></think>", False), ("final_answer", "42", "<answer>42", False),
    ("final_answer", "42", '<tool_call>{"name": "f", "arguments": {"x": "<answer>42</answer>"}}</tool_call>', False),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "pred"), MATH_RIGHT)
def test_a_right_answer_in_another_form(gold, pred):
    assert grade("math", gold, pred) == Verdict(True, "right")


@pytest.mark.parametrize(("gold", "pred"), MATH_WRONG)
def test_a_wrong_answer(gold, pred):
    assert grade("math", gold, pred).correct is False


@pytest.mark.parametrize(("kind", "gold", "pred", "right"), OTHERS)
def test_other_kinds(kind, gold, pred, right):
    verdict = grade(kind, gold, pred)
    assert verdict.correct is right, verdict


def test_there_are_a_hundred_cases():
    assert len(MATH_RIGHT) + len(MATH_WRONG) + len(OTHERS) >= 100


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_is_wrong_and_not_unjudged(kind):
    assert grade(kind, {"tests": ""}, None) == Verdict(False, "no answer")


@pytest.mark.skipif(available()[FULL_PYTHON] is not None, reason=f"no sandbox with full Python: {available()}")
@pytest.mark.usefixtures("patient")
class TestPrograms:
    TESTS: ClassVar = {"tests": "assert add(1, 2) == 3\nassert add(-1, 1) == 0"}

    @pytest.mark.parametrize(
        ("code", "right"),
        [
            ("def add(a, b): return a + b", True),
            ("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", True),
            ("```python\nwrong\n```\n```python\ndef add(a, b): return sum(x for x in (a, b))\n```", True),
            ("def add(a, b): return a - b", False),
            ("def add(a, b): return", False),
            ("def add(a, b):", False),
            ("exit(0)", False),
            ("import os\nos._exit(0)", False),
            ("", False),
        ],
    )
    def test_asserts(self, code, right):
        assert grade("code", self.TESTS, code).correct is right

    @pytest.mark.parametrize(
        ("code", "right"),
        [("def add(a, b): return a + b", True), ("def add(a, b): return 3", False), ("def other(): pass", False)],
    )
    def test_a_list_of_asserts(self, code, right):
        pieces = self.TESTS["tests"].split("\n")
        assert grade("code", {"tests": pieces}, code).correct is right

    @pytest.mark.parametrize(
        ("code", "right"), [("print(int(input()) * 2)", True), ("print(2)", False), ("1 / 0", False)]
    )
    def test_input_and_output(self, code, right):
        assert grade("code", {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8"]}, code).correct is right

    def test_a_program_that_does_not_end_is_wrong(self, monkeypatch):
        from nanoskyrl.envs.graders import grade_code
        from nanoskyrl.envs.sandbox.base import Limits

        monkeypatch.setattr(grade_code, "LIMITS", Limits(seconds=0.5))
        assert grade("code", self.TESTS, "while True: pass") == Verdict(False, "timeout")


@pytest.mark.parametrize("pred", ["9^{9^{9^{9}}}", "2^{2^{2^{2^{2^{2}}}}}"])
@pytest.mark.timeout(120)
def test_a_grader_that_hangs_is_killed_and_gives_no_verdict(pred):
    verdict = grade("math", "42", pred, seconds=1.0)
    assert verdict.correct is None or verdict.correct is False
    assert grade("math", "x+1", "1+x", seconds=120.0).correct  # the pool works on


def test_a_worker_that_does_not_answer_is_killed_and_replaced():
    pool = Workers(1)
    with pytest.raises(WorkerTimeout, match=r"no answer in 0\.2 s"):
        pool.call("time:sleep", 600, seconds=0.2)
    assert pool.call("operator:add", 1, 2, seconds=120.0) == 3
    with pytest.raises(WorkerDied, match="status 3"):
        pool.call("os:_exit", 3, seconds=120.0)
    with pytest.raises(ZeroDivisionError):
        pool.call("operator:truediv", 1, 0, seconds=120.0)
    assert pool.call("operator:add", 1, 2, seconds=120.0) == 3
    pool.close()


def test_a_forked_child_has_workers_of_its_own():
    pool = Workers(1)
    ours = pool.call("os:getpid", seconds=120.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if pool.call("os:getpid", seconds=120.0) != ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.call("os:getpid", seconds=120.0) == ours
    pool.close()


def test_a_killed_grader_says_timeout(monkeypatch):
    def killed(*_, **__):
        raise WorkerTimeout("no answer")

    monkeypatch.setattr(graders.POOL, "call", killed)
    for kind, gold, pred in (
        ("math", "x+1", "y"),
        ("set", "x+1, 2", "2, y"),
        ("tuple", "x+1", "y"),
        ("final_answer", "x+1", "<answer>y</answer>"),
    ):
        assert grade(kind, gold, pred) == Verdict(None, "timeout")


def test_wrong_use_is_refused():
    with pytest.raises(SettingsError, match="unknown grader `maths`"):
        grade("maths", "1", "1")
    for kind, gold in (
        ("mcq", "BC"), ("mcq", True), ("number", "many"), ("tool_call", "f(x)"), ("code", "x"),
        ("code", {"tests": 5}), ("code", {"tests": ["assert f(1)", 5]}), ("code", {"tests": "assert f(1"}),
        ("code", {"tests": ["assert f(1)", "assert f("]}), ("code", {"inputs": ["1"], "outputs": [2]}),
    ):  # fmt: skip
        with pytest.raises(InputError):
            grade(kind, gold, "x")


@settings(max_examples=60)
@given(kind=st.sampled_from(sorted(set(KINDS) - {"code"})), pred=st.text(max_size=60))
def test_no_text_makes_a_grader_raise(kind, pred):
    gold = {"mcq": "A", "tool_call": {"name": "f"}, "tool_call_set": {"name": "f"}, "number": "7"}.get(
        kind, "7 apples and a pear"
    )
    assert grade(kind, gold, pred).correct in (True, False)


def test_every_gold_solution_of_gsm8k_is_right_and_its_neighbour_wrong():
    rows = [json.loads(line) for line in data_file("gsm8k/test_shared.jsonl").read_text().splitlines()]
    assert len(rows) == 1000
    assert [row["id"] for row in rows if not grade("number", row["answer"], row["answer"]).correct] == []
    assert [row["id"] for row in rows if not grade("math", row["final"], f"\\boxed{{{row['final']}}}").correct] == []
    wrong = [row["id"] for row in rows if grade("number", row["answer"], row["answer"] + "1").correct]
    assert wrong == []
