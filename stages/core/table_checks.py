"""Whether a table keeps every promise of `trajectory.py`: its schema, its words, its token lists and its verdicts."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.trajectory import (
    DROP_REASONS,
    LOGPROBS_MODES,
    PER_RESPONSE_TOKEN,
    SCHEMA_KEY,
    SCORE_STATUSES,
    SPLITS,
    STATUSES,
    STOP_REASONS,
    TOKEN_COLUMNS,
    WITHHELD,
    Column,
    columns_of,
    schema_of,
)

WORDS = {
    "status": STATUSES, "split": SPLITS, "stop_reason": tuple(STOP_REASONS), "logprobs_mode": LOGPROBS_MODES,
    "score_status": SCORE_STATUSES,
}  # fmt: skip
"""What columns of words may hold."""
TRUE = pa.scalar(True)
LOGPROB_LIMIT = 1e-3
"""A log-prob of a certain token can come out a rounding error above 0."""


def check(table: pa.Table, stage: str, *, checked: str | None = None) -> None:
    """Raise unless the table keeps every promise of this module for shards of `stage`.

    Args:
        table: The rows.
        stage: Whose columns they have.
        checked: An earlier stage, whose columns were checked before and are as they were; None: no column was.

    Raises:
        InputError: names the column, the row and what was found.
    """
    expected = schema_of(stage)
    if not _fits(table.schema, expected):
        _explain_schema(table.schema, expected)
    if SCHEMA_KEY not in (table.schema.metadata or {}):
        raise InputError("the table carries no schema version", hint="Build tables with `schema_of`")
    known = {column.name for column in columns_of(checked)} if checked else set()
    _check_columns(table, [column for column in columns_of(stage) if column.name not in known])
    if checked is None:
        _check_reasons(table)
        _check_keys(table)
        _check_tokens(table)
        _refuse(
            pc.xor(pc.equal(table.column("status"), "failed"), pc.is_valid(table.column("error"))),
            lambda row: f"row {row} is failed without an error, or the other way round",
            "Write both",
        )
    _check_token_columns(table, [name for name in TOKEN_COLUMNS if name in table.column_names and name not in known])
    if "reward" in table.column_names and "reward" not in known:
        _refuse(
            pc.invert(pc.is_finite(table.column("reward"))),
            lambda row: f"the reward of row {row} is NaN or infinite",
            "A reward that is not known is null",
        )
    if "kept" in table.column_names and "kept" not in known:
        _check_verdicts(table)


def check_some(table: pa.Table, stage: str) -> None:
    """Raise unless these columns have the types, the values and the words of shards of `stage`, each by itself.

    Args:
        table: Rows with some of the columns.
        stage: Whose columns they are.

    Raises:
        InputError: names the column, the row and what was found.
    """
    columns = [column for column in columns_of(stage) if column.name in table.column_names]
    for column in columns:
        _check_type(table.schema.field(column.name), column)
    _check_columns(table, columns)


def _check_columns(table: pa.Table, columns: Sequence[Column]) -> None:
    """Refuse nulls and words that these columns may not hold."""
    for column in columns:
        if not column.nullable and table.column(column.name).null_count:
            row = _first(pc.is_null(table.column(column.name)))
            raise InputError(f"column `{column.name}` is null in row {row}", hint="Only nullable columns may be")
    for name in (column.name for column in columns if column.name in WORDS):
        _check_words(table, name, WORDS[name])


def _check_reasons(table: pa.Table) -> None:
    """Refuse rows whose status is not that of their stop_reason."""
    status, reason = table.column("status"), table.column("stop_reason")
    for name in pc.unique(reason).to_pylist():
        wrong = pc.and_(pc.equal(reason, name), pc.not_equal(status, STOP_REASONS[name]))
        _refuse(
            wrong,
            lambda row, name=name: f"row {row} has status `{status[row]}` with stop_reason `{name}`",
            f"It must be `{STOP_REASONS[name]}`",
        )


def _check_keys(table: pa.Table) -> None:
    if pc.count_distinct(table.column("trajectory_id")).as_py() == table.num_rows:
        return
    pairs = table.select(["trajectory_id", "step_index"])
    if pairs.group_by(pairs.column_names, use_threads=False).aggregate([]).num_rows < table.num_rows:
        raise InputError("two rows share (trajectory_id, step_index)", hint="Each row must have a pair of its own")


def _fits(found: pa.Schema, expected: pa.Schema) -> bool:
    """Say whether a schema is the expected one, or says "never null" where it might be null."""
    return found.equals(expected) or (
        found.names == expected.names
        and all(
            one.type == other.type and (other.nullable or not one.nullable)
            for one, other in zip(found, expected, strict=True)
        )
    )


def _check_words(table: pa.Table, name: str, allowed: Sequence[str]) -> None:
    for word in pc.unique(table.column(name)).to_pylist():
        if word not in allowed:
            raise InputError(f"column `{name}` holds `{word}`", hint=f"It must be one of {', '.join(allowed)}")


def _check_tokens(table: pa.Table) -> None:
    """Refuse rows whose tokens, masks and log-probs do not belong together."""
    trainable = table.column("trainable")
    for name in ("prompt_ids", "response_ids", "loss_mask", *WITHHELD):
        if table.column(name).null_count:
            _refuse(
                pc.and_(trainable, pc.is_null(table.column(name))),
                lambda row, name=name: f"row {row} is trainable but has no `{name}`",
                "Set trainable to false, or write the tokens",
            )
    if table.column("loss_mask").null_count:
        _refuse(
            pc.and_(pc.is_valid(table.column("rollout_logprobs")), pc.is_null(table.column("loss_mask"))),
            lambda row: f"row {row} has rollout_logprobs without a loss_mask",
            "Write both",
        )


def _check_token_columns(table: pa.Table, names: Sequence[str]) -> None:
    """Refuse lists of tokens with nulls, or of another length than the row's response, and what they may not hold."""
    for name in names:
        if name != "rollout_logprobs" and _flat(table, name).null_count:
            raise InputError(
                f"column `{name}` has a null element", hint="Only rollout_logprobs may, where loss_mask is 0"
            )
    response = table.column("response_ids")
    lengths = pc.list_value_length(response)
    for name in (name for name in names if name in PER_RESPONSE_TOKEN):
        if table.column(name).null_count == table.num_rows:
            continue
        found = pc.list_value_length(table.column(name))
        # A list that is null as a whole is allowed, and compares as null here.
        unfit = pc.fill_null(pc.not_equal(found, lengths), False)
        if response.null_count:
            unfit = pc.or_(unfit, pc.and_(pc.is_valid(table.column(name)), pc.is_null(response)))
        _refuse(
            unfit,
            lambda row, name=name, found=found: (
                f"row {row}: `{name}` has {found[row]} elements and response_ids {lengths[row]}"
            ),
            "Token lists of a row are null or equally long",
        )
    if "loss_mask" in names:
        mask = pc.min_max(_flat(table, "loss_mask"))
        if mask["min"].as_py() not in (None, 0, 1) or mask["max"].as_py() not in (None, 0, 1):
            raise InputError(
                "`loss_mask` holds other numbers than 0 and 1", hint="1 where the policy sampled the token"
            )
    if "rollout_logprobs" in names:
        _check_logprobs(table)


