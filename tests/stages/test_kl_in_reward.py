"""The coefficient of a KL in the reward as it adapts from step to step."""

import itertools
import json
import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from running import SMALL, same_bytes
from tolerances import LOGITS, PASS, allowed, assert_close

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.metrics import read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig
from nanoskyrl.stages.learning.kl_in_reward import FACT
from nanoskyrl.stages.looking.verify import verify
from nanoskyrl.stages.running.loop import loop
from nanoskyrl.stages.running.session import Session

STEPS = 3
ADAPTIVE = merge(
    SMALL,
    {
        "train": {"algo": "reinforce_pp", "lr": 3e-3},
        "advantage": {
            "use_kl_in_reward": True, "kl_ctrl": "adaptive", "kl_reward_coef": 0.5, "kl_target": 1e-3,
            "kl_horizon": 100,
        },
        "loop": {"steps": STEPS},
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory):
    """Three steps whose KL is steered."""
    run = Run(tmp_path_factory.mktemp("runs") / "adaptive")
    loop(run, ADAPTIVE)
    return run


def facts(run, step):
    return read_manifest(run.stage(step, "advantage")).facts[FACT]


def table(directory):
    return pa.concat_tables(read_parts(directory, read_manifest(directory)))


def test_each_step_goes_on_from_what_the_one_before_left(adaptive):
    found = [facts(adaptive, step) for step in range(STEPS)]
    assert found[0]["coef"] == 0.5
    # The policy is the reference still.
    assert found[0]["kl"] == pytest.approx(0, abs=allowed(torch.float32, PASS, LOGITS))
    for before, after in itertools.pairwise(found):
        assert after["coef"] == before["next_coef"]
    for each in found:
        error = np.clip(each["kl"] / 1e-3 - 1, -0.2, 0.2)
        assert each["next_coef"] == pytest.approx(each["coef"] * (1 + error * each["rows"] / 100), rel=1e-12)
    assert found[1]["coef"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 100))
    logged = [line for line in read_metrics(adaptive.metrics) if line["stage"] == "advantage"]
    assert [line[f"advantage/{FACT}/coef"] for line in logged] == [each["coef"] for each in found]


def test_the_coefficient_in_force_is_what_rewards_are_weighed_with(adaptive):
    step, rows = STEPS - 1, table(adaptive.stage(STEPS - 1, "advantage"))
    coef, means = facts(adaptive, step)["coef"], []
    assert coef != 0.5
    for reward, shaped, u, f, mask in zip(
        *(rows.column(name).to_pylist() for name in ("reward", "shaped_reward")),
        *(row_arrays(rows.column(name)) for name in ("rollout_logprobs", "ref_logprobs", "loss_mask")),
        strict=True,
    ):
        on = mask != 0
        distance = np.asarray(u[on], np.float64) - f[on]
        assert shaped == pytest.approx(reward - coef * float(distance.sum()), abs=1e-9)
        means.append(distance.mean())
    assert facts(adaptive, step)["kl"] == pytest.approx(np.mean(means))
    assert facts(adaptive, step)["rows"] == len(means)


def test_steps_by_hand_and_a_killed_step_give_the_bytes_of_the_loop(adaptive, tmp_path):
    run = Run(tmp_path / "hand")
    for step in range(STEPS):
        for stage in STAGES:
            getattr(Session(run, ADAPTIVE), stage)()
        if step == 1:  # killed while its advantages were written
            place = run.stage(1, "advantage")
            whole = read_manifest(place)
            started = {k: getattr(whole, k) for k in ("stage", "settings", "inputs", "policy", "code", "packages")}
            (place / "_started.json").write_text(json.dumps(started))
            (place / "_manifest.json").unlink()
            (place / "part-00000.parquet").unlink()
            assert Session(run, ADAPTIVE).advantage(1).manifest.digest == whole.digest
    assert same_bytes(adaptive.root, run.root) == []


def test_a_dry_run_weighs_with_the_coefficient_in_force(adaptive):
    found, wanted = Session(adaptive, ADAPTIVE).preview_advantage(), table(adaptive.stage(STEPS - 1, "advantage"))
    shaped, written = (of.column("shaped_reward").to_pylist() for of in (found, wanted))
    assert_close(shaped, written, PASS, scale=LOGITS)  # its passes are cut otherwise than part by part
    assert max(abs(a - b) for a, b in zip(written, wanted.column("reward").to_pylist(), strict=True)) > 1e-2


def test_advantages_made_from_a_step_that_was_replaced_are_found(adaptive, tmp_path):
    shutil.copytree(adaptive.root, tmp_path / "run")
    run = Run(tmp_path / "run")
    assert verify(run.root).holds
    Session(run, merge(ADAPTIVE, {"advantage": {"kl_reward_coef": 0.4}})).advantage(0, force=True)
    assert any("its KL coefficient is not of" in line for line in verify(run.root).broken)


def test_a_step_whose_predecessor_has_no_advantages_is_refused(adaptive, tmp_path):
    shutil.copytree(adaptive.root, tmp_path / "run")
    run = Run(tmp_path / "run")
    shutil.rmtree(run.stage(1, "advantage"))
    with pytest.raises(InputError, match=r"the KL coefficient of step 2 follows from .*, which is not finished"):
        Session(run, ADAPTIVE).advantage(2, force=True)


def test_a_step_outside_a_run_begins_or_goes_on_from_what_is_named(adaptive, tmp_path):
    session = Session(Run(tmp_path / "run"), ADAPTIVE)
    named = {"source": adaptive.stage(2, "score"), "policy": adaptive.policy(2), "reference": adaptive.policy(0)}
    begins = session.advantage(output=tmp_path / "a", **named).manifest
    goes_on = session.advantage(output=tmp_path / "b", previous=adaptive.stage(1, "advantage"), **named).manifest
    assert begins.facts[FACT]["coef"] == 0.5
    assert goes_on.facts[FACT] == facts(adaptive, 2)
    assert "previous" not in begins.inputs
    assert goes_on.inputs["previous"] == read_manifest(adaptive.stage(1, "advantage")).digest


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kl_ctrl": "adaptiv"}, r"`advantage\.kl_ctrl` must be"),
        ({"kl_ctrl": "adaptive"}, "needs `advantage.use_kl_in_reward`"),
        ({"kl_target": 0.0}, r"`advantage\.kl_target` must be above 0"),
        ({"kl_target": float("nan")}, r"`advantage\.kl_target` must be above 0"),
        ({"kl_horizon": 0}, r"`advantage\.kl_horizon` must be at least 1"),
    ],
    ids=str,
)
def test_controllers_that_cannot_be_are_refused(changes, says):
    with pytest.raises(SettingsError, match=says):
        AdvantageConfig(**changes)
