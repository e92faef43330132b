"""Commands that are killed in the middle of putting a file in place, in processes of their own."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# Loaded once, before the fork: what a loop imports takes seconds, and nothing of it has run yet.
FORKS.set_forkserver_preload(
    [
        "nanoskyrl.stages.running.loop",
        "nanoskyrl.stages.engines.hf",
        "transformers.models.qwen3.modeling_qwen3",
        "accelerate",
        "faults.warm",
    ]
)
SPAWNED = multiprocessing.get_context("spawn")
"""For commands that need nothing of it."""


def kill_at(stage: str, count: int, arguments: Sequence[Any], *, context: Any = FORKS) -> int | None:
    """Run the command until a stage puts its n-th file in place; return how the process ended.

    The n-th file is written and synced, and not yet renamed. 1 is started.json, then come parts, then the manifest.
    """
    process = context.Process(target=_run, args=(stage, count, [str(argument) for argument in arguments]))
    process.start()
    process.join()
    return process.exitcode


def _run(stage: str, count: int, arguments: list[str]) -> None:
    real, seen = Path.replace, 0

    def replace(self: Path, target: Any) -> Path:
        nonlocal seen
        if f"/{stage}/" in str(target):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, target)

    Path.replace = replace  # type: ignore[method-assign]
    from nanoskyrl_cli.main import run

    raise SystemExit(run(arguments))
