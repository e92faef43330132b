"""The folder `state/` of a train: where the optimizer and its schedule stopped.

`optimizer.pt` holds them, beside DeepSpeed's own checkpoint if there is one, and says what
left it: a learner of another optimizer, type or way of sharing refuses it.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.learning.deepspeed_strategy import DeepSpeedStrategy
from nanoskyrl.stages.learning.process_group import ProcessGroup
from nanoskyrl.stages.learning.state_files import StateFiles
from nanoskyrl.stages.learning.stepping import PlainStrategy

STATE_FILE = "optimizer.pt"
Strategy = PlainStrategy | DeepSpeedStrategy


def save_state(
    state: Path, strategy: Strategy, made_with: dict[str, str], world: ProcessGroup, *, beside: bool = False
) -> tuple[dict[str, str], Future[None]]:
    """Write a state, and return the digests of its files and what is done when they are in place.

    Args:
        state: Its directory.
        strategy: Holds what is saved; under DeepSpeed every process writes its share.
        made_with: Settings of `train` that a state cannot be loaded without.
        world: All processes.
        beside: Return at once, from copies of all that is saved in the host's memory.

    Raises:
        OutputError: it cannot be written.
    """
    files = StateFiles(state, world, beside=beside)
    # The schedule, filled in below, comes first: the order of states saved so far.
    saved = {"scheduler": None, "shared": strategy.shared, "made_with": made_with, **strategy.save_state(files)}
    if world.is_main:
        files.save(saved, files.place / STATE_FILE)
    return files.digests, files.write()


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
