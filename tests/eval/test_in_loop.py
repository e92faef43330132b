"""Benchmarks while a run trains."""

import json
from contextlib import closing

import pytest
import torch
from benches import rows_file
from running import SMALL

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import ConflictError, InputError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.engines.hf import HfEngine
from nanoskyrl.stages.eval import settings_of
from nanoskyrl.stages.looking.curve import curve, report_line
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.models.policy import policy_digest
from nanoskyrl.stages.running.kept_up import KeptUp
from nanoskyrl.stages.running.loop import loop


def test_a_benchmark_has_an_engine_of_its_own_where_its_settings_differ(tmp_path):
    with closing(KeptUp(tmp_path, {"hf": {"device": "cpu"}}, keep_up=True)) as kept:
        trains = kept.engine("hf")
        settings = settings_of("gsm8k", "hf", kept.settings)
        measures = kept.engine("hf", settings)
        assert isinstance(trains, HfEngine)
        assert isinstance(measures, HfEngine)
        assert (trains.config.dtype, measures.config.dtype) == ("auto", "float64")
        assert kept.engine("hf", settings) is measures
        assert kept.engine("hf", settings_of("text_math", "hf", kept.settings)) is trains


def test_eval_every_runs_the_chosen_benchmarks_and_writes_them_beside_the_policy(tmp_path):
    run = Run(tmp_path / "run")
    settings = merge(
        SMALL,
        {
            "loop": {"steps": 1, "eval_every": 1},
            "eval": {"bench": ("mmlu", "gsm8k"), "limit": 2, "max_generate_length": 4},
            "mmlu": {"data": str(rows_file("mmlu"))},
            "gsm8k": {"data": str(rows_file("gsm8k"))},
        },
    )
    reported = []
    loop(run, settings, report=lambda step, numbers: reported.append((step, numbers.get("stage"))))
    cuda = torch.cuda.is_available()
    for version in (0, 1):
        for name in ("mmlu", "gsm8k"):
            place = run.root / "evals" / f"{version:08d}" / name
            assert json.loads((place / "_summary.json").read_text())["samples"] == 2
            assert read_manifest(place).policy == policy_digest(run.policy(version))
            assert read_manifest(place).settings["hf"]["dtype"] == ("auto" if cuda else "float64")
    assert read_manifest(run.stage(0, "rollout")).settings["hf"]["dtype"] == "auto"
    assert [line for line in reported if line[1] == "eval"] == [(v, "eval") for v in (0, 0, 1, 1)]
    text = curve(run)
    assert [text.count(f"held-out {name}, policy") for name in ("mmlu", "gsm8k")] == [2, 2]
    assert verify(run.root).holds
    with pytest.raises(ConflictError, match="began with another `eval"):
        loop(run, merge(settings, {"eval": {"bench": ("mmlu",)}}))


@pytest.mark.parametrize("begun", [False, True])
def test_a_loop_without_prices_of_its_model_ends_before_it_trains(begun, tmp_path):
    run, prices = Run(tmp_path / "run"), tmp_path / "prices.toml"
    settings = merge(SMALL, {"loop": {"steps": 1}, "eval": {"prices": str(prices), "limit": 2}})
    prices.write_text("[starter]\nprompt = 1\ncompletion = 1\n")
    if begun:
        loop(run, settings)
    prices.write_text('["00000000"]\nprompt = 1\ncompletion = 1\n')
    trained = run.steps()
    with pytest.raises(InputError, match="no prices of `starter`"):
        loop(run, merge(settings, {"loop": {"steps": 2, "eval_every": 2}}))
    assert (run.steps(), run.root.exists()) == (trained, begun)


def test_every_policy_of_a_loop_has_the_price_of_what_it_began_with(tmp_path):
    run, prices = Run(tmp_path / "run"), tmp_path / "prices.toml"
    prices.write_text("[starter]\nprompt = 1\ncompletion = 1\n")
    loop(run, merge(SMALL, {"loop": {"steps": 1, "eval_every": 1}, "eval": {"prices": str(prices), "limit": 2}}))
    for version in ("00000000", "00000001"):
        assert json.loads((run.root / "evals" / version / "text_math" / "_summary.json").read_text())["cost"] > 0


@pytest.mark.parametrize(("own_test", "line"), [(False, "success on the training tasks"), (True, "held-out success")])
def test_success_on_training_tasks_is_not_called_held_out(own_test, line, tmp_path):
    for name, first in (("train", 0), ("test", 50)):
        rows = [{"prompt": f"{i} + 1", "ground_truth": str(i + 1)} for i in range(first, first + 4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data": str(tmp_path / "train.jsonl")} | ({"test_data": str(tmp_path / "test.jsonl")} if own_test else {})
    run, lines = Run(tmp_path / "run"), []
    settings = merge(SMALL, {"loop": {"steps": 1, "eval_every": 1}, "text_math": data})
    loop(run, settings, report=lambda step, numbers: lines.append(report_line(step, numbers)))
    assert [line in text for text in lines] == [True, False, True]
    assert ("held-out text_math, policy 1" in curve(run)) == own_test
    assert ("training tasks of text_math, policy 1" in curve(run)) != own_test
    out = run.root / "evals" / "00000001" / "text_math"
    assert json.loads((out / "_summary.json").read_text())["held_out"] is own_test
    assert ("test_data" in read_manifest(out).inputs) == own_test
    assert "test_data" not in read_manifest(run.stage(0, "rollout")).inputs
