"""Settings of training, apart from the code they set: reading a settings file must not load torch."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from nanoskyrl.algos.kl import KlEstimator
from nanoskyrl.stages.core.checked import (
    PLACE,
    Checked,
    Coefficient,
    Device,
    FiniteNonNegative,
    PositiveFloat,
    PositiveInt,
    Share,
)
from nanoskyrl.stages.core.errors import SettingsError

Beta = Annotated[float, Meta(ge=0, lt=1)]
CriticAmount = Annotated[float, Meta(gt=0, le=1000)]
FULL_BELOW = 50_000_000
"""Parameters under which the whole model is trained unless set otherwise."""
DEFAULT_LORA_RANK, DEFAULT_LORA_ALPHA = 32, 64
COMPILED_FROM = 100
"""Steps of a loop: compiling took 16 s where it saved 0.23 s of each step of a small model, and takes up to 80."""
ZERO_BUCKET = 50_000_000
"""Numbers that DeepSpeed exchanges at once; it holds two such buffers whatever the size of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Checked):
    """What the optimizer and the adapters are made with."""

    lr: Coefficient | None = None
    """None: 2e-4 for a whole model under 50 M parameters, 1e-6 for a larger one, 1e-4 for LoRA."""
    lr_scheduler: Literal[
        "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
    ] = "constant_with_warmup"
    """How the rate changes from step to step, as transformers has them: those that need no settings besides ours."""
    lr_warmup_steps: Annotated[int, Meta(ge=0, le=10**9)] = 0
    """Optimizer steps over which the rate rises from 0."""
    lr_decay_steps: PositiveInt | None = None
    """Optimizer steps after which a falling schedule has fallen; needed by linear and cosine."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW: decay of the means of gradient and squared gradient."""
    weight_decay: Coefficient = 0.01
    """AdamW: share of each weight taken off in a step, times the rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    lora_rank: Annotated[int, Meta(ge=0, le=4096)] | None = None
    """0 trains the whole model; None: 0 under 50 M parameters, else 32."""
    lora_alpha: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """Adapters are scaled by this over their rank; None: as the policy's adapters are, 64 for new ones."""
    lora_targets: tuple[str, ...] = ()
    """Layers and experts' parameters that get adapters, by their names or the ends of them, such as q_proj; empty: all
    linear layers and experts, but the head and routers."""
    lora_exclude: tuple[str, ...] = ()
    """Those that get none, in the same words."""
    lora_rslora: bool = False
    """Scale adapters by alpha over the root of their rank, so that a large rank learns as fast as a small one."""
    lora_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of an adapter's input that is dropped in training; above 0 the ratio of a fresh update is not 1."""
    quantization: Literal["nf4"] | None = None
    """nf4 holds the base of adapters in 4 bits a weight, as QLoRA does (extra `qlora`). None: as it is."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """The moments of adamw_8bit take a quarter of the memory."""
    strategy: Literal["auto", "ddp", "zero2", "zero3"] = "auto"
    """How several processes share the work: ddp, zero2 or zero3 (DeepSpeed); auto: ddp for LoRA and for models under
    50 M parameters, else zero3."""
    packing: bool = True
    """Lay rows end to end where the model's attention allows it, so that no padding is computed."""
    share_prefixes: bool = True
    """Compute prefixes that packed rows share, such as a group's prompt, once for all of them, where that saves
    time. Without effect with `lora_dropout`, which draws for each row."""
    gradient_checkpointing: Share | None = None
    """Share of the layers that are computed again in the backward pass instead of being kept; None: all of a model
    from 50 M parameters on, else none."""
    compile: bool | None = field(default=None, metadata=PLACE)
    """Compile the layers, but under ZeRO-3, and what is done with logits: faster on a GPU, after a minute at the
    start. None: on a GPU, in a loop of 100 steps or more, which repay it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 elsewhere."""
    device: Device = field(default="auto", metadata=PLACE)
    """Where the model is trained; auto finds a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(Checked):
    """How PPO's critic is made and trained."""

    backbone: Literal["own", "shared"] | None = None
    """own (a copy of the policy's decoder), or shared (the policy's own states); None: shared with LoRA, else own."""
    lr: CriticAmount | None = None
    """None: five times the policy's for a critic of its own, the policy's for one that shares."""
    value_clip: CriticAmount | None = 0.2
    """How far a value counts as having moved from the old one; null is any distance."""
    value_loss_coef: CriticAmount | None = None
    """Weight of the value loss beside the policy's; None: 1 for a critic of its own, 0.1 for one that shares."""
    loss_reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """How the value loss is averaged, as in `train.loss_reduction`."""
    max_grad_norm: CriticAmount = 1.0
    """Gradients of the critic's own weights are scaled down to this norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(OptimizerConfig):
    """How the policy learns from a table of advantages."""

    algo: str = "grpo"
    """ppo, grpo, sapo, gspo, dapo, ...: `skyrl list` names them; its settings are in the table of that name."""
    policy_mini_batch_size: PositiveInt | None = None
    """Prompts for one optimizer step; None: all, so that the update is on-policy at lag 0."""
    update_epochs_per_batch: PositiveInt = 1
    """Passes over the rows."""
    target_kl: FiniteNonNegative | None = None
    """Take no further optimizer step on a batch once the trained policy lies so many nats a token from the old one,
    half the mean squared log-ratio; the first is always taken. 0: no bound; None: what the lag asks for."""
    loss_reduction: (
        Literal["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"] | None
    ) = None
    """How the loss is averaged; None: what the algorithm was published with."""
    horizon: PositiveInt | None = None
    """The constant that seq_mean_token_sum_norm divides by."""
    empty_rows: Literal["count", "exclude"] = "count"
    """Rows without trained tokens in a mean over rows: count (how a batch is cut changes nothing) or exclude."""
    use_kl_loss: bool = False
    """Add the KL to the reference, the run's first policy, to the loss; `advantage` writes the log-probs it needs."""
    kl_loss_coef: Coefficient = 0.001
    """Weight of that KL."""
    kl_estimator_type: KlEstimator | None = None
    """None: what the algorithm was published with in its loss, else k3."""
    kl_straight_through: bool = False
    """Keep the estimator's value, and take the gradient of k2, which is that of KL(policy || reference)."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Bound of one forward and backward pass, with padding where there is any; how rows are cut changes only
    rounding."""
    max_staleness: Annotated[int, Meta(ge=0, le=10**9)] | None = None
    """Rows sampled by a policy so many versions older than the one that training starts from are kept, older ones are
    not; None keeps all."""
    state_every: PositiveInt = field(default=1, metadata=PLACE)
    """Write the optimizer's state after every so many steps of a run; one that was not written is made again from the
    shards when it is needed. 1 where the trainer does not stay up from step to step."""
    allow_estimator: bool = False
    """Train on advantages of another estimator than the algorithm's."""

    def check(self) -> None:
        """Refuse a KL without a gradient, and a reduction without its constant, before any model is loaded."""
        if self.use_kl_loss and self.kl_estimator_type == "k1" and not self.kl_straight_through:
            raise SettingsError(
                "`train.kl_estimator_type` k1 has no gradient in expectation",
                hint="Use k2 or k3, or set `train.kl_straight_through = true`",
            )
        check_horizon(self.loss_reduction, self.horizon)


