"""A policy that learns: model, optimizer and schedule, through accelerate.

A learner can stay up from step to step: `load` does nothing if it already holds the
policy and state asked for, so a live learner and a fresh one end with the same bytes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoskyrl.stages.core.digests import digest_json
from nanoskyrl.stages.core.errors import EngineError, InputError, SettingsError
from nanoskyrl.stages.core.storage import make_directory, sync_tree, write_errors
from nanoskyrl.stages.learning.batching import MicroBatch, Sequences, collate_all, idle_batch, response_part
from nanoskyrl.stages.learning.optim import Masters, check_bitsandbytes, make_optimizer, use_settings
from nanoskyrl.stages.learning.process_group import accelerator_of, device_of, join, strategy_of
from nanoskyrl.stages.learning.train_config import (
    DEFAULT_LORA_ALPHA,
    FULL_BELOW,
    CriticConfig,
    OptimizerConfig,
    backbone_or_default,
    rank_or_default,
)
from nanoskyrl.stages.models.adapters import keep_gradients, rank_of, with_adapters
from nanoskyrl.stages.models.checkpointing import keep_less
from nanoskyrl.stages.models.critic import Critic, load_critic, new_critic
from nanoskyrl.stages.models.device import pick_device, pick_dtype
from nanoskyrl.stages.models.kv_cache import without_wrapper
from nanoskyrl.stages.models.logprobs import Head, TokenStatistics, sequence_logprobs
from nanoskyrl.stages.models.packing import prepare_packing
from nanoskyrl.stages.models.policy import (
    PolicyInfo,
    cached_digest,
    count_parameters,
    critic_digest,
    find_base,
    is_adapter,
    load_model,
    policy_digest,
    read_info,
    write_info,
)
from nanoskyrl.stages.models.throughput import device_peak, training_flops
from nanoskyrl.stages.models.write_policy import write_policy

DEFAULT_LR = {"full_small": 2e-4, "full": 1e-6, "lora": 1e-4}
CRITIC_LR_FACTOR = 5
"""A critic of its own starts from nothing, and learns by regression: it can go faster than the policy."""
STATE_FILE = "optimizer.pt"
CANARY_TOKENS = 256
DEEPSPEED_TAG = "deepspeed"
END: Any = object()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    lr: float
    skipped: bool
    """The gradients were not finite, so the weights stayed as they were."""
    critic_grad_norm: float | None = None
    """Of the critic's own weights."""


