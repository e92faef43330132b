"""SWE-bench: patches found and checked, an agent that repairs a repository, and logs graded by the official code."""

import json
import subprocess

import pytest
from benches import Says, rows_file, run_bench, table_of
from running import skyrl

from nanoskyrl.envs.sandbox.base import FULL_PYTHON, available
from nanoskyrl.eval.benchmarks import swe_harness
from nanoskyrl.eval.benchmarks.patches import applies, parses, patch_in, read_predictions, tidy
from nanoskyrl.stages.core.errors import EngineError, InputError, SettingsError
from nanoskyrl.stages.looking.grade import grade_logs

NO_SANDBOX = available()[FULL_PYTHON] is not None
needs_sandbox = pytest.mark.skipif(NO_SANDBOX, reason="no sandbox for full Python here")
NO_DOCKER = swe_harness.why_not_docker()
PATCH = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"


def git(folder, *words):
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path):
    """Return rows of SWE-bench's layout on a small repository made here, and where it lies."""
    repositories = tmp_path / "repositories"
    place = repositories / "ours__calc"
    place.mkdir(parents=True)
    git(place, "init", "-q")
    (place / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (place / "test_calc.py").write_text("from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n")
    git(place, "add", "-A")
    git(place, "commit", "-q", "-m", "base")
    base = git(place, "rev-parse", "HEAD")
    (place / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    git(place, "commit", "-q", "-a", "-m", "the fix, which an agent must not find")
    row = {
        "repo": "ours/calc", "instance_id": "ours__calc-1", "base_commit": base, "patch": PATCH, "test_patch": "",
        "problem_statement": "add(1, 2) is -1", "hints_text": "", "version": "1", "created_at": "",
        "FAIL_TO_PASS": '["test_calc.py::test_adds"]', "PASS_TO_PASS": '["test_calc.py::test_zero"]',
    }  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    return {"data": str(rows), "repositories": str(repositories)}, place, base


def run_agent(project, output, script, **more):
    settings, _, _ = project
    engine = Says(lambda task: "")
    turns = iter(script)
    engine.reply = lambda environment, task, turn: next(turns, "")
    found = run_bench("swe_bench_verified", output, engine=engine, tables={"swe_bench_verified": settings}, **more)
    return found, json.loads(table_of(output).to_pylist()[0]["metadata"])


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# Patches


@pytest.mark.parametrize(
    ("text", "patch"),
    [
        (f"So:\n```diff\n{PATCH}```\nDone.", PATCH), (f"```diff\nfirst\n```\n```patch\n{PATCH}```", PATCH),
        (PATCH.rstrip("\n"), PATCH), (f"Here:\n{PATCH}\n\n", PATCH), ("no patch", ""), ("```python\nx\n```", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_patch_is_found_in_a_reply_and_ends_in_a_newline(text, patch):
    assert patch_in(text) == patch


def test_an_empty_patch_stays_empty():
    assert tidy(" \n\n") == ""


@pytest.mark.parametrize("text", ["", "words", PATCH.replace("-1,2 +1,2", "-1,9 +1,9"), "--- a\n+++ b\n"])
def test_what_is_no_patch_does_not_parse(text):
    assert parses(PATCH)
    assert not parses(text)


def test_a_patch_is_checked_against_the_base_commit_without_touching_the_repository(project):
    _, place, base = project
    assert applies(PATCH, place, base)
    assert not applies(PATCH.replace("a - b", "a * b"), place, base)
    assert not applies(PATCH, place, git(place, "rev-parse", "HEAD"))
    assert git(place, "status", "--porcelain") == ""
    with pytest.raises(InputError, match="has no commit 0000"):
        applies(PATCH, place, "0" * 40)


# Without Docker


@pytest.mark.skipif(NO_DOCKER is None, reason="Docker runs here")
@pytest.mark.parametrize("name", ["swe_bench_verified", "swe_bench_multilingual"])
def test_gold_patches_validate_and_no_resolve_rate_is_given(name, tmp_path):
    out = tmp_path / "out"
    found = run_bench(name, out)
    count = len(rows_file(name).read_text().splitlines())
    assert (found["success"], found["success_95"], found.get("pass_at_1")) == (None, None, None)
    assert (found["patch_parses_count"], found["patch_empty_count"], found["samples"]) == (count, 0, count)
    assert "No resolve rate" in found["note"]
    assert "not run: the official harness" in found["note"]
    written = read_predictions(out / "_files" / "predictions.jsonl")
    golds = {row["instance_id"]: row["patch"] for row in map(json.loads, rows_file(name).read_text().splitlines())}
    assert written == {instance: tidy(patch) for instance, patch in golds.items()}
    assert all(patch.endswith("\n") for patch in written.values())


@pytest.mark.skipif(NO_DOCKER is None, reason="Docker runs here")
def test_asking_for_docker_where_there_is_none_is_refused_before_anything_is_generated(tmp_path):
    with pytest.raises(EngineError, match="the SWE-bench harness cannot run here") as error:
        run_bench("swe_bench_verified", tmp_path / "out", tables={"swe_bench_verified": {"harness": "docker"}})
    assert "skyrl grade predictions.jsonl --logs DIR" in str(error.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(NO_DOCKER is not None, reason=f"no Docker here: {NO_DOCKER}")
@pytest.mark.slow
def test_the_harness_is_called_for_real(tmp_path):
    row = json.loads(rows_file("swe_bench_multilingual").read_text().splitlines()[0])
    with pytest.raises(EngineError, match="left no log"):  # its image does not exist
        swe_harness.evaluate_patch(row, row["patch"], "m", 60)


def test_rows_of_the_old_layout_are_refused_for_containers(monkeypatch):
    row = json.loads(rows_file("swe_bench_multilingual").read_text().splitlines()[1])
    with pytest.raises(SettingsError, match="has no `image`"):
        swe_harness.check_layout(row)


def test_empty_patches_are_a_class_of_their_own(tmp_path):
    found = run_bench("swe_bench_multilingual", tmp_path / "out", engine=Says(lambda task: "I give up"))
    assert (found["patch_empty_count"], found["patch_parses_count"], found["no_answer"]) == (2, None, 1.0)


def test_each_sample_has_predictions_of_its_own(tmp_path):
    out = tmp_path / "out"
    run_bench("swe_bench_multilingual", out, n_samples=2)
    assert sorted(path.name for path in (out / "_files").iterdir()) == ["predictions-1.jsonl", "predictions.jsonl"]
    assert json.loads((out / "_manifest.json").read_text())["files"].keys() >= {
        "_files/predictions.jsonl",
        "_summary.json",
    }


# The agent


@needs_sandbox
def test_an_agent_repairs_a_repository_with_shell_and_edits(project, tmp_path):
    script = [
        call("bash", command="ls; cat calc.py; python3 -c 'from calc import add; print(add(1, 2))'"),
        call("edit", path="calc.py", old="a - b", new="a + b"),
        call("bash", command="python3 -c 'from calc import add; assert add(1, 2) == 3'; git log --oneline | wc -l"),
        call("submit"),
    ]
    found, metadata = run_agent(project, tmp_path / "out", script)
    _, place, base = project
    assert applies(metadata["model_patch"], place, base)
    assert "+    return a + b" in metadata["model_patch"]
    assert (found["tool_calls_valid"], found["tool_calls_invalid"], found["turns_mean"]) == (4, 0, 4.0)
    assert (found["patch_parses_count"], found["patch_applies_count"], found["patch_applies_checked"]) == (1, 1, 1)
    turns = table_of(tmp_path / "out").to_pylist()[0]["turns"]
    assert "-1" in turns[0]["observation"]
    assert turns[2]["observation"].strip() == "1"  # one commit: the fix is not in the history
    assert [path.name for path in place.iterdir() if path.suffix == ".pyc"] == []


@needs_sandbox
def test_the_gold_patch_goes_through_the_agents_tools(project, tmp_path):
    settings, _, _ = project
    found = run_bench("swe_bench_verified", tmp_path / "out", tables={"swe_bench_verified": settings})
    assert (found["patch_applies_count"], found["patch_empty_count"]) == (1, 0)
    assert (
        read_predictions(tmp_path / "out" / "_files" / "predictions.jsonl")["ours__calc-1"].count("+    return a + b")
        == 1
    )


@needs_sandbox
def test_what_was_done_counts_when_turns_run_out(project, tmp_path):
    settings = dict(project[0], turns=2)
    script = [call("edit", path="calc.py", old="a - b", new="a + b"), call("bash", command="true"), call("submit")]
    found, metadata = run_agent((settings, *project[1:]), tmp_path / "out", script)
    assert "+    return a + b" in metadata["model_patch"]
    assert found["status"] == {"max_turns": 1}


@needs_sandbox
@pytest.mark.parametrize(
    ("action", "says", "error"),
    [
        (call("bash", command="exit 3"), "the command failed", None),
        (call("bash", command="cat /etc/shadow"), "o such file", None),
        (call("bash", command="yes"), "stopped", "tool_error"),
        (call("edit", path="calc.py", old="nowhere", new="x"), "stands 0 times", "tool_error"),
        (call("edit", path="/etc/motd", old="", new="x"), "error", "tool_error"),
        (call("edit", path="calc.py", old="", new="x"), "there already", "tool_error"),
        (call("bash"), "argument command", "bad_arguments"),
        (call("sudo"), "there is no tool 'sudo'", "unknown_tool"),
        ("<tool_call>{oops</tool_call>", "not valid JSON", "malformed"),
    ],
)  # fmt: skip
def test_what_an_agent_does_wrong_is_an_observation(action, says, error, project, tmp_path):
    run_agent(project, tmp_path / "out", [action, call("submit")])
    turn = table_of(tmp_path / "out").to_pylist()[0]["turns"][0]
    assert says in turn["observation"]
    assert json.loads(turn["tool_calls"])[0]["error"] == error


@needs_sandbox
def test_git_that_an_agent_has_tampered_with_runs_only_in_the_sandbox(project, tmp_path):
    proof = tmp_path / "proof"
    script = [
        call("bash", command=f"git config core.fsmonitor 'touch {proof}'; git config diff.external 'touch {proof}'"),
        call("edit", path="calc.py", old="a - b", new="a + b"),
        call("submit"),
    ]
    _, metadata = run_agent(project, tmp_path / "out", script)
    assert not proof.exists()
    assert "+    return a + b" in metadata["model_patch"]


# Saved logs, graded by the official code; they are written here, in the harness's format: no run of it left them


def log_of(row, results, *, exit_code=None):
    lines = [">>>>> Start Test Output", *(f"{status} {test}" for test, status in results.items())]
    if exit_code is not None:
        lines.append(f">>>>> Test Exit Code: {exit_code}")
    return "\n".join([">>>>> Applied Patch", *lines, ">>>>> End Test Output", ""])


@pytest.fixture
def saved(tmp_path):
    """Return predictions, logs and rows of the three shared issues: one resolved, one not, one forged."""
    pytest.importorskip("swebench", reason="the official harness is not installed: extra `swebench`")
    rows = [json.loads(line) for line in rows_file("swe_bench_verified").read_text().splitlines()]
    predictions = tmp_path / "predictions.jsonl"
    predictions.write_text(
        "".join(
            json.dumps({"instance_id": r["instance_id"], "model_name_or_path": "m", "model_patch": r["patch"]}) + "\n"
            for r in rows
        )
    )
    logs = tmp_path / "logs"
    for place, row in enumerate(rows):
        tests = [*json.loads(row["FAIL_TO_PASS"]), *json.loads(row["PASS_TO_PASS"])]
        results = dict.fromkeys(tests, "PASSED")
        if place == 1:
            results[tests[0]] = "FAILED"
        folder = logs / "run" / "m" / row["instance_id"]
        folder.mkdir(parents=True)
        (folder / "test_output.txt").write_text(log_of(row, results, exit_code=1 if place == 2 else None))
        (folder / "patch.diff").write_text(row["patch"])
    return predictions, logs, rows


def test_saved_logs_are_graded_through_the_official_code(saved):
    predictions, logs, _ = saved
    done = skyrl("grade", predictions, "--logs", logs, "--data", rows_file("swe_bench_verified"))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["resolved"] for row in found] == [True, False, False]
    assert found[2]["why"] == "the log shows no run of the tests that can be believed"  # all PASSED, exit code 1
    assert json.loads(done.stderr)["resolved"] == 1


def test_an_issue_without_a_log_is_not_run_and_not_failed(saved):
    predictions, logs, rows = saved
    (logs / "run" / "m" / rows[0]["instance_id"] / "test_output.txt").unlink()
    found, numbers = grade_logs(predictions, logs, str(rows_file("swe_bench_verified")))
    assert (found[0]["resolved"], found[0]["why"]) == (None, "no log: not run")
    assert (numbers["judged"], numbers["predictions"]) == (2, 3)


def test_a_log_of_another_patch_is_refused(saved):
    predictions, logs, rows = saved
    (logs / "run" / "m" / rows[0]["instance_id"] / "patch.diff").write_text(PATCH)
    with pytest.raises(SettingsError, match="is of another patch than the prediction"):
        grade_logs(predictions, logs, str(rows_file("swe_bench_verified")))


def test_rows_of_both_layouts_find_the_harness_log_parser():
    pytest.importorskip("swebench", reason="the official harness is not installed: extra `swebench`")
    old = json.loads(rows_file("swe_bench_verified").read_text().splitlines()[0])
    new = json.loads(rows_file("swe_bench_multilingual").read_text().splitlines()[0])
    from swebench.harness.log_parsers import PARSER_REGISTRY

    # Several projects share a parser.
    assert PARSER_REGISTRY[swe_harness._spec(old).log_parser] is PARSER_REGISTRY["parse_log_astropy"]
    assert swe_harness._spec(new).log_parser == "parse_log_jest"
    with pytest.raises(SettingsError, match="no log parser for `example/add-js`"):
        swe_harness._spec({**new, "log_parser": None})
