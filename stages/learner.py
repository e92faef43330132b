"""A policy that learns: model, optimizer and schedule, through accelerate.

A learner can stay up from step to step: `load` does nothing if it already holds the
policy and state asked for, so a live learner and a fresh one end with the same bytes.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from torch import Tensor

from nanoskyrl.stages.batching import MicroBatch, Sequences, collate_all, response_part
from nanoskyrl.stages.critic import Critic, load_critic, new_critic, save_critic
from nanoskyrl.stages.digests import digest_json
from nanoskyrl.stages.errors import EngineError, InputError, SettingsError
from nanoskyrl.stages.hf_engine import pick_device, pick_dtype
from nanoskyrl.stages.logprobs import TokenStatistics, sequence_logprobs
from nanoskyrl.stages.policy import (
    POLICY_JSON,
    PolicyInfo,
    cached_digest,
    critic_digest,
    is_adapter,
    is_weights,
    load_model,
    policy_digest,
    policy_files,
    read_info,
    write_info,
)
from nanoskyrl.stages.storage import TEMPORARY, link_or_copy, make_directory, sync_tree, write_errors
from nanoskyrl.stages.train_config import DEFAULT_LORA_RANK, FULL_BELOW, CriticConfig, OptimizerConfig

DEFAULT_LR = {"full_small": 2e-4, "full": 1e-6, "lora": 1e-4}
CRITIC_LR_FACTOR = 5
"""A critic of its own starts from nothing, and learns by regression: it can go faster than the policy."""
STATE_FILE = "optimizer.pt"
CANARY_TOKENS = 256


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    lr: float
    skipped: bool
    """The gradients were not finite, so the weights stayed as they were."""
    critic_grad_norm: float | None = None
    """Of the critic's own weights."""


