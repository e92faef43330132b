"""How long `skyrl --help` takes, beside importing typer and its rich help alone, an empty program, and torch.

    python benchmarks/cli.py [--check]

Processes of all programs take turns, so that a busy machine slows them equally; the first of each, which compiles the
bytecode, does not count. A ratio is the median over the turns. --check ends with 1 where the help takes more than 1.3
times what typer and its rich help do.
"""

import statistics
import subprocess
import sys
import time

HELP, TYPER = "skyrl --help", "import typer and its rich help"
PROGRAMS = {
    TYPER: "import typer, typer.rich_utils",
    HELP: "from nanoskyrl_cli.main import run; run(['--help'])",
    "python that does nothing": "pass",
    "import torch": "import torch",
}
RUNS = 15
MOST = 1.3


def seconds(program: str) -> float:
    """Return the wall time of a program in a process of its own."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> int:
    """Print the times and their ratio to the import of typer's."""
    turns = [{name: seconds(program) for name, program in PROGRAMS.items()} for _ in range(RUNS + 1)][1:]
    ratios = {name: statistics.median(turn[name] / turn[TYPER] for turn in turns) for name in PROGRAMS}
    for name, ratio in ratios.items():
        print(f"{name:32s} {statistics.median(turn[name] for turn in turns):6.3f} s  {ratio:5.2f}x")
    return int("--check" in sys.argv and ratios[HELP] > MOST)


if __name__ == "__main__":
    sys.exit(main())
