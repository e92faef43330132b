"""Rows of the trajectory table in Python, and the tables they make: built from flat buffers, checked, read back."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.safe_text import struck, struck_values
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import (
    TOKEN_COLUMNS,
    TOOL_CALL_FIELDS,
    WITHHELD,
    Column,
    ToolCall,
    Trajectory,
    Turn,
    columns_of,
    schema_of,
    tokens,
)


def to_json(value: Any) -> str:
    """Return JSON text for a column; a lone surrogate, which UTF-8 cannot hold, is kept as an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN and infinity are not JSON
        value = _without_nan(value)
        text = json.dumps(value, ensure_ascii=False)
    if struck(text) != text:  # not the JSON itself: what is struck out could take a sign of it along
        value = struck_values(value)
        text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    if column.name in ("messages", "metadata", "reward_parts"):
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
    """Yield the rows of a table as `Trajectory`; columns of `advantage` are left aside, and withheld text is empty."""
    known = {f.name for f in dataclasses.fields(Trajectory)}
    names = [name for name in table.column_names if name in known]
    plain = table.select([name for name in names if name not in TOKEN_COLUMNS]).to_pylist()
    lists = {name: row_arrays(table.column(name)) for name in names if name in TOKEN_COLUMNS}
    for index, row in enumerate(plain):
        try:
            for name, nothing in (("messages", "[]"), ("metadata", "{}"), ("reward_parts", "{}")):
                if name in row:
                    row[name] = json.loads(nothing if row[name] is None else row[name])
            row.update({name: "" for name in ("prompt", "response") if row[name] is None})
            row["turns"] = [
                Turn(**{**turn, "tool_calls": [ToolCall(**call) for call in json.loads(turn["tool_calls"])]})
                for turn in row["turns"] or ()
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"row {index} does not hold what its columns mean: {error}", hint="Run the stage that wrote it again"
            ) from error
        row.update({name: arrays[index] for name, arrays in lists.items()})
        yield Trajectory(**row)


def row_arrays(column: pa.ChunkedArray | pa.Array) -> list[np.ndarray | None]:
    """Return the lists of a column as numpy views, null rows as None and null elements as NaN (or 0 in integers)."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # an empty column has no chunk to combine
        array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
    flat, offsets = flat_values(array), array.offsets.to_numpy()
    null = array.is_null().to_numpy(zero_copy_only=False)
    return [None if null[i] else flat[offsets[i] : offsets[i + 1]] for i in range(len(array))]


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
