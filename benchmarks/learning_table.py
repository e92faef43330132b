"""The table and the curves of `learning.py`, from its results."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Line = dict[str, Any]


def table(found: Sequence[Line], steps: int) -> str:
    """Return the runs as Markdown: one line for each task, algorithm, lag and variant."""
    lines = [
        f"| Task | Algorithm | Lag | Variant | Before | After {steps} steps, by seed | Mean | Of lag 0 | Worst rise | "
        "Largest ratio | Least ESS | Collapse reported at |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task, algo, lag, variant in dict.fromkeys((r["task"], r["algo"], r["lag"], r["variant"]) for r in found):
        runs = [r for r in found if (r["task"], r["algo"], r["lag"], r["variant"]) == (task, algo, lag, variant)]
        good = [r for r in runs if not r["error"]]
        if not good:
            lines.append(f"| {task} | {algo} | {lag} | {variant} | failed: {runs[0]['error']} |")
            continue
        at_0 = [r["after"] for r in found if (r["task"], r["algo"], r["lag"]) == (task, algo, 0) and not r["error"]]
        after = mean(r["after"] for r in good)
        ess = [value for r in good for value in r["ess"] if value is not None]
        told = ", ".join(str(r["signs"][0]) if r["signs"] else "-" for r in good)
        failed = f" ({len(runs) - len(good)} failed)" if len(good) < len(runs) else ""
        lines.append(
            f"| {task} | {algo}{failed} | {lag} | {variant} | {mean(r['before'] for r in good):.3f} | "
            f"{', '.join(format(r['after'], '.3f') for r in good)} | {after:.3f} | "
            f"{format(after / mean(at_0), '.2f') if lag and at_0 else '-'} | "
            f"{min(r['after'] - r['before'] for r in good):+.3f} | "
            f"{', '.join(format(max(r['ratio_max']), '.3g') for r in good)} | "
            f"{format(min(ess), '.2f') if ess else '-'} | {told} |"
        )
    return "\n".join(lines)


def curves(found: Sequence[Line], path: Path) -> None:
    """Draw success against steps, a panel an algorithm: the mean of the seeds, and their range as a band."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "nanoskyrl"  # the same bytes each time
    import matplotlib.pyplot as plt

    algos = list(dict.fromkeys(r["algo"] for r in found))
    if not algos:
        return
    across = min(3, len(algos))
    down = math.ceil(len(algos) / across)
    figure, grid = plt.subplots(
        down, across, figsize=(4.2 * across, 3.0 * down), layout="constrained", squeeze=False, sharey=True
    )
    for axes, algo in zip(grid.flat, algos, strict=False):
        of_algo = [r for r in found if r["algo"] == algo]
        for lag, variant in dict.fromkeys((r["lag"], r["variant"]) for r in of_algo):
            seeds = [r["curve"] for r in of_algo if (r["lag"], r["variant"]) == (lag, variant)]
            by_step = list(zip(*seeds, strict=False))
            label = f"lag {lag}" + (f", {variant}" if lag else "")
            (line,) = axes.plot([mean(of) for of in by_step], label=label, linewidth=1.2)
            axes.fill_between(
                range(len(by_step)), [min(of) for of in by_step], [max(of) for of in by_step], alpha=0.15,
                color=line.get_color(), linewidth=0,
            )  # fmt: skip
        axes.set_title(algo, fontsize=9)
        axes.set_ylim(0, 1)
        axes.set_xlabel("step", fontsize=8)
        axes.legend(fontsize=6, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
