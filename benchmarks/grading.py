"""Time and memory of a step's worth of verdicts: 1,024 replies, ten of them bombs.

    python benchmarks/grading.py

The replies are those of tests/envs/data/graded.jsonl, again and again; workers are started within the time.
"""

import json
import resource
import time
from collections import Counter
from itertools import cycle, islice
from pathlib import Path

from nanoskyrl.envs.graders.kinds import POOL, grade

ROWS = Path(__file__).parents[1] / "tests/envs/data/graded.jsonl"
COUNT = 1024
BOMBS = (
    "9^{9^{9^{9}}}", "2^{2^{2^{2^{2^{2}}}}}", "9!!!", "1" * 100_000, "(x+1)^{99999}", "{" * 100_000,
    " " * 400_000 + "x",
    "(((x+1)^{100})^{100})^{100}", ", ".join(f"x+{i}" for i in range(10_000)), "\\boxed{" * 50_000,
)  # fmt: skip


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text("utf-8").split("\n") if line]
    rows = [*islice(cycle(rows), COUNT - len(BOMBS))]
    began, spent = time.perf_counter(), time.process_time()
    found: Counter[bool | None] = Counter(grade(row["kind"], row["gold"], row["pred"]).correct for row in rows)
    plain = time.perf_counter() - began
    found.update(grade(kind, "x+1", bomb).correct for bomb, kind in zip(BOMBS, cycle(("math", "set")), strict=False))
    seconds = time.perf_counter() - began
    POOL.close()  # only workers that ended are counted
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{COUNT} replies: {seconds:.1f} s, {seconds - plain:.1f} s of them for {len(BOMBS)} bombs; {dict(found)}")
    print(f"this process: {time.process_time() - spent:.1f} s of CPU, {own:.0f} MB; largest worker: {workers:.0f} MB")


if __name__ == "__main__":
    main()
