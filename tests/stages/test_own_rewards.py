"""Reward functions of the user's: their signatures, what they raise, and what happens when their code changes."""

import sys

import pyarrow as pa
import pytest

from nanoskyrl.envs.base import Score
from nanoskyrl.envs.graders import own_rewards
from nanoskyrl.stages.core import code
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.rows import BrokenRow, to_table
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.trajectory import Turn
from nanoskyrl.stages.looking.curve import report_line, success_keys
from nanoskyrl.stages.running.loop import step_numbers
from nanoskyrl.stages.score import score_table, summary, weighted
from nanoskyrl_cli.main import run as skyrl

FUNCTIONS = """
import asyncio

import nanoskyrl.envs.base


def whole(trajectory):
    return nanoskyrl.envs.base.Score(reward=2.0, parts={"style": 0.5})


def raises(trajectory):
    if trajectory.sample:
        raise ValueError("odd one")
    return 1.0


def trl(prompts, completions, ground_truth, **columns):
    assert columns["answer"] == ground_truth
    assert prompts == ["hi"] * len(completions)
    return [float(said == gold) + 10 * len(completions) for said, gold in zip(completions, ground_truth)]


def trl_messages(completions, **columns):
    return [float(messages[0]["role"] == "assistant") for messages in completions]


def trl_too_few(completions, **columns):
    return [1.0]


def trl_raises(prompts, completions, **columns):
    return [1 / 0 for _ in completions]


async def later(trajectory):
    together.append(trajectory)
    await asyncio.sleep(0)
    return float(len(together))


async def trl_later(completions, **columns):
    await asyncio.sleep(0)
    return [3.0 for _ in completions]


together = []
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    forget()


def write(here, text):
    """Write the user's module, for a process that begins now."""
    (here / "mine.py").write_text(text)
    forget()


def forget():
    sys.modules.pop("mine", None)
    code._read.cache_clear()
    own_rewards.POOL.close()


@pytest.fixture
def rows(make_trajectory):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "5"}]
    return to_table(
        [
            make_trajectory(
                trajectory_id=f"g{group}/{sample}", group_id=f"g{group}", sample=sample, messages=messages,
                turns=[Turn(action=str(sample), observation="", done=True)], metadata={"ground_truth": "1"},
            )
            for group in range(2)
            for sample in range(2)
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "given"),
    [
        ({"mine:whole": 1}, [2.0] * 4), ({"mine:trl": 1}, [20.0, 21.0] * 2), ({"mine:trl_later": 0.5}, [1.5] * 4),
        ({"mine:later": 1}, [2.0, 2.0, 4.0, 4.0]), ({"mine:trl": 0.1, "mine:whole": 1}, [4.0, 4.1] * 2),
    ],
    ids=str,
)  # fmt: skip
def test_either_signature_gives_rewards_and_a_batch_is_a_group(here, rows, rewards, given):
    write(here, FUNCTIONS)
    scored = score_table(rows, weighted(rewards, None))
    assert scored.column("reward").to_pylist() == pytest.approx(given), scored.column("reward_parts").to_pylist()


def test_a_function_of_trl_gets_messages_where_that_is_set(here, rows):
    write(here, FUNCTIONS)
    scored = score_table(rows, weighted({"mine:trl_messages": 1}, None, conversational=True))
    assert scored.column("reward").to_pylist() == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "error: ValueError: odd one (mine.py:13)"),
        ("trl_raises", "error: ZeroDivisionError: division by zero (mine.py:32)"),
        ("trl_too_few", "error: `mine:trl_too_few` returned 1 rewards for 2 completions"),
    ],
)  # fmt: skip
def test_what_a_function_raises_is_told_with_its_file_and_line(here, rows, name, says):
    write(here, FUNCTIONS)
    scored = score_table(rows, weighted({f"mine:{name}": 1}, None))
    assert says in scored.column("reward_parts").to_pylist()[1].replace('\\"', '"')
    assert scored.column("reward").to_pylist() == ([1.0, None] * 2 if name == "raises" else [None] * 4)