def _check_logprobs(table: pa.Table) -> None:
    """Refuse log-probs that are not exactly where tokens were sampled, or no log-probs."""
    both = _where_valid(table, "rollout_logprobs", "loss_mask")
    logprobs, sampled = _flat(both, "rollout_logprobs"), pc.not_equal(_flat(both, "loss_mask"), 0)
    if not pc.is_valid(logprobs).equals(sampled):
        raise InputError(
            "`rollout_logprobs` is null on a sampled token, or set on an observed one",
            hint="Null exactly where loss_mask is 0",
        )
    # NaN is not below the bound either.
    if not pc.all(pc.less_equal(logprobs, LOGPROB_LIMIT), min_count=0).as_py():
        raise InputError(
            "`rollout_logprobs` holds NaN, or a number above 0", hint="Write the natural log of a probability"
        )


def _where_valid(table: pa.Table, name: str, other: str) -> pa.Table:
    """Return two columns, in the rows in which the first one is not null."""
    both = table.select([name, other])
    return both.filter(pc.is_valid(table.column(name))) if table.column(name).null_count else both


def _check_verdicts(table: pa.Table) -> None:
    """Check what `advantage` says: a row is kept, or it has a reason and no advantages."""
    kept, reason, advantages = (table.column(name) for name in ("kept", "drop_reason", "advantages"))
    _check_words(table.filter(pc.is_valid(reason)), "drop_reason", DROP_REASONS)
    _refuse(
        pc.equal(kept, pc.is_valid(reason)),
        lambda row: f"row {row} is kept with a drop_reason, or left out without one",
        "A row has a drop_reason exactly where it is not kept",
    )
    _refuse(
        pc.not_equal(kept, pc.is_valid(advantages)),
        lambda row: f"row {row} is kept without advantages, or left out with them",
        "Advantages are null exactly where a row is not kept",
    )
    if not pc.all(pc.is_finite(_flat(table, "advantages")), min_count=0).as_py():
        raise InputError("`advantages` holds NaN or infinity", hint="Run `skyrl advantage` again, with `--force`")
    both = _where_valid(table, "advantages", "loss_mask")
    on_observed = pc.and_(pc.not_equal(_flat(both, "advantages"), 0), pc.equal(_flat(both, "loss_mask"), 0))
    if pc.any(on_observed, min_count=0).as_py():
        raise InputError("`advantages` is not 0 on an observed token", hint="0 where loss_mask is 0")


def _refuse(flags: pa.ChunkedArray, says: Callable[[int], str], hint: str) -> None:
    if (row := _first(flags)) is not None:
        raise InputError(says(row), hint=hint)


def _flat(table: pa.Table, name: str) -> pa.Array:
    """Return the elements of a list column as one array."""
    flat = [chunk.flatten() for chunk in table.column(name).chunks]
    return flat[0] if len(flat) == 1 else pa.concat_arrays(flat or [pa.array([], table.field(name).type.value_type)])


def _first(flags: pa.ChunkedArray) -> int | None:
    """Return the index of the first true element; null counts as false."""
    return pc.index(flags, TRUE).as_py() if pc.any(flags).as_py() else None


def _check_type(found: pa.Field, wanted: pa.Field | Column) -> None:
    if found.type != wanted.type:
        raise InputError(
            f"column `{wanted.name}` is {found.type}, not {wanted.type}", hint="docs/trajectory.md lists the types"
        )


def _explain_schema(found: pa.Schema, expected: pa.Schema) -> None:
    for wanted in expected:
        index = found.get_field_index(wanted.name)
        if index < 0:
            raise InputError(
                f"column `{wanted.name}` is missing", hint="docs/trajectory.md lists the columns of each stage"
            )
        _check_type(found.field(index), wanted)
    for name in found.names:
        if expected.get_field_index(name) < 0:
            raise InputError(
                f"column `{name}` is not known here", hint="docs/trajectory.md lists the columns of each stage"
            )
    raise InputError(
        "columns are in another order, or declared nullable where they are not", hint="Build tables with `schema_of`"
    )
