"""The name `Tensor` for signatures: settings are read, and estimators run, without torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any
