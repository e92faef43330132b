"""Rows of the trajectory table in Python, and the tables they make: built from flat buffers, checked, read back."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import copyreg
import dataclasses
import json
import marshal
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.metrics import finite
from nanoskyrl.stages.core.safe_text import struck, struck_values
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import (
    TOKEN_COLUMNS,
    TOOL_CALL_FIELDS,
    TURN_TYPE,
    WITHHELD,
    Column,
    ToolCall,
    Trajectory,
    Turn,
    columns_of,
    schema_of,
    tokens,
)

JSON_COLUMNS = {"messages": "[]", "metadata": "{}", "reward_parts": "{}"}
"""Columns that hold JSON, and what stands for a null."""
UNCHANGING = (str, int, float, bool, type(None))
"""Types of fields that nobody can change in a row, whose fields cannot be set."""
PIECE = 64
"""Rows of a table that are pickled together."""
TURN_FIELDS = [field.name for field in TURN_TYPE]
DEFAULTS = {
    f.name: None if f.default is f.default_factory is dataclasses.MISSING
    else f.default if f.default_factory is dataclasses.MISSING else f.default_factory
    for f in dataclasses.fields(Trajectory)
}  # fmt: skip
"""Of fields whose column a stage before `score` did not write."""


_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode  # `dumps` makes an encoder for each call


def to_json(value: Any) -> str:
    """Return JSON text for a column; a lone surrogate, which UTF-8 cannot hold, is kept as an escape."""
    try:
        text = _encoded(value)
    except ValueError:  # NaN and infinity are not JSON
        value = finite(value)
        text = json.dumps(value, ensure_ascii=False)
    if struck(text) != text:  # not the JSON itself: what is struck out could take a sign of it along
        value = struck_values(value)
        text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def texts_of(values: Iterable[Any]) -> list[str]:
    """Return what `to_json` does of each value; equal ones are written once."""
    texts: dict[bytes, str] = {}

    def text(value: Any) -> str:
        key = marshal.dumps(value, 2)  # 0.0, -0.0 and 0 are equal, and not one text
        if key not in texts:
            texts[key] = to_json(value)
        return texts[key]

    return [text(value) for value in values]


def from_json(text: str) -> Any:
    """Return the value of JSON text; raises as `json.loads` does."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:  # ten times as fast as `json`, and takes no NaN and no lone surrogate
        return json.loads(text)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def clean_text(text: str) -> str:
    """Return text that may be stored: without our keys, and lone surrogates, which UTF-8 cannot hold, become `?`."""
    text = struck(text)
    return text if _encodable(text) else text.encode(errors="replace").decode()


def list_column(
    rows: Sequence[np.ndarray | None], of: pa.DataType, valid: Sequence[np.ndarray | None] | None = None
) -> pa.Array:
    """Build a list column from one flat buffer and its offsets.

    Args:
        rows: one array a row, or None for a null row.
        of: the type of an element.
        valid: one boolean array a row, False where the element is null; None: all valid.
    """
    dtype = of.to_pandas_dtype()
    lengths = np.fromiter((0 if row is None else len(row) for row in rows), np.int64, len(rows))
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    # Not cast here: Arrow refuses numbers that do not fit the type, where numpy would wrap them.
    flat = np.concatenate([np.asarray(row) for row in rows if row is not None and len(row)] or [np.zeros(0, dtype)])
    null_elements = None
    if valid is not None:
        null_elements = ~np.concatenate(
            [np.asarray(row, bool) for row in valid if row is not None] or [np.zeros(0, bool)]
        )
    null_rows = np.fromiter((row is None for row in rows), bool, len(rows))
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(flat, of, mask=null_elements),
        type=tokens(of),
        mask=pa.array(null_rows) if null_rows.any() else None,
    )


