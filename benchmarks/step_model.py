"""A model of a step's time against the number of GPUs, from figures that were measured; docs/scale.md reads it.

    python benchmarks/step_model.py

Half of the GPUs generate and half train, with a lag of 1: a step takes the longer half, and what the driver does by
itself. The constants are from benchmarks/README.md (Qwen2.5-1.5B's shape, H200); what is
assumed says so.
"""

import argparse
import math
import sys
from typing import NamedTuple

GIB = 2**30

FULL, HALF_FULL = 47_013.0, 59_985 / 2
"""Tokens a second of a GPU that generates, with 1,024 and with 512 sequences on it."""
DRIVER_ROW, DRIVER_PART = 60e-6, 5e-3
"""Assumed: seconds of the driver for a trajectory and for a part, digests and summaries of score and advantage. `python
benchmarks/scale.py score` prints what to put here; it has not been run on an idle machine."""
SHARD_BYTES = 4.61
"""Of a shard, a response token."""
STORE, REDUCE = 1.25e9, 25e9
"""Assumed: bytes a second between the store and a host, and of a GPU's all-reduce between hosts."""


class Kind(NamedTuple):
    """What is known of a way of training."""

    name: str
    tokens: float
    """A second of a GPU that trains, in the loop."""
    written: float
    """GiB of policy and state after a step."""
    policy: float
    """GiB of them that generation waits for."""
    arrives: float
    """Seconds until servers hold it."""


KINDS = (Kind("LoRA r=32", 26_334.0, 0.48, 0.14, 0.80), Kind("whole model", 19_822.0, 20.13, 2.88, 1.30))
WRITING = 20.13 / 27.64
"""GiB a second of one process, digests included."""
TOKENS, PROMPT, ROWS_PER_PART, HOST = 256, 100, 512, 8


class StepTime(NamedTuple):
    """Seconds of a step, by what they are spent on."""

    generation: float
    training: float
    writing: float
    sync: float
    driver: float
    io: float

    @property
    def total(self) -> float:
        """Training and writing beside generation and what brings it there."""
        return max(self.training + self.writing, self.generation + self.sync + self.io + self.driver)

    @property
    def longest(self) -> str:
        """What it is spent on most."""
        return max(self._fields, key=lambda name: getattr(self, name))


def generating(sequences: float) -> float:
    """Return tokens a second of a GPU with so many sequences: a power law through the two points, and no more."""
    return min(FULL, FULL * (sequences / 1024) ** math.log2(FULL / HALF_FULL))


def step_time(gpus: int, rows: int, kind: Kind) -> StepTime:
    """Return what a step of so many trajectories takes on so many GPUs."""
    half, hosts = gpus // 2, max(1, gpus // HOST)
    tokens, far = rows * (TOKENS + PROMPT), hosts > 1
    exchanged = 2 * kind.policy * GIB / REDUCE if far else 0.0
    return StepTime(
        generation=rows * TOKENS / half / generating(rows / half),
        training=tokens / half / kind.tokens + exchanged,
        # The first process writes the policy; under ZeRO-3 each writes its share of the state.
        writing=(kind.policy + (kind.written - kind.policy) / half) / WRITING,
        sync=kind.arrives + (kind.policy * GIB / STORE if far else 0.0),
        driver=rows * DRIVER_ROW + -(-rows // ROWS_PER_PART) * DRIVER_PART,
        io=4 * tokens * SHARD_BYTES / STORE / hosts if far else 0.0,
    )


def main() -> int:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for title, of in (
        ("512 trajectories for each GPU that generates", lambda gpus: 256 * gpus),
        ("4,096 trajectories", lambda gpus: 4096),
    ):
        print(f"\n{title}\n")
        print("| GPUs | learns | step, s | generation | training | writing | sync | driver | I/O | rows/s | longest |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for gpus in (2, 8, 64, 512):
            for kind in KINDS:
                rows = of(gpus)
                found = step_time(gpus, rows, kind)
                cells = [f"{found.total:.1f}", *(f"{value:.2f}" for value in found), f"{rows / found.total:,.0f}"]
                print(f"| {gpus} | {kind.name} | {' | '.join(cells)} | {found.longest} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
