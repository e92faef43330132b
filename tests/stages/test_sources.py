"""Updates from several steps and policies at once."""

import numpy as np
import pytest
from running import SMALL
from tolerances import LOGITS, assert_close

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import read_metrics
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.learning.recipe import recipe_of
from nanoskyrl.stages.learning.train_config import TrainConfig
from nanoskyrl.stages.learning.update import old_logprobs_of
from nanoskyrl.stages.learning.update_inputs import open_sources
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session

STEPS = merge(SMALL, {"train": {"lr": 3e-3}, "loop": {"steps": 3}})
WEIGHED = {"off_policy": {"weight": "token"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps whose policies differ."""
    found = Run(tmp_path_factory.mktemp("runs") / "run")
    loop(found, STEPS)
    return found


def places(run, *steps):
    return [run.stage(step, "advantage") for step in steps]


def trained(run, out, *steps, settings=STEPS, version=2):
    session = Session(run, settings)
    return session.train(source=places(run, *steps), output=out, policy=run.policy(version)).manifest


def test_a_replay_window_is_all_of_its_rows_and_says_how_old_they_are(run, tmp_path):
    manifest = trained(run, tmp_path / "out", 0, 1, 2)
    assert {"advantage", "advantage.1", "advantage.2"} <= set(manifest.inputs)
    assert manifest.inputs["advantage"] == read_manifest(run.stage(2, "advantage")).digest
    kept = [
        read_manifest(place).rows_out - sum(read_manifest(place).dropped.values()) for place in places(run, 0, 1, 2)
    ]
    assert manifest.rows_out == sum(kept)
    ages = np.repeat([2, 1, 0], kept)
    line = read_metrics(Run(tmp_path).metrics)[-1]
    assert line["train/staleness/mean"] == pytest.approx(ages.mean())
    assert line["train/staleness/max"] == 2


def test_one_source_is_what_it_was(run, tmp_path):
    manifest = trained(run, tmp_path / "out", 2)
    assert manifest.facts["policy"] == read_manifest(run.stage(2, "train")).facts["policy"]


def test_rows_too_old_are_left_out_and_counted(run, tmp_path):
    settings = merge(STEPS, {"train": {"max_staleness": 1}})
    manifest = trained(run, tmp_path / "out", 0, 1, 2, settings=settings)
    oldest = read_manifest(run.stage(0, "advantage"))
    assert manifest.facts["stale_rows"] == oldest.rows_out - sum(oldest.dropped.values())
    with pytest.raises(InputError, match="every row is more than 1 policies old"):
        trained(run, tmp_path / "none", 0, settings=settings)


def test_off_policy_weights_are_against_the_policy_that_training_starts_from(run, tmp_path):
    settings = merge(STEPS, WEIGHED)
    recipe = recipe_of(TrainConfig(lr=3e-3), settings)
    sources = open_sources(places(run, 2, 0), recipe, run.policy(2))
    assert sources.recompute
    table, _, _ = sources.read(recipe, run.policy(2))
    learner = recipe.learner()
    learner.load(run.policy(2))
    old = old_logprobs_of(table, learner, recipe.config.max_tokens_per_micro_batch)
    objective = recipe.objective(table, old)
    masks, recorded = (row_arrays(table.column(name)) for name in ("loss_mask", "rollout_logprobs"))
    apart = []
    for row, mask in enumerate(masks):
        on = mask != 0
        ratio = np.exp(old[row][on] - recorded[row][on])
        weights = np.asarray(objective.sequences.weights[row])[on]
        assert_close(weights, np.minimum(ratio, recipe.off_policy.cap), 1, scale=LOGITS)  # the exponents are as large
        apart.append(np.abs(ratio - 1).max())
    assert max(apart) > 0.1
    assert min(apart) < 1e-3
    manifest = trained(run, tmp_path / "out", 2, 0, settings=settings)
    assert manifest.rows_out == table.num_rows


def test_the_same_input_twice_and_a_policy_without_a_version_are_refused(run, tmp_path):
    with pytest.raises(SettingsError, match="named twice"):
        trained(run, tmp_path / "out", 1, 1)
    with pytest.raises(InputError, match="has no version"):
        Session(run, merge(STEPS, {"train": {"max_staleness": 1}})).train(
            source=places(run, 1, 2), output=tmp_path / "out", policy=resolve_policy("starter")
        )


@pytest.mark.parametrize("settings", [STEPS, merge(STEPS, WEIGHED), merge(STEPS, {"train": {"max_staleness": 1}})])
def test_a_dry_run_shows_the_terms_that_training_on_the_same_window_meets(settings, run, tmp_path):
    # The oldest is named first: the newest step is trained all the same, from its own policy.
    numbers = Session(run, settings).preview_train(source=places(run, 0, 1, 2))
    manifest = trained(run, tmp_path / "out", 0, 1, 2, settings=settings)
    line = read_metrics(Run(tmp_path).metrics)[-1]
    assert numbers["rows"] == manifest.rows_out
    for name in ("train/loss", "train/ratio/max", "train/staleness/mean", "train/staleness/dropped"):
        assert numbers[name] == pytest.approx(line[name]), name