def backbone_or_default(asked: str | None, *, lora: bool) -> str:
    """Return the backbone of a new critic, own or shared.

    Args:
        asked: `critic.backbone`.
        lora: Whether the policy is trained through adapters.
    """
    return asked or ("shared" if lora else "own")


def rank_or_default(asked: int | None, parameters: int) -> int:
    """Return the rank of new adapters; 0: the whole model learns.

    Args:
        asked: `train.lora_rank`.
        parameters: Of the model.
    """
    return asked if asked is not None else (0 if parameters < FULL_BELOW else DEFAULT_LORA_RANK)


def strategy_or_default(asked: str, parameters: int, *, lora: bool) -> str:
    """Return how several processes share a model: ddp, zero2 or zero3.

    Args:
        asked: `train.strategy`.
        parameters: Of the model.
        lora: Whether adapters are trained.
    """
    # A small model costs more to gather than to hold.
    return asked if asked != "auto" else ("ddp" if lora or parameters < FULL_BELOW else "zero3")


def check_horizon(loss_reduction: str | None, horizon: int | None) -> None:
    """Refuse a reduction that divides by a constant which is not there."""
    if loss_reduction == "seq_mean_token_sum_norm" and horizon is None:
        raise SettingsError(
            "the loss reduction is seq_mean_token_sum_norm without a horizon",
            hint="Set `train.horizon`, for instance to max_generate_length",
        )
