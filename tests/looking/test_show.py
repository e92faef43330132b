"""`skyrl show` of everything that a run has."""

import json
import re

import pytest
from looked_at import HOSTILE, TASKS, told_run
from running import skyrl_here

from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.safe_text import STEERS, printable
from nanoskyrl.stages.core.shards import read_parts


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        done = skyrl_here("show", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def rows_of(place):
    return [row for table in read_parts(place, read_manifest(place)) for row in table.to_pylist()]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("", "groups|signal"),
        ("step-000001", r"rollout +16 rows of tool_use(.|\n)*groups with signal"),
        ("policies", r"2 +[0-9a-f]{12} +policy 1 +step 1"),
        ("policies/00000001", "parameters +4"),
        ("evals", "policy 0 tool_use"),
        ("evals/00000000", "success on held-out tasks"),
        ("evals/00000000/tool_use", "held-out tasks of tool_use"),
        ("step-000000/rollout", "16 rows of tool_use"),
        ("step-000000/train", "ratio_mean"),
        ("step-000000/sync", "policy 1 published"),
    ],
)
def test_anything_of_a_run_can_be_shown_and_as_json(small, shown, place, says):
    where = small.root / place
    assert re.search(says, shown(where))
    assert json.loads(shown(where, "--json"))


def test_rows_are_chosen_ordered_and_counted(small, shown):
    everything = rows_of(small.stage(0, "advantage")) + rows_of(small.stage(1, "advantage"))
    wanted = [row for row in everything if row["completion_tokens"] > 20 and not row["success"]]
    found = json.loads(shown(small.root, "--where", "tokens > 20 and not success", "--sort", "-tokens", "--json"))
    assert found["matched"] == len(wanted)
    lengths = sorted((row["completion_tokens"] for row in wanted), reverse=True)[:10]
    assert [row["tokens"] for row in found["rows"]] == lengths
    assert {row["trajectory_id"] for row in found["rows"]} <= {row["trajectory_id"] for row in wanted}


def test_groups_tasks_and_environments_come_to_their_mean(small, shown):
    rows = rows_of(small.stage(0, "score"))
    lines = json.loads(shown(small.stage(0, "score"), "--by", "group", "--json"))
    assert {line["group"] for line in lines} == {row["group_id"] for row in rows}
    for line in lines:
        of_group = [row["reward"] for row in rows if row["group_id"] == line["group"]]
        assert line["attempts"] == len(of_group) == 4
        assert line["reward"] == pytest.approx(sum(of_group) / 4)
        assert line["signal"] == float(len(set(of_group)) > 1)
    assert [line["env"] for line in json.loads(shown(small.root, "--by", "env", "--json"))] == ["tool_use"]
    assert [line["step"] for line in json.loads(shown(small.root, "--by", "step", "--json"))] == [0, 1]


def test_failed_calls_are_those_that_the_rows_record(small, shown):
    recorded = [
        call
        for step in (0, 1)
        for row in rows_of(small.stage(step, "rollout"))
        for turn in row["turns"]
        for call in json.loads(turn["tool_calls"])
        if not call["ok"] and call["error"] != "no_answer"
    ]
    found = json.loads(shown(small.root, "--failed-calls", "--json"))
    assert recorded  # the starter was taught bad habits
    assert sorted(call["error"] for call in found) == sorted(call["error"] for call in recorded)


def test_a_trajectory_is_found_by_the_start_of_its_id_by_its_row_and_by_its_task(small, shown):
    row = rows_of(small.stage(1, "advantage"))[5]
    by_id = skyrl_here("show", row["trajectory_id"][:10], "--run", small.root).stdout
    assert row["trajectory_id"] in by_id
    assert by_id == shown(small.stage(1, "advantage"), "--row", "5")
    of_task = shown(small.root, "--id", row["task_id"])
    assert of_task.count(row["task_id"][:24]) == 4
    assert skyrl_here("show", "nothing-of-the-kind", "--run", small.root).returncode == 2
    ambiguous = skyrl_here("show", small.root, "--id", "")
    assert (ambiguous.returncode, "Give more of the id" in ambiguous.stderr) == (2, True)


def test_tokens_carry_what_the_stages_wrote_of_them(small, shown):
    rows = rows_of(small.stage(0, "advantage"))
    index, row = next((index, row) for index, row in enumerate(rows) if row["kept"])
    found = json.loads(shown(small.stage(0, "advantage"), "--row", str(index), "--json"))
    tokens = found["tokens"]
    assert [token["id"] for token in tokens] == row["response_ids"]
    assert "".join(token["text"] for token in tokens) == row["response"]
    for token, mask, logprob, advantage in zip(
        tokens, row["loss_mask"], row["rollout_logprobs"], row["advantages"], strict=True
    ):
        assert token["sampled"] == bool(mask)
        assert token.get("logprob") == (logprob if mask else None)
        assert token.get("advantage") == (advantage if mask else None)
    table = shown(small.stage(0, "advantage"), "--row", str(index), "--tokens")
    assert len(table.splitlines()) == len(tokens) + 1
    for color in ("advantage", "logprob", "mask"):
        assert f"tokens by {color}" in shown(small.stage(0, "advantage"), "--row", str(index), "--color", color)
    assert "no ratios" in shown(small.stage(0, "advantage"), "--row", str(index), "--color", "ratio")


def test_steps_that_are_not_shown_are_counted(tmp_path, shown):
    run = told_run(tmp_path, success=[0.5] * 50, kl=[*[0.001] * 30, 232.0, *[0.001] * 19])
    (tmp_path / "step-000000").mkdir()
    assert "10 earlier steps; `--limit 50` shows all" in shown(run.root)
    assert "232!" in shown(run.root)
    assert "earlier steps" not in shown(run.root, "--limit", "50")
    assert [step["stands_out"] for step in json.loads(shown(run.root, "--json"))["steps"] if step["stands_out"]] == [
        ["kl"]
    ]


@pytest.mark.parametrize(
    "arguments",
    [("--row", "0"), ("--row", "0", "--color", "mask"), ("--failed-calls",), (), ("--where", "'script' in response")],
)
def test_nothing_that_a_policy_wrote_steers_the_terminal(hostile, shown, arguments):
    out = shown(hostile.stage(0, "score"), *arguments)
    assert not STEERS.search(out)
    assert "script" in out


def test_what_steers_is_written_out_and_what_does_not_stays():
    text = printable(HOSTILE)
    assert r"\x1b]0;pwned\x07\x1b[31mred" in text
    assert r"\u202eoverridden \x9b1m" in text
    assert "[bold]markup[/bold]" in text
    assert printable("漢字 héllo\n\t👩\u200d💻") == "漢字 héllo\n\t👩\u200d💻"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--by", "color"), "`--by` is one of group, task, env, step"),
        (("--color", "red"), "`--color` is one of advantage"),
        (("--sort", "rewrd"), "Did you mean `reward`?"),
        (("--by", "task", "--sort", "nothing"), "knows no `nothing` of groups"),
        (("--tokens",), "of one trajectory"),
        (("--row", "1"), "a run has no rows"),
        (("--where", "reward <"), "cannot be read"),
    ],
)
def test_what_cannot_be_shown_is_one_error(small, arguments, says):
    done = skyrl_here("show", small.root, *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_attempts_at_a_task_of_the_hostile_run_are_listed(hostile, shown):
    assert shown(hostile.root, "--id", TASKS[0]).count(TASKS[0]) == 2
