"""What dry runs and `compare` print: advantages of a shard by group, and algorithms side by side."""

from typing import IO

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.markup import escape

from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.looking.console import SafeConsole, plain_table

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
    if reason is not None:
        return reason
    of_row = table.slice(row, 1)
    (values,), (mask,) = (row_arrays(of_row.column(name)) for name in ("advantages", "loss_mask"))
    return span(values[mask != 0]) if values is not None and mask is not None else "0.000"


def _console(file: IO[str] | None) -> Console:
    """Return a console; into a file or a pipe lines are as long as they need to be."""
    found = SafeConsole(file=file)
    return found if found.is_terminal else SafeConsole(file=file, width=PIPED)


def show_advantages(table: pa.Table, limit: int = 64, file: IO[str] | None = None) -> None:
    """Print the rewards and advantages of the first rows, group by group."""
    console = _console(file)
    names = ("group", "sample", "reward", "shaped", "advantage", "return", "value")
    grid = plain_table(names, left=("group",), wrapped=())
    last = None
    for row, facts in enumerate(
        table.slice(0, limit).select(["group_id", "sample", "reward", "shaped_reward"]).to_pylist()
    ):
        group = facts["group_id"]
        cells = [group if group != last else "", str(facts["sample"])]
        cells += ["none" if facts[name] is None else f"{facts[name]:.3f}" for name in ("reward", "shaped_reward")]
        cells.append(advantage_of(table, row))
        for name in ("returns", "values"):
            of_row = table.slice(row, 1)
            (values,), (mask,) = (row_arrays(of_row.column(column)) for column in (name, "loss_mask"))
            cells.append("" if values is None or mask is None else span(values[mask != 0]))
        grid.add_row(*map(escape, cells))
        last = group
    console.print(grid)
    kept = sum(table.column("kept").to_pylist())
    more = f"{table.num_rows - limit} more rows; " if table.num_rows > limit else ""
    console.print(f"{more}{kept} of {table.num_rows} rows would be kept; nothing was written")


def show_comparison(found: pa.Table, limit: int, file: IO[str] | None = None) -> None:
    """Print what `compare` found: a row an algorithm, then how hard the first trajectories are pushed."""
    console = _console(file)
    rows = found.to_pylist()
    algos = [row["algo"] for row in rows]
    names = ("algo", "loss", "gradient norm", "share", "largest ratio", *algos)
    grid = plain_table(names, left=("algo",), title="cosines between gradients to the right")
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:.2%} {row['share_name'].replace('_ratio', '')}"
        cosines = ["" if value is None else f"{value:.3f}" for _, value in row["cosines"]]
        grid.add_row(
            row["algo"], f"{row['loss']:.4f}", f"{row['gradient_norm']:.4f}", share, f"{row['ratio_max']:.3g}", *cosines
        )
    console.print(grid)
    if not limit or not rows:
        return
    pushed = plain_table(("trajectory", *algos), left=("trajectory",), title="how hard rows are pushed up, x 1000")
    for index, trajectory in enumerate(rows[0]["trajectory_id"][:limit]):
        pushed.add_row(trajectory[:12], *(f"{row['weight'][index] * 1000:.3f}" for row in rows))
    console.print()
    console.print(pushed)
