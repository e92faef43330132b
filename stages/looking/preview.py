"""What dry runs and `compare` print: advantages of a shard by group, and algorithms side by side."""

from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa
from rich.markup import escape

from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.looking.console import open_console, plain_table

PIPED = 160
SHOWN = (
    "trajectory_id", "step_index", "group_id", "sample", "reward", "shaped_reward", "advantages", "returns", "values",
    "kept", "drop_reason",
)  # fmt: skip
"""What a dry run prints as JSON."""


def span(values: np.ndarray) -> str:
    """Return numbers as one, or as their range."""
    if not len(values):
        return "0.000"
    low, high = float(values.min()), float(values.max())
    return f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f} to {high:.3f}"


def advantage_of(table: pa.Table, row: int) -> str:
    """Return what a row's sampled tokens got, or why they got nothing."""
    reason = table.column("drop_reason")[row].as_py()
    return reason if reason is not None else _sampled(table, row, "advantages") or "0.000"


def _sampled(table: pa.Table, row: int, name: str) -> str:
    """Return what a column holds of a row's sampled tokens; empty where it holds nothing."""
    of_row = table.slice(row, 1)
    (values,), (mask,) = (row_arrays(of_row.column(column)) for column in (name, "loss_mask"))
    return span(values[mask != 0]) if values is not None and mask is not None else ""


def show_advantages(table: pa.Table, limit: int = 64, file: IO[str] | None = None) -> None:
    """Print the rewards and advantages of the first rows, group by group."""
    console = open_console(file, PIPED)
    names = ("group", "sample", "reward", "shaped", "advantage", "return", "value")
    facts = table.slice(0, limit).select(["group_id", "sample", "reward", "shaped_reward"]).to_pylist()
    before = [None, *(of["group_id"] for of in facts)]
    rows = (map(escape, _cells(table, row, of, before[row])) for row, of in enumerate(facts))
    console.print(plain_table(names, rows, left=("group",), wrapped=()))
    kept = sum(table.column("kept").to_pylist())
    more = f"{table.num_rows - limit} more rows; " if table.num_rows > limit else ""
    console.print(f"{more}{kept} of {table.num_rows} rows would be kept; nothing was written")


def _cells(table: pa.Table, row: int, facts: Mapping[str, Any], before: str | None) -> list[str]:
    """Return a row's line; its group stands there only where the row before is of another."""
    group = "" if facts["group_id"] == before else facts["group_id"]
    rewards = ["none" if facts[name] is None else f"{facts[name]:.3f}" for name in ("reward", "shaped_reward")]
    estimates = (advantage_of(table, row), _sampled(table, row, "returns"), _sampled(table, row, "values"))
    return [group, str(facts["sample"]), *rewards, *estimates]


def show_comparison(found: pa.Table, limit: int, file: IO[str] | None = None) -> None:
    """Print what `compare` found: a row an algorithm, then how hard the first trajectories are pushed."""
    console = open_console(file, PIPED)
    rows = found.to_pylist()
    algos = [row["algo"] for row in rows]
    names = ("algo", "loss", "gradient norm", "share", "largest ratio", *algos)
    title = "cosines between gradients to the right"
    console.print(plain_table(names, map(_compared, rows), left=("algo",), title=title))
    if not limit or not rows:
        return
    pushed = (
        [trajectory[:12], *(f"{row['weight'][index] * 1000:.3f}" for row in rows)]
        for index, trajectory in enumerate(rows[0]["trajectory_id"][:limit])
    )
    title = "how hard rows are pushed up, x 1000"
    console.print()
    console.print(plain_table(("trajectory", *algos), pushed, left=("trajectory",), title=title))


def _compared(row: Mapping[str, Any]) -> list[str]:
    """Return an algorithm's line."""
    share = "" if row["share"] is None else f"{row['share']:.2%} {row['share_name'].replace('_ratio', '')}"
    cosines = ["" if value is None else f"{value:.3f}" for _, value in row["cosines"]]
    numbers = f"{row['loss']:.4f}", f"{row['gradient_norm']:.4f}"
    return [row["algo"], *numbers, share, f"{row['ratio_max']:.3g}", *cosines]
