"""Engine `vllm`: servers that sample, attached to or started here, brought to a policy and proved to hold it.

Requests of one group go to one server, where their common beginning is computed once. A
request that comes to nothing is made again with the same seed, so that none is lost and
none counts twice. A server that was restarted is given the policy again before anything
is asked of it: its weights have a new name after each start, so an old request cannot
meet them by mistake.
"""

import asyncio
import atexit
import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np

from nanoskyrl.stages.core.errors import EngineError, ProofError, SettingsError
from nanoskyrl.stages.engines.base import AsyncTokenEngine, Generation, Request, Sampling
from nanoskyrl.stages.engines.vllm.client import Client, Lost, Refused, sampling_body
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.process import ServerProcess
from nanoskyrl.stages.engines.vllm.proof import (
    SELF_TEST_TOLERANCE,
    canary,
    compare_adapter,
    compare_weights,
    note_change,
    self_test,
)
from nanoskyrl.stages.engines.vllm.servers import SERVERS, Fleet, Servers, foreign, read_servers
from nanoskyrl.stages.engines.vllm.weights import expected_sums, merged
from nanoskyrl.stages.models.loading import load_tokenizer, stop_ids
from nanoskyrl.stages.models.policy import find_base, frame_digest, is_adapter, policy_digest, read_info, text_config
from nanoskyrl.stages.models.rendering import Renderer

T = TypeVar("T")
BFLOAT16_CANARY = 0.5
"""Nats by which single tokens may differ between a trainer and a server in bfloat16; this alone proves nothing."""
PROBE = [{"role": "user", "content": "What is 1 + 1? Think first, then answer."}]


@dataclass(slots=True)
class Server:
    """A server as the engine sees it."""

    index: int
    client: Client
    process: ServerProcess | None = None
    base: str = ""
    """Name of the whole model."""
    name: str = ""
    """Name that requests give: the base's, or an adapter's."""
    digest: str | None = None
    """Of the whole model that it holds, as its worker says."""
    loads: int = 0
    sums: list[dict[str, Any]] | None = None
    """Of the weights that it was last seen to hold."""
    warm: bool = False
    """Whether it has computed a canary before."""
    open: int = 0
    """Requests under way."""
    era: int = 0
    """Counts how often it was brought back."""
    lost: str | None = None
    """Why it is no longer asked."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the servers are to hold."""

    policy: Path
    digest: str
    whole: Path
    """A whole model on disk: the policy, an adapter's base, or the two merged."""
    whole_digest: str
    adapter: str | None
    """Name under which the policy is loaded beside its base; None: it is the whole model."""
    canary: list[int]


