"""The loop with real servers that are lost, and connections that are: the rows are those of a loop without faults."""

import asyncio
import os
import signal
import threading
from contextlib import contextmanager
from itertools import count

import aiohttp
import pytest
from aiohttp import web
from running import SMALL, differing_rows
from vllm_servers import CONFIG, missing

from nanoskyrl.stages import sync as sync_stage
from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.metrics import read_metrics
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.engines.vllm.client import Client
from nanoskyrl.stages.engines.vllm.process import ServerProcess
from nanoskyrl.stages.engines.vllm.servers import KEY, plan_servers
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.running.loop import loop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
SETTINGS = merge(
    SMALL, {"rollout": {"engine": "vllm"}, "vllm": {"gpus": "cpu", "max_num_seqs": 64, "kv_cache_gib": 0.25}}
)
PHASES = ("/v1/models", "skyrl_state", "skyrl_load", "/reset_prefix_cache", "skyrl_checksum", "prompt_logprobs")
"""What a sync of a whole model asks a server for, in turn."""


@pytest.fixture(scope="module", autouse=True)
def _installed():
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A loop of as many steps as there are phases, to which nothing happens."""
    run = Run(tmp_path_factory.mktemp("quiet") / "run")
    loop(run, merge(SETTINGS, {"loop": {"steps": 3}}))
    return run


@contextmanager
def proxied(upstream):
    """Stand before a server: connections that were idle for a second are closed, and each tenth answer is dropped."""
    answers, loop_of_proxy, ready = count(1), asyncio.new_event_loop(), threading.Event()
    place = {}

    async def forward(request):
        url, body = f"{upstream}{request.path_qs}", await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url, data=body, headers=dict(request.headers)) as answer,
        ):
            data = await answer.read()
        if next(answers) % 10 == 0:
            request.transport.close()
        return web.Response(status=answer.status, body=data, content_type=answer.content_type)

    async def serve():
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, keepalive_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place["url"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()

    def run():
        asyncio.set_event_loop(loop_of_proxy)
        loop_of_proxy.run_until_complete(serve())
        loop_of_proxy.run_forever()

    threading.Thread(target=run, daemon=True).start()
    assert ready.wait(60)
    yield place["url"], answers
    loop_of_proxy.call_soon_threadsafe(loop_of_proxy.stop)


def test_a_proxy_that_drops_answers_and_idle_connections_changes_no_row(quiet, tmp_path, monkeypatch):
    (process,) = plan_servers(resolve_policy("starter"), CONFIG, tmp_path / "logs")
    monkeypatch.setenv(KEY, process.key)
    process.start()
    run = Run(tmp_path / "run")
    try:
        with proxied(process.url) as (url, answers):
            loop(run, merge(SETTINGS, {"vllm": {"urls": [url]}, "loop": {"steps": 3}}))
            assert next(answers) > 50
    finally:
        process.stop()
    assert differing_rows(quiet, run, 3) == []
    lines = read_metrics(run.metrics)
    assert sum(line.get("rollout/engine/retries") or 0 for line in lines) > 0


@pytest.mark.parametrize(
    "phases",
    [["skyrl_load"], *(pytest.param(two, marks=pytest.mark.slow) for two in (PHASES[::3], PHASES[1::3], PHASES[5:]))],
    ids=" and ".join,
)
def test_a_server_killed_in_a_phase_of_sync_is_replaced_and_no_row_changes(quiet, tmp_path, monkeypatch, phases):
    started, pending, armed = [], list(phases), threading.Event()
    start, call, deliver = ServerProcess.start, Client.call, sync_stage.deliver

    def starts(self):
        start(self)
        started.append(self)

    async def calls(self, method, path, body=None, **options):
        names = (path, (body or {}).get("method"), "prompt_logprobs" if "prompt_logprobs" in (body or {}) else None)
        if armed.is_set() and pending and pending[0] in names:
            pending.pop(0)
            armed.clear()
            pid = started[-1].process.pid
            # Loading takes a moment, and it is in its midst that the server goes.
            threading.Timer(0.02, os.killpg, (pid, signal.SIGKILL)).start()
            if "skyrl_load" not in names:
                await asyncio.sleep(0.2)
        return await call(self, method, path, body, **options)

    def delivers(*arguments, **options):
        armed.set()
        return deliver(*arguments, **options)

    monkeypatch.setattr(ServerProcess, "start", starts)
    monkeypatch.setattr(Client, "call", calls)
    monkeypatch.setattr(sync_stage, "deliver", delivers)
    run = Run(tmp_path / "run")
    loop(run, merge(SETTINGS, {"loop": {"steps": 1 + len(phases)}}))
    assert (pending, len(started)) == ([], 1 + len(phases))
    assert differing_rows(quiet, run, 1 + len(phases)) == []