class PolicyModule(nn.Module):
    """A model as it is trained: one forward pass gives log-probs and entropies.

    What wraps a model for several processes watches its forward pass, so all of it goes through here.
    """

    def __init__(self, model: Any, *, fused: bool = False) -> None:
        """Wrap a model of transformers or peft."""
        super().__init__()
        self.model = model
        self.head = Head(without_wrapper(model), fused=fused)

    def forward(
        self, ids: Tensor, mask: Tensor, select: Tensor | None, temperature: float, want_hidden: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what `sequence_logprobs` does, as a tuple: DeepSpeed looks for tensors in no other record."""
        found = sequence_logprobs(
            self.model, ids, mask, temperature=temperature, select=select, head=self.head, want_hidden=want_hidden
        )
        return found.logprobs, found.entropy, found.hidden


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
        self.world = join(pick_device(config.device))
        self.device = device_of(pick_device(config.device))
        self.model: Any = None
        self.packed = False
        self.strategy = "one"
        self.parameters = 0
        """How many numbers the model holds."""
        self.policy_digest: str | None = None
        self._critic_digest: str | None = None
        self._seed = 0
        self._state_digest: str | None = None
        self._policy: Path | None = None
        self._module: Any = None
        self.masters = Masters([])
        """What the optimizer steps: the weights themselves, or float32 copies."""
        self._critic_masters = Masters([])
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._critic_optimizer: Any = None
        self._critic_scheduler: Any = None
        self._accelerator: Any = None
        self.lora_rank = 0

    @property
    def lr(self) -> float:
        """The peak learning rate in force."""
        if self.config.lr is not None:
            return self.config.lr
        if self.lora_rank:
            return DEFAULT_LR["lora"]
        return DEFAULT_LR["full_small" if self.parameters < FULL_BELOW else "full"]

    @property
    def _critic_lr(self) -> float:
        assert self.critic is not None
        assert self.critic_config is not None
        if self.critic_config.lr is not None:
            return self.critic_config.lr
        return self.lr * (CRITIC_LR_FACTOR if self._bare(self.critic).backbone is not None else 1)

    @property
    def value_loss_coef(self) -> float:
        """Weight of the value loss beside the policy's."""
        assert self.critic is not None
        assert self.critic_config is not None
        if self.critic_config.value_loss_coef is not None:
            return self.critic_config.value_loss_coef
        return 1.0 if self._bare(self.critic).backbone is not None else 0.1

    @property
    def dtype(self) -> str:
        """Name of the type that weights are held in."""
        return str(pick_dtype(self.config.dtype, self.device)).removeprefix("torch.")

    @property
    def _with_deepspeed(self) -> bool:
        return self.strategy.startswith("zero")

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
        held = (policy_digest(policy), critic_digest(policy) if self.critic_config else None, _state_digest(state))
        if (*held, seed) == (self.policy_digest, self._critic_digest, self._state_digest, self._seed):
            self._policy = policy
            return
        if self.config.quantization is not None:
            check_bitsandbytes(f"quantization = {self.config.quantization}")
        dtype = pick_dtype(self.config.dtype, self.device)
        self.policy_digest = self.model = self._module = self._optimizer = None  # two models at once may not fit
        if self._accelerator is not None:
            self._accelerator.free_memory()
        model = load_model(policy, dtype=dtype, device=self.device, quantization=self.config.quantization)
        found = count_parameters(find_base(policy) if is_adapter(policy) else policy)
        self.parameters = found or sum(p.numel() for p in model.parameters())
        self.packed = self.config.packing and prepare_packing(model)
        adapters = rank_of(model, rank=self.config.lora_rank, alpha=self.config.lora_alpha)
        self.lora_rank = rank_or_default(self.config.lora_rank, self.parameters) if adapters is None else adapters
        if self.config.quantization is not None and not self.lora_rank:
            raise SettingsError(
                f"`train.quantization` is {self.config.quantization}, and no adapters are trained",
                hint="Set `train.lora_rank`, such as 32: quantized weights themselves do not learn",
            )
        self.strategy = strategy_of(self.config, self.world, parameters=self.parameters, lora=bool(self.lora_rank))
        self.critic = self._critic_optimizer = self._critic_scheduler = None
        self._critic_masters = Masters([])
        if self.critic_config is not None:
            if self._with_deepspeed:
                raise SettingsError(
                    f"a critic cannot be trained beside the policy under {self.strategy}",
                    hint="Set `train.strategy = ddp`, or choose an algorithm without a critic",
                )
            asked = self.critic_config.backbone
            self.critic = load_critic(policy, model, asked, dtype=dtype, device=self.device) or new_critic(
                model, backbone_or_default(asked, lora=bool(self.lora_rank))
            )
        if self.lora_rank and not is_adapter(policy):
            alpha = self.config.lora_alpha if self.config.lora_alpha is not None else DEFAULT_LORA_ALPHA
            model = with_adapters(model, policy, rank=self.lora_rank, alpha=alpha, seed=seed)
        self.model = model
        self._prepare(dtype)
        if state is not None:
            self._load_state(state)
        self.policy_digest, self._critic_digest, self._state_digest = held
        self._policy, self._seed = policy, seed

    def _prepare(self, dtype: torch.dtype) -> None:
        module = PolicyModule(self.model, fused=self.config.compile)
        # No dropout: the ratio of a fresh update must be 1, and a resumed step must see the same masks.
        module.eval()
        if self.config.quantization is not None:
            keep_gradients(module)
        if self.frozen:
            self._module = module
            return
        # ZeRO-3 gathers weights inside the layers: each product would be a program of its own.
        layers = self.config.compile and self.strategy != "zero3"
        keep_less(without_wrapper(self.model), self._checkpointed(), compiled=layers)
        if self._accelerator is None:
            self._accelerator = accelerator_of(self.strategy, self.config, self.device.partition(":")[0], dtype)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self._with_deepspeed:  # which keeps float32 copies of its own
            self.masters = Masters([])
            optimizer, self._scheduler = make_optimizer(trained, self.lr, self.config)
        else:
            self.masters = Masters(trained)
            optimizer, self._scheduler = make_optimizer(self.masters.stepped, self.lr, self.config)
        self._module, self._optimizer = self._accelerator.prepare(module, optimizer)
        if self.critic is not None:
            if self.critic.backbone is not None:
                keep_less(self.critic.backbone, self._checkpointed())
            # An optimizer of its own: a run may go over to an algorithm without a critic, and back.
            self._critic_masters = Masters(self.critic.parameters())
            optimizer, self._critic_scheduler = make_optimizer(
                self._critic_masters.stepped, self._critic_lr, self.config
            )
            prepared = self._accelerator.prepare(self.critic, optimizer)
            self.critic, self._critic_optimizer = prepared[0].eval(), prepared[1]

    def _checkpointed(self) -> float:
        share = self.config.gradient_checkpointing
        return share if share is not None else float(self.parameters >= FULL_BELOW)

    def _load_state(self, state: Path) -> None:
        """Go on from a state; rates, decays and schedules are those of the settings, not those it was made with."""
        try:
            saved = torch.load(state / STATE_FILE, map_location=self.device, weights_only=True)
            self._check_made_alike(saved, state)
            if self._with_deepspeed:
                self._load_deepspeed(state)
            self._scheduler.load_state_dict(saved["scheduler"])
            if self._with_deepspeed:
                use_settings(self._scheduler, self.lr, self.config)
                return
            self._optimizer.load_state_dict(saved["optimizer"])
            use_settings(self._scheduler, self.lr, self.config)
            self.masters.load_state(saved.get("masters", ()))
            if self.critic is not None and "critic_optimizer" in saved:
                self._critic_optimizer.load_state_dict(saved["critic_optimizer"])
                self._critic_masters.load_state(saved.get("critic_masters", ()))
                self._critic_scheduler.load_state_dict(saved["critic_scheduler"])
                use_settings(self._critic_scheduler, self._critic_lr, self.config)
        except FileNotFoundError as error:
            raise InputError(
                f"`{state}` has been pruned", hint="Train from the newest step, or keep more with `loop.keep_states`"
            ) from error
        except (RuntimeError, ValueError, KeyError) as error:
            raise InputError(
                f"the optimizer's state in `{state}` does not fit: {' '.join(str(error).split())[:200]}",
                hint="Train with the settings it was made with",
            ) from error

    def _check_made_alike(self, saved: dict[str, Any], state: Path) -> None:
        """Raise SettingsError if the state was left by another optimizer, type, or way of sharing it."""
        for name, ours in self._made_with().items():
            if (theirs := saved.get("made_with", {}).get(name, ours)) != ours:
                raise SettingsError(
                    f"the optimizer's state in `{state}` was left with `train.{name}` {theirs}, and this is {ours}",
                    hint=f"Go on with `train.{name} = {theirs}`, or begin another run with this policy",
                )
        # Without DeepSpeed every process holds all of it.
        ours = (self.strategy, self.world.size) if self._with_deepspeed else ("ddp", 1)
        theirs = tuple(saved.get("shared", ours))
        if theirs != ours:
            words = [f"{name} on {count} process{'es' * (count != 1)}" for name, count in (theirs, ours)]
            raise SettingsError(
                f"the optimizer's state in `{state}` was left by {words[0]}, and this is {words[1]}",
                hint=f"Go on with `train.strategy = {theirs[0]}`"
                + (f" and `--num-processes {theirs[1]}`" if theirs[0] != "ddp" else "")
                + ", or begin another run with this policy",
            )

    def _made_with(self) -> dict[str, str]:
        """Return the settings that a state cannot be taken up without."""
        return {"optimizer": self.config.optimizer, "dtype": self.dtype}

    def _load_deepspeed(self, state: Path) -> None:
        try:
            # Not strictly: weights that do not learn are not in it.
            found, _ = self._module.load_checkpoint(
                str(state), tag=DEEPSPEED_TAG, load_module_strict=False, load_lr_scheduler_states=False
            )
        except Exception as error:  # assertions and errors of its own
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if found is None:
            raise FileNotFoundError(state)

    def micro_batches(self, sequences: Sequences, rows: Sequence[int], max_tokens: int) -> Iterator[MicroBatch | None]:
        """Yield this process's micro-batches of these rows; None: the others have one more."""
        return collate_all(sequences, rows, max_tokens, self.device, packed=self.packed, world=self.world)

    def mfu(self, lengths: Sequence[int], seconds: float) -> float | None:
        """Return the share of all devices' arithmetic that passes over these rows used; None where it is unknown."""
        if not self.device.startswith("cuda") or (peak := device_peak(torch.cuda.get_device_name(self.device))) is None:
            return None
        config = without_wrapper(self.model).config.get_text_config()
        flops = training_flops(self.parameters, config, lengths, lora=bool(self.lora_rank))
        return flops / seconds / peak / self.world.size

    def peak_device_memory(self) -> int | None:
        """Return the most memory that this process had in use on its GPU; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.startswith("cuda") else None

    def statistics(self, batch: MicroBatch, temperature: float) -> TokenStatistics:
        """Return log-probs, with gradient, and entropies of a micro-batch's sampled tokens."""
        shared = self.critic is not None and self._bare(self.critic).backbone is None
        return TokenStatistics(*self._module(batch.ids, batch.attention_mask, batch.loss_mask, temperature, shared))

    def _bare(self, module: Any) -> Any:
        return module if self._accelerator is None else self._accelerator.unwrap_model(module)

    def values_of(self, batch: MicroBatch, found: TokenStatistics) -> Tensor:
        """Return what the critic foretells before each sampled token, with gradient; [B, T-1], 0 elsewhere."""
        assert self.critic is not None
        return self.critic(batch.ids, batch.attention_mask, found.hidden) * batch.loss_mask

    def _idle(self) -> Tensor:
        """Return a loss of 0 that reaches every weight: the others wait for this process's gradient."""
        batch = idle_batch(self.device)
        found = self.statistics(batch, 1.0)
        loss = found.logprobs.sum() * 0
        if self.critic is not None:
            loss = loss + self.values_of(batch, found).sum() * 0
        return loss

    def logprobs(self, sequences: Sequences, temperature: float, max_tokens: int) -> list[np.ndarray]:
        """Return the nats of every row's response tokens, 0 on those that were observed."""
        return self._by_row(sequences, max_tokens, lambda batch: self.statistics(batch, temperature).logprobs)

    def values(self, sequences: Sequences, max_tokens: int) -> list[np.ndarray]:
        """Return what the critic foretells before each of a row's response tokens, 0 where they were observed."""
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
                    continue
                for row, line in zip(batch.rows, of_batch(batch).float().cpu().numpy(), strict=True):
                    found[row] = response_part(sequences, row, line)
        if self.world.size == 1:
            return found
        ends = np.cumsum([len(row) for row in found])
        return np.split(self.world.sum(np.concatenate(found)), ends[:-1])

    def gradient(self, batches: Iterable[MicroBatch | None], loss_of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Return the gradient of the summed loss by the trained weights, as one vector on the CPU; nothing is kept."""
        self.accumulate(batches, loss_of)
        found = [self._gradient_of(p).flatten().float().cpu() for p in self.model.parameters() if p.requires_grad]
        self.forget_gradients()
        return torch.cat(found)

    def _gradient_of(self, parameter: Any) -> Tensor:
        if self._with_deepspeed:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(parameter)  # type: ignore[return-value]
        master = next(m for p, m in zip(self.masters.parameters, self.masters.stepped, strict=True) if p is parameter)
        return torch.zeros_like(master) if master.grad is None else master.grad

    @property
    def _optimizers(self) -> list[Any]:
        return [each for each in (self._optimizer, self._critic_optimizer) if each is not None]

    def forget_gradients(self) -> None:
        """Free what was accumulated."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def accumulate(self, batches: Iterable[MicroBatch | None], loss_of: Callable[[MicroBatch], Tensor]) -> None:
        """Put the summed gradient of all processes' micro-batches in place of what was there."""
        self.forget_gradients()
        batches = iter(batches)
        batch, more = next(batches, END), True
        while more and batch is not END:
            following = next(batches, END)
            more = following is not END
            # Several processes: gradients are averaged, and the loss is a share of the sum. Copies in float32 take
            # up each micro-batch's gradient, so each is exchanged; otherwise the last one's exchange does for all.
            wait = more and not self.masters.any and self.world.size > 1 and not self._with_deepspeed
            with self._accelerator.no_sync(self._module) if wait else contextlib.nullcontext():
                loss = self._idle() if batch is None else loss_of(batch)  # type: ignore[arg-type]
                if self._with_deepspeed:
                    self._module.set_gradient_accumulation_boundary(not more)
                    self._module.backward(loss * self.world.size)
                else:
                    self._accelerator.backward(loss * self.world.size if self.world.size > 1 else loss)
            self.masters.take_gradients()
            self._critic_masters.take_gradients()
            batch = following

    def step(self, batches: Iterable[MicroBatch | None], loss_of: Callable[[MicroBatch], Tensor]) -> StepResult:
        """Add up the gradients of the micro-batches and take one optimizer step.

        Args:
            batches: Of one mini-batch.
            loss_of: Returns a micro-batch's share of the mini-batch's loss.
        """
        self.accumulate(batches, loss_of)
        lr = float(self._scheduler.get_last_lr()[0])
        if self._with_deepspeed:
            return self._deepspeed_step(lr)
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters.stepped, self.config.max_grad_norm))
        of_critic = None
        if self.critic is not None and self.critic_config is not None:
            of_critic = float(
                torch.nn.utils.clip_grad_norm_(self._critic_masters.stepped, self.critic_config.max_grad_norm)
            )
        finite = np.isfinite(norm) and np.isfinite(of_critic or 0.0)
        if finite:
            for optimizer in self._optimizers:
                optimizer.step()
            self.masters.give_back()
            self._critic_masters.give_back()
            self.policy_digest = None  # no published policy any more, until it is saved
        for scheduler in (self._scheduler, self._critic_scheduler):
            if scheduler is not None:
                scheduler.step()
        return StepResult(norm, lr, not finite, of_critic)

    def _deepspeed_step(self, lr: float) -> StepResult:
        self.policy_digest = None
        self._module.step()
        norm = float(self._module.get_global_grad_norm() or 0.0)
        self._scheduler.step()
        skipped = bool(getattr(self._module.optimizer, "overflow", False))
        if not np.isfinite(norm) and not skipped:
            raise EngineError(
                "the gradient was not finite, and DeepSpeed stepped all the same",
                hint="Lower `train.lr`; the policy on disk is as it was",
            )
        return StepResult(norm, lr, skipped)

    def save(self, policy: Path, state: Path, canary: Sequence[int]) -> str:
        """Write the policy and the optimizer's state, and return the policy's digest.

        Args:
            policy: Directory for weights, config, tokenizer and policy.json.
            state: Directory for optimizer and schedule.
            canary: Tokens of one trained sequence, by which `sync` proves that the weights arrived.
        """
        assert self._policy is not None
        parent = policy_digest(self._policy)
        # Under ZeRO-3 all processes take part, layer by layer; the first one gets the whole.
        gathered = self._gathered()
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
        self._save_state(state)
        self.world.barrier()
        if self.world.is_main:
            with write_errors(policy.parent):
                sync_tree(policy)
                sync_tree(state)
        self.world.barrier()
        self.policy_digest, self._state_digest, self._policy = policy_digest(policy), _state_digest(state), policy
        self._critic_digest = critic_digest(policy)
        return self.policy_digest

    def _gathered(self) -> dict[str, Tensor] | None:
        """Return the weights by the names of the bare model, if no process holds them whole."""
        if self.strategy != "zero3":
            return None
        prefix = "model."
        found = self._accelerator.get_state_dict(self._module) or {}
        return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}

    def _canary(self, canary: Sequence[int]) -> list[float]:
        """Return the nats of a sequence's tokens but the first, at temperature 1."""
        with torch.no_grad():
            ids = torch.tensor([list(canary)[:CANARY_TOKENS]], device=self.device)
            return self._module(ids, torch.ones_like(ids), None, 1.0, False)[0][0].tolist()

    def _save_state(self, state: Path) -> None:
        make_directory(state)
        kept: dict[str, Any] = {
            "scheduler": self._scheduler.state_dict(),
            "shared": (self.strategy, self.world.size) if self._with_deepspeed else ("ddp", 1),
            "made_with": self._made_with(),
        }
        if self._with_deepspeed:
            with without_checksums():
                self._module.save_checkpoint(str(state), tag=DEEPSPEED_TAG, exclude_frozen_parameters=True)
        else:
            kept["optimizer"] = self._optimizer.state_dict()
            if self.masters.any:
                kept["masters"] = self.masters.state()
            if self.critic is not None:
                kept["critic_optimizer"] = self._critic_optimizer.state_dict()
                if self._critic_masters.any:
                    kept["critic_masters"] = self._critic_masters.state()
                kept["critic_scheduler"] = self._critic_scheduler.state_dict()
        if self.world.is_main:
            # torch's writer knows no OSError.
            with without_checksums(), write_errors(state / STATE_FILE, RuntimeError):
                torch.save(kept, state / STATE_FILE)


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Let torch leave out the CRC-32 of what it saves: it takes two thirds of the time, and no reader checks it."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _state_digest(state: Path | None) -> str | None:
    if state is None:
        return None
    return digest_json({path.name: cached_digest(path) for path in sorted(state.rglob("*")) if path.is_file()})
