"""Which GPUs there are, and how they are named: 0-3, 0,2 or cpu."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from nanoskyrl.stages.core.children import ending_with_us
from nanoskyrl.stages.core.errors import SettingsError

PATTERN = re.compile(r"cpu|[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
MOST = 1024


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
        if max(int(first), int(last or first)) >= MOST:
            raise SettingsError(
                f"`{name}` names GPU {last or first}", hint=f"A host has fewer than {MOST}; count from 0"
            )
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) != len(found) or (text != "cpu" and not found):
        raise SettingsError(f"`{name}` is {text!r}: a GPU twice, or none", hint="Name each once, as 0-3")
    return tuple(found)


def visible(gpus: Sequence[int]) -> str:
    """Return what CUDA_VISIBLE_DEVICES must say for a process to see these, counted among those that we see."""
    ours = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(ours[gpu] if ours else str(gpu) for gpu in gpus)


def count_gpus() -> int:
    """Return how many GPUs there are to start servers on, without loading torch."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([name for name in named.split(",") if name.strip() not in ("", "-1")])
    return len(driver_lines())


def driver_lines() -> list[str]:
    """Return name, driver and memory of every GPU, as nvidia-smi prints them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False, env=ending_with_us())
        if ran.returncode == 0:
            return [line.strip() for line in ran.stdout.splitlines() if line.strip()]
    return []
