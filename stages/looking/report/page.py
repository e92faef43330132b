"""One HTML page of a run, complete in itself: `skyrl report`.

The page asks for nothing from elsewhere, and its policy forbids the browser to: one script and one style are
allowed, by their digests. Everything that a policy wrote lies in a JSON block and becomes text, never markup.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.core.storage import write_whole
from nanoskyrl.stages.looking.error_patterns import PATTERNS
from nanoskyrl.stages.looking.report import charts, runs
from nanoskyrl.stages.looking.report.runs import ReportedRun
from nanoskyrl.stages.looking.report.sample import BYTES, sampled
from nanoskyrl.stages.looking.step_numbers import BY_NAME

NAME = "report.html"
"""Of the page, in the run."""
CURVES = (
    "success", "reward", "signal", "tokens", "turns", "cut", "failed", "entropy", "kl", "clipped", "gap", "grad",
    "loss",
)  # fmt: skip
DRAWN = ("success", "reward", "signal")
"""Curves that are drawn even where they never change: what a run is about."""
STILL = 5
"""Steps from which on a number that never changed is taken for one that does not."""
TITLES = {
    "success": "Success", "reward": "Reward", "signal": "Groups with signal", "tokens": "Sampled tokens",
    "turns": "Turns", "cut": "Cut off by a limit", "failed": "Failed tool calls", "entropy": "Entropy",
    "kl": "KL of the update", "clipped": "Clipped or gated", "gap": "Gap between engine and trainer",
    "grad": "Gradient norm", "loss": "Loss",
}  # fmt: skip
LINEAGE_STEPS = 200
"""Steps of the graph of lineage, at most: the newest."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Runs that are one curve: the seeds of one experiment."""

    label: str
    runs: list[ReportedRun]
    color: int


