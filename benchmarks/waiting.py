"""Environments and reward functions that wait, at the same time: seconds beside those of a pool of threads alone.

    python benchmarks/waiting.py                    # half a minute
    python benchmarks/waiting.py --code DIR         # another checkout of the project, without the settings of this one

- 768 episodes of one step of 20 ms on the engine `scripted`, in one part.
- A reward function of 20 ms over 1,000 rows of a made-up rollout, and one that returns at once over 10,000.

Each command runs in a process of its own; start-up (the same on 16 rows) is taken off. Beside each stands what a pool
of as many threads takes that does nothing else, or, of the quick function, the environment's own rewards.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from made_up import made_up_rollout

STEPS, ROWS, QUICK_ROWS, WAIT, AT_ONCE = 768, 1000, 10_000, 0.02, 32
MODULE = f"""
import time

from nanoskyrl.envs.worlds.text_math.environment import TextMath, TextMathEpisode


class Slow(TextMath):
    def start(self):
        return SlowEpisode()


class SlowEpisode(TextMathEpisode):
    def step(self, action):
        time.sleep({WAIT})
        return super().step(action)


def slow(trajectory):
    time.sleep({WAIT})
    return float(len(trajectory.response))


def quick(trajectory):
    return float(len(trajectory.response))
"""


def seconds(arguments: list[str], place: Path, code: Path | None) -> float:
    """Return the wall clock of a command."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "nanoskyrl_cli.main", *arguments], cwd=place, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, (code, place))))},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(arguments)}\n{done.stderr[-2000:]}")
    return time.perf_counter() - began


def pool(count: int) -> float:
    """Return the wall clock of as many waits in threads."""
    began = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(time.sleep, [WAIT] * count))
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="environments and reward functions that wait")
    parser.add_argument("--code", type=Path, help="a folder in which `nanoskyrl` is another checkout")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, up to {AT_ONCE} at once")
    print(f"{'':44}{'s':>8}{'beside':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "waits.py").write_text(MODULE)
        for rows in (16, ROWS // 16 * 16, QUICK_ROWS):
            made_up_rollout(place / str(rows), rows)

        def attempts(count: int) -> float:
            given = {
                "train_batch_size": count, "n_samples_per_prompt": 1, "rows_per_part": STEPS, "max_generate_length": 64
            }  # fmt: skip
            flags = [flag for name, value in given.items() for flag in ("--set", f"rollout.{name}={value}")]
            return seconds(
                ["rollout", "--env", "waits:Slow", "--engine", "scripted", "--out", f"episodes{count}", *flags],
                place, options.code,
            )  # fmt: skip

        def rewards(name: str, count: int) -> float:
            return seconds(
                ["score", str(count), "--out", f"{name}{count}".replace(":", ""), "--reward", name], place, options.code
            )

        def line(name: str, ours: float, theirs: float, beside: str) -> None:
            print(f"{name:44}{ours:8.2f}{theirs:10.2f}{ours / theirs:8.2f}  {beside}", flush=True)

        threads = f"{AT_ONCE} threads"
        line(f"{STEPS} steps of 20 ms", attempts(STEPS) - attempts(16), pool(STEPS - 16), threads)
        slow = rewards("waits:slow", ROWS // 16 * 16) - rewards("waits:slow", 16)
        line(f"{ROWS // 16 * 16} rewards of 20 ms", slow, pool(ROWS // 16 * 16 - 16), threads)
        quick, own = (rewards(name, QUICK_ROWS) - rewards(name, 16) for name in ("waits:quick", "env"))
        line(f"{QUICK_ROWS} rewards at once", quick, own, "the environment's own")


if __name__ == "__main__":
    main()
