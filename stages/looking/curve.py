"""A run's learning curve as plain text, and one line for each step while it runs."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.metrics import latest, number_in, read_metrics
from nanoskyrl.stages.core.runs import Run

WIDTH, HEIGHT = 72, 16
BAR = 20
_ENVIRONMENT = re.compile("reward/(?!part/)(.+)/success")
"""Success of one of several environments, among the numbers of `score`; `part/` begins the name of a reward's part."""


def report_line(step: int, numbers: dict[str, Any]) -> str:
    """Return what a step did, in one line."""
    if numbers.get("stage") == "eval":
        name = next((key.split("/")[1] for key in numbers if key.startswith("eval/") and key.endswith("/success")), "")
        success = numbers.get(f"eval/{name}/success")
        samples = numbers.get(f"eval/{name}/samples")
        held_out = numbers.get(f"eval/{name}/held_out", True)
        what = "held-out success" if held_out else "success on the training tasks"
        return f"policy {step:4d}  {what} {_percent(success)} on {samples} samples of {name}"
    success = numbers.get("reward/success")
    bar = "█" * round(BAR * (success or 0.0))
    shown = {"reward": "reward/avg_raw_reward", "entropy": "policy/policy_entropy", "grad": "train/grad_norm"}
    of_envs = "".join(f"  {name} {_percent(numbers[key]).strip()}" for name, key in success_keys(numbers).items())
    rest = "  ".join(f"{name} {number(numbers.get(key), '.3g')}" for name, key in shown.items())
    seconds = number(numbers.get("loop/timing/total"), ".3g")
    unjudged = numbers.get("score/unjudged")
    why = f"  unjudged: {unjudged}" if unjudged else ""
    return f"step {step:4d}  success {_percent(success)} {bar:<{BAR}}{of_envs}  {rest}  {seconds} s{why}"


def success_keys(numbers: Iterable[str]) -> dict[str, str]:
    """Return the names of the numbers that are the success of one of several environments, by environment."""
    return {found[1]: key for key in numbers if (found := _ENVIRONMENT.fullmatch(key))}


def number(value: Any, form: str = ".3f") -> str:
    """Return a number in a form, three digits behind the point unless named; `?` of none."""
    return "?" if value is None else f"{value:{form}}"


def _percent(value: float | None) -> str:
    return "   ?  " if value is None else f"{100 * value:5.1f}%"


def curve(run: Run) -> str:
    """Return a plot of sampled success by step, with the evaluations below; empty for a run without steps.

    Rewards that say nothing of success, such as a function's, are plotted themselves.
    """
    lines = read_metrics(run.metrics)
    keys = success_keys(sorted({key for line in latest(lines, "score").values() for key in line}))
    series = {name: _points(lines, key) for name, key in keys.items()}
    points, name = _points(lines, "reward/success"), "success"
    if not points:
        points, name = _points(lines, "reward/avg_raw_reward"), "reward"
    below = evaluations(run)
    if not points:
        return below or f"no finished step in {run.root}"
    if len(points) == 1:
        return below
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(WIDTH, HEIGHT)
    for label, of_env in series.items() if name == "success" and len(series) > 1 else [("", points)]:
        marker = "braille" if not label else label[:1]
        plotext.plot([step for step, _ in of_env], [value for _, value in of_env], marker=marker, label=label or None)
    if name == "success":
        plotext.ylim(0, 1)
    last = max(1, points[-1][0])
    plotext.xlim(0, last)
    plotext.xticks(sorted({round(last * i / 4) for i in range(5)}))
    plotext.title(f"sampled {name} of training tasks, by step")
    return "\n".join([plotext.uncolorize(plotext.build()).rstrip(), below]).rstrip()


def _points(lines: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    by_step = {step: number_in(line, key) for step, line in latest(lines, "score").items()}
    return sorted((step, value) for step, value in by_step.items() if value is not None)


def evaluated_of(place: Path) -> str:
    """Return what an evaluation is of: a policy of the run by its number, or the name that its folder has."""
    who = place.parent.name
    return f"policy {int(who)}" if re.fullmatch(r"0\d{7}", who) else who


def evaluations(run: Run) -> str:
    """Return a line for each finished evaluation in the run, by what was evaluated."""
    from nanoskyrl.stages.looking.eval_report import (
        summary_of,  # a loop that reports its steps needs no more than those
    )

    rows = []
    for place in run.evaluations():
        numbers = summary_of(place)
        success, samples = _percent(numbers.get("success")).strip(), numbers.get("samples")
        tasks = "held-out" if numbers.get("held_out", True) else "training tasks of"
        rows.append(f"{tasks} {place.name}, {evaluated_of(place)}: success {success} on {samples} samples")
    return "\n".join(rows)