def to_table(rows: Iterable[Trajectory], stage: str = "rollout") -> pa.Table:
    """Build and check the Arrow table of these rows, with the columns of `rollout` or `score`."""
    rows = list(rows)
    _check_lengths(rows)
    with told_as(
        InputError, "a row does not fit the table", pa.ArrowInvalid, pa.ArrowTypeError,
        hint="docs/trajectory.md lists the types",
    ):  # fmt: skip
        arrays = [_to_array(rows, column) for column in columns_of(stage)]
    table = pa.Table.from_arrays(arrays, schema=schema_of(stage))
    check(table, stage)
    return table


def _to_array(rows: Sequence[Trajectory], column: Column) -> pa.Array:
    values = [getattr(row, column.name) for row in rows]
    if column.name == "rollout_logprobs":
        valid = [None if row.rollout_logprobs is None or row.loss_mask is None else row.loss_mask != 0 for row in rows]
        return list_column(values, pa.float32(), valid)
    if column.name in TOKEN_COLUMNS:
        return list_column(values, column.type.value_type)
    if column.name == "turns":
        return pa.array([[_turn_to_dict(turn) for turn in turns] for turns in values], column.type)
    if column.name in JSON_COLUMNS:
        return pa.array([to_json(value) for value in values], pa.string())
    if column.type == pa.string():
        return pa.array([None if value is None else clean_text(value) for value in values], pa.string())
    return pa.array(values, column.type)


def _check_lengths(rows: Sequence[Trajectory]) -> None:
    """Refuse rows whose token lists do not fit, before they are put into one buffer."""
    for row in rows:
        for name in ("loss_mask", "rollout_logprobs"):
            found, wanted = getattr(row, name), row.response_ids
            if found is not None and (wanted is None or len(found) != len(wanted)):
                raise InputError(
                    f"trajectory {row.trajectory_id}: `{name}` has {len(found)} elements and response_ids "
                    f"{'is null' if wanted is None else len(wanted)}",
                    hint="Token lists of a row are null or equally long",
                )
        if row.rollout_logprobs is not None and row.loss_mask is None:
            raise InputError(
                f"trajectory {row.trajectory_id} has rollout_logprobs without a loss_mask", hint="Write both"
            )


def calls_to_json(calls: Sequence[ToolCall]) -> str:
    """Return the calls of a turn as the table keeps them."""
    return to_json([{name: getattr(call, name) for name in TOOL_CALL_FIELDS} for call in calls])


def _turn_to_dict(turn: Turn) -> dict[str, Any]:
    return {
        "action": clean_text(turn.action),
        "observation": clean_text(turn.observation),
        "reward": turn.reward,
        "done": turn.done,
        "tool_calls": calls_to_json(turn.tool_calls),
        "first_token": turn.first_token,
        "token_count": turn.token_count,
    }


def from_table(table: pa.Table) -> Iterator[Trajectory]:
    """Yield the rows of a table as `Trajectory`; columns of `advantage` are left aside, and withheld text is empty.

    A field is read when it is asked for, so what nobody looks at costs nothing.

    Raises:
        BrokenRow: by the field that is asked for.
    """
    yield from StoredRows(table)


class BrokenRow(InputError):
    """A row does not hold what its columns mean."""


