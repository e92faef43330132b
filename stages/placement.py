"""Which GPUs generate and which train, and whether what is to lie there fits."""

import re
from dataclasses import dataclass

from nanoskyrl.stages.errors import SettingsError

PATTERN = re.compile(r"cpu|\d+(-\d+)?(,\d+(-\d+)?)*")


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


def gpus_of(name: str, text: str) -> tuple[int, ...]:
    """Return the GPUs of 0-3, 0,2 or cpu, in order.

    Raises:
        SettingsError: it is none of these, or names one twice.
    """
    if not PATTERN.fullmatch(text):
        raise SettingsError(f"`{name}` must be cpu, or GPUs such as 0-3 or 0,2, not {text!r}", hint="Count from 0")
    found: list[int] = []
    for piece in () if text == "cpu" else text.split(","):
        first, _, last = piece.partition("-")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) != len(found) or (text != "cpu" and not found):
        raise SettingsError(f"`{name}` is {text!r}: a GPU twice, or none", hint="Name each once, as 0-3")
    return tuple(found)


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
