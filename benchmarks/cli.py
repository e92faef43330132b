"""How long `skyrl --help` takes, beside an interpreter that does nothing and one that imports torch.

    python benchmarks/cli.py

Median of ten processes each, after one that compiles the bytecode.
"""

import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "python that does nothing": "pass",
    "skyrl --help": "from nanoskyrl_cli.main import run; run(['--help'])",
    "import torch": "import torch",
}
RUNS = 10


def seconds(program: str) -> float:
    """Return the median wall time of a program in a process of its own."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Print the times and their ratio to the empty program's."""
    found = {name: seconds(program) for name, program in PROGRAMS.items()}
    empty = found["python that does nothing"]
    for name, value in found.items():
        print(f"{name:26s} {value:6.3f} s  {value / empty:5.1f}x")


if __name__ == "__main__":
    main()
