"""How long `verify` and `verify --rerun` of the quickstart take, beside the run itself.

    python benchmarks/rerun.py --out DIR [--steps 30]

Each is a process of its own, whose idle threads sleep, as in `make quickstart`.
Ends with 1 unless every step was made again and is equal, byte for byte.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def skyrl(*arguments: object) -> tuple[float, str, int]:
    """Run the command; return its seconds, what it printed and its exit code."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "nanoskyrl_cli", *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=False
    )
    return time.perf_counter() - start, done.stdout, done.returncode


def main() -> int:
    """Run, verify, make again; print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the run")
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run = asked.out / "run"
    own, _, code = skyrl("loop", "--preset", "quickstart", "--steps", asked.steps, "--run", run)
    if code:
        return code
    times = {"skyrl loop --preset quickstart": own}
    times["skyrl verify"], _, plain = skyrl("verify", run, "--json")
    times["skyrl verify --rerun"], printed, again = skyrl("verify", run, "--rerun", "--json")
    found = json.loads(printed)
    equal = found["proved"].get("outputs made again", 0)
    print(f"| {asked.steps} steps of the quickstart | seconds | of the run's own |\n| --- | ---: | ---: |")
    for name, seconds in times.items():
        print(f"| `{name}` | {seconds:.0f} | {seconds / own:.0%} |")
    print(f"\n{equal} of {4 * asked.steps} outputs made again and equal; {len(found['broken'])} broken")
    print("\n".join(found["made_again"]))
    return int(bool(plain or again) or equal != 4 * asked.steps)


if __name__ == "__main__":
    sys.exit(main())
