"""RolloutWorkers on Ray that start vLLM servers of their own."""

import time

import pytest
from faults.killed_runs import with_environment
from running import GUARD_SECONDS, SMALL, differing_rows
from vllm_servers import missing

from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.interface import open_run

pytest.importorskip("ray")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SERVERS = {"gpus": "cpu", "max_num_seqs": 64, "kv_cache_gib": 0.25, "start_seconds": 400}


def test_two_workers_with_servers_give_the_rows_of_one_engine_and_leave_no_process(tmp_path, monkeypatch):
    if reason := missing():
        pytest.skip(reason)
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # its sockets' names must be short
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))  # of all that is started here
    settings = {"rollout": {**SMALL["rollout"], "engine": "vllm"}, "vllm": SERVERS}
    ray = {"run": {"executor": "ray"}, "ray": {"address": "local", "rollout_workers": 2, "env_workers": 2}}
    for name, how in (("local", {}), ("ray", ray)):
        with open_run(tmp_path / name, {**settings, **how}) as run:
            run.rollout()
    assert differing_rows(Run(tmp_path / "local"), Run(tmp_path / "ray"), 1) == []
    deadline = time.monotonic() + GUARD_SECONDS
    while left := [process.name() for process in with_environment(scratch) if "VLLM" in process.name()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
