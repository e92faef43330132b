"""What a report tells of its runs: curves, timing, evaluations, attempts by environment, settings, lineage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.metrics import grouped, latest, number_in, read_metrics
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.runs import Run, version_of
from nanoskyrl.stages.looking.environment_report import EnvironmentReport, environment_reports
from nanoskyrl.stages.looking.eval_report import summary_of
from nanoskyrl.stages.looking.find_rows import RowSource, of_step
from nanoskyrl.stages.looking.reading import Remark, remarks
from nanoskyrl.stages.looking.report.charts import Series
from nanoskyrl.stages.looking.show_run import readable
from nanoskyrl.stages.looking.step_numbers import Steps, step_numbers

READ = 100_000
"""Rows that errors and environments are counted in, about: of more, the first parts of steps spread evenly are read."""
SPANS = {
    "generating": ("rollout", "generate"),
    "environments": ("rollout", "env"),
    "rollout, besides": ("rollout", None),
    "score": ("score", None),
    "advantage": ("advantage", None),
    "training": ("train", "train"),
    "train, besides": ("train", None),
    "sync": ("sync", None),
}
"""What a step's seconds go to: the stage, and the part of it; None: the stage but for its named parts."""
MACHINE = {
    "tokens per second": ("train/tokens_per_second", 1.0),
    "share of the GPU's peak (MFU)": ("train/mfu", 1.0),
    "GPU memory of training, GB": ("train/peak_device_memory_bytes", 1e-9),
    "memory of training, GB": ("train/peak_memory_bytes", 1e-9),
}


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One run, read once."""

    run: Run
    name: str
    steps: list[int]
    numbers: Steps
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""

    @property
    def says(self) -> list[Remark]:
        """What its numbers say."""
        return remarks(self.steps, self.numbers)


def read_run(run: Run) -> ReportedRun:
    """Return a run for a report.

    Raises:
        InputError: it is no run, or has no step.
    """
    if not run.root.is_dir():
        raise InputError(f"there is nothing at `{run.root}`", hint="Name a run")
    steps, numbers = step_numbers(run)
    if not steps:
        raise InputError(f"`{run.root}` is no run, or has no step yet", hint="Name the directory of a run")
    return ReportedRun(run, run.root.resolve().name, steps, numbers, read_metrics(run.metrics))


def together(runs: Sequence[ReportedRun], name: str, color: int, label: str) -> Series:
    """Return a number of several runs as one curve: their mean at each step, and their range as a band."""
    pairs = (pair for one in runs for pair in zip(one.steps, one.numbers.get(name, []), strict=False))
    found = grouped((step, value) for step, value in pairs if value is not None)
    steps = sorted(found)
    means = [sum(found[step]) / len(found[step]) for step in steps]
    if len(runs) == 1:
        return Series(label, color, steps, means)
    return Series(label, color, steps, means, [min(found[s]) for s in steps], [max(found[s]) for s in steps])


def seconds_by_part(one: ReportedRun) -> dict[str, list[float | None]]:
    """Return where the seconds of each step went."""
    by_stage = {stage: latest(one.lines, stage) for stage in STAGES}

    def spent(stage: str, part: str | None, step: int) -> float | None:
        line = by_stage[stage].get(step, {})
        if part is not None:
            return number_in(line, f"timing/{part}")
        total = number_in(line, "timing/total")
        named = [number_in(line, f"timing/{of}") or 0.0 for s, of in SPANS.values() if s == stage and of is not None]
        return None if total is None else max(0.0, total - sum(named))

    found = {name: [spent(stage, part, step) for step in one.steps] for name, (stage, part) in SPANS.items()}
    return {name: values for name, values in found.items() if any(values)}


def machine_curves(one: ReportedRun, color: int, label: str) -> dict[str, Series]:
    """Return what training took of the machine, by name; what was not measured is left out."""
    trains = latest(one.lines, "train")
    measured = {
        name: [None if (of := number_in(trains.get(step, {}), key)) is None else of * scale for step in one.steps]
        for name, (key, scale) in MACHINE.items()
    }
    return {
        name: Series(label, color, one.steps, values)
        for name, values in measured.items()
        if any(value is not None for value in values)
    }


def evaluations(one: ReportedRun) -> dict[str, list[dict[str, Any]]]:
    """Return the summaries of finished evaluations of the run's own policies by what was evaluated, with `version`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for place in one.run.evaluations():
        version = version_of(one.run.root / "policies" / place.parent.name)
        if version is None or readable(place) is None:
            continue
        try:
            numbers = summary_of(place)
        except InputError:
            continue
        found.setdefault(place.name, []).append({**numbers, "version": version})
    return found


