"""Rows of an older policy: what a lag changes, when a batch's steps end, and how a collapse is reported."""

import json
import warnings

import pytest
from running import SMALL, same_bytes

from nanoskyrl.stages.core.config import merge, parse_set, stage_config
from nanoskyrl.stages.core.errors import CollapseError, Notice
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import latest, read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.lag_defaults import described, of_lag
from nanoskyrl.stages.running import collapse
from nanoskyrl.stages.running.collapse import CollapseWatch, collapse_of, remedy
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.run_settings import kept_settings
from nanoskyrl.stages.running.session import Session

FOUR_STEPS = merge(SMALL, {"train": {"update_epochs_per_batch": 4, "lr": 1e-3}, "loop": {"steps": 1}})


def trained(run, step=0):
    return latest(read_metrics(run.metrics), "train")[step]


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory):
    """Return a step trained by four optimizer steps, without a bound."""
    run = Run(tmp_path_factory.mktemp("four") / "run")
    loop(run, FOUR_STEPS)
    return run


@pytest.fixture(scope="module")
def lagged(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("lagged") / "run")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop(run, merge(SMALL, {"run": {"lag": 1}, "train": {"update_epochs_per_batch": 2}}))
    return run, [str(one.message) for one in told if issubclass(one.category, Notice)]


def test_a_batch_s_optimizer_steps_end_at_the_kl_bound(four_steps, tmp_path):
    run = Run(tmp_path / "run")
    loop(run, merge(FOUR_STEPS, {"train": {"target_kl": 1e-5}}))
    assert trained(four_steps)["train/optimizer_steps"] == 4
    assert trained(run)["train/optimizer_steps"] == 1
    made = read_manifest(run.stage(0, "train"))
    assert (made.facts["optimizer_steps"], made.settings["train"]["target_kl"]) == (1, 1e-5)
    # A pass that was seen and not followed is no other row's, nor twice the row's tokens.
    tokens = [Session(run, FOUR_STEPS).run.stage(0, "train"), four_steps.stage(0, "train")]
    assert len({tuple(column(place, "tokens")) for place in tokens}) == 1


def column(place, name):
    from nanoskyrl.stages.core.shards import read_parts

    return [value for part in read_parts(place, read_manifest(place)) for value in part.column(name).to_pylist()]


@pytest.mark.parametrize("bound", [0, 1e6])
def test_no_bound_and_one_that_is_not_reached_give_the_same_weights(four_steps, tmp_path, bound):
    session = Session(Run(tmp_path / "run"), merge(FOUR_STEPS, {"train": {"target_kl": bound}}))
    found = session.train(
        source=four_steps.stage(0, "advantage"), policy=four_steps.policy(0), output=tmp_path / "train"
    )
    assert found.manifest.facts["policy"] == read_manifest(four_steps.stage(0, "train")).facts["policy"]


def test_the_first_optimizer_step_is_always_taken_so_on_policy_a_bound_changes_nothing(tmp_path):
    for name, bound in (("none", {}), ("tiny", {"target_kl": 1e-9})):
        loop(Run(tmp_path / name), merge(SMALL, {"loop": {"steps": 1}, "train": bound}))
    policies = [read_manifest(Run(tmp_path / name).stage(0, "train")).facts["policy"] for name in ("none", "tiny")]
    assert policies[0] == policies[1]


def test_the_whole_sample_is_effective_on_policy_and_less_of_it_off(four_steps, lagged):
    assert trained(four_steps)["policy/effective_sample_share"] == pytest.approx(1, abs=1e-4)
    assert 0 < trained(lagged[0], 1)["policy/effective_sample_share"] < 0.9999


# Defaults by lag.


def test_at_lag_0_nothing_is_changed_and_what_is_set_holds_at_any():
    assert of_lag({"run": {"lag": 0}}) == {}
    assert of_lag({"run": {"lag": 3, "lag_defaults": False}}) == {}
    found = of_lag({"run": {"lag": 1}})
    assert found
    for table, keys in found.items():
        for key, value in keys.items():
            left = of_lag({"run": {"lag": 1}, table: {key: value}})
            assert key not in left.get(table, {})


def test_weights_and_old_log_probs_go_together():
    for table, key, value in (("off_policy", "weight", "none"), ("advantage", "old_logprobs", "rollout")):
        assert of_lag({"run": {"lag": 1}, table: {key: value}}) == {
            "train": {"target_kl": 0.01}, "off_policy": {"kl_coef": 0.1},
        }  # fmt: skip
    for value in ("token", "sequence"):
        assert of_lag({"run": {"lag": 1}, "off_policy": {"weight": value}})["advantage"] == {
            "old_logprobs": "recompute"
        }
    assert of_lag({"run": {"lag": 1}, "advantage": {"old_logprobs": "recompute"}})["off_policy"]["weight"] == "token"


def test_null_is_what_the_lag_asks_for_in_the_loop_and_in_its_trainer(tmp_path):
    session = Session(Run(tmp_path / "run"), merge(SMALL, {"run": {"lag": 1}, "train": {"target_kl": None}}))
    assert session.settings["train"]["target_kl"] == 0.01


@pytest.mark.parametrize("word", ["none", "token"])
def test_a_setting_s_own_word_none_is_not_null(word):
    assert parse_set(f"off_policy.weight={word}") == {"off_policy": {"weight": word}}
    assert parse_set("off_policy.band=none") == {"off_policy": {"band": None}}


