"""The folder `state/` of a train: where the optimizer and its schedule stopped.

`optimizer.pt` holds them, beside DeepSpeed's own checkpoint if there is one, and says what
left it: a learner of another optimizer, type or way of sharing refuses it.
"""

from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config as serialization

from nanoskyrl.stages.core.digests import cached_digest, digest_json
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.storage import make_directory, write_errors
from nanoskyrl.stages.learning.deepspeed_strategy import DeepSpeedStrategy
from nanoskyrl.stages.learning.stepping import PlainStrategy

STATE_FILE = "optimizer.pt"
Strategy = PlainStrategy | DeepSpeedStrategy


def state_digest(state: Path | None) -> str | None:
    """Return the digest of all files of a state; None for none. One that was not written is known by its place."""
    if state is None:
        return None
    files = sorted(path for path in state.rglob("*") if path.is_file())
    return digest_json({path.name: cached_digest(path) for path in files}) if files else str(state.resolve())


def save_state(state: Path, strategy: Strategy, made_with: dict[str, str], *, is_main: bool) -> None:
    """Write a state.

    Args:
        state: Its directory.
        strategy: Holds what is saved; under DeepSpeed every process writes its share.
        made_with: Settings of `train` that a state cannot be loaded without.
        is_main: Whether this process writes what all of them hold.

    Raises:
        OutputError: it cannot be written.
    """
    make_directory(state)
    # No CRC-32: it takes two thirds of the time, and no reader checks it.
    with serialization.patch("save.compute_crc32", False):  # pyright: ignore[reportAttributeAccessIssue]
        # The schedule, filled in below, comes first: the bytes are those of states saved so far.
        saved = {"scheduler": None, "shared": strategy.shared, "made_with": made_with, **strategy.save_state(state)}
        if is_main:
            with write_errors(state / STATE_FILE, RuntimeError):  # torch's writer knows no OSError
                torch.save(saved, state / STATE_FILE)


def load_state(state: Path, strategy: Strategy, made_with: dict[str, str], *, device: str) -> None:
    """Let a strategy resume from a state.

    Args:
        state: Its directory.
        strategy: With the weights that the state goes with.
        made_with: Settings of `train` that a state cannot be loaded without.
        device: Where its tensors go.

    Raises:
        InputError: it has been pruned, or holds something else.
        SettingsError: it was left by another optimizer, type, or way of sharing it.
    """
    try:
        saved = torch.load(state / STATE_FILE, map_location=device, weights_only=True)
        _check_made_alike(saved, state, strategy, made_with)
        strategy.load_state(state, saved)
    except FileNotFoundError as error:
        raise InputError(
            f"`{state}` has been pruned", hint="Train from the newest step, or keep more with `loop.keep_states`"
        ) from error
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"the optimizer's state in `{state}` does not fit: {' '.join(str(error).split())[:200]}",
            hint="Train with the settings it was made with",
        ) from error


def _check_made_alike(saved: dict[str, Any], state: Path, strategy: Strategy, made_with: dict[str, str]) -> None:
    """Raise SettingsError if a state was left by another optimizer, type, or way of sharing it."""
    for name, ours in made_with.items():
        if (theirs := saved.get("made_with", {}).get(name, ours)) != ours:
            raise SettingsError(
                f"the optimizer's state in `{state}` was left with `train.{name}` {theirs}, and this is {ours}",
                hint=f"Continue with `train.{name} = {theirs}`, or begin another run with this policy",
            )
    theirs, ours = tuple(saved.get("shared", strategy.shared)), strategy.shared
    if theirs != ours:
        words = [f"{name} on {count} process{'es' * (count != 1)}" for name, count in (theirs, ours)]
        raise SettingsError(
            f"the optimizer's state in `{state}` was left by {words[0]}, and this is {words[1]}",
            hint=f"Continue with `train.strategy = {theirs[0]}`"
            + (f" and `--num-processes {theirs[1]}`" if theirs[0] != "ddp" else "")
            + ", or begin another run with this policy",
        )
