"""Parquet files of one table: how they are encoded, read and checked against their digest.

zstd everywhere, a dictionary for words and masks, and byte-stream split for floats and
token ids, whose bytes compress better apart. A part is read only if its digest is the
one in the manifest. `benchmarks/shards.py` measures it.
"""

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanoskyrl.stages.core.digests import digest_bytes
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.manifest import Manifest, Part
from nanoskyrl.stages.core.storage import file_bytes, write_whole
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import RENAMED, SCHEMA_KEY, SCHEMA_VERSION

COMPRESSION_LEVEL = 1
"""Higher levels take longer and gain nothing here: what is split is noise in its low bytes."""
TOKEN_IDS = ("prompt_ids.list.element", "response_ids.list.element")
"""Split like floats: frequent tokens have small ids, so the high bytes are nearly all 0."""


VERSION = re.compile("[0-9]{1,9}")
"""A schema version in a file's metadata; int would take other digits, too, but not any number of them."""


def part_name(index: int) -> str:
    """Return `part-00000.parquet` and its successors."""
    return f"part-{index:05d}.parquet"


def _leaves(path: str, of: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the Parquet path and type of every leaf of a column."""
    if pa.types.is_list(of):
        yield from _leaves(f"{path}.list.element", of.value_type)
    elif pa.types.is_struct(of):
        for child in of:
            yield from _leaves(f"{path}.{child.name}", child.type)
    else:
        yield path, of


def write_part(path: Path, table: pa.Table) -> None:
    """Put one part in place, whole."""
    write_whole(path, part_bytes(table))


def part_bytes(table: pa.Table) -> bytes:
    """Return the contents of a part's file."""
    buffer = io.BytesIO()
    leaves = [leaf for field in table.schema for leaf in _leaves(field.name, field.type)]
    split = [name for name, of in leaves if pa.types.is_floating(of) or name in TOKEN_IDS]
    others = [name for name, _ in leaves if name not in split]
    pq.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=others,  # pyright: ignore[reportArgumentType] # the stubs know bool only
        use_byte_stream_split=split,  # pyright: ignore[reportArgumentType]
        write_statistics=False,
    )
    return buffer.getvalue()


def read_part(path: Path, digest: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of one part.

    Args:
        path: The file.
        digest: What its bytes must hash to; None skips the check.
        columns: Which to read; None reads all.

    Raises:
        InputError: the file is missing, its bytes differ from the digest, it is not Parquet,
            lacks a column, or was written under a newer schema.
    """
    try:
        data = file_bytes(path)
    except FileNotFoundError as error:
        raise InputError(f"`{path}` is missing", hint="Run the stage that writes it again, with `--force`") from error
    except OSError as error:
        raise InputError(f"`{path}` cannot be read: {error.strerror or error}", hint="Name a Parquet file") from error
    if digest is not None and digest_bytes(data) != digest:
        raise InputError(
            f"`{path}` is corrupt: its digest is not the one in the manifest",
            hint="Run the stage that writes it again, with `--force`",
        )
    with told_as(
        InputError,
        f"`{path}` is not a readable Parquet file",
        pa.ArrowException,
        OSError,
        UnicodeDecodeError,
        hint="Run the stage that writes it again",
    ):
        file = pq.ParquetFile(pa.BufferReader(data))
        renamed = _renamed_since(file.schema_arrow, path)
        wanted = None if columns is None else [renamed.get(name, name) for name in columns]
        # Without threads: pyarrow's pool can abort a process that exits (apache/arrow#39162), and is no faster.
        # Not by `read_table`, which starts one of the pool's threads whatever it is given.
        table = file.read(columns=wanted, use_threads=False)
        if digest is None:  # else its bytes are those that were written
            table.validate(full=True)
    if renamed:
        now = {then: name for name, then in renamed.items()}
        table = table.rename_columns([now.get(name, name) for name in table.column_names])
        table = table.replace_schema_metadata({SCHEMA_KEY: str(SCHEMA_VERSION)})
    if columns is None:
        return table
    if missing := [name for name in columns if name not in table.column_names]:
        raise InputError(f"`{path}` has no column `{missing[0]}`", hint="Run the stage that writes it again")
    return table.select(list(columns))


def read_checked(directory: Path, stage: str, part: Part) -> pa.Table:
    """Return a part that keeps every promise of shards of `stage`; raises as `read_part` and `check` do."""
    table = read_part(directory / part.name, part.digest)
    check(table, stage)
    return table


def _renamed_since(schema: pa.Schema, path: Path) -> dict[str, str]:
    """Return the columns that had other names when a part was written: the name now, and then.

    Raises:
        InputError: it was written under a newer schema, or says none that is a number.
    """
    version = (schema.metadata or {}).get(SCHEMA_KEY, b"0").decode(errors="replace")
    if not VERSION.fullmatch(version):
        raise InputError(
            f"`{path}` has the schema version {version!r}, no number", hint="Run the stage that writes it again"
        )
    if int(version) > SCHEMA_VERSION:
        raise InputError(
            f"`{path}` has schema version {int(version)}; this nanoskyrl reads up to {SCHEMA_VERSION}",
            hint="Install a newer nanoskyrl",
        )
    return {now: then for then, now in RENAMED.items() if then in schema.names} if int(version) == 1 else {}


def read_parts(directory: Path, manifest: Manifest, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the table of each part, in order, each checked against its digest."""
    for part in manifest.parts:
        yield read_part(directory / part.name, part.digest, columns)
