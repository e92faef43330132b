"""Every environment through the stages: the expert, the starter policy, and the same bytes again."""

import pytest
from running import same_bytes

from nanoskyrl.stages.core.registry import ENVS
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.rollout import rollout
from nanoskyrl.stages.score import ScoreConfig, score

OUTSIDE = ("openenv", "fleet", "skyrl_gym", "verifiers")
"""Environments whose world is elsewhere."""
INSIDE = [name for name in ENVS if name not in OUTSIDE]
SETTINGS = {"tool_use": {"tool_use": {"kinds": ["calculator", "search", "arithmetic", "multi_hop", "data", "mixed"]}}}


def run(tmp_path, env, engine, **more):
    """Attempt 64 tasks once each, score them twice, and return the scored table's columns."""
    config = RolloutConfig(env=env, engine=engine, train_batch_size=64, n_samples_per_prompt=1, **more)
    settings = SETTINGS.get(env, {})
    policy = None
    if engine == "hf":
        from nanoskyrl.stages.engines.base import HfConfig
        from nanoskyrl.stages.engines.hf import HfEngine
        from nanoskyrl.stages.models.policy import STARTER, resolve_policy

        policy = resolve_policy(STARTER)
        rollout(policy, tmp_path / "rollout", config, settings=settings, engine=HfEngine(HfConfig(device="cpu")))
    else:
        rollout(policy, tmp_path / "rollout", config, settings=settings)
    manifest = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig(), settings=settings)
    score(tmp_path / "rollout", tmp_path / "again", ScoreConfig(), settings=settings)
    assert same_bytes(tmp_path / "score", tmp_path / "again") == []
    tables = list(read_parts(tmp_path / "score", manifest))
    return {name: [v for table in tables for v in table.column(name).to_pylist()] for name in tables[0].column_names}


@pytest.mark.parametrize("env", INSIDE)
def test_the_expert_always_succeeds_and_scoring_again_gives_the_same_bytes(tmp_path, env):
    rows = run(tmp_path, env, "scripted", max_turns=60)
    assert rows["success"] == [True] * 64
    assert rows["status"] == ["completed"] * 64


@pytest.mark.parametrize(
    "env", [name if name == "text_math" else pytest.param(name, marks=pytest.mark.slow) for name in INSIDE]
)
def test_the_starter_policy_gets_a_verdict_for_every_attempt(tmp_path, env):
    rows = run(tmp_path, env, "hf", max_turns=3, max_generate_length=32)
    last = [i for i, is_last in enumerate(rows["is_last_step"]) if is_last]
    assert len(last) == 64
    assert {rows["score_status"][i] for i in last} == {"scored"}
    assert not {rows["status"][i] for i in last} & {"failed"}
