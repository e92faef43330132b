"""Which GPUs generate and which train, and whether what is to lie there fits."""

from dataclasses import dataclass

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.gpus import gpus_of


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the two halves of a loop run."""

    generate: tuple[int, ...]
    """GPUs; none: the CPU."""
    train: tuple[int, ...]

    @property
    def apart(self) -> bool:
        """Whether they can run at once: a GPU that both want is taken in turns."""
        return not set(self.generate) & set(self.train)


def placement_of(generate: str | None, train: str | None) -> Placement | None:
    """Return where a loop runs; None: both halves in turns, wherever they like.

    Raises:
        SettingsError: only one is named.
    """
    if generate is None and train is None:
        return None
    if generate is None or train is None:
        raise SettingsError(
            f"`loop.gpus_{'generate' if train else 'train'}` is not set, and the other is",
            hint="Set both, as `--gpus-generate 0-3 --gpus-train 4-7`",
        )
    return Placement(gpus_of("loop.gpus_generate", generate), gpus_of("loop.gpus_train", train))
