"""A finished run's rollouts, trained on again under other recipes, step after step: no token is generated.

Each recipe starts from the run's first policy and takes the run's scored steps in their order, so its policy
drifts away from the one that sampled: a stress test, and several times cheaper than a loop. What it says of a
recipe is how soon and how far the ratio, the effective sample size and the entropy go, and what its last policy
solves; what a loop with that recipe would have sampled, it does not say.

python benchmarks/retrain.py runs/quickstart-0 --out runs/again --recipe 'plain: run.lag_defaults=false' \
    --recipe 'narrow: sapo.tau_pos=4 sapo.tau_neg=4' --recipe 'grpo: train.algo=grpo'
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from learning import VARIANTS, Result, read, recipes_of, write

from nanoskyrl.stages.core.config import merge, parse_set
from nanoskyrl.stages.core.metrics import MetricsLog, latest, read_metrics
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.running.interface import open_run
from nanoskyrl.stages.running.run_settings import kept_settings
from nanoskyrl.stages.running.standing_trainer import follow


def again(run: Run, place: Path, words: list[str], name: str, steps: int) -> Result:
    """Train on the rollouts of a run under these settings, evaluate the last policy, and return the numbers."""
    began = time.perf_counter()
    settings = merge(kept_settings(run), *map(parse_set, words))
    for step in range(steps):
        for stage in ("rollout", "score"):
            target = place / run.stage(step, stage).relative_to(run.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(run.stage(step, stage).resolve(), target_is_directory=True)
    with open_run(place, settings, ahead=True, lasts=True) as opened:
        if not (place / "metrics.jsonl").exists():
            for step, line in latest(read_metrics(run.metrics), "score").items():
                if step < steps:
                    MetricsLog(place / "metrics.jsonl", step).write("score", {**line, "stage": "score"})
            opened.eval(policy=opened.places.policy_of(0))
        follow(opened, steps=steps, keep_states=1)
        opened.eval(policy=opened.run.stage(steps - 1, "train") / "policy")
    table = settings.get("train", {})
    result = Result("files", table.get("algo", "grpo"), settings.get("run", {}).get("lag", 0), name, 0)
    read(place, result)
    result.seconds = time.perf_counter() - began
    return result


def main() -> None:
    """Train again under each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", default="", help=", ".join(VARIANTS))
    parser.add_argument("--recipe", action="append", default=[], help="NAME: table.key=value ...")
    parser.add_argument("--steps", type=int, help="None: all that are scored")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    run = Run(asked.run)
    steps = asked.steps or len([step for step in run.steps() if "score" in run.made(step)])
    asked.out.mkdir(parents=True, exist_ok=True)
    found = []
    with (asked.out / "results.jsonl").open("w") as file:
        for name, words in recipes_of(asked.variants, asked.recipe).items():
            found.append(again(run, asked.out / name.replace("/", "_"), words, name, steps))
            file.write(json.dumps(asdict(found[-1])) + "\n")
            print(f"{name}: {found[-1].before:.3f} -> {found[-1].after:.3f}, {found[-1].seconds:.0f} s", flush=True)
    print(write(asked.out, found, steps))


if __name__ == "__main__":
    main()