def test_a_row_that_nobody_wrote_so_is_no_failure_of_the_function(here, rows):
    write(here, "def f(trajectory):\n    return float(len(trajectory.metadata))\n")
    place = rows.column_names.index("metadata")
    broken = rows.set_column(place, rows.schema.field(place), pa.array(["{"] * 4))
    with pytest.raises(BrokenRow, match="row 0 does not hold what its columns mean"):
        score_table(broken, weighted({"mine:f": 1}, None))


def test_each_part_has_a_curve_and_rounding_is_no_signal(rows):
    scores = iter([Score(reward=0.7, parts={"a": 1.0}), Score(reward=0.7 + 1e-12, parts={"a": 0.0})] * 2)
    numbers = summary([score_table(rows, lambda trajectory: next(scores))])
    assert numbers["reward/part/a"] == 0.5
    assert numbers["reward/groups_with_signal"] == 0.0


def test_the_code_of_rewards_is_in_the_settings_and_rows_without_a_verdict_are_judged_again(here, capsys):
    scored = Run(here / "runs" / "default").stage(0, "score")
    write(here, "def f(trajectory):\n    raise KeyError('gone')\n")
    assert skyrl(["rollout", "--engine", "scripted", "--set", "rollout.train_batch_size=2"]) == 0
    assert skyrl(["score", "--reward", "mine:f"]) == 3
    told = capsys.readouterr().err
    size = read_manifest(scored).rows_out
    assert f"0 of {size} rows scored" in told
    assert f"{size} trajectories: KeyError: 'gone' (mine.py:2)" in told
    numbers = step_numbers(Run(here / "runs" / "default"), 0)
    assert "KeyError: 'gone' (mine.py:2)" in report_line(0, numbers)
    # Fixed: nothing had a verdict, so all is judged again, without --force.
    write(here, "def f(trajectory):\n    return float(trajectory.sample)\n")
    assert skyrl(["score"]) == 0
    assert read_manifest(scored).dropped == {}
    before = read_manifest(scored).digest
    # A comment is no change; another sign is one, and is named.
    write(here, "# A comment.\ndef f(trajectory):\n    return float(trajectory.sample)\n")
    assert skyrl(["score"]) == 0
    assert "Up to date" in capsys.readouterr().err
    write(here, "def f(trajectory):\n    return -float(trajectory.sample)\n")
    assert skyrl(["score"]) == 2
    assert "reward_code.mine:f" in capsys.readouterr().err
    assert read_manifest(scored).digest == before


def test_code_that_changes_between_steps_is_named(here, capsys):
    flags = ["--set", "rollout.train_batch_size=2"]
    for step, sign in enumerate(("", "-")):
        write(here, f"def f(trajectory):\n    return {sign}1.0\n")
        assert skyrl(["rollout", "--engine", "scripted", "--out", f"runs/default/step-{step:06d}/rollout", *flags]) == 0
        assert skyrl(["score", f"runs/default/step-{step:06d}/rollout", "--reward", "mine:f"]) == 0
        told = capsys.readouterr().err
        assert ("`mine:f` changed since" in told) == (step == 1), told


def test_verdicts_stay_where_only_some_rows_have_none(here, capsys):
    write(
        here,
        "import pathlib\n\ndef f(trajectory):\n    if trajectory.sample and not pathlib.Path('open').exists():\n"
        "        raise OSError\n    return 1.0\n",
    )
    flags = ["--set", "rollout.train_batch_size=2", "--set", "rollout.n_samples_per_prompt=2"]
    assert skyrl(["rollout", "--engine", "scripted", *flags]) == 0
    assert skyrl(["score", "--reward", "mine:f"]) == 3
    (here / "open").touch()
    assert skyrl(["score"]) == 0
    manifest = read_manifest(scored := Run(here / "runs" / "default").stage(0, "score"))
    assert [reward for table in read_parts(scored, manifest) for reward in table["reward"].to_pylist()] == [1.0] * 4
    assert latest(read_metrics(here / "runs/default/metrics.jsonl"), "score")[0]["reward/part/mine:f"] == 1.0


def test_a_part_named_success_is_no_environment():
    numbers = {"reward/success": 0.5, "reward/part/mine/success": 0.25, "reward/tool_use/success": 0.75}
    assert success_keys(numbers) == {"tool_use": "reward/tool_use/success"}
