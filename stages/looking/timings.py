"""Where a run's time went."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from nanoskyrl.stages.core.metrics import number_in, read_metrics
from nanoskyrl.stages.core.pipeline import RESERVED, STAGES
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.console import plain_table


def stages_in(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the stages of a step that left numbers: those of every run, and those of somebody's own."""
    return sorted({str(line.get("stage")) for line in lines} - (RESERVED - {*STAGES}))


def timing_table(run: Run) -> Table:
    """Return where a run's time went: generating, training, and everything else by name."""
    seconds = time_spent(run)
    total = sum(seconds.values())
    other = total - seconds["generating"] - seconds["training"]
    rows = [
        *(_line(name, value, total) for name, value in seconds.items()),
        (),
        ("in all", f"{total:.1f}", ""),
        _line("of it neither generating nor training", other, total),
    ]
    return plain_table(("what", "seconds", "share"), rows, left=("what",))


def _line(name: str, seconds: float, total: float) -> tuple[str, str, str]:
    return name, f"{seconds:.1f}", f"{seconds / total:.1%}" if total else ""


def time_spent(run: Run) -> dict[str, float]:
    """Return a run's seconds by what they were spent on; a step done again counts as often as it was done."""
    lines = read_metrics(run.metrics)

    def spent(stage: str, name: str = "total") -> float:
        return sum(number_in(line, f"timing/{name}") or 0.0 for line in lines if line.get("stage") == stage)

    generating, training = spent("rollout", "generate") + spent("eval", "generate"), spent("train", "train")
    environments = spent("rollout", "env") + spent("eval", "env")
    return {
        "generating": generating,
        "training": training,
        "start-up and imports": spent("startup", "startup"),
        "environments": environments,
        "rollout, besides": spent("rollout") - spent("rollout", "generate") - spent("rollout", "env"),
        "score": spent("score"),
        **{stage: spent(stage) for stage in stages_in(lines) if stage not in STAGES},
        "advantage": spent("advantage"),
        "train, besides": spent("train") - training,
        "sync": spent("sync"),
        "eval, besides": spent("eval") - spent("eval", "generate") - spent("eval", "env"),
        "loop, besides": max(0.0, spent("loop") - sum(map(spent, stages_in(lines)))) if spent("loop") else 0.0,
    }
