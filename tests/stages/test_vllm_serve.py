"""`skyrl serve` on a real server, and the loop by hand against it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from running import SMALL, as_flags, skyrl
from vllm_servers import missing

from nanoskyrl.stages.core.manifest import read_manifest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _installed():
    if reason := missing():
        pytest.skip(reason)


def wait_for(condition, what, seconds=240):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.2)
    return found


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_the_loop_by_hand_attaches_to_the_servers_of_its_run_which_are_watched_and_stopped(tmp_path):
    run = tmp_path / "run"
    file = run / "servers.json"
    program = "from nanoskyrl_cli.main import main; main()"
    flags = ["--set", "vllm.max_num_seqs=32", "--set", "vllm.kv_cache_gib=0.25"]
    serving = subprocess.Popen(
        [sys.executable, "-c", program, "serve", "--gpus", "cpu", "--run", str(run), *flags],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: file.is_file() or serving.poll() is not None, "no servers.json")
        assert serving.poll() is None, serving.stderr.read()
        assert file.stat().st_mode & 0o077 == 0
        first = json.loads(file.read_bytes())["addresses"][0]["pid"]

        second = skyrl("serve", "--gpus", "cpu", "--run", run)
        assert (second.returncode, "is served already" in second.stderr) == (1, True)

        for command in ("rollout", "score", "advantage", "train", "sync"):
            options = ["--engine", "vllm", *as_flags({"rollout": SMALL["rollout"]})] if command == "rollout" else []
            done = skyrl(command, "--run", run, *options)
            assert done.returncode == 0, done.stderr
        proof = read_manifest(run / "step-000000" / "sync").facts["proof"]
        assert proof["sums_match"]
        assert proof["canary_gap"] <= proof["tolerance"]

        os.kill(first, signal.SIGKILL)
        wait_for(lambda: json.loads(file.read_bytes())["addresses"][0]["pid"] != first, "the server did not come back")
        done = skyrl("rollout", "--run", run)
        assert done.returncode == 0, done.stderr
        assert read_manifest(run / "step-000001" / "rollout").policy == proof_digest(run)
        pid = json.loads(file.read_bytes())["addresses"][0]["pid"]
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.wait(300)
    assert serving.returncode == 0, serving.stderr.read()
    assert not file.exists()
    assert gone(pid)


def proof_digest(run):
    return read_manifest(run / "step-000000" / "sync").facts["policy"]
