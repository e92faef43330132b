"""Calls per second of every sandbox, in this checkout and in others.

python benchmarks/sandboxes.py [CHECKOUT ...] [--seconds 2] [--rounds 3]

Everything is measured in turn, round by round, for a busy machine is not equally busy all the time. Each figure is
also given against `python -I -S -c` in a plain process, measured beside it. `asserts` is what `code` with tests does:
fifty asserts on a function, in the judge's process and the program's.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

CODE = "print(sum(range(10)))"
SOLUTION, TESTS = "def f(x): return x * x", "\n".join(f"assert f({i}) == {i * i}" for i in range(50))
PACKAGES = ("stages", "envs", "algos", "eval")
PLAIN = "plain process"


def calls_per_second(run: Callable[[], Any], seconds: float) -> float:
    """Return how often something can be run in a second, one after the other."""
    run()
    calls, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        run()
        calls += 1
    return calls / (time.perf_counter() - begun)


def measure(seconds: float) -> None:
    """Print a line for everything that can be run with the package that Python finds."""
    try:
        graders, sandbox = (
            import_module("nanoskyrl.envs.graders.program_tests"),
            import_module("nanoskyrl.envs.sandbox.base"),
        )
    except ModuleNotFoundError:  # before the folders of today
        graders, sandbox = import_module("nanoskyrl.envs.program_tests"), import_module("nanoskyrl.envs.sandbox")
    plain = [sys.executable, "-I", "-S", "-c", CODE]
    runs: dict[str, Callable[[], Any]] = {PLAIN: lambda: subprocess.run(plain, capture_output=True, check=True)}
    for name in (name for name, why in sandbox.available().items() if why is None):
        runs[name] = lambda name=name: sandbox.run_python(CODE, backend=name)
    limits = sandbox.Limits(seconds=60.0, memory_mb=1024)
    runs["asserts"] = lambda: graders.run_tests(SOLUTION, TESTS, limits)
    for name, run in runs.items():
        print(f"{name}\t{calls_per_second(run, seconds)}", flush=True)


def measured(checkout: Path, seconds: float) -> dict[str, float]:
    """Return what `measure` prints with the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "nanoskyrl"
        package.mkdir()
        for name in PACKAGES:
            (package / name).symlink_to(checkout.resolve() / name)
        command = [sys.executable, __file__, "--measure", "--seconds", str(seconds)]
        environment = {**os.environ, "PYTHONPATH": folder}
        told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name: float(figure) for name, figure in (line.split("\t") for line in told.splitlines())}


def main() -> None:
    """Print a table for each checkout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.seconds)
        return
    checkouts = [*asked.checkouts, Path(__file__).parents[1]]
    rounds = [[measured(checkout, asked.seconds) for checkout in checkouts] for _ in range(asked.rounds)]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {asked.rounds} rounds of {asked.seconds} s")
    for place, checkout in enumerate(checkouts):
        print(f"\n| {checkout} | calls/s | against a plain process |\n| --- | --- | --- |")
        for name in rounds[0][place]:
            figures = [found[place][name] for found in rounds]
            ratio = statistics.median(found[place][name] / found[place][PLAIN] for found in rounds)
            print(f"| {name} | {min(figures):.1f} to {max(figures):.1f} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
