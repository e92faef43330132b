"""Rows of a file or a folder, whatever it holds: JSON lines or an array, Parquet, CSV, Arrow, or what `datasets` reads.

What a file is is known by its first bytes, and only where those say nothing by its name. A folder is what
`save_to_disk` or the hub leaves. Arrow files are memory-mapped; Parquet is read without a pool of threads.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from nanoskyrl.stages.core.errors import InputError, told_as

Place = tuple[str, dict[str, Any]]
"""Where a row stands, for messages, and the row."""

COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
PARQUET, ARROW = b"PAR1", b"ARROW1"
ELSE = {
    b"PK\x03\x04": "a zip archive, or a workbook", b"%PDF": "a PDF", b"SQLite": "an SQLite database",
    b"\x89PNG": "a picture", b"\x28\xb5\x2f\xfd": "a file compressed by zstd",
    b"version https://git-lfs": "a pointer of git-lfs, and not the file itself",
    b"<!DOCTYPE": "a page of HTML", b"<html": "a page of HTML",
    b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16",
    b"\x80\x04": "a pickle", b"\x80\x05": "a pickle",
}  # fmt: skip
"""What files begin with that hold no rows."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
LONGEST_FIELD = 1 << 27
"""Characters of one CSV field; Python's own limit is shorter than a SWE-bench patch may be."""
HINT = "Give JSON lines (.jsonl), a JSON array, .parquet, .csv or .arrow, or a folder that `datasets` reads"


def file_rows(path: Path) -> Iterator[Place]:
    """Yield the rows of a file, each with the place that an error names.

    Raises:
        InputError: it cannot be read as what it is, or is nothing that holds rows.
    """
    with path.open("rb") as file:
        head = file.read(64)
    for magic, opened in COMPRESSED.items():
        if head.startswith(magic):
            says = f"`{path}` cannot be decompressed"
            with (
                told_as(InputError, says, OSError, EOFError, lzma.LZMAError, hint="Write it again"),
                path.open("rb") as file,
                opened(file) as inner,
            ):
                data = inner.read()
            yield from _text_rows(data, path, path.with_suffix("").suffix)
            return
    if head.startswith(PARQUET):
        yield from _parquet_rows(path)
    elif head.startswith(ARROW) or path.suffix.lower() in (".arrow", ".feather"):
        yield from _arrow_rows(path)
    else:
        for magic, name in ELSE.items():
            if head.startswith(magic):
                raise InputError(f"`{path}` is {name}", hint=HINT)
        if path.suffix.lower() in (".parquet", ".pq"):
            raise InputError(f"`{path}` cannot be read as Parquet: it does not begin as Parquet does", hint=HINT)
        yield from _text_rows(path.read_bytes(), path, path.suffix)


def _text_rows(data: bytes, path: Path, suffix: str) -> Iterator[Place]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"`{path}` is not UTF-8 text: {error.reason}", hint=HINT) from error
    if (separator := SEPARATORS.get(suffix.lower())) is not None:
        yield from _csv_rows(text, path, separator)
    elif suffix.lower() == ".json" and text.lstrip().startswith("["):
        yield from _array_rows(text, path)
    else:
        yield from _line_rows(text, path)


def json_rows(path: Path) -> Iterator[Place]:
    """Yield each object of a file of JSON lines, with the place that an error names.

    Raises:
        InputError: the file is no UTF-8 text, or a line is no JSON object.
    """
    yield from _text_rows(path.read_bytes(), path, ".jsonl")


def _line_rows(text: str, path: Path) -> Iterator[Place]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"line {number} of `{path}`"
        with told_as(
            InputError, f"{place} is not JSON", ValueError, RecursionError, hint=f"Write one JSON object a line. {HINT}"
        ):
            row = json.loads(line)
        yield place, _object(row, place)


def _array_rows(text: str, path: Path) -> Iterator[Place]:
    with told_as(InputError, f"`{path}` is not JSON", ValueError, RecursionError, hint="Write an array of objects"):
        rows = json.loads(text)
    for number, row in enumerate(rows):
        place = f"item {number} of `{path}`"
        yield place, _object(row, place)


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{place} is not a JSON object", hint="Write one JSON object a line")
    return row


def _csv_rows(text: str, path: Path, separator: str) -> Iterator[Place]:
    """Yield rows of texts: nothing is taken for a number, a date or a missing value."""
    csv.field_size_limit(LONGEST_FIELD)
    with told_as(InputError, f"`{path}` cannot be read as CSV", csv.Error, hint="Save it as UTF-8 CSV"):
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
        for number, row in enumerate(reader):
            if None in row or None in row.values():
                raise InputError(
                    f"row {number} of `{path}` has not as many fields as the header", hint="Check its quotes"
                )
            yield f"row {number} of `{path}`", dict(row)


def _parquet_rows(path: Path) -> Iterator[Place]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        told_as(
            InputError,
            f"`{path}` cannot be read as Parquet",
            pa.ArrowException,
            OSError,
            hint="Write it again, or use JSON lines",
        ),
        path.open("rb") as file,
    ):
        # Without a pool, and without reading ahead in one: a pool that is still at work at exit ends the process.
        table = pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)
    yield from numbered(table.to_pylist(), path)


def _arrow_rows(path: Path) -> Iterator[Place]:
    import pyarrow as pa

    def table() -> pa.Table:
        source = pa.memory_map(str(path))
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()

    with told_as(InputError, f"`{path}` cannot be read as Arrow", pa.ArrowException, OSError, hint="Write it again"):
        rows = table()
    for batch in rows.to_batches(max_chunksize=1024):
        yield from numbered(batch.to_pylist(), path)


def folder_rows(path: Path, split: str) -> Iterator[Place]:
    """Yield the rows of a folder: what `save_to_disk` left, or files as the hub keeps them.

    Where it has a split of this name that is read; where it has a single one, that.

    Raises:
        InputError: it holds no data, or several splits, and none of this name.
    """
    import datasets

    datasets.disable_progress_bars()
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found: Any = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path))
    except Exception as error:  # the library and its readers raise what they like
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"`{path}` is a folder that holds no data set: {type(error).__name__}: {reason}", hint=HINT
        ) from error
    if isinstance(found, dict):
        if split not in found and len(found) != 1:
            raise InputError(
                f"`{path}` has no split `{split}`, but {', '.join(found)}",
                hint=f"Name the folder or the file of one, or call one of them {split}",
            )
        found = found[split] if split in found else next(iter(found.values()))
    yield from numbered(found, path)


def numbered(rows: Iterable[Any], name: Path | str) -> Iterator[Place]:
    """Yield rows with their number and where they come from."""
    for number, row in enumerate(rows):
        yield f"row {number} of `{name}`", dict(row)
