"""Rows of two outputs side by side, by trajectory and step: part by part, and only columns whose bytes differ.

The writer of parts is deterministic, so columns of equal bytes are equal and are never decoded. Parts that do not
hold the same rows in the same order are matched by the ids of their rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.trajectory import RENAMED
from nanoskyrl.stages.looking.diff_columns import ColumnDifference, Decode, compare_column
from nanoskyrl.stages.looking.ledger import keys_of

KEYS = ("trajectory_id", "step_index")
NAMES = ("task_id", "sample")
"""What a row is called by, beside its id."""
ID_SHOWN = 12
"""Characters of an id; `show` and `replay` take any unique start."""


@dataclass(slots=True)
class RowsDifference:
    """How the rows of two outputs differ."""

    rows: int = 0
    """That both have."""
    columns: dict[str, ColumnDifference] = field(default_factory=dict)
    only_ours: list[str] = field(default_factory=list)
    """Names of rows."""
    only_theirs: list[str] = field(default_factory=list)
    reordered: int = 0
    """Rows that come before others in the first, and behind them in the second."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what differs and how."""
        for where, names in (("the first", self.only_ours), ("the second", self.only_theirs)):
            if names:
                yield "rows", f"{len(names)} in {where} alone, such as {names[0][:ID_SHOWN]}"
        if self.reordered:
            yield "order", f"{self.reordered} of {self.rows} rows lie in another order"
        for name, found in self.columns.items():
            if found.rows:
                yield name, found.in_words(self.rows)


def compare_rows(
    ours: tuple[Path, Manifest], theirs: tuple[Path, Manifest], tolerance: float, decode: Decode | None
) -> RowsDifference:
    """Return how the rows of two outputs differ.

    Args:
        ours: A directory and its manifest.
        theirs: The other.
        tolerance: Largest difference of numbers that counts as none.
        decode: Of token ids; None: only their numbers are shown.

    Raises:
        InputError: a part is missing, or is no Parquet file.
    """
    found = RowsDifference()
    parts = [[directory / part.name for part in manifest.parts] for directory, manifest in (ours, theirs)]
    apart: list[list[Path]] = [parts[0][len(parts[1]) :], parts[1][len(parts[0]) :]]
    for a, b in zip(*parts, strict=False):
        if a.is_file() and b.is_file() and a.stat().st_size == b.stat().st_size and digest_file(a) == digest_file(b):
            found.rows += pq.ParquetFile(a).metadata.num_rows
        elif not _compare_aligned(a, b, found, tolerance, decode):
            apart[0].append(a)
            apart[1].append(b)
    if any(apart):
        _compare_by_id(sorted(apart[0]), sorted(apart[1]), found, tolerance, decode)
    return found


def _compare_aligned(a: Path, b: Path, found: RowsDifference, tolerance: float, decode: Decode | None) -> bool:
    """Compare two parts if they hold the same rows in the same order, and say whether they do."""
    ids = [read_part(path, columns=KEYS) for path in (a, b)]
    if not ids[0].equals(ids[1]):
        return False
    names = changed_columns(a, b)
    first, second = (read_part(path) if names is None else _columns_of(path, names) for path in (a, b))
    _compare_tables(first, second, found, tolerance, decode)
    return True


def _columns_of(path: Path, names: Sequence[str]) -> pa.Table:
    known = pq.read_schema(path).names
    return read_part(path, columns=list(dict.fromkeys([*KEYS, *(name for name in NAMES if name in known), *names])))


def changed_columns(a: Path, b: Path) -> list[str] | None:
    """Return the columns of two parts whose bytes differ; None where bytes do not tell: another schema or layout."""
    files = pq.ParquetFile(a), pq.ParquetFile(b)
    first, second = (file.metadata for file in files)
    schemas, layout = [file.schema_arrow for file in files], ("created_by", "num_row_groups", "num_rows")
    others = schemas[0] != schemas[1] or any(getattr(first, of) != getattr(second, of) for of in layout)
    if others or set(RENAMED) & set(schemas[0].names):
        return None
    changed: dict[str, None] = {}
    with a.open("rb") as ours, b.open("rb") as theirs:
        for group in range(first.num_row_groups):
            for column in range(first.num_columns):
                chunks = [metadata.row_group(group).column(column) for metadata in (first, second)]
                spans = [(_start(chunk), chunk.total_compressed_size) for chunk in chunks]
                name = chunks[0].path_in_schema.split(".")[0]
                if name in changed:
                    continue
                if spans[0][1] != spans[1][1] or _read(ours, *spans[0]) != _read(theirs, *spans[1]):
                    changed[name] = None
    return list(changed)


def _start(chunk: pq.ColumnChunkMetaData) -> int:
    return chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _compare_tables(
    ours: pa.Table, theirs: pa.Table, found: RowsDifference, tolerance: float, decode: Decode | None
) -> None:
    """Compare tables of the same rows."""
    found.rows += ours.num_rows
    for name in dict.fromkeys([*ours.column_names, *theirs.column_names]):
        if name in KEYS:
            continue
        difference = found.columns.setdefault(name, ColumnDifference())
        if name not in ours.column_names or name not in theirs.column_names:
            where = "first" if name in ours.column_names else "second"
            difference.first = f"a column of the {where} alone"
            difference.rows += ours.num_rows
        elif ours.schema.field(name).type != theirs.schema.field(name).type:
            types = (str(table.schema.field(name).type) for table in (ours, theirs))
            difference.first = f"type {' -> '.join(types)}"
            difference.rows += ours.num_rows
        else:
            columns = ours.column(name), theirs.column(name)
            compare_column(name, *columns, tolerance, difference, partial(_name, ours), decode)


def _name(table: pa.Table, row: int) -> str:
    """Return what a row is called: the start of its id, its step where there are several, its task and sample."""
    trajectory, step = (table.column(name)[row].as_py() for name in KEYS)
    task = ", ".join(f"{name} {table.column(name)[row].as_py()}" for name in NAMES if name in table.column_names)
    more = f" step {step}" * (step > 0) + f" ({task.replace('task_id ', '')})" * bool(task)
    return f"{str(trajectory)[:ID_SHOWN]}{more}"


def _compare_by_id(
    ours: list[Path], theirs: list[Path], found: RowsDifference, tolerance: float, decode: Decode | None
) -> None:
    """Compare parts that hold other rows, or the same in another order."""
    where = {
        key: (index, row)
        for index, path in enumerate(theirs)
        for row, key in enumerate(keys_of(read_part(path, columns=KEYS)))
    }

    @lru_cache(maxsize=2)  # parts that are cut elsewhere overlap with two
    def read(path: Path) -> pa.Table:
        return read_part(path)

    highest = (0, 0)
    for path in ours:
        table = read_part(path)
        rows: dict[int, list[tuple[int, int]]] = {}
        for row, key in enumerate(keys_of(table)):
            if (at := where.pop(key, None)) is None:
                found.only_ours.append(_name(table, row))
            else:
                rows.setdefault(at[0], []).append((row, at[1]))
                found.reordered += at < highest
                highest = max(highest, at)
        for index, pairs in rows.items():
            first, second = (list(side) for side in zip(*pairs, strict=True))
            _compare_tables(table.take(first), read(theirs[index]).take(second), found, tolerance, decode)
    for index, others in grouped(where.values()).items():
        table = read(theirs[index])
        found.only_theirs += [_name(table, row) for row in others]
