"""Rows of a run, a stage or a part that meet a condition, in an order: read part by part, the best of them kept."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import InputError, SettingsError, did_you_mean
from nanoskyrl.stages.core.manifest import PASSES_ON, is_finished, read_manifest
from nanoskyrl.stages.core.runs import Run, step_of
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.trajectory import columns_of
from nanoskyrl.stages.looking.row_facts import DIAGNOSTICS, PARTS, fact, known_facts, needed
from nanoskyrl.stages.looking.where import Condition, read_condition

WITH_ROWS = ("advantage", "score", "rollout")
"""Stages whose rows are trajectories, the one that tells most first."""
SOURCE = "source"
"""Beside the facts that were asked for: the index of the part that a row was found in."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """One part that rows are read from."""

    path: Path
    digest: str | None
    columns: tuple[str, ...]
    step: int | None
    """Of the run; None: outside of one."""
    first_row: int
    """The number of its first row in the output that it is a part of."""
    rows: int

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the part's rows with these columns, or all."""
        return read_part(self.path, self.digest, columns)


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows that were found."""

    table: pa.Table
    """The facts asked for, and SOURCE, `step` and `row`."""
    matched: int
    """Rows that met the condition, of which the table may hold the first ones."""


def sources_of(place: Path) -> list[RowSource]:
    """Return the parts of a run (of each step the stage that tells most), of a stage or a file.

    Raises:
        InputError: nothing of the kind is there, or a manifest cannot be read.
    """
    if place.suffix == ".parquet":
        table = read_part(place)
        return [RowSource(place, None, tuple(table.column_names), None, 0, table.num_rows)]
    if is_finished(place):
        return _of_stage(place, step_of(place.parent))
    run = Run(place)
    found = [source for step in run.steps() for source in of_step(run, step)]
    if not found and place.is_dir() and not run.steps():
        found = of_step(Run(place.parent), step_of(place)) if step_of(place) is not None else []
    if not found:
        raise InputError(f"`{place}` has no rows", hint="Name a run, a step, the directory of a stage, or a part")
    return found


def of_step(run: Run, step: int | None) -> list[RowSource]:
    """Return the parts of the stage of a step that tells most of its rows; [] where none is finished."""
    if step is None:
        return []
    places = (run.stage(step, stage) for stage in WITH_ROWS)
    return next((_of_stage(place, step) for place in places if is_finished(place)), [])


def _of_stage(place: Path, step: int | None) -> list[RowSource]:
    manifest = read_manifest(place)
    table = str(manifest.facts.get(PASSES_ON, manifest.stage))
    if table == "train":
        columns: tuple[str, ...] = ("trajectory_id", "step_index", *DIAGNOSTICS)
    elif table in (*WITH_ROWS, "eval"):
        columns = tuple(column.name for column in columns_of(table))
    else:
        return []
    firsts = accumulate((part.rows for part in manifest.parts), initial=0)
    return [
        RowSource(place / part.name, part.digest, columns, step, first, part.rows)
        for part, first in zip(manifest.parts, firsts, strict=False)
    ]


def select(
    sources: Sequence[RowSource],
    names: Iterable[str],
    *,
    where: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> Selection:
    """Return facts of the rows that meet a condition.

    Args:
        sources: Where they are looked for.
        names: Of facts; one that a source does not have is null there.
        where: A condition, as `where.py` reads it; None: all rows.
        sort: A fact to order by, with `-` before it for the largest first; null comes last. None: as they lie.
        limit: How many rows are returned; None: all.

    Raises:
        SettingsError: the condition or the order names what is no fact, or cannot be worked out.
    """
    known = _known(sources)
    condition = _condition(where, known)
    key, descending = _order(sort, known)
    wanted: tuple[str, ...] = tuple(dict.fromkeys([*names, *filter(None, [key])]))
    kept: list[pa.Table] = []
    matched = held = 0
    for index, source in enumerate(sources):
        found = _facts(source, index, wanted, condition)
        matched += found.num_rows
        if limit is not None and key is None:
            found = found.slice(0, min(found.num_rows, max(0, limit - held)))
        kept.append(found)
        held += found.num_rows
        if key is not None and limit is not None and held > 4 * limit + 1000:
            kept = [_best(kept, key, descending, limit)]
            held = kept[0].num_rows
        elif key is None and condition is None and limit is not None and held >= limit:
            break
    table = _best(kept, key, descending, limit) if key else pa.concat_tables(kept, promote_options="default")
    return Selection(table, matched)


def by_part(sources: Sequence[RowSource], names: Sequence[str], *, where: str | None = None) -> Iterator[pa.Table]:
    """Yield the same of all rows that meet a condition, part by part: nothing of a part is kept.

    Raises:
        SettingsError: the condition names what is no fact of any part, or cannot be worked out.
    """
    condition = _condition(where, _known(sources))
    for index, source in enumerate(sources):
        yield _facts(source, index, tuple(names), condition)


def _known(sources: Sequence[RowSource]) -> set[str]:
    return {name for source in sources for name in known_facts(source.columns)}


def _condition(where: str | None, known: set[str]) -> Condition | None:
    return None if where is None else read_condition(where, known, (PARTS,))


def _order(sort: str | None, known: set[str]) -> tuple[str | None, bool]:
    if sort is None:
        return None, False
    name = sort.removeprefix("-")
    if name not in known and not name.startswith(f"{PARTS}."):
        raise SettingsError(
            f"`--sort` knows no `{name}`", hint=did_you_mean(name, known) or f"It knows {', '.join(sorted(known))}"
        )
    return name, sort.startswith("-")


def _facts(source: RowSource, index: int, wanted: tuple[str, ...], condition: Condition | None) -> pa.Table:
    """Return the facts of the rows of one part that meet the condition."""
    asked = needed(condition.names, source.columns) if condition else []
    columns = list(dict.fromkeys([*asked, *needed(wanted, source.columns)]))
    table = source.read(columns or [source.columns[0]])
    rows = pa.array(range(source.first_row, source.first_row + table.num_rows), pa.int64())
    known = known_facts(source.columns)

    def named(name: str) -> pa.Array:
        if name == "row":
            return rows
        if name == "step":
            return pa.array([source.step] * table.num_rows, pa.int64())
        if name not in known and not name.startswith(f"{PARTS}."):
            return pa.nulls(table.num_rows)
        return fact(table, name)

    if condition is not None:
        mask = condition.holds(named, table.num_rows)
        table, rows = table.filter(mask), rows.filter(mask)
    found = {name: named(name) for name in dict.fromkeys([*wanted, "step", "row"])}
    return pa.table({SOURCE: pa.array([index] * table.num_rows, pa.int64()), **found})


def _best(tables: list[pa.Table], key: str, descending: bool, limit: int | None) -> pa.Table:
    """Return the first rows of several tables by a fact."""
    table = pa.concat_tables(tables, promote_options="default")
    keys = [(key, "descending" if descending else "ascending"), (SOURCE, "ascending"), ("row", "ascending")]
    keys = keys if key not in (SOURCE, "row") else keys[:1]
    order = pc.sort_indices(table, sort_keys=keys)  # what is null comes last
    return table.take(order if limit is None else order[: min(limit, len(order))])


def whole_rows(sources: Sequence[RowSource], found: pa.Table, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of a selection with all their columns, or these, in its order; a part is read once."""
    pieces: dict[int, tuple[list[int], pa.Table]] = {}
    places = list(zip(found.column(SOURCE).to_pylist(), found.column("row").to_pylist(), strict=True))
    for index in dict.fromkeys(index for index, _ in places):
        source = sources[index]
        rows = [row - source.first_row for at, row in places if at == index]
        has = None if columns is None else [name for name in columns if name in source.columns]
        pieces[index] = (rows, source.read(has).take(rows))
    order = {index: iter(range(len(rows))) for index, (rows, _) in pieces.items()}
    taken = [pieces[index][1].slice(next(order[index]), 1) for index, _ in places]
    return pa.concat_tables(taken, promote_options="default") if taken else pa.table({})


