"""Bringing servers to a policy: weights or an adapter are loaded, and every server proves that it holds them.

A server that was started again is brought to the policy again: its weights have a new name
after each start, so an old request cannot meet them by mistake. Servers that nanoskyrl did
not start take adapters; whole weights they must hold already.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.children import drop_directory
from nanoskyrl.stages.core.errors import ProofError
from nanoskyrl.stages.engines.vllm.client import Client, Refused
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.process import ServerProcess
from nanoskyrl.stages.engines.vllm.proof import compare_adapter, compare_weights
from nanoskyrl.stages.engines.vllm.weights import expected_sums, merged
from nanoskyrl.stages.models.policy import find_base, is_adapter, policy_digest, read_info
from nanoskyrl.stages.models.rendering import Renderer

PROBE = [{"role": "user", "content": "What is 1 + 1? Think first, then answer."}]


class Counts(dict[str, Any]):
    """Numbers about the engine's work since it was last asked for them; one that is not there is 0."""

    def __missing__(self, name: str) -> int:
        return 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long the slowest server took for something."""
        began = time.perf_counter()
        yield
        name = f"{name}_seconds"
        self[name] = max(self[name], time.perf_counter() - began)


@dataclass(slots=True)
class Server:
    """A server as the engine sees it."""

    index: int
    client: Client
    process: ServerProcess | None
    started_with: str
    """Digest of the whole model that it has when it starts."""
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
class Target:
    """What the servers are to hold."""

    policy: Path
    whole: Path
    """A whole model on disk: the policy, an adapter's base, or the two merged."""
    whole_digest: str
    adapter: str | None
    """Name under which the policy is loaded beside its base; None: it is the whole model."""
    canary: list[int]


