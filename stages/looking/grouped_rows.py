"""What the rows of a group, a task, an environment or a step came to, counted part by part: a run may be large."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Sequence
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.looking.find_rows import RowSource, by_part

By = Literal["group", "task", "env", "step"]
BY = get_args(By)
COLUMN_OF: dict[str, str] = {"group": "group_id", "task": "task_id", "env": "env", "step": "step"}
NUMBERS = ("success", "reward", "came_to", "turns", "tokens", "failed_calls")
_HOW = {"sum": "sum", "count": "sum", "min": "min", "max": "max"}
"""What is kept of each number, and how two of it become one."""


def grouped_rows(
    sources: Sequence[RowSource], by: By, *, where: str | None, sort: str | None, limit: int
) -> tuple[list[dict[str, Any]], int]:
    """Return what the rows of each group, task, environment or step came to, and how many of those there are.

    The order is that of `sort`, a key of what is returned with `-` before it for the largest first; None: by step, or
    those with least success first.
    """
    # Whole groups lie in a part, so an attempt's rows are counted together there.
    names = [COLUMN_OF[by], "trajectory_id", "group_id", "task_id", *(name for name in NUMBERS if name != "came_to")]
    counted, rows_before = [], 0
    for rows in by_part(sources, names, where=where):
        counted.append(_of_groups(rows, COLUMN_OF[by], rows_before))
        rows_before += rows.num_rows
    found = _added(pa.concat_tables(counted), ["key", "group", "task"])
    came_to = zip(*(found.column(f"came_to_{how}").to_pylist() for how in ("count", "min", "max")), strict=True)
    signal = [float(has_spread([least, most])) if count > 1 else None for count, least, most in came_to]
    found = found.append_column("signal", pa.array(signal, pa.float64()))
    lines = [_line(by, counts) for counts in _added(found, ["key"]).sort_by("place").to_pylist()]
    name, descending = (sort or ("step" if by == "step" else "success")).removeprefix("-"), (sort or "").startswith("-")
    if lines and name not in lines[0]:
        raise SettingsError(f"`--sort` knows no `{name}` of groups", hint=f"It knows {', '.join(lines[0])}")
    known = [line for line in lines if line[name] is not None]
    known.sort(key=lambda line: line[name], reverse=descending)
    return [*known, *(line for line in lines if line[name] is None)][:limit], len(lines)


def _of_groups(rows: pa.Table, key: str, rows_before: int) -> pa.Table:
    """Return the counts of each group of a part, with the place at which it first comes: a row for each."""
    keys = {"key": key, "group": "group_id", "task": "task_id", "attempts": "trajectory_id"}
    columns = {name: rows.column(column) for name, column in keys.items()}
    columns["place"] = pa.array(range(rows_before, rows_before + rows.num_rows), pa.int64())
    columns |= {name: rows.column(name).cast(pa.float64()) for name in NUMBERS if name != "came_to"}
    success, reward = columns["success"], columns["reward"]
    columns["came_to"] = pc.if_else(pc.is_null(reward), reward, pc.coalesce(success, reward))
    counts = [(name, how) for name in NUMBERS for how in _HOW]
    grouped = pa.table(columns).group_by(["key", "group", "task"])
    found = grouped.aggregate([("attempts", "count_distinct"), ("place", "min"), *counts])
    names = {"attempts_count_distinct": "attempts", "place_min": "place"}
    return found.rename_columns([names.get(name, name) for name in found.column_names])


def _added(table: pa.Table, keys: list[str]) -> pa.Table:
    """Return counts added up by keys; with them, what is known of signal."""
    counts = {"attempts": "sum", "place": "min", **{f"{name}_{how}": _HOW[how] for name in NUMBERS for how in _HOW}}
    more = [] if "signal" not in table.column_names else [("signal", "sum"), ("signal", "count"), ("task", "min")]
    found = table.group_by(keys).aggregate([*counts.items(), *more])
    names = {f"{name}_{how}": name for name, how in counts.items()}
    return found.rename_columns([names.get(name, name) for name in found.column_names])


def _line(by: str, counts: dict[str, Any]) -> dict[str, Any]:
    def mean(name: str) -> float | None:
        count = counts[f"{name}_count"]
        return counts[f"{name}_sum"] / count if count else None

    return {
        by: counts["key"],
        **({"task": counts["task_min"]} if by == "group" else {}),
        "attempts": counts["attempts"],
        "success": mean("success"),
        "reward": mean("reward"),
        "lowest": counts["reward_min"],
        "highest": counts["reward_max"],
        "signal": mean("signal"),
        "turns": mean("turns"),
        "tokens": mean("tokens"),
        "failed_calls": int(counts["failed_calls_sum"] or 0),
    }