class StoredTrajectory(Trajectory):
    """A row of a table; changed copies of it hold their fields themselves."""

    __slots__ = ("_index", "_read", "_rows")

    def __getattr__(self, name: str) -> Any:
        """Read a field that was not read yet."""
        if name == "_rows":  # of a copy, which has its fields
            raise AttributeError(name)
        rows = self._rows
        value = (rows.columns.get(name) or rows.column(name))[self._index]
        object.__setattr__(self, name, value)
        if not isinstance(value, UNCHANGING):
            object.__setattr__(self, "_read", True)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a row of a piece of the table, which is pickled once for all its rows, if no list of it was read.

        What was read may have been changed since, and a copy has that, too.
        """
        rows = getattr(self, "_rows", None)
        if rows is not None and not self._read:
            return operator.getitem, (rows.piece(self._index // PIECE), self._index % PIECE)
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # pyright: ignore[reportAttributeAccessIssue]

    def __copy__(self) -> Trajectory:
        """Return another view of the row; of one that was read, a row with the same fields."""
        return (
            dataclasses.replace(self) if getattr(self, "_rows", None) is None or self._read else self._rows[self._index]
        )

    @property
    def last_action(self) -> str:
        """What the policy wrote last; no turn is made for that."""
        rows = getattr(self, "_rows", None)
        return super().last_action if rows is None else rows.last_actions[self._index]


class StoredRows(Sequence[Trajectory]):
    """The rows of a table, each made when it is asked for, as is each column as Python values."""

    def __init__(self, table: pa.Table) -> None:
        """Read nothing yet."""
        self._table, self._count = table, table.num_rows
        self.columns: dict[str, Any] = {}
        """Those that were made; nothing that is false."""
        self._pieces: dict[int, StoredRows] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the table as bytes of its own rows alone, which a slice's buffers are not."""
        return _unpickled, (self._bytes,)

    @cached_property
    def _bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._table.schema) as stream:
            stream.write_table(self._table)
        return sink.getvalue().to_pybytes()

    def piece(self, place: int) -> "StoredRows":
        """Return the rows of a piece of the table."""
        if place not in self._pieces:
            self._pieces[place] = StoredRows(self._table.slice(place * PIECE, PIECE))
        return self._pieces[place]

    def __len__(self) -> int:
        """Count the rows."""
        return self._count

    def __getitem__(self, index: int) -> Trajectory:  # pyright: ignore[reportIncompatibleMethodOverride] # no slices
        """Return a row, as `from_table` does."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        row = object.__new__(StoredTrajectory)
        object.__setattr__(row, "_rows", self)
        object.__setattr__(row, "_index", index)
        object.__setattr__(row, "_read", False)
        return row

    @cached_property
    def last_actions(self) -> list[str]:
        """What the policy wrote last in each row."""
        turns = one_chunk(self._table.column("turns"))
        ends, actions = turns.offsets.to_numpy(), turns.values.field("action")
        some = (ends[1:] > ends[:-1]) & turns.is_valid().to_numpy(zero_copy_only=False)
        return pc.fill_null(actions.take(pa.array(ends[1:] - 1, mask=~some)), "").to_pylist()

    def column(self, name: str) -> Any:
        """Make a column, whose items are those of its rows."""
        if name not in DEFAULTS:
            raise AttributeError(f"a trajectory has no `{name}`")
        if name not in self._table.column_names:
            default = DEFAULTS[name]
            made: Any = [default() if callable(default) else default for _ in range(self._count)]
        elif name in TOKEN_COLUMNS:
            made = row_arrays(self._table.column(name))
        elif name == "turns":
            made = _Turns(self._table.column(name))
        else:
            made = self._table.column(name).to_pylist()
            if name in JSON_COLUMNS:
                made = _Json(made, JSON_COLUMNS[name])
            elif name in ("prompt", "response"):
                made = ["" if value is None else value for value in made]
        self.columns[name] = made
        return made


def _unpickled(data: bytes) -> StoredRows:
    with pa.ipc.open_stream(data) as stream:
        return StoredRows(stream.read_all())


class _Json:
    """The values of a column of JSON, each read when it is asked for."""

    def __init__(self, texts: list[str | None], null: str) -> None:
        self._texts, self._null = texts, null

    def __getitem__(self, row: int) -> Any:
        text = self._texts[row]
        try:
            return from_json(self._null if text is None else text)
        except (ValueError, RecursionError) as error:
            raise _broken(row, error) from error


def _broken(row: int, error: Exception) -> BrokenRow:
    return BrokenRow(
        f"row {row} does not hold what its columns mean: {error}", hint="Run the stage that wrote it again"
    )


class _Turns:
    """The turns of each row of a column, made when they are asked for; a row without any has none."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = one_chunk(column)
        ends = array.offsets.to_numpy()
        turns = array.values.slice(ends[0], ends[-1] - ends[0])
        self._ends = (ends - ends[0]).tolist()
        self._turns = list(zip(*(turns.field(name).to_pylist() for name in TURN_FIELDS), strict=True))
        self._null = array.is_null().to_pylist()

    def __getitem__(self, row: int) -> list[Turn]:
        if self._null[row]:
            return []
        try:
            return [_turn(*turn) for turn in self._turns[self._ends[row] : self._ends[row + 1]]]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _broken(row, error) from error


