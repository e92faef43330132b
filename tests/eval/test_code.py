"""Programs that models wrote: found, run in the sandbox only, and right for what they answer alone."""

import ast
import base64
import json
import pickle
import re
import zlib
from dataclasses import replace

import pytest
from benches import LCB_SOLUTIONS, Says, rows_file, run_bench
from running import ROOT, data_file

from nanoskyrl.envs.sandbox.base import FULL_PYTHON, Ran, available
from nanoskyrl.eval.benchmarks.code import Outcome, fenced, last_block, outcome_of, same_output
from nanoskyrl.eval.benchmarks.humaneval import LIMITS, HumanEval, checked, completed
from nanoskyrl.eval.benchmarks.livecodebench import LiveCodeBench, LiveCodeBenchConfig, plain_unpickled, unpacked_tests
from nanoskyrl.stages.core.errors import InputError, SandboxError, SettingsError

ROW = {
    "task_id": "t/0", "prompt": "def add(a, b):\n    '''Add.'''\n", "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add",
}  # fmt: skip


@pytest.fixture(autouse=True)
def sandboxed():
    """Skip where no sandbox runs full Python."""
    if available()[FULL_PYTHON] is not None:
        pytest.skip(f"no sandbox for full Python here: {available()}")


@pytest.fixture
def one(tmp_path):
    """Return what a reply to the one task scores."""

    def score(text):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(ROW) + "\n")
        found = run_bench(
            "humaneval", tmp_path / "out", engine=Says(lambda task: text), tables={"humaneval": {"data": str(path)}}
        )
        (tmp_path / "out").rename(tmp_path / f"out-{len(list(tmp_path.glob('out-*')))}")
        return found["success"], found["no_answer"]

    return score


def humaneval_rows():
    return [json.loads(line) for line in data_file("humaneval/humaneval_shared.jsonl").read_text().splitlines()]


def passes(row, solution):
    return checked(completed(solution, row["prompt"], row["entry_point"]), row)[0]


EVERY = pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
"""Every tenth row, or with the slow tests all 120."""


@EVERY
@pytest.mark.usefixtures("patient")
def test_canonical_solutions_pass(step):
    rows = humaneval_rows()
    assert len(rows) == 120
    rows = rows[::step]
    failed = [r["task_id"] for r in rows if not passes(r, f"```python\n{r['prompt']}{r['canonical_solution']}\n```")]
    assert failed == []


class Mutate(ast.NodeTransformer):
    """Return another value from every return."""

    def visit_Return(self, node):
        return ast.copy_location(ast.Return(ast.Tuple([ast.Constant("mutant"), ast.Constant(0)], ast.Load())), node)


@EVERY
def test_mutated_solutions_fail(step):
    survived = []
    for row in humaneval_rows()[::step]:
        mutant = ast.unparse(Mutate().visit(ast.parse(row["prompt"] + row["canonical_solution"])))
        if passes(row, f"```python\n{mutant}\n```"):
            survived.append(row["task_id"])
    assert survived == []


@pytest.mark.parametrize(
    ("text", "success"),
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", 1.0),
        ("def add(a, b):\n    return a + b\n", 1.0),
        ("    return a + b\n", 1.0),
        ("A draft:\n```python\ndef add(a, b): return 0\n```\nBetter:\n```py\ndef add(a, b): return a + b\n```", 1.0),
        ("```python\ndef add(a, b):\n    return a - b\n```", 0.0),
        ("```python\nimport sys\ndef add(a, b):\n    sys.exit(0)\n```", 0.0),
        ("```python\nimport os\ndef add(a, b):\n    os._exit(0)\n```", 0.0),
        ("```python\nimport sys\nprint('true')\nsys.exit(0)\ndef add(a, b): pass\n```", 0.0),
        ("```python\ndef add(a, b):\n    while True: pass\n```", 0.0),
        ("```python\ndef add(a, b):\n    return open('/etc/passwd').read() and 3\n```", 0.0),
        ("```python\ndef add(a, b:\n```", 0.0),
    ],
)  # fmt: skip
def test_a_program_counts_for_what_it_answers(text, success, one, monkeypatch, patient):
    if "while True" in text:
        monkeypatch.setattr("nanoskyrl.eval.benchmarks.humaneval.LIMITS", replace(LIMITS, seconds=1.5))
    assert one(text)[0] == success