@pytest.mark.parametrize("algo", ["ppo", "sapo", "gspo", "dapo"])
def test_algorithms_train_on_older_rows_with_the_defaults_of_a_lag(tmp_path, algo):
    run = Run(tmp_path / "run")
    loop(run, merge(SMALL, {"run": {"lag": 1}, "train": {"algo": algo}, "loop": {"steps": 3}}))
    update = trained(run, 2)
    assert update["policy/off_policy_weight"] != 1
    assert update["train/ratio/max"] == pytest.approx(1, abs=1e-3)


def test_the_more_updates_lie_between_sampling_and_training_the_less_may_each_move_the_policy():
    bounds = [of_lag({"run": {"lag": lag}})["train"]["target_kl"] for lag in (1, 4, 5000)]
    assert bounds == [0.01, 0.004, 4e-06]


def test_a_lag_changes_no_setting_of_a_surrogate():
    for algo in ("ppo", "grpo", "sapo", "gspo", "dapo", "cispo"):
        for lag in (1, 4, 16):
            changed = of_lag({"run": {"lag": lag}, "train": {"algo": algo}})
            assert changed.keys() <= {"train", "off_policy", "advantage"}
            assert changed.get("train", {}).keys() <= {"target_kl"}
            assert changed.get("advantage", {}).keys() <= {"old_logprobs"}


def test_a_lag_s_defaults_are_printed_in_one_line_and_recorded_and_the_run_keeps_only_what_was_set(lagged):
    run, told = lagged
    changed = of_lag({"run": {"lag": 1}})
    assert [text for text in told if described(changed) in text]
    recorded = json.loads((run.root / "resolved.json").read_text())
    for table, keys in changed.items():
        assert {key: recorded[table][key] for key in keys} == keys
        assert not keys.keys() & kept_settings(run).get(table, {}).keys()


def test_by_hand_with_the_same_lag_the_same_bytes(lagged, tmp_path):
    settings = merge(SMALL, {"run": {"lag": 1}, "train": {"update_epochs_per_batch": 2}})
    for _ in range(2):
        for stage in STAGES:
            getattr(Session(Run(tmp_path / "hand"), settings), stage)()
    assert same_bytes(lagged[0].root, tmp_path / "hand") == []


# Signs of a collapse.

LEARNS = [0.45, 0.48, 0.52, 0.55, 0.6, 0.58, 0.66, 0.7, 0.69, 0.75, 0.74, 0.8]


def steps_of(successes, **others):
    named = {"ratio": collapse.RATIO, "sample": collapse.SAMPLE, "entropy": collapse.ENTROPY}
    columns = {named[name]: values for name, values in others.items()}
    return [
        {collapse.SUCCESS: success, **{name: values[at] for name, values in columns.items()}}
        for at, success in enumerate(successes)
    ]


def test_success_that_rises_or_swings_is_no_collapse():
    assert collapse_of(steps_of(LEARNS)) is None
    assert collapse_of(steps_of([0.7, 0.6] * 10)) is None
    assert collapse_of(steps_of([0.9, 0.1])) is None  # too few steps say nothing
    assert collapse_of(steps_of([0.7] * 8 + [None] * 8)) is None


def test_success_that_falls_for_several_steps_is_reported_with_where_it_comes_from():
    falls = [*LEARNS, 0.7, 0.6, 0.5, 0.4, 0.3]
    found = collapse_of(
        steps_of(falls, ratio=[3.0] * 12 + [4e3] * 5, sample=[0.99] * 12 + [0.2] * 5, entropy=[0.1] * 12 + [0.9] * 5)
    )
    assert found is not None
    assert (round(found.best, 3), found.last) == (0.736, 0.5)
    assert found.signs == (
        "the largest ratio rose from 3 to 4e+03", "the effective sample fell from 99% to 20%",
        "entropy rose from 0.1 to 0.9",
    )  # fmt: skip
    alone = collapse_of(steps_of(falls))
    assert alone is not None
    assert alone.signs == ()


def test_a_collapse_is_reported_once_in_several_steps():
    watch = CollapseWatch([])
    falls = [*LEARNS, *(0.75 - 0.05 * i for i in range(12))]
    told = [step for step, numbers in enumerate(steps_of(falls)) if watch.after(step, numbers)]
    assert told == list(range(told[0], len(falls), collapse.STEPS))


def test_what_to_try_is_what_is_not_in_force():
    assert remedy({"run": {"lag": 1, "lag_defaults": False}}, 2e-4) == "run.lag_defaults=true"
    assert remedy({"train": {"update_epochs_per_batch": 4}}, 2e-4).startswith("train.target_kl=")
    assert remedy({"train": {"update_epochs_per_batch": 4, "target_kl": 0.1}}, 2e-4) == "train.lr=0.0001"
    for settings in ({}, {"run": {"lag": 4}}):
        table, _, words = remedy(settings, 1e-3).partition(".")
        key, _, value = words.partition("=")
        stage_config({table: {key: float(value)}}, table)


def test_a_loop_stops_where_it_is_to_stop_on_collapse_and_else_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(collapse, "STEPS", 2)
    broken = merge(SMALL, {"train": {"lr": 0.05}, "loop": {"steps": 5, "stop_on_collapse": True}})
    with pytest.raises(CollapseError, match="success fell from") as stopped:
        loop(Run(tmp_path / "stops"), broken)
    assert "--set train.lr=" in str(stopped.value.hint)
    assert Run(tmp_path / "stops").next_step() == 4
    with pytest.warns(Notice, match="success fell from"):
        loop(Run(tmp_path / "stops"), merge(broken, {"loop": {"stop_on_collapse": False}}))
    assert Run(tmp_path / "stops").next_step() == 5