class Learner:
    """A model with its optimizer, and a critic if it is asked for one."""

    def __init__(self, config: OptimizerConfig = OptimizerConfig(), *, critic: CriticConfig | None = None) -> None:
        """Hold nothing until `load`.

        Args:
            config: Of the optimizer and the adapters.
            critic: How a critic is made where the policy has none yet; None: there is no critic.
        """
        self.config, self.critic_config = config, critic
        self.critic: Critic | None = None
        self.device = pick_device(config.device)
        self.model: Any = None
        self.policy_digest: str | None = None
        self._critic_digest: str | None = None
        self._seed = 0
        self._state_digest: str | None = None
        self._policy: Path | None = None
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
        return DEFAULT_LR["full_small" if self._parameters() < FULL_BELOW else "full"]

    @property
    def _critic_lr(self) -> float:
        assert self.critic is not None
        assert self.critic_config is not None
        if self.critic_config.lr is not None:
            return self.critic_config.lr
        return self.lr * (CRITIC_LR_FACTOR if self.critic.backbone is not None else 1)

    @property
    def value_loss_coef(self) -> float:
        """Weight of the value loss beside the policy's."""
        assert self.critic is not None
        assert self.critic_config is not None
        if self.critic_config.value_loss_coef is not None:
            return self.critic_config.value_loss_coef
        return 1.0 if self.critic.backbone is not None else 0.1

    @property
    def dtype(self) -> str:
        """Name of the type that weights are held in."""
        return str(pick_dtype(self.config.dtype, self.device)).removeprefix("torch.")

    def _parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def load(self, policy: Path, state: Path | None = None, *, seed: int = 0) -> None:
        """Take a policy, and the optimizer's state that goes with it, unless they are held already.

        Args:
            policy: Where training starts from.
            state: The `state/` of the train that made it; None starts the optimizer afresh.
            seed: Of the random weights of new adapters.

        Raises:
            InputError: the policy or the state does not load.
            SettingsError: another kind of training than the one that made the policy.
        """
        held = (policy_digest(policy), critic_digest(policy) if self.critic_config else None, _state_digest(state))
        if (*held, seed) == (self.policy_digest, self._critic_digest, self._state_digest, self._seed):
            self._policy = policy
            return
        dtype = pick_dtype(self.config.dtype, self.device)
        model = load_model(policy, dtype=dtype, device=self.device)
        self.lora_rank = _rank_of(model, self.config.lora_rank)
        self.critic = self._critic_optimizer = self._critic_scheduler = None
        if self.critic_config is not None:
            self.critic = load_critic(policy, model, self.critic_config, dtype=dtype, device=self.device) or new_critic(
                model, self.critic_config, lora=bool(self.lora_rank)
            )
        if self.lora_rank and not is_adapter(policy):
            if read_info(policy).parent is not None:
                raise SettingsError(
                    f"`{policy}` was trained as a whole, and `train.lora_rank` is {self.lora_rank}",
                    hint="Go on with `train.lora_rank = 0`, or begin another run with this policy",
                )
            model = self._with_adapters(model, policy, seed)
        self.model = model
        self._prepare()
        if state is not None:
            self._load_state(state)
        self.policy_digest, self._critic_digest, self._state_digest = held
        self._policy, self._seed = policy, seed

    def _with_adapters(self, model: Any, policy: Path, seed: int) -> Any:
        from peft import LoraConfig, get_peft_model

        # Not the smallest layer: a router of a few experts would forbid every useful rank.
        head = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        largest = max((min(m.in_features, m.out_features) for m in linear), default=self.lora_rank)
        if self.lora_rank > largest:
            raise SettingsError(
                f"`train.lora_rank` is {self.lora_rank}, past the {largest} of the model's largest layer",
                hint="Give less than that, such as 16, or train the whole model with 0",
            )
        torch.manual_seed(seed)
        config = LoraConfig(
            r=self.lora_rank, lora_alpha=self.config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
        # The place of the base differs from run to run; its name does not.
        model.peft_config["default"].base_model_name_or_path = read_info(policy).source
        return model

    def _prepare(self) -> None:
        from accelerate import Accelerator

        if self._accelerator is None:
            self._accelerator = Accelerator(cpu=self.device == "cpu")
        self._accelerator.free_memory()  # it would keep the models of earlier loads
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.model, self._optimizer, self._scheduler = self._accelerator.prepare(
            self.model, *self._optimizer_of(trained, self.lr)
        )
        # No dropout: the ratio of a fresh update must be 1, and a resumed step must see the same masks.
        self.model.eval()
        if self.critic is not None:
            # An optimizer of its own: a run may go over to an algorithm without a critic, and back.
            prepared = self._accelerator.prepare(
                self.critic, *self._optimizer_of(list(self.critic.parameters()), self._critic_lr)
            )
            self.critic, self._critic_optimizer, self._critic_scheduler = prepared[0].eval(), *prepared[1:]

    def _optimizer_of(self, parameters: list[Any], lr: float) -> tuple[Any, Any]:
        """Return an optimizer and its schedule."""
        from transformers import get_scheduler

        optimizer = torch.optim.AdamW(
            parameters, lr=lr, betas=self.config.adam_betas, weight_decay=self.config.weight_decay
        )
        try:
            scheduler = get_scheduler(
                self.config.lr_scheduler,
                optimizer,
                num_warmup_steps=self.config.lr_warmup_steps,
                num_training_steps=self.config.lr_decay_steps,
            )
        except ValueError as error:
            raise SettingsError(
                f"`train.lr_scheduler` {self.config.lr_scheduler!r}: {error}",
                hint="Check the name, and `train.lr_decay_steps`",
            ) from error
        return optimizer, scheduler

    def _load_state(self, state: Path) -> None:
        try:
            saved = torch.load(state / STATE_FILE, map_location=self.device, weights_only=True)
            self._optimizer.load_state_dict(saved["optimizer"])
            self._scheduler.load_state_dict(saved["scheduler"])
            if self.critic is not None and "critic_optimizer" in saved:
                self._critic_optimizer.load_state_dict(saved["critic_optimizer"])
                self._critic_scheduler.load_state_dict(saved["critic_scheduler"])
        except FileNotFoundError as error:
            raise InputError(
                f"`{state}` has been pruned", hint="Train from the newest step, or keep more with `loop.keep_states`"
            ) from error
        except (RuntimeError, ValueError, KeyError) as error:
            raise InputError(
                f"the optimizer's state in `{state}` does not fit: {error}",
                hint="Train with the settings it was made with",
            ) from error

    def statistics(self, batch: MicroBatch, temperature: float) -> TokenStatistics:
        """Return log-probs, with gradient, and entropies of a micro-batch's sampled tokens."""
        return sequence_logprobs(
            self.model, batch.ids, batch.attention_mask, temperature=temperature, select=batch.loss_mask
        )

    def values_of(self, batch: MicroBatch, found: TokenStatistics) -> Tensor:
        """Return what the critic foretells before each sampled token, with gradient; [B, T-1], 0 elsewhere."""
        assert self.critic is not None
        return self.critic(batch.ids, batch.attention_mask, found.hidden) * batch.loss_mask

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
        model = self._accelerator.unwrap_model(self.model)
        with model.disable_adapter() if self.lora_rank else contextlib.nullcontext():
            return self.logprobs(sequences, temperature, max_tokens)

    def _by_row(
        self, sequences: Sequences, max_tokens: int, of_batch: Callable[[MicroBatch], Tensor]
    ) -> list[np.ndarray]:
        found = [np.zeros(len(row), np.float32) for row in sequences.response_ids]
        rows = [row for row, count in enumerate(sequences.trained_tokens) if count]
        with torch.no_grad():
            for batch in collate_all(sequences, rows, max_tokens, self.device):
                for row, line in zip(batch.rows, of_batch(batch).float().cpu().numpy(), strict=True):
                    found[row] = response_part(sequences, row, line)
        return found

    def gradient(self, batches: Iterable[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Return the gradient of the summed loss by the trained weights, as one vector on the CPU; nothing is kept."""
        self._accumulate(batches, loss_of)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float().cpu() for p in parameters]
        self._forget_gradients()
        return torch.cat(flat)

    @property
    def _optimizers(self) -> list[Any]:
        return [each for each in (self._optimizer, self._critic_optimizer) if each is not None]

    def _forget_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, batches: Iterable[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]) -> None:
        """Put the summed gradient of the micro-batches in place of what was there."""
        self._forget_gradients()
        for batch in batches:
            self._accelerator.backward(loss_of(batch))

    def step(self, batches: Iterable[MicroBatch], loss_of: Callable[[MicroBatch], Tensor]) -> StepResult:
        """Add up the gradients of the micro-batches and take one optimizer step.

        Args:
            batches: Of one mini-batch.
            loss_of: Returns a micro-batch's share of the mini-batch's loss.
        """
        self._accumulate(batches, loss_of)
        norm = float(self._accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        of_critic = None
        if self.critic is not None and self.critic_config is not None:
            of_critic = float(
                self._accelerator.clip_grad_norm_(self.critic.parameters(), self.critic_config.max_grad_norm)
            )
        lr = float(self._scheduler.get_last_lr()[0])
        finite = np.isfinite(norm) and np.isfinite(of_critic or 0.0)
        if finite:
            for optimizer in self._optimizers:
                optimizer.step()
            self.policy_digest = None  # no published policy any more, until it is saved
        for scheduler in (self._scheduler, self._critic_scheduler):
            if scheduler is not None:
                scheduler.step()
        return StepResult(norm, lr, not finite, of_critic)

    def save(self, policy: Path, state: Path, canary: Sequence[int]) -> str:
        """Write the policy and the optimizer's state, and return the policy's digest.

        Args:
            policy: Directory for weights, config, tokenizer and policy.json.
            state: Directory for optimizer and schedule.
            canary: Tokens of one trained sequence, by which `sync` proves that the weights arrived.
        """
        assert self._policy is not None
        parent = policy_digest(self._policy)
        base = (read_info(self._policy).base or parent) if self.lora_rank else None
        model = self._accelerator.unwrap_model(self.model)
        # Asked to find out whether embeddings changed, peft would look for the base model on the hub.
        whole = {"save_embedding_layers": False} if self.lora_rank else {}
        make_directory(policy)
        with (
            write_errors(policy, SafetensorError),
            tempfile.TemporaryDirectory(dir=policy.parent, prefix="policy-", suffix=TEMPORARY) as scratch,
        ):
            model.save_pretrained(scratch, **whole)
            for file in policy_files(Path(scratch)):
                file.rename(policy / file.name)
        # The tokenizer is the parent's, byte for byte. A directory from outside may change under us: copy that.
        take = link_or_copy if (self._policy / POLICY_JSON).is_file() else shutil.copyfile
        with write_errors(policy):
            for file in policy_files(self._policy):
                there = is_weights(file) or (policy / file.name).exists()
                if not there and not (base and file.name == "config.json"):
                    take(file, policy / file.name)
        if self.critic is not None:
            with write_errors(policy, SafetensorError):
                save_critic(self._accelerator.unwrap_model(self.critic), policy)
        canary = list(canary)[:CANARY_TOKENS]
        with torch.no_grad():
            ids = torch.tensor([canary], device=self.device)
            logprobs = sequence_logprobs(self.model, ids, torch.ones_like(ids), temperature=1.0).logprobs[0].tolist()
        if not np.isfinite(logprobs).all():
            raise EngineError("the trained policy gives log-probs that are not finite", hint="Lower `train.lr`")
        write_info(
            policy,
            PolicyInfo(
                parent=parent,
                base=base,
                source=read_info(self._policy).source,
                canary_ids=canary,
                canary_logprobs=logprobs,
                critic=critic_digest(policy),
            ),
        )
        make_directory(state)
        kept = {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}
        if self.critic is not None:
            kept["critic_optimizer"] = self._critic_optimizer.state_dict()
            kept["critic_scheduler"] = self._critic_scheduler.state_dict()
        with write_errors(state / STATE_FILE, RuntimeError):  # torch's writer knows no OSError
            torch.save(kept, state / STATE_FILE)
        with write_errors(policy.parent):
            sync_tree(policy)
            sync_tree(state)
        self.policy_digest, self._state_digest, self._policy = policy_digest(policy), _state_digest(state), policy
        self._critic_digest = critic_digest(policy)
        return self.policy_digest


def _state_digest(state: Path | None) -> str | None:
    if state is None:
        return None
    return digest_json({path.name: cached_digest(path) for path in sorted(state.glob("*"))})


def _rank_of(model: Any, asked: int | None) -> int:
    """Return the rank of the adapters that are, or are to be, on the model; 0 for none."""
    if hasattr(model, "peft_config"):
        found = model.peft_config["default"].r
        if asked is not None and asked != found:
            raise SettingsError(
                f"the policy has adapters of rank {found}, and `train.lora_rank` is {asked}",
                hint="Go on with its rank, or begin another run",
            )
        return found
    if asked is not None:
        return asked
    return 0 if sum(p.numel() for p in model.parameters()) < FULL_BELOW else DEFAULT_LORA_RANK


def one_temperature(table: pa.Table) -> float:
    """Return the temperature that all rows were sampled at.

    Raises:
        InputError: rows differ, or were sampled greedily or from a truncated distribution.
    """
    found = sorted(set(table.column("temperature").to_pylist()))
    if len(found) != 1:
        raise InputError(
            f"rows were sampled at temperatures {', '.join(map(str, found))}", hint="Train on rows of one temperature"
        )
    if found[0] == 0:
        raise InputError(
            "rows were sampled greedily, at temperature 0", hint="Sample at a temperature above 0 to train"
        )
    return found[0]