class Delivery:
    """Gives servers the policy that was chosen, and has each prove that it holds it."""

    target: Target
    """Set by `choose`."""

    def __init__(self, config: VllmConfig, counts: Counts) -> None:
        """Deliver nothing until `choose`."""
        self.config, self.counts = config, counts
        self.tested = False
        """Whether the self-test has proved what the servers hold."""
        self._merged: Path | None = None
        self._sums: tuple[str, dict[str, list[str]]] | None = None
        self._adding = threading.Lock()

    def choose(self, policy: Path, digest: str, renderer: Renderer, lora_rank: int) -> None:
        """Decide how a policy is delivered: as it is, as an adapter, or merged into its base.

        Args:
            policy: The policy's directory.
            digest: Its digest.
            renderer: Writes a canary, where the policy has none.
            lora_rank: Largest rank of adapters that the servers take.
        """
        ids = read_info(policy).canary_ids or renderer.prompt_ids(PROBE)
        if len(ids) < 2:  # there is nothing to predict
            ids = list(range(8))
        whole, whole_digest, adapter = policy, digest, None
        if is_adapter(policy):
            rank = int(json.loads((policy / "adapter_config.json").read_bytes()).get("r", 0))
            if self.config.urls or rank <= lora_rank:
                whole = find_base(policy)
                whole_digest, adapter = policy_digest(whole), f"adapter-{digest[:16]}"
            else:
                self.forget_merged()
                whole = self._merged = merged(policy)
        self.target = Target(policy, whole, whole_digest, adapter, ids)

    def forget_merged(self) -> None:
        """Delete the model that was merged last."""
        if self._merged is not None:
            drop_directory(self._merged)
            self._merged = None

    async def bring(self, server: Server) -> dict[str, Any]:
        """Give a server the policy, prove that it holds it, and return what was shown.

        Raises:
            Lost, Refused: the server did not answer, or said no.
            ProofError: it does not hold the weights afterwards.
        """
        target, client = self.target, server.client
        models = await client.models()
        base = next(model for model in models if not model.get("parent"))
        if base["id"] != server.base:
            server.sums = None  # another process, with the weights that it began with
        server.base, server.name = base["id"], base["id"]
        proof: dict[str, Any] = {"context": base.get("max_model_len") or 1 << 20}
        try:
            state = (await client.worker("skyrl_state", seconds=60))[0]
            if state["digest"] is None and not state["loads"]:
                state = (await client.worker("skyrl_hold", server.started_with))[0]
        except Refused:
            server.digest = None
            await self._bring_foreign(server, proof)
            return proof
        proof["dtype"] = state["dtype"]
        adapters = [model["id"] for model in models if str(model["id"]).startswith("adapter-")]
        if state["digest"] != target.whole_digest:
            await self._load_whole(server, state["dtype"], proof)
        else:
            server.digest, server.loads = state["digest"], state["loads"]
            with self.counts.timed("checksum"):
                found = await client.worker("skyrl_checksum")
                if self.config.checksum and len(found) == 1:
                    await asyncio.to_thread(self._expected, state["dtype"])
            proof["checksum"] = self._compare(found, state["dtype"], server)
        if not server.warm:
            await client.choose_endpoint(self.config.endpoint, server.base, target.canary)
            await client.prompt_logprobs(server.base, target.canary)  # compiled now, not at the first sync
            server.warm = True
        if target.adapter is not None:
            await self._load_adapter(server, target.adapter, adapters, proof)
        for name in adapters:
            if name != target.adapter:
                await client.unload_adapter(name)
        return proof

    async def _load_whole(self, server: Server, dtype: str, proof: dict[str, Any]) -> None:
        target, client, timed = self.target, server.client, self.counts.timed
        sums_before = server.sums
        # What the sums must be is worked out while the server loads.
        expected = asyncio.ensure_future(asyncio.to_thread(self._expected, dtype))
        with timed("reload"):
            states = await client.worker(
                "skyrl_load", str(target.whole), target.whole_digest, seconds=self.config.start_seconds
            )
        with timed("reset_prefix_cache"):
            await client.reset_prefix_cache()
        proof["stale_layers"] = max(int(found.get("stale", 0)) for found in states)
        with timed("checksum"):
            sums_after = await client.worker("skyrl_checksum")
        with timed("expected_sums_waited"):
            await expected
        proof["checksum"] = self._compare(sums_after, dtype, server)
        if server.sums and sums_before == server.sums:
            proof["rounded_away"] = True  # other numbers on disk, the same in the server's type
        server.digest, server.loads = states[0]["digest"], states[0]["loads"]

    async def _load_adapter(self, server: Server, adapter: str, loaded: list[str], proof: dict[str, Any]) -> None:
        target, client, timed = self.target, server.client, self.counts.timed
        proof["delivered"] = "adapter"
        if adapter not in loaded:
            with timed("load_adapter"):
                await client.load_adapter(adapter, target.policy.resolve())
            with timed("reset_prefix_cache"):
                await client.reset_prefix_cache()
        with timed("checksum"):
            proof["adapter_checksum"] = await compare_adapter(client, target.policy, proof["dtype"])
        server.name = adapter

    async def _bring_foreign(self, server: Server, proof: dict[str, Any]) -> None:
        """Use a server without our extension: adapters can be loaded, whole models must be served already."""
        proof |= {"dtype": "float32" if self.config.dtype == "float32" else "bfloat16", "checksum": "not ours to take"}
        if self.target.adapter is not None:
            await self._load_adapter(server, self.target.adapter, [], proof)
        elif self.tested or not self.config.self_test:
            raise ProofError(
                f"server {server.client.url} cannot be given whole weights: nanoskyrl did not start it",
                hint="Start it with `skyrl serve`, or train adapters; its own model is proved by `vllm.self_test`",
            )

    def _expected(self, dtype: str) -> dict[str, list[str]]:
        with self._adding:  # servers that load side by side ask at the same time
            target = self.target
            key = f"{target.whole_digest} {dtype}"
            if self._sums is None or self._sums[0] != key:
                self._sums = key, expected_sums(target.whole, dtype)
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
