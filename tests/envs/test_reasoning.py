"""Tasks of reasoning-gym, where it is installed."""

import json
import os
import subprocess
import sys

import pytest
from envs_rows import row_for
from running import data_file

from nanoskyrl.envs.graders.workers import WorkerTimeout
from nanoskyrl.envs.worlds.text_math import reasoning
from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathConfig
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.score import judge

gym = pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("name", ["chain_sum", "propositional_logic", "spell_backward"])
def test_right_answers_count_and_others_do_not(name):
    environment = TextMath(TextMathConfig(family=f"reasoning_gym:{name}", n_train=6, n_test=3))
    train, test = environment.tasks("train"), environment.tasks("test")
    assert (len(train), len(test)) == (6, 3)
    assert not {task.prompt for task in train} & {task.prompt for task in test}
    for task in train:
        if task.ground_truth is not None:
            assert environment.score(row_for(environment, task, environment.expert(task))).success is True
        for wrong in ("<answer>-98765</answer>", "no tags", ""):
            score = environment.score(row_for(environment, task, [wrong]))
            assert score.success is False
            assert score.reward <= 0.1


@pytest.mark.parametrize("name", ["acre", "word_ladder"])
def test_tasks_that_count_all_entries_at_the_start_are_given_fewer(name):
    environment = TextMath(TextMathConfig(family=f"reasoning_gym:{name}", n_train=2, n_test=1))
    assert [len(environment.tasks(split)) for split in ("train", "test")] == [2, 1]


def test_tasks_that_go_over_sets_of_strings_are_the_same_in_every_process():
    code = (
        "from nanoskyrl.envs.worlds.text_math import reasoning\n"
        "print([(task.prompt, task.ground_truth) for task in reasoning.tasks('word_ladder', 'train', 3)])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    here = [(task.prompt, task.ground_truth) for task in reasoning.tasks("word_ladder", "train", 3)]
    assert elsewhere.splitlines()[-1] == str(here)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(gym.factory.DATASETS.keys() - {"composite"}))
def test_every_task_can_be_posed_and_judged(name):
    environment = TextMath(TextMathConfig(family=f"reasoning_gym:{name}", n_train=2, n_test=1))
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    assert {task.split for task in tasks} == {"train", "test"}
    for task in tasks:
        if task.ground_truth is not None:
            assert environment.score(row_for(environment, task, environment.expert(task))).success is True
        assert environment.score(row_for(environment, task, ["no tags"])).success is False


def test_the_marks_are_those_of_the_package():
    rows = [json.loads(line) for line in data_file("reasoning_gym/shared.jsonl").read_text().splitlines()]
    for row in rows[::60]:
        entry = gym.create_dataset(row["task"], size=40, seed=row["seed"])[row["index"]]
        assert entry["question"] == row["question"]


def test_a_scorer_that_hangs_gives_no_verdict(monkeypatch):
    environment = TextMath(TextMathConfig(family="reasoning_gym:chain_sum", n_train=1))
    row = row_for(environment, environment.tasks("train")[0], ["<answer>1</answer>"])

    def hangs(*_, **__):
        raise WorkerTimeout("no answer in 10 s")

    monkeypatch.setattr(reasoning.POOL, "call", hangs)
    verdict, status = judge(to_table([row]), environment.score)[row.trajectory_id]
    assert (verdict.reward, verdict.success, status) == (None, None, "verifier_timeout")


def test_another_version_and_another_name_are_refused():
    with pytest.raises(InputError, match=r"is of reasoning-gym 0\.0\.1"):
        reasoning.verdict({"name": "chain_sum", "index": 0, "version": "0.0.1"}, "1")
    with pytest.raises(SettingsError, match="has no task `chain_sums`"):
        TextMath(TextMathConfig(family="reasoning_gym:chain_sums")).tasks("train")
    with pytest.raises(SettingsError, match="`composite` is no task"):
        TextMath(TextMathConfig(family="reasoning_gym:composite")).tasks("train")
