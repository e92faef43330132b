"""A loop for some minutes, and what it holds at each step: `python tests/faults/soak.py 20`; prints a table."""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from running import SMALL

from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.loop import loop

HELD = ("resident MB", "handles", "threads", "children", "files in the temporary folder")


def held(scratch: Path) -> tuple[float, int, int, int, int]:
    """Return what this process holds now."""
    process = psutil.Process()
    with process.oneshot():
        resident, handles, threads = process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
    return resident, handles, threads, len(process.children(recursive=True)), sum(1 for _ in scratch.rglob("*"))


def main(minutes: float) -> int:
    """Run it; return 1 where something grew."""
    top = Path(tempfile.mkdtemp(prefix="nanoskyrl-soak-"))
    scratch = top / "tmp"
    scratch.mkdir()
    os.environ["TMPDIR"], tempfile.tempdir = str(scratch), str(scratch)
    seen: list[tuple[float, tuple[float, int, int, int, int]]] = []
    began = time.monotonic()

    class Over(Exception):
        pass

    def report(step: int, numbers: dict) -> None:
        if numbers.get("stage") == "eval":
            return
        seen.append((time.monotonic() - began, held(scratch)))
        if seen[-1][0] > 60 * minutes:
            raise Over

    settings = merge(
        SMALL,
        {
            # Answers are judged by workers, and code runs in a sandbox.
            "rollout": {"env": {"text_math": 1.0, "tool_use": 1.0}, "max_turns": 3},
            "loop": {"steps": 1_000_000, "eval_every": 20}, "eval": {"limit": 4, "env": "text_math"},
        },
    )  # fmt: skip
    with contextlib.suppress(Over):
        loop(Run(top / "run"), settings, report=report)
    print(f"{len(seen)} steps in {minutes:g} minutes.\n")
    print("| Minute | Step | " + " | ".join(HELD) + " |")
    print("| ---: | ---: |" + " ---: |" * len(HELD))
    for index in sorted({round(i * (len(seen) - 1) / 20) for i in range(21)}):
        seconds, values = seen[index]
        print(f"| {seconds / 60:.1f} | {index} | {values[0]:.0f} | " + " | ".join(map(str, values[1:])) + " |")
    # The first quarter warms up: libraries, caches of a bounded size.
    quarter = len(seen) // 4
    early, late = (max(v[0] for _, v in part) for part in (seen[quarter : 2 * quarter], seen[-quarter:]))
    counts = [
        (max(v[i] for _, v in seen[quarter : 2 * quarter]), max(v[i] for _, v in seen[-quarter:])) for i in range(1, 5)
    ]
    print(
        f"\nLargest in the second quarter and in the last: {early:.0f} and {late:.0f} MB; "
        + ", ".join(f"{n} {a} and {b}" for n, (a, b) in zip(HELD[1:], counts, strict=True))
        + "."
    )
    return int(late > 1.05 * early or any(b > a for a, b in counts))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