class VllmEngine(AsyncTokenEngine):
    """vLLM servers behind one face."""

    Config = VllmConfig
    takes_stop_strings = True

    def __init__(self, config: VllmConfig) -> None:
        """Hold nothing until `load`."""
        self.config = config
        self.place: Path | None = None
        """The run's directory, where `servers.json` may lie and logs are written."""
        self.capacity = config.alive or 2 * config.max_num_seqs
        self.trajectory_seconds = config.trajectory_seconds
        self._servers: list[Server] = []
        self._setup: Servers | None = None
        self._fleet: Fleet | None = None
        self._wanted: Wanted | None = None
        self._merged: Path | None = None
        self._homes: dict[str, Server] = {}
        self._counts: dict[str, float | int | str | None] = {}
        self._sums: tuple[str, dict[str, list[str]]] | None = None
        self._tested = False
        self._frame: str | None = None
        """Digest of what is not weights, whose tokenizer was read last."""
        self._dtype = "float32"
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None

    # What the turn loop calls

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the engine's event loop, in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="vllm engine", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; Ctrl-C ends it, too."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def sample(self, request: Request, sampling: Sampling) -> Generation:
        """Return what came of a request; one that fails on servers that answer fails alone.

        Raises:
            EngineError: no server is left.
            ProofError: one that came back cannot be given the policy.
        """
        body = sampling_body(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            seed=request.seed if self.config.seeded else None, max_tokens=request.max_tokens,
            stop_ids=self._stop_list, stop_strings=sampling.stop_strings,
        )  # fmt: skip
        wanted = sampling.logprobs_mode != "recomputed"
        if sampling.logprobs_mode == "raw" and not (
            sampling.temperature in (0, 1) and sampling.top_p == 1 and not sampling.top_k
        ):
            raise SettingsError(
                "engine `vllm` gives log-probs of the distribution drawn from, not raw ones",
                hint="Set `rollout.logprobs_mode` to processed, or temperature to 1",
            )
        why = ""
        for trial in range(self.config.tries):
            server = self._home(request.group)
            era = server.era
            server.open += 1
            try:
                tokens, nats, reason = await server.client.complete(
                    server.name, request.prompt_ids, body, want_logprobs=wanted
                )
                if reason == "stop" and tokens[-1] not in self._stop_list:
                    reason = "stop_string"
                logprobs = None if nats is None else np.array(nats, np.float32)
                return Generation(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
            except Refused as refused:
                if refused.status in (401, 403):
                    raise EngineError(
                        f"server {server.client.url} refuses the key", hint="Give its key as $VLLM_API_KEY"
                    ) from refused
                if refused.status != 404:  # not for want of the weights: the request itself is wrong
                    return _failed(f"server: {refused}")
                why = str(refused)
            except Lost as lost:
                why = str(lost)
            finally:
                server.open -= 1
            self._count("retries")
            await self._recover(server, era, why, trial)
        return _failed(f"{self.config.tries} tries failed, the last with: {why}")

    def verify(self) -> None:
        """Raise ProofError unless every server still holds the policy that was loaded."""
        self._do(self._verify())

    async def _verify(self) -> None:
        assert self._wanted is not None
        for server in self._servers:
            if server.lost or server.digest is None:
                continue  # another's server says nothing of what it holds
            for trial in range(self.config.tries):
                era = server.era
                try:
                    state = (await server.client.worker("skyrl_state", seconds=60))[0]
                    break
                except (Lost, Refused) as error:  # it died since; whatever it sampled before came from our weights
                    await self._recover(server, era, str(error), trial)
            else:
                continue
            if (state["digest"], state["loads"]) != (server.digest, server.loads):
                raise ProofError(
                    f"server {server.client.url} was given other weights during the rollout",
                    hint="Let one process at a time work with a run's servers; run the rollout again",
                )

    def facts(self) -> dict[str, float | int | str | None]:
        """Return numbers about the engine's work since it was last asked, for the log."""
        found, self._counts = self._counts, {}
        return {"servers": sum(server.lost is None for server in self._servers), "retries": 0, "restarts": 0, **found}

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Note how long the slowest server took for something."""
        began = time.perf_counter()
        yield
        key = f"{name}_seconds"
        self._counts[key] = max(float(self._counts.get(key) or 0), time.perf_counter() - began)

    def _count(self, name: str) -> None:
        self._counts[name] = int(self._counts.get(name) or 0) + 1

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""
        return frozenset(self._stop_list)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, given those before, at temperature 1, from the first server."""
        server = next(server for server in self._servers if server.lost is None)
        return self._do(server.client.prompt_logprobs(server.name, token_ids))

    # Policies

    def load(self, policy: Path) -> None:
        """Bring every server to this policy, and prove it; returns once requests are answered from it.

        Raises:
            EngineError: no vLLM, or a server that does not start or answer.
            ProofError: a server does not hold the weights afterwards.
        """
        digest = policy_digest(policy)
        if digest == self.policy_digest:
            self.proof = {"unchanged": True}
            return
        shape = self._read_frame(policy)
        began = time.perf_counter()
        first = not self._servers
        if first:
            self._attach_or_start(policy)
        started = time.perf_counter()
        self.policy_digest = None
        self._wanted = self._want(policy, digest)
        self._homes.clear()
        proofs = self._do(self._bring_all(began if first else started))
        longest = int(shape.get("max_position_embeddings", 1 << 20))
        self.context_length = min(longest, *(int(p.pop("context", longest)) for p in proofs))
        self._dtype = str(proofs[0].get("dtype", "float32"))
        self.canary_tolerance = 1e-4 if self._dtype == "float32" else BFLOAT16_CANARY
        if not self._tested and self.config.self_test:
            prompt = self.renderer.prompt_ids(PROBE)
            requests = [
                Request(prompt_ids=prompt, seed=i, max_tokens=32, group=f"self-test-{i}")
                for i in range(self.config.self_test)
            ]
            tolerance = self.config.self_test_tolerance or SELF_TEST_TOLERANCE[self._dtype]
            self._counts |= self_test(policy, prompt, self.generate(requests, Sampling()), tolerance)
            self._tested = True
        self.proof = {"servers": len(proofs), **proofs[0]}
        self._counts |= {"load_seconds": time.perf_counter() - started}
        self.policy_digest = digest

    def _read_frame(self, policy: Path) -> dict[str, Any]:
        """Read the tokenizer, unless it is that of the policy before, and return the model's shape."""
        shape = text_config(policy)
        frame = frame_digest(policy)
        if frame != self._frame:
            tokenizer = load_tokenizer(policy)
            self.renderer = Renderer(tokenizer)
            vocabulary = int(shape.get("vocab_size", 1 << 30))
            self._stop_list = sorted(stop_ids(policy, tokenizer, self.renderer.turn_end_id, vocabulary))
            self._frame = frame
        return shape

    def _want(self, policy: Path, digest: str) -> Wanted:
        assert self._setup is not None
        canary = read_info(policy).canary_ids or self.renderer.prompt_ids(PROBE)
        if len(canary) < 2:  # there is nothing to foretell
            canary = list(range(8))
        if not is_adapter(policy):
            return Wanted(policy, digest, policy, digest, None, canary)
        rank = int(json.loads((policy / "adapter_config.json").read_bytes()).get("r", 0))
        if self.config.urls or rank <= self._setup.lora_rank:
            base = find_base(policy)
            return Wanted(policy, digest, base, policy_digest(base), f"adapter-{digest[:16]}", canary)
        self._forget_merged()
        self._merged = merged(policy)
        return Wanted(policy, digest, self._merged, digest, None, canary)

    def _attach_or_start(self, policy: Path) -> None:
        config = self.config
        if config.urls:
            self._setup = foreign(config)
        elif self.place is not None:
            self._setup = read_servers(self.place / SERVERS)
        if self._setup is None:
            logs = self.place / "logs" if self.place is not None else Path(tempfile.mkdtemp(prefix="nanoskyrl-logs-"))
            self._fleet = Fleet.plan(policy, config, logs)
            self._setup = self._fleet.servers()
        atexit.register(self.close)
        self._do(self._open())
        if config.alive is None:
            self.capacity = 2 * self._setup.seats
        self.capacity *= len(self._servers)

    async def _open(self) -> None:
        assert self._setup is not None
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)
        processes = self._fleet.processes if self._fleet else [None] * len(self._setup.addresses)
        for process in filter(None, processes):
            process.start()
        for index, (address, process) in enumerate(zip(self._setup.addresses, processes, strict=True)):
            url = process.url if process else address.url
            client = Client(url, self._setup.key, self._session, self.config.request_seconds)
            self._servers.append(Server(index, client, process))

    async def _bring_all(self, began: float) -> list[dict[str, Any]]:
        tasks = [asyncio.ensure_future(self._ready_and_bring(server)) for server in self._servers]
        try:
            done = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        self._counts["ready_seconds"] = time.perf_counter() - began
        return done

    async def _ready_and_bring(self, server: Server) -> dict[str, Any]:
        async with server.lock:
            await self._ready(server)
            try:
                return await self._bring(server)
            except (Lost, Refused) as error:
                raise EngineError(
                    f"server {server.client.url} cannot be given the policy: {error}", hint=_hint(server)
                ) from error

    async def _ready(self, server: Server) -> None:
        """Wait until the server answers.

        Raises:
            EngineError: it ended, or took too long; with the last words of its log.
        """
        deadline = time.monotonic() + self.config.start_seconds
        while not await server.client.healthy():
            if server.process is not None and not server.process.running:
                raise EngineError(
                    f"the vLLM server ended while starting: {server.process.last_words()}", hint=_hint(server)
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"server {server.client.url} does not answer after {self.config.start_seconds:g} seconds",
                    hint=_hint(server),
                )
            await asyncio.sleep(0.25)
            self._reread(server)

    def _reread(self, server: Server) -> None:
        """Look where a server of `skyrl serve` is now: it may have been restarted on another port."""
        if self._fleet is not None or self.config.urls or self.place is None:
            return
        found = read_servers(self.place / SERVERS)
        if found is None:
            raise EngineError(
                f"the servers of run `{self.place}` are no longer kept up", hint="Start `skyrl serve` again, and go on"
            )
        if server.index < len(found.addresses):
            server.client.url, server.client.key = found.addresses[server.index].url, found.key

    async def _bring(self, server: Server) -> dict[str, Any]:
        """Give a server the policy, prove that it holds it, and return what was shown."""
        assert self._wanted is not None
        assert self._setup is not None
        wanted, client = self._wanted, server.client
        models = await client.models()
        base = next(model for model in models if not model.get("parent"))
        if base["id"] != server.base:
            server.sums = None  # another process, with the weights that it began with
        server.base, server.name = base["id"], base["id"]
        proof: dict[str, Any] = {"context": base.get("max_model_len") or 1 << 20}
        try:
            state = (await client.worker("skyrl_state", seconds=60))[0]
            if state["digest"] is None and not state["loads"]:
                state = (await client.worker("skyrl_hold", self._setup.started_with))[0]
        except Refused:
            state = None
        if state is None:
            server.digest = None
            await self._bring_foreign(server, proof)
            return proof
        proof["dtype"] = state["dtype"]
        adapters = [model["id"] for model in models if str(model["id"]).startswith("adapter-")]
        if state["digest"] != wanted.whole_digest:
            await self._load_whole(server, wanted, state, proof)
        else:
            server.digest, server.loads = state["digest"], state["loads"]
            with self._timed("checksum"):
                found = await client.worker("skyrl_checksum")
                if self.config.checksum and len(found) == 1:
                    await asyncio.to_thread(self._expected, state["dtype"])
            proof["checksum"] = self._compare(found, state["dtype"], server)
        if not server.warm:
            await client.choose_endpoint(self.config.endpoint, server.base, wanted.canary)
            await client.prompt_logprobs(server.base, wanted.canary)  # compiled now, not at the first sync
            server.warm = True
        if wanted.adapter is not None:
            await self._load_adapter(server, wanted, adapters, proof)
        for name in adapters:
            if name != wanted.adapter:
                await client.unload_adapter(name)
        return proof

    async def _load_whole(self, server: Server, wanted: Wanted, state: dict[str, Any], proof: dict[str, Any]) -> None:
        client = server.client
        with self._timed("canary_before"):
            before = await canary(client, server.base, wanted.canary)
            sums_before = server.sums or await client.worker("skyrl_checksum")
        limit = self.config.start_seconds
        # What the sums must be is worked out while the server loads.
        expected = asyncio.ensure_future(asyncio.to_thread(self._expected, state["dtype"]))
        with self._timed("reload"):
            states = await client.worker("skyrl_load", str(wanted.whole), wanted.whole_digest, seconds=limit)
        with self._timed("reset_prefix_cache"):
            await client.reset_prefix_cache()
        proof["stale_layers"] = max(int(found.get("stale", 0)) for found in states)
        with self._timed("checksum"):
            sums_after = await client.worker("skyrl_checksum")
        with self._timed("expected_sums_waited"):
            await expected
        proof["checksum"] = self._compare(sums_after, state["dtype"], server)
        with self._timed("canary_after"):
            after = await client.prompt_logprobs(server.base, wanted.canary)
        rounded_away = proof["checksum"] == "matches" and sums_before == sums_after
        note_change(before, after, proof, rounded_away=rounded_away)
        server.digest, server.loads = states[0]["digest"], states[0]["loads"]

    async def _load_adapter(self, server: Server, wanted: Wanted, adapters: list[str], proof: dict[str, Any]) -> None:
        assert wanted.adapter is not None
        client = server.client
        proof["delivered"] = "adapter"
        if wanted.adapter not in adapters:
            held = adapters[-1] if adapters else server.base
            with self._timed("canary_before"):
                before = await canary(client, held, wanted.canary)
            with self._timed("load_adapter"):
                await client.load_adapter(wanted.adapter, wanted.policy.resolve())
            with self._timed("reset_prefix_cache"):
                await client.reset_prefix_cache()
            with self._timed("canary_after"):
                after = await client.prompt_logprobs(wanted.adapter, wanted.canary)
            with self._timed("checksum"):
                proof["adapter_checksum"] = await compare_adapter(client, wanted.policy, proof["dtype"])
            summed = proof["adapter_checksum"] == "matches"
            note_change(before, after, proof, summed=summed)
        server.name = wanted.adapter

    async def _bring_foreign(self, server: Server, proof: dict[str, Any]) -> None:
        """Use a server without our extension: adapters can be loaded, whole models must be served already."""
        assert self._wanted is not None
        proof |= {"dtype": "float32" if self.config.dtype == "float32" else "bfloat16", "checksum": "not ours to take"}
        if self._wanted.adapter is not None:
            await self._load_adapter(server, self._wanted, [], proof)
            return
        if self._tested or not self.config.self_test:
            raise ProofError(
                f"server {server.client.url} cannot be given whole weights: nanoskyrl did not start it",
                hint="Start it with `skyrl serve`, or train adapters; its own model is proved by `vllm.self_test`",
            )

    def _expected(self, dtype: str) -> dict[str, list[str]]:
        assert self._wanted is not None
        key = f"{self._wanted.whole_digest} {dtype}"
        if self._sums is None or self._sums[0] != key:
            self._sums = key, expected_sums(self._wanted.whole, dtype)
        return self._sums[1]

    def _compare(self, found: list[dict[str, Any]], dtype: str, server: Server) -> str:
        """Say how the worker's sums compare with those of the files; raises ProofError where they differ."""
        server.sums = None
        if not self.config.checksum:
            return "not asked for"
        if len(found) > 1:
            return "not comparable: the weights are spread over GPUs"
        compare_weights(found[0], self._expected(dtype), server.client.url)
        server.sums = found
        return "matches"

    # Servers that come and go

    def _home(self, group: str) -> Server:
        """Return the server of a group: the one it had, else the least busy."""
        server = self._homes.get(group) if group else None
        if server is None or server.lost is not None:
            living = [server for server in self._servers if server.lost is None]
            if not living:
                reasons = "; ".join(server.lost or "" for server in self._servers)
                raise EngineError(f"no vLLM server is left: {reasons}", hint="See the logs, and start again")
            server = min(living, key=lambda one: (one.open, one.index))
            if group:
                self._homes[group] = server
        return server

    async def _recover(self, server: Server, era: int, why: str, trial: int) -> None:
        """Make a server fit to be asked again, or give it up; one caller works while the others wait."""
        async with server.lock:
            if server.era != era or server.lost is not None:
                return
            if await self._still_ours(server):
                await asyncio.sleep(min(0.1 * 2**trial, 5.0))
                return
            try:
                if server.process is not None:
                    self._restart(server, server.process, why)
                await self._ready(server)
                await self._bring(server)
                server.era += 1
            except (EngineError, Lost, Refused) as error:
                server.lost = str(error)

    async def _still_ours(self, server: Server) -> bool:
        """Say whether a server answers and holds what it was given."""
        for _ in range(3):
            if server.process is not None and not server.process.running:
                return False
            if await server.client.healthy():
                break
            await asyncio.sleep(0.5)
        else:
            return False
        try:
            names = {model["id"] for model in await server.client.models()}
            if server.name not in names:
                return False
            if server.digest is None:
                return True
            state = (await server.client.worker("skyrl_state", seconds=60))[0]
        except (Lost, Refused):
            return False
        return (state["digest"], state["loads"]) == (server.digest, server.loads)

    def _restart(self, server: Server, process: ServerProcess, why: str) -> None:
        process.restart(why if process.running else process.last_words())
        self._count("restarts")
        server.sums = None
        server.client.url = process.url

    def close(self) -> None:
        """Stop the servers that were started here, and let go of the others."""
        atexit.unregister(self.close)
        if self._session is not None and self._thread is not None:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(10)
        if self._fleet is not None:
            self._fleet.stop()
        self._forget_merged()
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            self._thread = None
        self._servers, self._session, self._fleet, self._setup = [], None, None, None
        self.policy_digest, self._tested = None, False

    def _forget_merged(self) -> None:
        if self._merged is not None:
            shutil.rmtree(self._merged, ignore_errors=True)
            self._merged = None


def _failed(error: str) -> Generation:
    return Generation(token_ids=[], logprobs=None, finish_reason="error", error=error)


def _hint(server: Server) -> str:
    log = server.process.log if server.process is not None else None
    return f"The whole log is `{log}`" if log else "Look at the server's log"