def _turn(
    action: str, observation: str, reward: float | None, done: bool, calls: str, first: int | None, count: int | None
) -> Turn:
    made = [] if calls == "[]" else [ToolCall(**call) for call in from_json(calls)]
    return Turn(
        action=action, observation=observation, reward=reward, done=done, tool_calls=made, first_token=first,
        token_count=count,
    )  # fmt: skip


def one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # an empty column has no chunk to combine
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    return array


def row_arrays(column: pa.ChunkedArray | pa.Array) -> list[np.ndarray | None]:
    """Return the lists of a column as numpy views, null rows as None and null elements as NaN (or 0 in integers)."""
    array = one_chunk(column)
    flat, offsets = flat_values(array), array.offsets.to_numpy()
    null = array.is_null().to_numpy(zero_copy_only=False)
    return [None if null[i] else flat[offsets[i] : offsets[i + 1]] for i in range(len(array))]


def values_in(table: pa.Table, name: str) -> list[Any]:
    """Return the values of a column, nulls where the table does not have it."""
    return table.column(name).to_pylist() if name in table.column_names else [None] * table.num_rows


def words_in(column: pa.ChunkedArray) -> list[str]:
    """Return the words of a column; each is in memory once."""
    encoded = one_chunk(column).dictionary_encode()
    words = encoded.dictionary.to_pylist()
    return [words[code] for code in encoded.indices.to_pylist()]


def rows_where(table: pa.Table, flags: pa.ChunkedArray) -> pa.Table:
    """Return the rows whose flag is true: mostly all, and then the table itself."""
    return table if pc.all(flags, skip_nulls=False).as_py() else table.filter(flags)


def counts_in(column: pa.ChunkedArray) -> dict[Any, int]:
    """Return how often each value is in a column, in the order in which they first come."""
    return {item["values"]: item["counts"] for item in pc.value_counts(column).to_pylist()}


def flat_values(array: pa.ListArray) -> np.ndarray:
    """Return all elements of a list array as one numpy array, null elements as NaN (or 0 in integers)."""
    values = array.values
    if values.null_count == 0:
        return values.to_numpy(zero_copy_only=True)
    filler = float("nan") if pa.types.is_floating(values.type) else 0
    return pc.fill_null(values, pa.scalar(filler, values.type)).to_numpy()


def withheld(table: pa.Table, parts: Sequence[dict[str, float | None]]) -> pa.Table:
    """Return scored rows without any text or token: ids, grades and counts are left.

    Args:
        table: Rows with the columns of `score`.
        parts: What is kept beside each reward, in place of `reward_parts`.
    """
    schema = schema_of("score")
    rows = table.num_rows
    gone = (*WITHHELD, "prompt_ids", "response_ids", "loss_mask", "rollout_logprobs")
    errors = pc.if_else(pc.is_valid(table.column("error")), pa.scalar("withheld"), pa.scalar(None, pa.string()))
    filled: dict[str, Any] = {
        "trainable": pa.array([False] * rows, pa.bool_()),
        "error": errors.combine_chunks() if isinstance(errors, pa.ChunkedArray) else errors,
        "reward_parts": pa.array([to_json(kept) for kept in parts], pa.string()),
    }
    columns = [
        pa.nulls(rows, schema.field(name).type) if name in gone else filled.get(name, table.column(name))
        for name in schema.names
    ]
    return pa.Table.from_arrays(columns, schema=schema)
