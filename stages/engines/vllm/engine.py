"""Engine `vllm`: servers that sample, brought to a policy and proved to hold it.

Requests of one group go to one server, where their common beginning is computed once. A
request that comes to nothing is made again with the same seed, so that none is lost and
none counts twice. `supervision.py` keeps the servers up, `delivery.py` gives them policies.
"""

import atexit
import contextlib
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nanoskyrl.stages.core.errors import EngineError, SettingsError
from nanoskyrl.stages.engines.base import Generation, Request, SamplingParams, ServedEngine
from nanoskyrl.stages.engines.vllm.client import Lost, Refused, sampling_body
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.delivery import PROBE, Counts, Delivery
from nanoskyrl.stages.engines.vllm.proof import SELF_TEST_TOLERANCE, self_test, sums_match
from nanoskyrl.stages.engines.vllm.supervision import Supervisor
from nanoskyrl.stages.models.loading import load_tokenizer, stop_ids
from nanoskyrl.stages.models.policy import frame_digest, policy_at_hand, policy_digest, text_config
from nanoskyrl.stages.models.rendering import Renderer

T = TypeVar("T")
BFLOAT16_CANARY = 0.06
"""As `canary_tolerance`, for servers in bfloat16; docs/generation.md has what was seen."""


class VllmEngine(ServedEngine):
    """vLLM servers behind one face."""

    Config = VllmConfig

    def __init__(self, config: VllmConfig) -> None:
        """Hold nothing until `load`."""
        self.config = config
        self.capacity = config.alive or 2 * config.max_num_seqs
        self.trajectory_seconds = config.trajectory_seconds
        self.counts = Counts()
        self.delivery = Delivery(config, self.counts)
        self.supervisor = Supervisor(config, self.delivery, self.counts)
        self._frame: str | None = None
        """Digest of what is not weights, whose tokenizer was read last."""

    # What the turn loop calls

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; Ctrl-C ends it, too."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def sample(self, request: Request, sampling: SamplingParams) -> Generation:
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
            server = self.supervisor.home(request.group)
            era = server.era
            server.open += 1
            try:
                tokens, logprobs, reason = await server.client.complete(
                    server.name, request.prompt_ids, body, want_logprobs=wanted
                )
                if reason == "stop" and tokens[-1] not in self._stop_list:
                    reason = "stop_string"
                return Generation(token_ids=tokens, rollout_logprobs=logprobs, finish_reason=reason)
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
            self.counts["retries"] += 1
            await self.supervisor.recover(server, era, why, trial)
        return _failed(f"{self.config.tries} tries failed, the last with: {why}")

    def verify(self) -> None:
        """Raise ProofError unless every server still holds the policy that was loaded."""
        self._do(self.supervisor.verify())

    def facts(self) -> dict[str, float | int | str | None]:
        """Return numbers about the engine's work since it was last asked, for the log."""
        found = {"servers": len(self.supervisor.living), "retries": 0, "restarts": 0, **self.counts}
        self.counts.clear()
        return found

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a turn."""
        return frozenset(self._stop_list)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, given those before, at temperature 1, from the first server."""
        return self._do(self.supervisor.logprobs(token_ids))

    # Policies

    def load(self, policy: Path) -> None:
        """Bring every server to this policy, and prove it; returns once requests are answered from it.

        Raises:
            EngineError: no vLLM, or a server that does not start or answer.
            ProofError: a server does not hold the weights afterwards.
        """
        digest = policy_digest(policy)
        if digest == self.policy_digest:
            self.proof = {"sums_match": self.proof.get("sums_match"), "unchanged": True}
            return
        policy = policy_at_hand(policy)
        shape = self._read_frame(policy)
        began = started = time.perf_counter()
        if not self.supervisor.servers:
            self.supervisor.find(policy, self.place)
            atexit.register(self.close)
            self._do(self.supervisor.start())
            self.capacity = len(self.supervisor.servers) * (self.config.alive or 2 * self.supervisor.setup.seats)
            started = time.perf_counter()
        self.policy_digest = None
        self.delivery.choose(policy, digest, self.renderer, self.supervisor.setup.lora_rank)
        proofs = self._do(self.supervisor.bring_all())
        self.counts["ready_seconds"] = time.perf_counter() - began
        longest = int(shape.get("max_position_embeddings", 1 << 20))
        self.context_length = min(longest, *(int(p.pop("context", longest)) for p in proofs))
        dtype = str(proofs[0].get("dtype", "float32"))
        self.canary_tolerance = 1e-4 if dtype == "float32" else BFLOAT16_CANARY
        proved = all(map(sums_match, proofs))
        if not proved and not self.delivery.tested and self.config.self_test:
            prompt = self.renderer.prompt_ids(PROBE)
            requests = [
                Request(prompt_ids=prompt, seed=i, max_tokens=32, group=f"self-test-{i}")
                for i in range(self.config.self_test)
            ]
            tolerance = self.config.self_test_tolerance or SELF_TEST_TOLERANCE[dtype]
            self.counts |= self_test(policy, prompt, self.generate(requests, SamplingParams()), tolerance)
            self.delivery.tested = True
        self.proof = {"servers": len(proofs), "sums_match": proved, **proofs[0]}
        self.counts["load_seconds"] = time.perf_counter() - started
        self.policy_digest = digest

    def _read_frame(self, policy: Path) -> dict[str, Any]:
        """Read the tokenizer, unless it is that of the policy before, and return the model's shape."""
        shape = text_config(policy)
        frame = frame_digest(policy)
        if frame != self._frame:
            tokenizer = load_tokenizer(policy)
            self.renderer = Renderer(tokenizer)
            vocabulary = int(shape.get("vocab_size", 1 << 30))
            self._stop_list = sorted(stop_ids(policy, tokenizer, self.renderer.turn_end_ids, vocabulary))
            self._frame = frame
        return shape

    def close(self) -> None:
        """Stop the servers that were started here, and let go of the others."""
        atexit.unregister(self.close)
        if self._thread is not None:
            with contextlib.suppress(Exception):
                self.submit(self.supervisor.disconnect()).result(10)
        self.supervisor.stop()
        self.delivery.forget_merged()
        self.stop_loop()
        self.policy_digest, self.delivery.tested = None, False


def _failed(error: str) -> Generation:
    return Generation(token_ids=[], rollout_logprobs=None, finish_reason="error", error=error)