def test_no_program_runs_outside_the_sandbox(one, monkeypatch):
    """Without a sandbox nothing is graded, and nothing is run some other way."""

    def none():
        raise SandboxError("no sandbox here", hint="x")

    for module in ("humaneval", "code"):
        monkeypatch.setattr(f"nanoskyrl.eval.benchmarks.{module}.full_python", none)
    with pytest.raises(SandboxError):
        one("```python\ndef add(a, b):\n    return a + b\n```")
    for path in (ROOT / "eval").rglob("*.py"):
        tree = ast.parse(path.read_text())
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not called & {"exec", "eval"}, path


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("test", 5, "`test` must be text, not 5"),
        ("test", ["assert add(1, 2) == 3"], "`test` must be text, not ['assert add(1, 2) == 3']"),
        ("test", "def check(candidate:", "`test`: tests are no Python: SyntaxError"),
        ("test", "assert add(1, 2) == 3", "`test` defines no function `check`"),
        ("test", "", "`test` defines no function `check`"),
        ("prompt", {"text": "def add(a, b):"}, "`prompt` must be text, not {'text': 'def add(a, b):'}"),
        ("canonical_solution", 1.5, "`canonical_solution` must be text, not 1.5"),
        ("entry_point", True, "`entry_point` must be text, not True"),
        ("entry_point", "sub", "`entry_point` is 'sub', a function that `prompt` does not begin"),
        ("entry_point", "add(1", "`entry_point` is 'add(1', a function that `prompt` does not begin"),
    ],
)
def test_rows_of_humaneval_that_no_solution_could_pass_are_refused(column, value, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, {**ROW, "task_id": "t/1", column: value})))
    with pytest.raises(InputError, match=re.escape(f"row 1 of `{path}`: {message}")):
        HumanEval(HumanEval.Config(data=str(path))).tasks("test")


@pytest.mark.parametrize("answer", ["[" * 200_000, "9" * 5000, "{", "", '"\\ud800'])
def test_an_answer_that_is_no_json_is_wrong_and_raises_nothing(answer):
    assert outcome_of(Ran(True, f"word{answer}\n", "", None), "word") == Outcome(reason="error")


def test_a_reply_is_found_in_fences():
    text = "```python\na = 1\n```\n```json\n{}\n```\n```\nb = 2\n```"
    assert fenced(text) == ["a = 1\n", "b = 2\n"]
    assert last_block(text) == "b = 2"
    assert last_block("no fence") == ""
    assert last_block("```only one") == ""


# LiveCodeBench


def lcb_rows():
    return [json.loads(line) for line in rows_file("livecodebench").read_text().splitlines()]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("row", range(3))
def test_a_solution_that_fails_one_private_test_fails(row, tmp_path):
    given = lcb_rows()[row]
    tests = unpacked_tests(given)
    assert len(tests) > len(json.loads(given["public_test_cases"])) == 1
    solution = {
        "fix_a": "n = int(input())\nx = list(map(int, input().split()))\nprint(6 if x == [1, 2, 3] else 'no')",
        "fix_b": "class Solution:\n    def countPairs(self, nums, target):\n        return 2",
        "fix_c": "print(1.5)",
    }[given["question_id"]]
    found = run_bench(
        "livecodebench", tmp_path / "out",
        engine=Says(lambda task: f"```python\n{solution if task.task_id == given['question_id'] else 'x'}\n```"),
    )  # fmt: skip
    assert found["success"] == 0.0
    from benches import table_of

    rows = table_of(tmp_path / "out").to_pylist()
    parts = next(json.loads(r["reward_parts"]) for r in rows if r["task_id"] == given["question_id"])
    assert (parts["tests_passed"], parts["tests"]) == (1.0, len(tests))


def test_a_program_cannot_read_what_the_right_output_is(tmp_path):
    peek = "import glob, sys\nprint(sys.stdin.read() and [open(p).read() for p in glob.glob('*')])"
    found = run_bench("livecodebench", tmp_path / "out", engine=Says(lambda task: f"```python\n{peek}\n```"))
    assert found["success"] == 0.0


class Boom:
    def __reduce__(self):
        return (print, ("run by unpickling",))


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_private_tests_are_read_from_a_plain_pickle_alone(capsys):
    tests = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    row = {"public_test_cases": "[]", "private_test_cases": packed(tests)}
    assert unpacked_tests(row) == json.loads(tests)
    for value in (Boom(), [tests], {"a": Boom()}):
        with pytest.raises(ValueError, match="private tests"):
            unpacked_tests({**row, "private_test_cases": packed(value)})
    with pytest.raises(ValueError, match="no plain pickle"):
        plain_unpickled(b"\x80\x04garbage")
    assert "run by unpickling" not in capsys.readouterr().out


TEST = {"input": "1", "output": "2", "testtype": "stdin"}


def public(*tests):
    return {"public_test_cases": json.dumps(tests)}


def private(tests):
    return {"private_test_cases": packed(json.dumps(tests))}


