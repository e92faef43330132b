"""Every benchmark against a real OpenAI-compatible server that is not ours, with the starter policy in it."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from benches import OWN, SAMPLES, STARTER, rows_file, run_bench, table_of

from nanoskyrl.stages.core.config import plugin_config
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.rows import from_table

SECONDS = 600
SERVE = "import sys; from transformers.cli.transformers import main; sys.exit(main())"


@pytest.fixture(scope="module")
def server():
    """Return the address of `transformers serve`."""
    pytest.importorskip("uvicorn")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = ["serve", str(STARTER), "--port", str(port), "--device", "cpu", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + SECONDS
    try:
        while True:
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                pytest.fail(f"transformers serve did not start: {process.communicate()[0][-2000:]}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=60)
                break
            except OSError:
                time.sleep(0.2)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(120)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAMPLES, *OWN])
def test_a_benchmark_runs_against_a_server_and_its_grades_follow_from_the_stored_text(name, server, tmp_path):
    found = run_bench(
        name, tmp_path / "out", engine_name="openai", limit=2, max_generate_length=24,
        tables={"openai": {"base_url": server, "model": str(STARTER), "concurrency": 2}},
    )  # fmt: skip
    assert found["samples"] == 2
    assert found["prompt_tokens"] > 0
    assert 0 < found["completion_tokens"] <= 2 * 24
    assert found["status"].get("failed", 0) == 0
    if name == "browsecomp":
        return  # its text is not stored
    bench = lookup("bench", name)(plugin_config({name: {"data": str(rows_file(name))}}, "env", name))
    for row in from_table(table_of(tmp_path / "out")):
        assert row.response
        again = bench.score(row)
        assert (again.reward, again.success) == (row.reward, row.success)
