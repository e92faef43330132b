"""Settings of training, apart from the code they set: reading a settings file must not load torch."""

from dataclasses import dataclass

from nanoskyrl.algos.aggregate import reduction
from nanoskyrl.stages.engines import check_device
from nanoskyrl.stages.errors import SettingsError

FULL_BELOW = 50_000_000
"""Parameters under which the whole model is trained unless told otherwise."""
DEFAULT_LORA_RANK = 32
RANGES = {
    "lr": (0, 1e3),
    "weight_decay": (0, 1e3),
    "lr_warmup_steps": (0, 1e12),
    "lora_alpha": (1, 1e6),
    "lora_rank": (0, 4096),
}
"""Least and largest values that can be meant."""
HINTS = {"lr": "2e-4 suits the starter policy", "lora_rank": "0 trains the whole model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """What the optimizer and the adapters are made with."""

    lr: float | None = None
    """None: 2e-4 for a whole model under 50 M parameters, 1e-6 for a larger one, 1e-4 for LoRA."""
    lr_scheduler: str = "constant_with_warmup"
    """A schedule of transformers: constant_with_warmup, linear, cosine, ..."""
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
    lora_alpha: int = 64
    """Adapters are scaled by this over their rank."""
    dtype: str = "auto"
    """float32, bfloat16 or auto: bfloat16 on a GPU, float32 elsewhere."""
    device: str = "auto"
    """cpu, cuda or auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(OptimizerConfig):
    """How the policy learns from a table of advantages."""

    algo: str = "grpo"
    """grpo or sapo; its settings stand in the table of that name."""
    policy_mini_batch_size: int | None = None
    """Prompts for one optimizer step; None: all, so that the update is on-policy at lag 0."""
    update_epochs_per_batch: int = 1
    """Passes over the rows."""
    loss_reduction: str | None = None
    """token_mean, sequence_mean or seq_mean_token_sum_norm; None: what the algorithm was published with."""
    horizon: int | None = None
    """The constant that seq_mean_token_sum_norm divides by."""
    max_tokens_per_micro_batch: int = 16384
    """Bound of one forward and backward pass, padding counted; how rows are cut changes only rounding."""
    allow_estimator: bool = False
    """Train on advantages of another estimator than the algorithm's."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant, before any model is loaded."""
        for name in (
            "policy_mini_batch_size",
            "update_epochs_per_batch",
            "max_tokens_per_micro_batch",
            "horizon",
            "lr_decay_steps",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(f"`train.{name}` must be at least 1, not {value}", hint="Give a positive number")
        check_device("train", self.device)
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise SettingsError(
                f"`train.dtype` must be auto, float32 or bfloat16, not {self.dtype!r}", hint="Choose one"
            )
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise SettingsError(
                    f"`train.{name}` must be at least {low}, at most {high:g}, not {value}",
                    hint=HINTS.get(name, "Give a usual number"),
                )
        if not self.max_grad_norm > 0:
            raise SettingsError(f"`train.max_grad_norm` must be above 0, not {self.max_grad_norm}", hint="1 is usual")
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            raise SettingsError(
                f"`train.adam_betas` must be 0 to below 1, not {list(self.adam_betas)}", hint="0.9 and 0.999 are usual"
            )
        if self.loss_reduction is not None:
            reduction(self.loss_reduction)
        if self.loss_reduction == "seq_mean_token_sum_norm" and self.horizon is None:
            raise SettingsError(
                "`train.loss_reduction` is seq_mean_token_sum_norm without a horizon",
                hint="Set `train.horizon`, for instance to max_generate_length",
            )
