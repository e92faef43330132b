"""Numbers of a run, appended to `metrics.jsonl`, which lies outside all digests.

Clocks, hosts and throughput belong here and nowhere else. Names are
`stage/quantity/statistic`, or those that SkyRL users know. The mean of nothing is None.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

METRICS = "metrics.jsonl"

Value = float | int | str | None


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, or None of nothing."""
    values = list(values)
    try:
        return math.fsum(values) / len(values) if values else None
    except OverflowError:
        return math.inf


def variance(values: Sequence[float]) -> float:
    """Return the mean square of the distances to the mean; of values, not of none."""
    middle = sum(values) / len(values)
    return sum((value - middle) ** 2 for value in values) / len(values)


class Stopwatch:
    """Seconds spent, by what they were spent on: each second has a name, so together they are the whole.

    A block inside another one takes its time from it. What comes before the first block is `prepare`, and what lies
    outside of all blocks later is `other`. Threads may add what they did meanwhile.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self.seconds: dict[str, float] = {}
        self._began = self._since = time.perf_counter()
        self._names = ["prepare"]

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time inside the block to `name`."""
        self._count()
        self._names[0] = "other"
        self._names.append(name)
        try:
            yield
        finally:
            self._count()
            self._names.pop()

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _count(self) -> None:
        """Give the time since the last count to the innermost block."""
        now = time.perf_counter()
        self.add(self._names[-1], now - self._since)
        self._since = now

    def timings(self) -> dict[str, float]:
        """Return `timing/NAME` for each name, and `timing/total` since the stopwatch was made."""
        self._count()
        named = {f"timing/{name}": seconds for name, seconds in self.seconds.items()}
        return {**named, "timing/total": self._since - self._began}


@dataclass(frozen=True, slots=True)
class MetricsLog:
    """Where a stage's numbers go; without a path they go nowhere."""

    path: Path | None = None
    step: int | None = None

    def write(self, stage: str, values: Mapping[str, Value]) -> None:
        """Append one line."""
        if self.path is None:
            return
        line = {"step": self.step, "stage": stage, "time": time.time(), "host": socket.gethostname(), **finite(values)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write call: lines of several processes do not mix.
        with self.path.open("ab") as file:
            torn = file.tell() > 0 and not _ends_a_line(self.path)  # by a process that was killed
            file.write((("\n" if torn else "") + json.dumps(line, default=float) + "\n").encode())


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def finite(value: Any) -> Any:
    """Return a value with NaN and infinities, its own and those inside it, as None, which JSON can hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, keys in the order in which they first come."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def read_metrics(path: Path, *, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return all lines, or those in the last bytes of the file; one torn by a crash is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        if tail_bytes is not None:
            file.seek(max(0, path.stat().st_size - tail_bytes))
        data = file.read()
    lines = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                lines.append(value)
    return lines


def latest(lines: Iterable[Mapping[str, Any]], stage: str) -> dict[int, Mapping[str, Any]]:
    """Return the last line of a stage for each step: a step done again counts once."""
    return {line["step"]: line for line in lines if line.get("stage") == stage and isinstance(line.get("step"), int)}


def number_in(line: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a line; None where there is none, whatever else somebody wrote there."""
    value = line.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def seconds_of_stages(by_stage: Iterable[Mapping[int, Mapping[str, Any]]], step: int) -> float | None:
    """Return the seconds of a step's stages together, for a step that no loop timed; None where nothing says.

    Args:
        by_stage: The `latest` lines of each stage.
        step: Whose.
    """
    found = [number_in(lines.get(step, {}), "timing/total") for lines in by_stage]
    return sum(value for value in found if value is not None) or None


def peak_memory_bytes() -> int:
    """Return the largest resident size this process has had."""
    import resource

    scale = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
