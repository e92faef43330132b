"""Numbers of a run for those who watch elsewhere: TensorBoard and Weights & Biases, by accelerate's trackers.

`metrics.jsonl` has all of them in any case. WandB is offline unless $WANDB_MODE says otherwise.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.storage import make_directory, mirror_of

NAMES = ("tensorboard", "wandb")


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not known, or not installed.

    Raises:
        SettingsError: names it, and what to install.
    """
    for name in names:
        if name not in NAMES:
            raise SettingsError(f"there is no tracker `{name}`", hint=f"`loop.trackers` takes {' and '.join(NAMES)}")
        if importlib.util.find_spec(name) is None:
            raise SettingsError(f"the tracker {name} is not installed", hint=f"pip install 'nanoskyrl[{name}]'")


class Trackers:
    """Those that a run reports to; opened with the first numbers."""

    def __init__(self, names: Sequence[str], root: Path) -> None:
        """Say which, and for which run.

        Args:
            names: tensorboard, wandb.
            root: The run directory; they write below its `logs/`.
        """
        self.names, self.root = names, root
        self._open: list[Any] | None = None

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        """Report the numbers of a step; what is no number is left out."""
        if self._open is None:
            self._open = [self._started(name) for name in self.names]
        values = {
            key: float(value) for key, value in numbers.items() if isinstance(value, int | float) and key != "step"
        }
        for tracker in self._open:
            tracker.log(values, step=step)

    def _started(self, name: str) -> Any:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()  # it asks who is the first process
        place = mirror_of(self.root) / "logs"
        make_directory(place)
        kind, run = LOGGER_TYPE_TO_CLASS[name], self.root.resolve().name
        if name == "wandb":
            os.environ.setdefault("WANDB_MODE", "offline")
            tracker = kind("nanoskyrl", name=run, dir=str(place))
        else:
            tracker = kind(name, str(place))
        tracker.start()
        return tracker

    def close(self) -> None:
        """Write what is left."""
        for tracker in self._open or ():
            tracker.finish()
        self._open = None
