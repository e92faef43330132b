"""The long form of the campaign of kills: `python tests/faults/campaign.py FOLDER hf=20 scripted=25 overlapped=5 vllm=5`.

Each run is a line of FOLDER/results.jsonl, and is not made again: the campaign is made in parts, and prints its tables
at the end of each.
"""

import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.killed_runs import killed_run, reference

from nanoskyrl.stages.core.metrics import read_metrics


def main(top: Path, asked: list[str]) -> int:
    """Make what is missing of the campaign; return how many runs had a problem."""
    top.mkdir(parents=True, exist_ok=True)
    results = top / "results.jsonl"
    for kind, count in (word.split("=") for word in asked):
        done = {line["seed"] for line in read_metrics(results) if line["kind"] == kind}
        missing = [seed for seed in range(int(count)) if seed not in done]
        shutil.rmtree(top / kind, ignore_errors=True)  # of a campaign that was interrupted
        whole = reference(kind, top / kind / "whole") if missing else Path()
        for seed in missing:
            place, began = top / kind / str(seed), time.perf_counter()
            found = killed_run(kind, place, whole, seed)
            line = {"kind": kind, "seed": seed, **vars(found), "seconds": time.perf_counter() - began}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            for problem in found.problems:
                print(f"{kind} {problem}", file=sys.stderr, flush=True)
            shutil.rmtree(place)
    return tell(read_metrics(results))


def tell(lines: list[dict[str, Any]]) -> int:
    """Print the tables; return how many runs had a problem."""
    print("| Runs | Number | Kills | with a server | Differences, rows lost or doubled, things left | Seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in dict.fromkeys(line["kind"] for line in lines):
        of = [line for line in lines if line["kind"] == kind]
        kills, served, seconds = (sum(line[key] for line in of) for key in ("kills", "with_server", "seconds"))
        problems = sum(len(line["problems"]) for line in of)
        print(f"| {kind} | {len(of)} | {kills} | {served} | {problems} | {seconds:.0f} |")
    print("\nKilled before:\n\n| Kills | File event |\n| ---: | --- |")
    places = sum((Counter(line["places"]) for line in lines), Counter[str]())
    for place, count in places.most_common():
        print(f"| {count} | `{place}` |")
    return sum(bool(line["problems"]) for line in lines)


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1]), sys.argv[2:]), 1))
