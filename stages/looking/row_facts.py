"""Facts of rows for people: columns of the table, and what follows from them, such as calls, turns and advantages.

`show --where`, `--sort` and `--by`, the report and the browser ask for facts by name; only the columns that a fact
needs are read, part by part.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.envs.graders.kinds import NO_ANSWER
from nanoskyrl.stages.core.rows import one_chunk, row_arrays
from nanoskyrl.stages.core.trajectory import COLUMNS

PARTS = "part"
"""Before the name of a part of the reward, as in `part.answer`."""
NO_CALLS, FAILED = "[]", '"ok": false'
"""What a turn without calls records, and what is part of the text of every call that failed."""
PLAIN = tuple(column.name for column in COLUMNS if not pa.types.is_nested(column.type))
DIAGNOSTICS = ("tokens", "ratio_mean", "ratio_max", "kl", "entropy", "share")
"""Numbers of a row that `train` writes."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What follows from columns of a row."""

    needs: tuple[str, ...]
    work_out: Callable[[pa.Table], pa.Array]


def recorded_calls(table: pa.Table) -> list[list[dict[str, Any]]]:
    """Return what each row records of its calls, each with its `turn`; what cannot be read is left out."""
    column = one_chunk(table.column("turns"))
    texts = pc.struct_field(column.flatten(), "tool_calls").to_pylist()
    found, at = [], 0
    for length in pc.fill_null(pc.list_value_length(column), 0).to_pylist():
        found.append(
            [
                {"turn": turn, **call}
                for turn, text in enumerate(texts[at : at + length])
                if text != NO_CALLS
                for call in _read_calls(text)
            ]
        )
        at += length
    return found


def calls_by_row(table: pa.Table) -> list[list[dict[str, Any]]]:
    """Return the tool calls of each row; a missing answer, which is recorded beside them, is none."""
    return [[call for call in calls if call.get("error") != NO_ANSWER] for calls in recorded_calls(table)]


def _read_calls(text: str | None) -> list[dict[str, Any]]:
    try:
        calls = json.loads(text or NO_CALLS)
    except (ValueError, RecursionError):
        return []
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _counted(
    table: pa.Table, may_count: Callable[[pa.Array], pa.Array], counts: Callable[[dict[str, Any]], bool]
) -> pa.Array:
    """Return how many calls of each row count; only texts that may hold one are read."""
    column = one_chunk(table.column("turns"))
    texts = pc.struct_field(column.flatten(), "tool_calls")
    mask = may_count(texts)
    found = np.zeros(len(column), np.int64)
    rows = pc.list_parent_indices(column).filter(mask).to_pylist()
    for row, text in zip(rows, texts.filter(mask).to_pylist(), strict=True):
        found[row] += sum(counts(call) for call in _read_calls(text) if call.get("error") != NO_ANSWER)
    return pa.array(found)


def _advantages(table: pa.Table) -> pa.Array:
    """Return the mean over a row's sampled tokens; null where the row is not kept."""
    values = []
    lists = (row_arrays(table.column(name)) for name in ("advantages", "loss_mask"))
    for of_row, mask in zip(*lists, strict=True):
        on = None if of_row is None or mask is None else of_row[mask != 0]
        values.append(None if on is None or not len(on) else float(np.mean(on, dtype=np.float64)))
    return pa.array(values, pa.float64())


DERIVED: Mapping[str, Fact] = {
    "turns": Fact(("turns",), lambda table: one_chunk(pc.list_value_length(table.column("turns")))),
    "tool_calls": Fact(("turns",), partial(
        _counted, may_count=lambda texts: pc.not_equal(texts, NO_CALLS), counts=lambda call: True,
    )),
    "failed_calls": Fact(("turns",), partial(
        _counted, may_count=lambda texts: pc.match_substring(texts, FAILED), counts=lambda call: not call.get("ok"),
    )),
    "advantage": Fact(("advantages", "loss_mask"), _advantages),
    "tokens": Fact(("completion_tokens",), lambda table: one_chunk(table.column("completion_tokens"))),
}  # fmt: skip
GIVEN = ("step", "row")
"""Facts of where a row lies, which whoever reads it knows."""


def known_facts(columns: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the facts that follow from a table with these columns, each with the columns that it needs."""
    columns = set(columns)
    plain = {name: (name,) for name in (*PLAIN, *DIAGNOSTICS) if name in columns}
    derived = {name: fact.needs for name, fact in DERIVED.items() if columns.issuperset(fact.needs)}
    return {**dict.fromkeys(GIVEN, ()), **derived, **plain}


def needed(names: Iterable[str], columns: Iterable[str]) -> list[str]:
    """Return the columns that facts of these names are worked out from, in their order in the table."""
    known = known_facts(columns)
    wanted = {
        column
        for name in names
        for column in (("reward_parts",) if name.startswith(f"{PARTS}.") else known.get(name, ()))
    }
    return [column for column in columns if column in wanted]


def fact(table: pa.Table, name: str) -> pa.Array:
    """Return a fact of each row."""
    if name.startswith(f"{PARTS}."):
        return _part(table, name.removeprefix(f"{PARTS}."))
    if name in table.column_names and not pa.types.is_nested(table.schema.field(name).type):
        return one_chunk(table.column(name))
    return DERIVED[name].work_out(table)


def _part(table: pa.Table, name: str) -> pa.Array:
    if "reward_parts" not in table.column_names:
        return pa.nulls(table.num_rows, pa.float64())
    found = (json.loads(text or "{}").get(name) for text in table.column("reward_parts").to_pylist())
    return pa.array([value if isinstance(value, int | float) else None for value in found], pa.float64())
