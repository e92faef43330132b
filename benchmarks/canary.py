"""How far engines and trainers are apart in runs that were made: the canary of each sync, and the KL of each step.

    python benchmarks/canary.py runs/sums runs/calculator
    python benchmarks/canary.py runs/sums --curve docs/plots/smollm2.png
    python benchmarks/canary.py runs/quickstart-0 --curve docs/plots/quickstart.png
    python benchmarks/canary.py runs/lag0 runs/lag1 --curve docs/plots/smollm2-lags.png --seconds

Reads metrics.jsonl and the manifests of `sync`; prints quantiles of `sync/canary_gap` (mean difference weighted by
probability, nats), of the largest difference, and of `policy/rollout_train_kl`, then the curve: held-out success by
policy and sampled reward by step. `--curve` draws it, `--seconds` against the seconds since the first step was trained.
"""

import argparse
import re
from pathlib import Path

import numpy as np

from nanoskyrl.stages.core.metrics import latest, number_in, read_metrics
from nanoskyrl.stages.core.runs import Run

HELD_OUT, SAMPLED = "eval/[^/]*/success", "reward/success"
QUANTILES = (0.5, 0.9, 0.99, 1.0)
NUMBERS = {"sync": ("sync/canary_gap", "sync/canary_abs_diff/max"), "train": ("policy/rollout_train_kl",)}


def series(run: Run, stage: str, name: str) -> dict[int, float]:
    """Return by step the metric whose name matches."""
    lines = latest(read_metrics(run.metrics), stage)
    found = {
        step: number_in(line, key) for step, line in sorted(lines.items()) for key in line if re.fullmatch(name, key)
    }
    return {step: value for step, value in found.items() if value is not None}


def seconds(run: Run) -> dict[int, float]:
    """Return by policy when it was there, since the first one that was trained."""
    times = {step + 1: line["time"] for step, line in sorted(latest(read_metrics(run.metrics), "train").items())}
    return {0: 0.0} | {version: time - times[1] for version, time in times.items()}


def draw(runs: list[Run], target: Path, *, against_seconds: bool) -> None:
    """Draw held-out and sampled success of runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for color, run in zip(("tab:blue", "tab:orange", "tab:green"), runs, strict=False):
        sampled, held = series(run, "score", SAMPLED), series(run, "eval", HELD_OUT)
        if against_seconds:
            at = seconds(run)
            sampled, held = ({at[step]: value for step, value in of.items() if step in at} for of in (sampled, held))
        name = run.root.name
        axes.plot(list(sampled), list(sampled.values()), color=color, alpha=0.6, lw=1, label=f"{name}, sampled")
        line = "o-" if len(held) > 2 else "o"
        axes.plot(list(held), list(held.values()), line, color=color, label=f"{name}, held-out")
    axes.set(xlabel="seconds" if against_seconds else "step", ylabel="success", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(target, dpi=140)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--seconds", action="store_true")
    args = parser.parse_args()
    runs = [Run(path) for path in args.runs]
    for run in runs:
        print(run.root)
        for stage, names in NUMBERS.items():
            for name in names:
                values = np.array(list(series(run, stage, name).values()))
                if len(values):
                    told = ", ".join(f"{q:.0%} {np.quantile(values, q):.3g}" for q in QUANTILES)
                    print(f"  {name}: {len(values)} steps, mean {values.mean():.3g}; quantiles {told}")
        for stage, name in (("eval", HELD_OUT), ("score", SAMPLED)):
            values = series(run, stage, name)
            print(f"  {name}: " + ", ".join(f"{step} {value:.3f}" for step, value in values.items()))
    if args.curve:
        draw(runs, args.curve, against_seconds=args.seconds)
