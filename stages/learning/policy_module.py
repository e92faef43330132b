"""The policy as what DDP and DeepSpeed wrap: a module whose forward gives statistics of tokens."""

from typing import Any

from torch import Tensor, nn

from nanoskyrl.stages.models.kv_cache import without_wrapper
from nanoskyrl.stages.models.logprobs import LogprobHead, sequence_logprobs
from nanoskyrl.stages.models.packing import Pack


class PolicyModule(nn.Module):
    """A model as it is trained: one forward pass gives log-probs and entropies.

    What wraps a model for several processes watches its forward pass, so all of it goes through here.
    """

    def __init__(self, model: Any, *, fused: bool = False) -> None:
        """Wrap a model of transformers or peft."""
        super().__init__()
        self.model = model
        self.head = LogprobHead(without_wrapper(model), fused=fused)

    def forward(
        self, ids: Tensor, mask: Tensor, select: Tensor | None, temperature: float, pack: Pack | None = None,
        want_hidden: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Return what `sequence_logprobs` does, as a tuple: DeepSpeed looks for tensors in no other record."""
        found = sequence_logprobs(
            self.model, ids, mask, temperature=temperature, select=select, head=self.head, pack=pack,
            want_hidden=want_hidden,
        )  # fmt: skip
        return found.logprobs, found.entropy, found.hidden
