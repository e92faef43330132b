"""Engine `hf`: transformers in this process, on a CPU or one GPU, batched and repeatable.

Every request draws from a random stream of its own, one number a token, by inverting the
cumulative distribution. So a row's tokens depend on its seed and its prompt and not on
the rows beside it, but for rounding in the last bits of the logits. In float32 that moves
log-probs of long rows by 1e-4 and turns a token in some; in float64 neither was seen.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.engines.base import Generation, HfConfig, Request, SamplingParams, TokenEngine
from nanoskyrl.stages.models.decoding import SHARING, Decoding, find_sharing
from nanoskyrl.stages.models.device import pick_device, pick_dtype
from nanoskyrl.stages.models.loading import check_vocabulary, load_model, load_tokenizer, stop_ids
from nanoskyrl.stages.models.logits import logit_transform
from nanoskyrl.stages.models.logprobs import sequence_logprobs
from nanoskyrl.stages.models.policy import frame_digest, is_adapter, policy_at_hand, policy_digest
from nanoskyrl.stages.models.rendering import Renderer
from nanoskyrl.stages.models.rows_alone import embeddings_of, run_alone

COMPACT_BELOW = 0.75
"""Finished rows are dropped from the batch when fewer than this share of it is alive."""
ELEMENTS_AT_ONCE = 1 << 24
"""Rows times vocabulary that are sampled at once, in float64."""


class HfEngine(TokenEngine):
    """A transformers model that samples."""

    Config = HfConfig
    takes_stop_strings = True

    def __init__(self, config: HfConfig) -> None:
        """Hold nothing until `load`."""
        self.config = config
        self.device = pick_device(config.device)
        self._model: Any = None
        self._policy = Path()
        self._embeddings = 0
        self._sharing = SHARING[0]
        self._stop_ids: frozenset[int] | None = None
        self._frame: str | None = None  # digest of all that is not weights

    def load(self, policy: Path) -> None:
        """Read the weights, unless they are those already held."""
        digest = policy_digest(policy)
        if digest == self.policy_digest:
            return
        policy = policy_at_hand(policy)
        if not self._take_weights(policy):
            model = load_model(policy, dtype=pick_dtype(self.config.dtype, self.device), device=self.device)
            if hasattr(model, "merge_and_unload"):
                model = model.merge_and_unload()
            self._model = model.eval().requires_grad_(False)
            self._embeddings = embeddings_of(model)
            alone = run_alone(model)
            self._sharing = find_sharing(model, alone)
            logit_transform(model, alone)
            tokenizer = load_tokenizer(policy)
            check_vocabulary(policy, tokenizer, self._embeddings)
            self.renderer = Renderer(tokenizer)
            self._policy, self._stop_ids = policy, None
            longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            self.context_length = int(longest or 1 << 20)
            self._frame = frame_digest(policy)
        self.policy_digest = digest

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token that ends a turn; found when it is first needed, for it asks the chat template."""
        if self._stop_ids is None:
            tokenizer, turn_ends = self.renderer.tokenizer, self.renderer.turn_end_ids
            self._stop_ids = stop_ids(self._policy, tokenizer, turn_ends, self._embeddings)
        return self._stop_ids

    def _take_weights(self, policy: Path) -> bool:
        """Copy weights into the model that is up, if nothing else differs; say whether that was done."""
        files = sorted(policy.glob("*.safetensors"))  # a large model has several
        if self._model is None or is_adapter(policy) or not files or frame_digest(policy) != self._frame:
            return False
        from safetensors.torch import load_file

        held = dict(self._model.named_parameters())
        found = {name: value for file in files for name, value in load_file(file).items()}
        # Names that do not match one to one mean that loading converts them: leave that to transformers.
        if held.keys() != found.keys() or any(held[name].shape != value.shape for name, value in found.items()):
            return False
        for name, value in found.items():
            held[name].copy_(value)
        return True

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        """Return one generation for each request, batch by batch in their order."""
        size = self.config.batch_size
        done: dict[int, Generation] = {}
        with torch.inference_mode():
            for start in range(0, len(requests), size):
                for rows in self._together(requests, range(start, min(start + size, len(requests)))):
                    made = self._generate_batch([requests[row] for row in rows], sampling)
                    done |= zip(rows, made, strict=True)
        return [done[row] for row in range(len(requests))]

    def _together(self, requests: Sequence[Request], rows: Sequence[int]) -> Iterable[Sequence[int]]:
        """Return the rows of a batch as the model can take them: at once, those of one length, or each by itself."""

        def share(row: int) -> int:
            return {"any length": 0, "one length": len(requests[row].prompt_ids), "one row": row}[self._sharing]

        return grouped((share(row), row) for row in rows).values()

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first, given those before, at temperature 1."""
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)], device=self.device)
            return sequence_logprobs(self._model, ids, torch.ones_like(ids), temperature=1.0).logprobs[0].tolist()

    def _generate_batch(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Generation]:
        limits = torch.tensor([request.max_tokens for request in requests])
        uniform = torch.from_numpy(
            np.stack([_uniform(request.seed, int(limits.max())) for request in requests])
        )  # [B, max_tokens] in [0, 1)
        self._check_embedded(requests)
        prompts = [request.prompt_ids for request in requests]
        decoding = Decoding(self._model, prompts, masked=self._sharing == SHARING[0])
        stop = torch.tensor(sorted(self.stop_ids))
        stops = StopStrings(sampling.stop_strings, self.renderer.decode, len(requests))

        alive = torch.arange(len(requests))  # rows of the request list that the batch still holds
        running = torch.ones(len(requests), dtype=torch.bool)  # by row of the batch
        columns_ids, columns_logprobs, columns_rows = [], [], []
        for step in range(int(limits.max())):
            ids, logprobs = draw(decoding.logits, uniform[alive, step], sampling)
            columns_rows.append(alive[running])
            columns_ids.append(ids[running])
            columns_logprobs.append(logprobs[running])
            running = running & ~torch.isin(ids, stop)
            if sampling.stop_strings:
                running = running & ~stops.met(alive, ids, running)
            running = running & (step + 1 < limits[alive])
            if not running.any():
                break
            if running.float().mean() < COMPACT_BELOW:
                rows = running.nonzero()[:, 0]
                decoding.keep(rows)
                alive, ids, running = alive[rows], ids[rows], running[rows]
            decoding.step(ids)
        return _by_row(len(requests), columns_rows, columns_ids, columns_logprobs, self.stop_ids, stops.rows, sampling)

    def _check_embedded(self, requests: Sequence[Request]) -> None:
        largest = max(max(request.prompt_ids) for request in requests)
        if largest >= self._embeddings:
            raise InputError(
                f"a prompt holds the token {largest}, and the model of `{self._policy}` embeds {self._embeddings}",
                hint="Name a model with its own tokenizer, or resize the embeddings",
            )


class StopStrings:
    """Which rows have written one of the stop strings."""

    def __init__(self, texts: Sequence[str], decode: Callable[[list[int]], str], count: int) -> None:
        """Look at the last tokens of each row only; a token may be less than a character, but is at least a byte."""
        self._texts, self._decode = texts, decode
        self._longest = max((len(text.encode()) for text in texts), default=0)
        self._tails: list[list[int]] = [[] for _ in range(count)]
        self.rows: set[int] = set()
        """Rows that a stop string has ended."""

    def met(self, rows: torch.Tensor, ids: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
        """Take one token of each row [B], and return for which of the running ones a stop string is complete [B]."""
        found = torch.zeros(len(rows), dtype=torch.bool)
        for place, (row, token, on) in enumerate(zip(rows.tolist(), ids.tolist(), running.tolist(), strict=True)):
            if not on:
                continue
            tail = self._tails[row]
            tail.append(token)
            del tail[: -self._longest - 1]
            text = self._decode(tail)
            if any(stop in text for stop in self._texts):
                found[place] = True
                self.rows.add(row)
        return found


def _uniform(seed: int, count: int) -> np.ndarray:
    """Return `count` numbers in [0, 1) of a stream that belongs to this seed."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token a row.

    Args:
        logits: [B, V] of the model, before temperature.
        uniform: [B] in [0, 1); the draw of each row.
        sampling: Temperature, top_k and top_p, applied in this order.

    Returns:
        Token ids [B] and their nats [B] float32, on the CPU, in the mode that `sampling` asks for.
    """
    ids, nats = [], []
    rows = max(1, ELEMENTS_AT_ONCE // logits.shape[-1])
    for start in range(0, len(logits), rows):
        raw = logits[start : start + rows]
        raw = raw if raw.dtype == torch.float64 else raw.float()
        # Greedy has no distribution of its own; its tokens are scored at temperature 1.
        scaled = raw / sampling.temperature if sampling.temperature > 0 else raw
        kept = _truncate(scaled, sampling)
        if sampling.temperature > 0:
            cumulative = kept.softmax(-1, dtype=torch.float64).cumsum(-1)
            # Just below the total, so that rounding never points past the last token.
            target = uniform[start : start + rows, None].to(cumulative) * cumulative[:, -1:] * (1 - 1e-12)
            # Weights that are not numbers point past the end; their log-prob is NaN, which fails the attempt.
            chosen = torch.searchsorted(cumulative, target, right=True).clamp(max=raw.shape[-1] - 1)
        else:
            chosen = raw.argmax(-1, keepdim=True)
        scored = raw if sampling.logprobs_mode == "raw" else kept if sampling.temperature > 0 else raw
        nats.append(scored.log_softmax(-1).gather(-1, chosen)[:, 0].float().cpu())
        ids.append(chosen[:, 0].cpu())
    return torch.cat(ids), torch.cat(nats)


def _truncate(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Set logits outside top_k and top_p to minus infinity; the likeliest token always stays."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= sampling.top_p)
        logits = logits.masked_fill(cut, float("-inf"))
    return logits


def _by_row(
    count: int,
    rows: list[torch.Tensor],
    ids: list[torch.Tensor],
    logprobs: list[torch.Tensor],
    stop: frozenset[int],
    stopped: set[int],
    sampling: SamplingParams,
) -> list[Generation]:
    """Turn tokens listed step by step into one generation a row."""
    flat_rows = torch.cat(rows)
    order = flat_rows.argsort(stable=True)
    lengths = torch.bincount(flat_rows, minlength=count).tolist()
    split_ids = torch.cat(ids)[order].split(lengths)
    split_logprobs = torch.cat(logprobs)[order].split(lengths)

    def generation(row: int, tokens: list[int], nats: torch.Tensor) -> Generation:
        reason = "stop" if tokens and tokens[-1] in stop else "stop_string" if row in stopped else "length"
        logprobs = None if sampling.logprobs_mode == "recomputed" else nats.numpy()
        return Generation(token_ids=tokens, rollout_logprobs=logprobs, finish_reason=reason)

    return [generation(row, split_ids[row].tolist(), split_logprobs[row]) for row in range(count)]
