"""Settings of training, apart from the code they set: reading a settings file must not load torch."""

from dataclasses import dataclass

from nanoskyrl.algos.aggregate import reduction
from nanoskyrl.algos.kl import KL_ESTIMATORS
from nanoskyrl.stages.core.errors import SettingsError, check_numbers, check_words
from nanoskyrl.stages.engines.base import check_device

EMPTY_ROWS = ("count", "exclude")
BACKBONES = ("own", "shared")
FULL_BELOW = 50_000_000
"""Parameters under which the whole model is trained unless told otherwise."""
DEFAULT_LORA_RANK, DEFAULT_LORA_ALPHA = 32, 64
ZERO_BUCKET = 50_000_000
"""Numbers that DeepSpeed exchanges at once; it holds two such buffers whatever the size of the model."""
SCHEDULERS = (
    "constant_with_warmup", "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt",
)  # fmt: skip
"""Those of transformers that follow from the step alone and need no settings besides ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer and the adapters are made with."""

    lr: float | None = None
    """None: 2e-4 for a whole model under 50 M parameters, 1e-6 for a larger one, 1e-4 for LoRA."""
    lr_scheduler: str = "constant_with_warmup"
    """constant_with_warmup, constant, linear, cosine, cosine_with_restarts, polynomial or inverse_sqrt, as transformers
    has them."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the rate rises from 0."""
    lr_decay_steps: int | None = None
    """Optimizer steps after which a falling schedule has fallen; needed by linear and cosine."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW: decay of the means of gradient and squared gradient."""
    weight_decay: float = 0.01
    """AdamW: share of each weight taken off in a step, times the rate."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    lora_rank: int | None = None
    """0 trains the whole model; None: 0 under 50 M parameters, else 32."""
    lora_alpha: int | None = None
    """Adapters are scaled by this over their rank; None: as the policy's adapters are, 64 for new ones."""
    lora_targets: tuple[str, ...] = ()
    """Layers and experts' parameters that get adapters, by their names or the ends of them, such as q_proj; empty: all
    linear layers and experts, but the head and routers."""
    lora_exclude: tuple[str, ...] = ()
    """Those that get none, in the same words."""
    lora_rslora: bool = False
    """Scale adapters by alpha over the root of their rank, so that a large rank learns as fast as a small one."""
    lora_dropout: float = 0.0
    """Share of an adapter's input that is dropped in training; above 0 the ratio of a fresh update is not 1."""
    quantization: str | None = None
    """nf4 holds the base of adapters in 4 bits a weight, as QLoRA does (extra `qlora`). None: as it is."""
    optimizer: str = "adamw"
    """adamw, or adamw_8bit, whose moments take a quarter of the memory."""
    strategy: str = "auto"
    """How several processes share the work: ddp, zero2 or zero3 (DeepSpeed); auto: ddp for LoRA and for models under
    50 M parameters, else zero3."""
    packing: bool = True
    """Lay rows end to end where the model's attention allows it, so that no padding is computed."""
    gradient_checkpointing: float | None = None
    """Share of the layers that are computed again in the backward pass instead of being kept; None: all of a model
    from 50 M parameters on, else none."""
    compile: bool = False
    """Compile the layers, but under ZeRO-3, and what is done with logits: faster on a GPU, after a minute at the
    start."""
    dtype: str = "auto"
    """float32, bfloat16 or auto: bfloat16 on a GPU, float32 elsewhere."""
    device: str = "auto"
    """cpu, cuda or auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """How PPO's critic is made and trained."""

    backbone: str | None = None
    """own (a copy of the policy's decoder), or shared (the policy's own states); None: shared with LoRA, else own."""
    lr: float | None = None
    """None: five times the policy's for a critic of its own, the policy's for one that shares."""
    value_clip: float | None = 0.2
    """How far a value counts as having moved from the old one; null is any distance."""
    value_loss_coef: float | None = None
    """Weight of the value loss beside the policy's; None: 1 for a critic of its own, 0.1 for one that shares."""
    loss_reduction: str = "token_mean"
    """How the value loss is averaged, as in `train.loss_reduction`."""
    max_grad_norm: float = 1.0
    """Gradients of the critic's own weights are scaled down to this norm."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        check_words("critic", self, backbone=(None, *BACKBONES), loss_reduction=("token_mean", "sequence_mean"))
        check_numbers("critic", self, "lr", "value_clip", "value_loss_coef", "max_grad_norm", above=0, most=1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(OptimizerConfig):
    """How the policy learns from a table of advantages."""

    algo: str = "grpo"
    """ppo, grpo, sapo, gspo, dapo, ...: `skyrl list` names them; its settings stand in the table of that name."""
    policy_mini_batch_size: int | None = None
    """Prompts for one optimizer step; None: all, so that the update is on-policy at lag 0."""
    update_epochs_per_batch: int = 1
    """Passes over the rows."""
    loss_reduction: str | None = None
    """token_mean, sequence_mean, prompt_mean, seq_mean_token_sum or seq_mean_token_sum_norm; None: what the algorithm
    was published with."""
    horizon: int | None = None
    """The constant that seq_mean_token_sum_norm divides by."""
    empty_rows: str = "count"
    """Rows without trained tokens in a mean over rows: count (how a batch is cut changes nothing) or exclude."""
    use_kl_loss: bool = False
    """Add the KL to the reference, the run's first policy, to the loss; `advantage` writes the log-probs it needs."""
    kl_loss_coef: float = 0.001
    """Weight of that KL."""
    kl_estimator_type: str | None = None
    """k1, k2, k3 or abs; None: what the algorithm was published with in its loss, else k3."""
    kl_straight_through: bool = False
    """Keep the estimator's value, and take the gradient of k2, which is that of KL(policy || reference)."""
    max_tokens_per_micro_batch: int = 16384
    """Bound of one forward and backward pass, with padding where there is any; how rows are cut changes only
    rounding."""
    max_staleness: int | None = None
    """Rows sampled by a policy so many versions older than the one that training starts from are kept, older ones are
    not; None keeps all."""
    allow_estimator: bool = False
    """Train on advantages of another estimator than the algorithm's."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant, before any model is loaded."""
        check_numbers(
            "train", self, "policy_mini_batch_size", "update_epochs_per_batch", "max_tokens_per_micro_batch", "horizon",
            "lr_decay_steps", least=1,
        )  # fmt: skip
        check_device("train", self.device)
        check_numbers("train", self, "lr", least=0, most=1000, hint="2e-4 suits the starter policy")
        check_numbers("train", self, "weight_decay", "kl_loss_coef", least=0, most=1000)
        check_numbers("train", self, "lr_warmup_steps", "max_staleness", least=0, most=10**9)
        check_numbers("train", self, "lora_rank", least=0, most=4096, hint="0 trains the whole model")
        check_numbers("train", self, "lora_alpha", least=1, most=10**6)
        check_numbers("train", self, "lora_dropout", least=0, below=1, hint="0 is usual: dropout moves the ratios")
        check_numbers("train", self, "gradient_checkpointing", least=0, most=1, hint="It is a share of the layers")
        check_numbers("train", self, "max_grad_norm", above=0, hint="1 is usual")
        check_numbers("train", self, "adam_betas", least=0, below=1, hint="0.9 and 0.999 are usual")
        check_words(
            "train", self, dtype=("auto", "float32", "bfloat16"), strategy=("auto", "ddp", "zero2", "zero3"),
            optimizer=("adamw", "adamw_8bit"), quantization=(None, "nf4"), lr_scheduler=SCHEDULERS,
            kl_estimator_type=(None, *KL_ESTIMATORS), empty_rows=EMPTY_ROWS,
        )  # fmt: skip
        if self.use_kl_loss and self.kl_estimator_type == "k1" and not self.kl_straight_through:
            raise SettingsError(
                "`train.kl_estimator_type` k1 has no gradient in expectation",
                hint="Use k2 or k3, or set `train.kl_straight_through = true`",
            )
        if self.loss_reduction is not None:
            reduction(self.loss_reduction)
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