def located_rows(place: Path, name: str) -> tuple[list[RowSource], pa.Table]:
    """Return the rows of one trajectory, named by its task or any unique start of its id.

    Raises:
        InputError: there is none, or the start is that of several.
    """
    sources = sources_of(place)
    by_id = _named(sources, "trajectory_id", name)
    ids = dict.fromkeys(by_id.column("trajectory_id").to_pylist())
    if len(ids) > 1:
        shown = ", ".join(list(ids)[:3])
        raise InputError(f"`{name}` begins {len(ids)} ids in `{place}`: {shown}", hint="Give more of the id")
    if ids:
        return sources, by_id
    of_task = _named(sources, "task_id", name)
    if not of_task.num_rows:
        raise InputError(
            f"no trajectory of `{place}` has an id that begins with `{name}`, nor a task of this name",
            hint="`skyrl show RUN --where ...` lists ids and tasks; others are RUN/policies and RUN/evals",
        )
    return sources, of_task


def _named(sources: Sequence[RowSource], column: str, name: str) -> pa.Table:
    found = [pa.table({"trajectory_id": pa.array([], pa.string()), "task_id": pa.array([], pa.string())})]
    for index, source in enumerate(sources):
        if column in source.columns:
            table = _facts(source, index, ("trajectory_id", "task_id", "sample", "reward", "success"), None)
            values = table.column(column)
            is_it = pc.starts_with(values, name) if column == "trajectory_id" else pc.equal(values, name)
            found.append(table.filter(is_it))
    return pa.concat_tables(found, promote_options="default")
