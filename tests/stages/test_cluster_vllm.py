"""RolloutWorkers on Ray that start vLLM servers of their own."""

import pytest
from running import SMALL, differing_rows
from vllm_servers import missing

from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.interface import open_run

pytest.importorskip("ray")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SERVERS = {"gpus": "cpu", "max_num_seqs": 64, "kv_cache_gib": 0.25, "start_seconds": 400}


def test_two_workers_with_servers_give_the_rows_of_one_engine(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    settings = {"rollout": {**SMALL["rollout"], "engine": "vllm"}, "vllm": SERVERS}
    ray = {"run": {"executor": "ray"}, "ray": {"address": "local", "rollout_workers": 2, "env_workers": 2}}
    for name, how in (("local", {}), ("ray", ray)):
        with open_run(tmp_path / name, {**settings, **how}) as run:
            run.rollout()
    assert differing_rows(Run(tmp_path / "local"), Run(tmp_path / "ray"), 1) == []