def write_report(main: Sequence[Run], compared: Sequence[Run], output: Path) -> dict[str, Any]:
    """Write the page, and return what it holds: runs, steps, trajectories, bytes.

    Args:
        main: Runs of one experiment, such as its seeds: their curves are a mean with a band.
        compared: Each is a curve of its own beside it.
        output: The file.

    Raises:
        InputError: one is no run, or has no step.
        SettingsError: what draws charts is not installed.
        OutputError: the file cannot be written.
    """
    groups = [[runs.read_run(run) for run in main], *([runs.read_run(run)] for run in compared)]
    sides = [_Side(_label(group), group, color) for color, group in enumerate(groups)]
    shown = [one for side in sides for one in side.runs]
    samples = [sampled(one, index, BYTES // len(shown)) for index, one in enumerate(shown)]
    trajectories = [record for found, _ in samples for record in found]
    total = sum(rows for _, rows in samples)
    data = {"runs": [one.name for one in shown], "patterns": PATTERNS, "trajectories": trajectories}
    text = _rendered(sides, data, len(trajectories), total)
    write_whole(output, text.encode(), durable=False)
    return {
        "output": str(output), "runs": [str(one.run.root) for one in shown], "steps": len(shown[0].steps),
        "trajectories": len(trajectories), "of": total, "bytes": len(text.encode()),
    }  # fmt: skip


def _label(group: Sequence[ReportedRun]) -> str:
    name = printable(group[0].name)
    return name if len(group) == 1 else f"{name} and {len(group) - 1} more (mean and range)"


def _rendered(sides: Sequence[_Side], data: Mapping[str, Any], shown: int, total: int) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = Path(__file__).parent
    style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        (folder / "page.html").read_text(encoding="utf-8")
    )
    first = sides[0].runs[0]
    curves, still = _curves(sides)
    return page.render(
        title=printable(" beside ".join(", ".join(one.name for one in side.runs) for side in sides)),
        sides=[
            {"label": side.label, "color": side.color, "runs": [printable(str(one.run.root)) for one in side.runs]}
            for side in sides
        ],
        tiles=_tiles(first),
        says=[{"run": printable(one.name), "remarks": one.says} for side in sides for one in side.runs],
        curves=[{**curve, "svg": Markup(curve["svg"])} for curve in curves],
        still=still,
        timing=[{**chart, "svg": Markup(chart["svg"])} for chart in _timing(sides)],
        parts=list(runs.SPANS),
        evaluations=[{**chart, "svg": Markup(chart["svg"])} for chart in _evaluations(sides)],
        environments=[_environments(one) for side in sides for one in side.runs],
        patterns=PATTERNS,
        lineage=[_lineage(one) for side in sides for one in side.runs],
        settings=_settings([one for side in sides for one in side.runs]),
        names=[printable(one.name) for side in sides for one in side.runs],
        shown=shown,
        total=total,
        data=Markup(_json(data)),
        style=Markup(style),
        script=Markup(script),
        allowed=f"script-src '{_digest(script)}'; style-src '{_digest(style)}'",
    )  # fmt: skip


def _json(value: Any) -> str:
    """Return JSON that cannot end the element that holds it."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def _digest(text: str) -> str:
    """Return what a page's policy calls an inline script or style by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _tiles(one: ReportedRun) -> list[tuple[str, str, str]]:
    """Return the numbers at the head of the page: a name, a number, and what it was."""
    found = []
    for name in ("success", "reward", "signal", "entropy"):
        values = [value for value in one.numbers[name] if value is not None]
        if values:
            percent = BY_NAME[name].kind == "share"
            first, last = (f"{value:.1%}" if percent else f"{value:.3g}" for value in (values[0], values[-1]))
            found.append((TITLES[name], last, f"from {first}"))
    seconds = sum(value for value in one.numbers["seconds"] if value is not None)
    found.append(("Steps", str(len(one.steps)), f"{seconds / 60:.1f} minutes"))
    return found


def _curves(sides: Sequence[_Side]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the curves, and in words the numbers that never change: most would be lines along an axis."""
    names = dict.fromkeys(name for side in sides for one in side.runs for name in one.numbers)
    parts = [name for name in names if name.startswith("part.")]
    drawn, still = [], []
    for name in (*CURVES, *parts):
        series = [runs.together(side.runs, name, side.color, side.label) for side in sides]
        title = TITLES.get(name) or f"Part of the reward: {printable(name.removeprefix('part.'))}"
        values = {value for one in series for value in (*one.values, *(one.low or ()), *(one.high or ()))}
        if len(values) == 1 and name not in DRAWN and max(len(one.values) for one in series) >= STILL:
            still.append(f"{title} {values.pop():.4g}")
            continue
        kind = BY_NAME[name].kind if name in BY_NAME else "plain"
        svg = charts.curves(series, share=kind == "share" and name not in ("clipped", "failed", "cut"))
        meaning = BY_NAME[name].meaning if name in BY_NAME else "mean of this part of the reward"
        if svg:
            drawn.append({"name": name, "title": title, "meaning": meaning, "svg": svg})
    return drawn, still


def _timing(sides: Sequence[_Side]) -> Iterable[dict[str, Any]]:
    for side in sides:
        one = side.runs[0]
        svg = charts.stacked(one.steps, runs.seconds_by_part(one), "seconds")
        if svg:
            yield {"title": f"Seconds of each step, {printable(one.name)}", "svg": svg, "legend": True}
    measured = (runs.machine_curves(side.runs[0], side.color, side.label) for side in sides)
    for name, several in grouped(curve for of_side in measured for curve in of_side.items()).items():
        yield {"title": name[0].upper() + name[1:], "svg": charts.curves(several), "legend": False}


def _evaluations(sides: Sequence[_Side]) -> Iterable[dict[str, Any]]:
    found = grouped(
        (name, (printable(one.name), side.color, numbers))
        for side in sides
        for one in side.runs
        for name, numbers in runs.evaluations(one).items()
    )
    for name, several in found.items():
        series = [runs.interval_series(*of_run) for of_run in several]
        svg = charts.curves(series, share=True, intervals=True, x="policy")
        rows = [{"run": run, **one} for run, _, numbers in several for one in numbers]
        yield {"title": printable(name), "svg": svg, "rows": rows}


def _environments(one: ReportedRun) -> dict[str, Any]:
    """Return a run's environments: first step, last step and all of them, with the share that shows each error."""
    by_step, read, total = runs.environments(one)
    steps = list(by_step)
    found = []
    for env in dict.fromkeys(env for reports in by_step.values() for env in reports):
        ends = [by_step[step][env].to_plain() for step in (*steps[:1], *steps[-1:]) if env in by_step[step]]
        shares = {
            pattern: [
                by_step[step][env].patterns[pattern] / by_step[step][env].attempts if env in by_step[step] else None
                for step in steps
            ]
            for pattern in PATTERNS
        }
        seen = [
            {
                "pattern": pattern,
                "first": values[0] or 0.0,
                "last": values[-1] or 0.0,
                "most": max(value or 0.0 for value in values),
            }
            for pattern, values in shares.items()
            if any(values)
        ]
        found.append({"env": printable(env), "first": ends[0], "last": ends[-1], "patterns": seen})
    return {"run": printable(one.name), "steps": steps, "envs": found, "read": read, "total": total}


def _lineage(one: ReportedRun) -> dict[str, Any]:
    lines = runs.lineage(one)
    return {"run": printable(one.name), "steps": lines[-LINEAGE_STEPS:], "earlier": max(0, len(lines) - LINEAGE_STEPS)}


def _settings(shown: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Return every setting with its value in each run; those that differ come first."""
    by_run = [runs.settings_of(one) for one in shown]
    values = {
        name: [json.dumps(settings.get(name), ensure_ascii=False) for settings in by_run]
        for name in sorted({name for settings in by_run for name in settings})
    }
    found = (
        {"name": printable(name), "values": [printable(v) for v in of], "differs": len(set(of)) > 1}
        for name, of in values.items()
    )
    return sorted(found, key=lambda line: not line["differs"])