def lcb_file(tmp_path, changes):
    """Return a file of the sample rows whose second is changed."""
    rows = lcb_rows()
    rows[1] |= changes
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"public_test_cases": 3}, "`public_test_cases` must be text, not 3"),
        ({"public_test_cases": [TEST]}, "`public_test_cases` must be text, not [{'input'"),
        ({"public_test_cases": "[{"}, "`public_test_cases` is no JSON"),
        ({"public_test_cases": "7"}, "`public_test_cases` must be a list of tests, not 7"),
        ({"public_test_cases": '["1"]'}, "test 0 of `public_test_cases` must be an object, not '1'"),
        (public(TEST, {**TEST, "input": 1}), "input of test 1 of `public_test_cases` must be text, not 1"),
        (public({"input": "1"}), "output of test 0 of `public_test_cases` must be text, not None"),
        (public({**TEST, "testtype": "x"}), "testtype of test 0 of `public_test_cases` must be stdin or functional"),
        (
            {**public({**TEST, "testtype": "functional"}), "metadata": "{}"},
            "test 0 of `public_test_cases` calls a function, and `metadata` has no func_name",
        ),
        (
            {**public({"input": "1\n[2", "output": "2"}), "metadata": '{"func_name": "countPairs"}'},
            "test 0 of `public_test_cases` calls a function, and '[2' is no JSON",
        ),
        ({"metadata": "[]"}, "`metadata` must be a JSON object, not []"),
        ({"metadata": "{"}, "`metadata` is no JSON"),
        ({"metadata": '{"func_name": 3}'}, "func_name in `metadata` must be text, not 3"),
        ({"private_test_cases": 3}, "`private_test_cases` must be text, not 3"),
        ({"starter_code": ["x"]}, "`starter_code` must be text, not ['x']"),
        ({"question_content": 1}, "`question_content` must be text, not 1"),
    ],
)  # fmt: skip
def test_rows_of_livecodebench_that_no_program_could_pass_are_refused(changes, message, tmp_path):
    path = lcb_file(tmp_path, changes)
    with pytest.raises(InputError, match=re.escape(f"row 1 of `{path}`: {message}")):
        LiveCodeBench(LiveCodeBenchConfig(data=str(path), start_date="2025-02-01")).tasks("test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private_test_cases": "[{"}, "`private_test_cases` is neither JSON nor packed JSON"),
        ({"private_test_cases": "AAAA"}, "`private_test_cases` is neither JSON nor packed JSON: private tests cannot"),
        ({"private_test_cases": packed("[{")}, "`private_test_cases` is neither JSON nor packed JSON"),
        (private(TEST), "`private_test_cases` must be a list of tests, not {'input'"),
        (private([{**TEST, "output": [2]}]), "output of test 0 of `private_test_cases` must be text, not [2]"),
        (
            {"private_test_cases": "[]", "public_test_cases": "[]"},
            "`public_test_cases` and `private_test_cases` hold no test",
        ),
    ],
)  # fmt: skip
def test_private_tests_are_looked_at_before_anything_is_asked(changes, message, tmp_path):
    path = lcb_file(tmp_path, changes)
    tables = {"livecodebench": {"data": str(path)}}

    def none(task):
        raise AssertionError("a task was posed")

    with pytest.raises(InputError, match=re.escape(f"row `fix_b` of `{path}`: {message}")):
        run_bench("livecodebench", tmp_path / "out", engine=Says(none), tables=tables)
    assert not (tmp_path / "out").exists()
    others = {"livecodebench": {**tables["livecodebench"], "start_date": "2025-03-01"}}
    assert run_bench("livecodebench", tmp_path / "out", engine=Says(lambda task: ""), tables=others)["samples"] == 1


def test_a_date_window_leaves_out_other_contests():
    def ids(**window):
        config = LiveCodeBenchConfig(data=str(rows_file("livecodebench")), **window)
        return [task.task_id for task in LiveCodeBench(config).tasks("test")]

    assert ids() == list(LCB_SOLUTIONS)
    assert ids(start_date="2025-02-01") == ["fix_b", "fix_c"]
    assert ids(start_date="2025-01-04", end_date="2025-02-01") == ["fix_a", "fix_b"]
    with pytest.raises(InputError, match="no problem between"):
        ids(start_date="2026-01-01")
    with pytest.raises(SettingsError, match="no date"):
        LiveCodeBenchConfig(start_date="yesterday")
    with pytest.raises(SettingsError, match=r"livecodebench\.version"):
        LiveCodeBenchConfig(version="v99")


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ("6\n", "6", True), (" 6 \n\n", "6\n", True), ("1.50", "1.5", True), ("1 2", "1 2.0", True),
        ("1\n2", "1 2", False), ("1.5000001", "1.5", False), ("yes", "Yes", False), ("", "0", False),
        ("nan", "nan", True), ("a 1", "a 1.0", False), ("sNaN", "5", False), ("5", "sNaN 5", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_line_by_line_as_text_or_exact_numbers(found, wanted, same):
    assert same_output(found, wanted) is same


def test_humaneval_poses_the_whole_function():
    row = humaneval_rows()[0]
    task = HumanEval(HumanEval.Config(data=str(rows_file("humaneval")))).pose(row, 0)
    assert row["prompt"].rstrip() in task.messages[0]["content"]
    assert row["canonical_solution"] not in task.messages[0]["content"]
