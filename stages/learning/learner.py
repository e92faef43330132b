"""A policy that learns: model, optimizer and schedule, through accelerate.

A learner can stay up from step to step: `load` does nothing if it already holds the
policy and state asked for, so a live learner and a fresh one end with the same bytes.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoskyrl.stages.core.errors import EngineError, SettingsError
from nanoskyrl.stages.core.storage import at_hand, sync_tree, write_errors
from nanoskyrl.stages.learning.batching import MicroBatch, Sequences, collate_all, idle_batch, response_part
from nanoskyrl.stages.learning.deepspeed_strategy import DeepSpeedStrategy
from nanoskyrl.stages.learning.optim import check_bitsandbytes
from nanoskyrl.stages.learning.optimizer_state import load_state, save_state
from nanoskyrl.stages.learning.policy_module import PolicyModule
from nanoskyrl.stages.learning.process_group import accelerator_of, device_of, join, strategy_of
from nanoskyrl.stages.learning.stepping import PlainStrategy, StepResult
from nanoskyrl.stages.learning.train_config import (
    COMPILED_FROM,
    DEFAULT_LORA_ALPHA,
    FULL_BELOW,
    CriticConfig,
    OptimizerConfig,
    backbone_or_default,
    rank_or_default,
)
from nanoskyrl.stages.models.adapters import LoraSettings, rank_of, set_dropout, with_adapters
from nanoskyrl.stages.models.checkpointing import has_layers, keep_less
from nanoskyrl.stages.models.critic import Critic, load_critic, new_critic
from nanoskyrl.stages.models.device import pick_device, pick_dtype
from nanoskyrl.stages.models.kv_cache import without_wrapper
from nanoskyrl.stages.models.loading import load_model
from nanoskyrl.stages.models.logprobs import TokenStatistics
from nanoskyrl.stages.models.packing import Workload, can_share, check_padding, prepare_packing
from nanoskyrl.stages.models.policy import (
    PolicyInfo,
    count_parameters,
    critic_digest,
    find_base,
    is_adapter,
    policy_at_hand,
    policy_digest,
    read_info,
    write_info,
)
from nanoskyrl.stages.models.rows_alone import whole_weights
from nanoskyrl.stages.models.throughput import device_peak, training_flops
from nanoskyrl.stages.models.write_policy import write_policy

DEFAULT_LR = {"full_small": 2e-4, "full": 1e-6, "lora": 1e-4}
CRITIC_LR_FACTOR = 5
"""A critic of its own starts from nothing, and learns by regression: it can go faster than the policy."""
CANARY_TOKENS = 256
PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Read by torch when it first allocates."""
END: Any = object()