def interval_series(label: str, color: int, found: Sequence[Mapping[str, Any]]) -> Series:
    """Return evaluations of one kind as points with their 95% intervals."""
    ends = [numbers.get("success_95") or (None, None) for numbers in found]
    return Series(
        label, color, [numbers["version"] for numbers in found], [numbers.get("success") for numbers in found],
        [low for low, _ in ends], [high for _, high in ends],
    )  # fmt: skip


def environments(one: ReportedRun) -> tuple[dict[int, dict[str, EnvironmentReport]], int, int]:
    """Return the attempts of each environment by step, the rows that were read for them, and how many there are."""
    sources = {step: found for step in one.run.steps() if (found := of_step(one.run, step))}
    total = sum(source.rows for found in sources.values() for source in found)
    steps = list(sources)
    if total > READ:
        steps = spread(steps, max(2, round(len(steps) * READ / total)))
        sources = {step: _first(sources[step], READ // len(steps)) for step in steps}
    read = sum(source.rows for found in sources.values() for source in found)
    return {step: environment_reports(sources[step]) for step in steps}, read, total


def _first(sources: Sequence[RowSource], rows: int) -> list[RowSource]:
    """Return the first parts, as many as hold so many rows, and one at least: a part has whole groups."""
    found, held = [sources[0]], sources[0].rows
    for source in sources[1:]:
        held += source.rows
        if held > rows:
            break
        found.append(source)
    return found


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return so many of the items, evenly, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (count - 1))] for index in range(count)] if count > 1 else [items[last]]


def manifests(one: ReportedRun) -> Iterator[tuple[int, str, Manifest]]:
    """Yield the manifests of a run's stages, step by step."""
    for step in one.run.steps():
        for stage in one.run.made(step):
            if manifest := readable(one.run.stage(step, stage)):
                yield step, stage, manifest


def lineage(one: ReportedRun) -> list[dict[str, Any]]:
    """Return the stages of each step: their digests, rows, and whether the input they record is what lies there."""
    by_step = grouped((step, (stage, manifest)) for step, stage, manifest in manifests(one))
    found = {step: dict(made) for step, made in by_step.items()}
    return [{"step": step, "nodes": [_node(made, name) for name in _in_order(made)]} for step, made in found.items()]


def _in_order(made: Mapping[str, Manifest]) -> list[str]:
    """Return the stages of a step, each behind those whose output it read."""
    order: list[str] = []
    while len(order) < len(made):
        rest = [name for name in made if name not in order]
        order.append(next((n for n in rest if not (made.keys() - {*order, n}) & made[n].inputs.keys()), rest[0]))
    return order


def _node(made: Mapping[str, Manifest], name: str) -> dict[str, Any]:
    manifest = made[name]
    return {
        "stage": name,
        "digest": manifest.digest[:8],
        "rows": manifest.rows_out,
        "policy": (manifest.policy or "")[:8],
        "made": str(manifest.facts.get("policy") or "")[:8],
        "broken": any(key in made and made[key].digest != digest for key, digest in manifest.inputs.items()),
    }


def settings_of(one: ReportedRun) -> dict[str, Any]:
    """Return the settings of a run's newest stages as `table.key`, with the versions that ran them."""
    found: dict[str, Any] = {}
    for _, _, manifest in manifests(one):
        found |= dict(_flat(manifest.settings))
        found |= {f"version of {name}": version for name, version in manifest.packages.items()}
        found["version of nanoskyrl"] = manifest.code.get("version")
    return found


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        name = f"{before}.{key}" if before else str(key)
        if isinstance(item, Mapping) and item:
            yield from _flat(item, name)
        else:
            yield name, item
