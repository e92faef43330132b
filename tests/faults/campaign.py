"""The long form of the campaign of kills: `python tests/faults/campaign.py hf=20 scripted=25 overlapped=5`; prints a table."""

import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.killed_runs import killed_run, reference


def main(asked: list[str], first_seed: int = 0) -> int:
    """Run the campaign; return how many runs had a problem."""
    top = Path(tempfile.mkdtemp(prefix="nanoskyrl-campaign-"))
    places: Counter[str] = Counter()
    broken, rows = 0, []
    for kind, count in (word.split("=") for word in asked):
        began, kills, told = time.perf_counter(), 0, []
        whole = reference(kind, top / kind / "whole")
        for seed in range(first_seed, first_seed + int(count)):
            found = killed_run(kind, top / kind / str(seed), whole, seed)
            kills += found.kills
            places += found.places
            told += found.problems
            for problem in found.problems:
                print(f"{kind} {problem}", file=sys.stderr, flush=True)
            broken += bool(found.problems)
            if not found.problems:
                shutil.rmtree(top / kind / str(seed))
        rows.append((kind, count, kills, len(told), time.perf_counter() - began))
        print(f"{kind}: {kills} kills in {count} runs, {len(told)} problems", file=sys.stderr, flush=True)
    print("| Runs | Number | Kills | Differences, rows lost or doubled, things left | Seconds |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for kind, count, kills, problems, seconds in rows:
        print(f"| {kind} | {count} | {kills} | {problems} | {seconds:.0f} |")
    print("\nKilled before:\n")
    print("| Kills | File event |")
    print("| ---: | --- |")
    for place, count in places.most_common():
        print(f"| {count} | `{place}` |")
    if not broken:
        shutil.rmtree(top)
    return broken


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