class Learner:
    """A model with its optimizer, and a critic if it is asked for one."""

    def __init__(
        self, config: OptimizerConfig = OptimizerConfig(), *, critic: CriticConfig | None = None, frozen: bool = False
    ) -> None:
        """Hold nothing until `load`.

        Args:
            config: Of the optimizer and the adapters.
            critic: How a critic is made where the policy has none yet; None: there is no critic.
            frozen: Never train: hold no optimizer.
        """
        self.config, self.critic_config, self.frozen = config, critic, frozen
        self.critic: Critic | None = None
        self.loop_steps = 1
        """Of the loop that it stays up for: whether compiling is worth its time."""
        self.world = join(pick_device(config.device))
        self.device = device_of(pick_device(config.device))
        if self.device.startswith("cuda"):
            # Pinned memory, which policies and states pass through, is made by 8 threads instead of one.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", PINNED)
        self.model: Any = None
        self.packed = self.shares = False
        """Whether rows are laid end to end, and whether prefixes that they share are computed once."""
        self.strategy: PlainStrategy | DeepSpeedStrategy = PlainStrategy()
        """Steps the weights."""
        self.parameters = 0
        """How many numbers the model holds."""
        self.trained_parameters = 0
        """How many numbers learn: all of them, or those of the adapters."""
        self.policy_digest: str | None = None
        self._beside: tuple[str | None, str | None, int] = (None, None, 0)
        """Digest of the critic and place of the state that go with the policy, and the seed of its adapters."""
        self._writing: Future[None] | None = None
        """A state on its way into its place."""
        self._policy: Path | None = None
        self._module: Any = None
        self._accelerator: Any = None
        self._made_with = {"optimizer": config.optimizer, "dtype": self.dtype}
        """Settings that a state cannot be loaded without."""
        self.lora_rank = 0

    @property
    def lr(self) -> float:
        """The peak learning rate in force."""
        if self.config.lr is not None:
            return self.config.lr
        return DEFAULT_LR["lora" if self.lora_rank else "full_small" if self.parameters < FULL_BELOW else "full"]

    @property
    def value_loss_coef(self) -> float:
        """Weight of the value loss beside the policy's."""
        assert self.critic_config is not None
        return self.critic_config.value_loss_coef or (1.0 if self._bare(self.critic).backbone is not None else 0.1)

    @property
    def dtype(self) -> str:
        """Name of the type that weights are held in."""
        return str(pick_dtype(self.config.dtype, self.device)).removeprefix("torch.")

    def holds(self, policy: Path, state: Path | None, *, seed: int = 0) -> bool:
        """Say whether `load` would have nothing to do."""
        return (policy_digest(policy), self._what_is_beside(policy, state, seed)) == (self.policy_digest, self._beside)

    def _what_is_beside(self, policy: Path, state: Path | None, seed: int) -> tuple[str | None, str | None, int]:
        # A state is known by its place, for it may not be written: a train of other settings leaves another policy.
        place = None if state is None else str(state.resolve())
        return critic_digest(policy) if self.critic_config else None, place, seed

    def load(self, policy: Path, state: Path | None = None, *, seed: int = 0) -> None:
        """Take a policy, and the optimizer's state that goes with it, unless they are held already.

        Args:
            policy: Where training starts from.
            state: The `state/` of the train that made it; None starts the optimizer afresh.
            seed: Of the random weights of new adapters.

        Raises:
            InputError: the policy or the state does not load.
            SettingsError: another kind of training than the one that made the policy, or one that cannot be here.
        """
        if self.holds(policy, state, seed=seed):
            self._policy = policy
            return
        self.settle()
        self.world.barrier()
        if self.config.quantization is not None:
            check_bitsandbytes(f"quantization = {self.config.quantization}")
        dtype, files = pick_dtype(self.config.dtype, self.device), policy_at_hand(policy)
        # Two models at once may not fit.
        self.policy_digest = self.model = self.critic = self._module = None
        self.strategy = PlainStrategy()
        if self._accelerator is not None:
            self._accelerator.free_memory()
        self.model = load_model(files, dtype=dtype, device=self.device, quantization=self.config.quantization)
        self.parameters = count_parameters(find_base(files) if is_adapter(files) else files) or sum(
            p.numel() for p in self.model.parameters()
        )
        with whole_weights(self.model):
            alone = check_padding(self.model)
            self.packed = self.config.packing and prepare_packing(self.model, alone)
            asked = self.config.share_prefixes and not self.config.lora_dropout
            self.shares = asked and self.packed and can_share(self.model)
        lora = LoraSettings(
            rank=self.config.lora_rank, alpha=self.config.lora_alpha, targets=self.config.lora_targets,
            exclude=self.config.lora_exclude, rslora=self.config.lora_rslora, dropout=self.config.lora_dropout,
        )  # fmt: skip
        adapters = rank_of(self.model, lora)
        self.lora_rank = rank_or_default(self.config.lora_rank, self.parameters) if adapters is None else adapters
        if self.config.quantization is not None and not self.lora_rank:
            raise SettingsError(
                f"`train.quantization` is {self.config.quantization}, and no adapters are trained",
                hint="Set `train.lora_rank`, such as 32: quantized weights themselves do not learn",
            )
        name = strategy_of(self.config, self.world, parameters=self.parameters, lora=bool(self.lora_rank))
        self.strategy = (DeepSpeedStrategy if name.startswith("zero") else PlainStrategy)(name, self.world.size)
        if self.critic_config is not None:
            if not self.strategy.trains_critic:
                raise SettingsError(
                    f"a critic cannot be trained beside the policy under {name}",
                    hint="Set `train.strategy = ddp`, or choose an algorithm without a critic",
                )
            asked = self.critic_config.backbone
            self.critic = load_critic(files, self.model, asked, dtype=dtype, device=self.device) or new_critic(
                self.model, backbone_or_default(asked, lora=bool(self.lora_rank))
            )
        if self.lora_rank and not is_adapter(policy):
            lora = replace(lora, rank=self.lora_rank, alpha=lora.alpha or DEFAULT_LORA_ALPHA)
            self.model = with_adapters(self.model, files, lora, seed=seed)
        self.trained_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._prepare(dtype)
        if state is not None:
            load_state(at_hand(state), self.strategy, self._made_with, device=self.device)
        self._taken(policy, state, seed)

    def _taken(self, policy: Path, state: Path | None, seed: int) -> None:
        """Note what is held."""
        self.policy_digest, self._policy = policy_digest(policy), policy
        self._beside = self._what_is_beside(policy, state, seed)

    def _prepare(self, dtype: torch.dtype) -> None:
        # No dropout: the ratio of a fresh update must be 1, and a resumed step must see the same masks.
        compiled = self._compiles()
        self._module = PolicyModule(self.model, fused=compiled).eval()
        if self.frozen:
            return
        share = self.config.gradient_checkpointing
        share = float(self.parameters >= FULL_BELOW) if share is None else share
        # ZeRO-3 gathers weights inside the layers: each product would be a program of its own.
        keep_less(without_wrapper(self.model), share, compiled=compiled and self.strategy.name != "zero3")
        if self._accelerator is None:
            self._accelerator = accelerator_of(self.strategy.name, self.config, self.device.partition(":")[0], dtype)
        self._module = self.strategy.prepare(self._accelerator, self._module, self.lr, self.config)
        if self.critic is not None and self.critic_config is not None:
            factor = 1
            if self.critic.backbone is not None:
                keep_less(self.critic.backbone, share)
                factor = CRITIC_LR_FACTOR
            lr = self.critic_config.lr or self.lr * factor
            config = replace(self.config, max_grad_norm=self.critic_config.max_grad_norm)
            self.critic = self.strategy.prepare(self._accelerator, self.critic, lr, config).eval()

    def _compiles(self) -> bool:
        if self.config.compile is not None:
            return self.config.compile
        chosen = self.device.startswith("cuda") and self.loop_steps >= COMPILED_FROM
        if chosen:  # nobody asked for it: what does not compile is computed as it is
            torch._dynamo.config.suppress_errors = True
        return chosen and has_layers(without_wrapper(self.model))

    def micro_batches(self, sequences: Sequences, rows: Sequence[int], max_tokens: int) -> Iterator[MicroBatch | None]:
        """Yield this process's micro-batches of these rows; None: the others have one more."""
        return collate_all(
            sequences, rows, max_tokens, self.device, packed=self.packed, shares=self.shares, world=self.world
        )

    def mfu(self, work: Workload, seconds: float) -> float | None:
        """Return the share of all devices' arithmetic that so much work used; None where it is unknown."""
        if not self.device.startswith("cuda") or (peak := device_peak(torch.cuda.get_device_name(self.device))) is None:
            return None
        config = without_wrapper(self.model).config.get_text_config()
        flops = training_flops(self.parameters, config, work.computed, work.pairs, lora=bool(self.lora_rank))
        return flops / seconds / peak / self.world.size

    def peak_device_memory(self) -> int | None:
        """Return the most memory that this process had in use on its GPU; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.startswith("cuda") else None

    def statistics(self, batch: MicroBatch, temperature: float) -> TokenStatistics:
        """Return log-probs, with gradient, and entropies of a micro-batch's sampled tokens."""
        shared = self.critic is not None and self._bare(self.critic).backbone is None
        tokens = batch.ids, batch.attention_mask, batch.loss_mask
        return TokenStatistics(*self._module(*tokens, temperature, batch.pack, shared))

    def _bare(self, module: Any) -> Any:
        return module if self._accelerator is None else self._accelerator.unwrap_model(module)

    def values_of(self, batch: MicroBatch, found: TokenStatistics) -> Tensor:
        """Return what the critic predicts before each sampled token, with gradient; [B, T-1], 0 elsewhere."""
        assert self.critic is not None
        return self.critic(batch.ids, batch.attention_mask, batch.pack, found.hidden) * batch.loss_mask

    def _idle(self) -> Tensor:
        """Return a loss of 0 that reaches every weight: the others wait for this process's gradient."""
        batch = idle_batch(self.device, packed=self.packed)
        found = self.statistics(batch, 1.0)
        loss = found.logprobs.sum() * 0
        if self.critic is not None:
            loss = loss + self.values_of(batch, found).sum() * 0
        return loss

    def logprobs(self, sequences: Sequences, temperature: float, max_tokens: int) -> list[np.ndarray]:
        """Return the nats of every row's response tokens, 0 on those that were observed."""
        return self._by_row(sequences, max_tokens, lambda batch: self.statistics(batch, temperature).logprobs)

    def values(self, sequences: Sequences, max_tokens: int) -> list[np.ndarray]:
        """Return what the critic predicts before each of a row's response tokens, 0 where they were observed."""
        return self._by_row(
            sequences, max_tokens, lambda batch: self.values_of(batch, self.statistics(batch, temperature=1.0))
        )

    def reference_logprobs(self, sequences: Sequences, temperature: float, max_tokens: int) -> list[np.ndarray]:
        """Return the nats under the model without its adapters, if it has any: no second copy is needed."""
        with self.model.disable_adapter() if self.lora_rank else contextlib.nullcontext():
            return self.logprobs(sequences, temperature, max_tokens)

    def _by_row(
        self, sequences: Sequences, max_tokens: int, of_batch: Callable[[MicroBatch], Tensor]
    ) -> list[np.ndarray]:
        found = [np.zeros(len(row), np.float32) for row in sequences.response_ids]
        rows = [row for row, count in enumerate(sequences.trained_tokens) if count]
        with torch.no_grad():
            for batch in self.micro_batches(sequences, rows, max_tokens):
                if batch is None:
                    self._idle()
                else:
                    for row, line in zip(batch.rows, of_batch(batch).float().cpu().numpy(), strict=True):
                        found[row] = response_part(sequences, row, line)
        if self.world.size == 1:
            return found
        ends = np.cumsum([len(row) for row in found])
        return np.split(self.world.sum(np.concatenate(found)), ends[:-1])

    def gradient(self, batches: Iterable[MicroBatch | None], loss_of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Return the gradient of the summed loss by the trained weights, as one vector on the CPU; nothing is kept."""
        self.accumulate(batches, loss_of)
        found = [
            self.strategy.gradient_of(p).flatten().float().cpu() for p in self.model.parameters() if p.requires_grad
        ]
        self.strategy.forget_gradients()
        return torch.cat(found)

    def accumulate(self, batches: Iterable[MicroBatch | None], loss_of: Callable[[MicroBatch], Tensor]) -> None:
        """Put the summed gradient of all processes' micro-batches in place of what was there."""
        self.strategy.forget_gradients()
        if self.config.lora_dropout:
            set_dropout(self.model, on=True)
        for batch, following in itertools.pairwise(itertools.chain(batches, [END])):
            loss = self._idle if batch is None else partial(loss_of, batch)
            self.strategy.add_gradient(loss, last=following is END)
        if self.config.lora_dropout:
            set_dropout(self.model, on=False)

    def step(
        self,
        batches: Iterable[MicroBatch | None],
        loss_of: Callable[[MicroBatch], Tensor],
        goes_on: Callable[[], bool] = lambda: True,
    ) -> StepResult | None:
        """Add up the gradients of the micro-batches and take one optimizer step.

        Args:
            batches: Of one mini-batch.
            loss_of: Returns a micro-batch's share of the mini-batch's loss.
            goes_on: Asked once all of them were seen, in every process: whether to take the step.

        Returns:
            None where it was not taken.
        """
        self.accumulate(batches, loss_of)
        if not goes_on():
            self.strategy.forget_gradients()
            return None
        self.policy_digest = None  # no published policy any more, until it is saved
        return self.strategy.step()

    def save(
        self, policy: Path, state: Path, canary: Sequence[int], *, with_state: bool = True, beside: bool = False
    ) -> dict[str, str]:
        """Write the policy and the optimizer's state, and return the digests of the state's files by their names.

        Args:
            policy: Directory for weights, config, tokenizer and policy.json.
            state: Directory for optimizer and schedule.
            canary: Tokens of one trained sequence, by which `sync` proves that the weights arrived.
            with_state: Whether the state is written; held it is either way.
            beside: Return before the state is in its place: see `settle`.

        Raises:
            EngineError: the policy gives no finite log-probs.
            OutputError: something cannot be written, such as the state before this one.
        """
        assert self._policy is not None
        self.settle()
        parent = policy_digest(self._policy)
        # Under ZeRO-3 all processes take part, layer by layer; the first one gets the whole.
        gathered = self.strategy.gathered()
        if self.world.is_main:
            write_policy(
                self.model, policy, start=self._policy, adapter=bool(self.lora_rank), gathered=gathered,
                critic=None if self.critic is None else self._bare(self.critic),
            )  # fmt: skip
        del gathered
        logprobs = self._canary(canary)
        if not np.isfinite(logprobs).all():
            raise EngineError("the trained policy gives log-probs that are not finite", hint="Lower `train.lr`")
        if self.world.is_main:
            write_info(
                policy,
                PolicyInfo(
                    parent=parent,
                    base=(read_info(self._policy).base or parent) if self.lora_rank else None,
                    source=read_info(self._policy).source,
                    canary_ids=list(canary)[:CANARY_TOKENS],
                    canary_logprobs=logprobs,
                    critic=critic_digest(policy),
                ),
            )
        digests = self.save_state(state, beside=beside) if with_state else {}
        if self.world.is_main:
            with write_errors(policy.parent):
                sync_tree(policy)
        self.world.barrier()
        self._taken(policy, state, self._beside[-1])
        return digests

    def save_state(self, state: Path, *, beside: bool = False) -> dict[str, str]:
        """Write the optimizer's state alone, and return the digests of its files by their names."""
        digests, self._writing = save_state(state, self.strategy, self._made_with, self.world, beside=beside)
        return digests

    def settle(self) -> None:
        """Wait until the last state that was saved is in its place.

        Raises:
            OutputError: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _canary(self, canary: Sequence[int]) -> list[float]:
        """Return the nats of a sequence's tokens but the first, at temperature 1."""
        with torch.no_grad():
            ids = torch.tensor([list(canary)[:CANARY_TOKENS]], device=self.device)
            return self._module(ids, torch.ones_like(ids), None, 1.0)[0][0].tolist()
