"""The trajectory table: the one place that knows its columns.

One row is one training sequence: a whole conversation, or one step of it. A row keeps
the tokens as they were sampled and observed, so no later stage turns text into tokens.
Every token list of a row is null as a whole or as long as `response_ids`; single
elements are null only in `logprobs`, exactly where `loss_mask` is 0.
`docs/trajectory.md` is this module as a page.
"""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import InputError

SCHEMA_VERSION = 1
"""Raised when a column changes its name, type or meaning. Readers refuse newer ones."""
SCHEMA_KEY = b"nanoskyrl.schema_version"
"""Where the version stands in the metadata of every Parquet file."""

STATUSES = ("completed", "truncated", "max_turns", "failed")
STOP_REASONS = {
    "stop": "completed",
    "length": "truncated",
    "max_turns": "max_turns",
    "max_input_length": "truncated",
    "max_sequence_length": "truncated",
    "error": "failed",
}
"""Why a trajectory ended, and the status that goes with it."""
SPLITS = ("train", "test")
SCORE_STATUSES = ("scored", "verifier_timeout", "verifier_error", "skipped")
DROP_REASONS = ("zero_variance", "surplus", "overlong", "singleton", "failed", "unscored", "untrainable")
LOGPROBS_MODES = ("processed", "raw", "recomputed")
LOGPROB_LIMIT = 1e-3
"""A log-prob of a certain token can come out a rounding error above 0."""


def _tokens(of: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", of))


TURN_TYPE = pa.struct(
    [
        pa.field("action", pa.string()),
        pa.field("observation", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("done", pa.bool_()),
        pa.field("tool_calls", pa.string()),
        pa.field("first_token", pa.int32()),
        pa.field("token_count", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, the stage that writes it, whether it may be null, and what it means."""

    name: str
    type: pa.DataType
    stage: str
    meaning: str
    nullable: bool = False


COLUMNS = (
    Column("trajectory_id", pa.string(), "rollout",
           "a digest of run seed, step, env, split, task, sample and sampling round; (trajectory_id, step_index) is unique"),
    Column("step_index", pa.int32(), "rollout", "0 for a whole conversation, else the turn this row holds"),
    Column("is_last_step", pa.bool_(), "rollout", "true for a whole conversation and for the last of several steps"),
    Column("group_id", pa.string(), "rollout", "opaque; shared by the attempts at one prompt, never parsed"),
    Column("sample", pa.int32(), "rollout", "index in the group, 0..n_samples_per_prompt-1"),
    Column("env", pa.string(), "rollout", "name of the environment"),
    Column("task_id", pa.string(), "rollout", "the task inside its environment and split"),
    Column("split", pa.string(), "rollout", "train or test"),
    Column("seed", pa.int64(), "rollout", "seeds the environment and the sampler of this trajectory"),
    Column("policy_version", pa.int32(), "rollout", "N of the `policies/N` that sampled it; null outside a run", True),
    Column("policy_digest", pa.string(), "rollout", "digest of the weights, config and tokenizer that sampled it; null for engines without", True),
    Column("temperature", pa.float64(), "rollout", "logits were divided by it; 0 is greedy"),
    Column("top_p", pa.float64(), "rollout", "nucleus mass; 1 is off"),
    Column("top_k", pa.int32(), "rollout", "number of candidates; 0 is off"),
    Column("logprobs_mode", pa.string(), "rollout", "processed: after temperature, top_k and top_p; raw: before; recomputed: left null for `advantage`"),
    Column("prompt_ids", _tokens(pa.int32()), "rollout", "tokens before the first sampled one; null for engines without token ids", True),
    Column("response_ids", _tokens(pa.int32()), "rollout", "all tokens after the prompt, sampled and observed", True),
    Column("loss_mask", _tokens(pa.int8()), "rollout", "1 where the policy sampled the token, 0 where it was observed", True),
    Column("logprobs", _tokens(pa.float32()), "rollout", "nats under the sampling policy; an element is null where loss_mask is 0", True),
    Column("prompt", pa.string(), "rollout", "prompt_ids decoded, for reading; never encoded again; null where a benchmark withholds its text", True),
    Column("response", pa.string(), "rollout", "response_ids decoded, for reading; never encoded again; null where withheld", True),
    Column("messages", pa.string(), "rollout", "JSON: the conversation as role and content; null where withheld", True),
    Column("turns", pa.list_(pa.field("element", TURN_TYPE)), "rollout",
           "per turn: action, observation, reward (the environment's own word, nullable), done, tool_calls (JSON: tool, args, result, ok, error), first_token (index into response_ids), token_count; null where withheld", True),
    Column("status", pa.string(), "rollout", "completed, truncated, max_turns or failed"),
    Column("stop_reason", pa.string(), "rollout", "stop, length, max_turns, max_input_length, max_sequence_length or error"),
    Column("error", pa.string(), "rollout", "what failed; null unless status is failed", True),
    Column("trainable", pa.bool_(), "rollout", "false for engines without token ids"),
    Column("prompt_tokens", pa.int32(), "rollout", "as the engine counts them; null where it does not say", True),
    Column("completion_tokens", pa.int32(), "rollout", "sampled tokens, as the engine counts them; null where it does not say", True),
    Column("metadata", pa.string(), "rollout", "JSON: what the environment says of the task; ground truth for scoring; null where withheld", True),
    Column("reward", pa.float64(), "score", "null: not scored, and never read as 0", True),
    Column("reward_parts", pa.string(), "score", "JSON: the components of the reward by name"),
    Column("success", pa.bool_(), "score", "whether the task was solved; null: not known", True),
    Column("score_status", pa.string(), "score", "scored, verifier_timeout, verifier_error, or skipped (a failed row)"),
    Column("shaped_reward", pa.float64(), "advantage", "what the estimator saw: reward with the punishment for length and the KL; equal to reward without", True),
    Column("advantages", _tokens(pa.float32()), "advantage", "per response token, 0 where loss_mask is 0; null where the row is not kept", True),
    Column("returns", _tokens(pa.float32()), "advantage", "PPO: targets of the critic", True),
    Column("values", _tokens(pa.float32()), "advantage", "PPO: what the critic foretold", True),
    Column("old_logprobs", _tokens(pa.float32()), "advantage", "nats under the policy at the start of the update, where asked for", True),
    Column("ref_logprobs", _tokens(pa.float32()), "advantage", "nats under the frozen reference, where asked for", True),
    Column("kept", pa.bool_(), "advantage", "whether `train` learns from the row"),
    Column("drop_reason", pa.string(), "advantage", "zero_variance, surplus (more groups than dynamic sampling was to fill), overlong, singleton, failed, unscored or untrainable; null where kept", True),
)  # fmt: skip

WITHHELD = ("prompt", "response", "messages", "turns", "metadata")
"""Null in rows of benchmarks whose text must not be written down, and in no others; they have no tokens either."""
STAGE_ORDER = ("rollout", "score", "advantage")
TOKEN_COLUMNS = tuple(column.name for column in COLUMNS if pa.types.is_list(column.type) and column.name != "turns")
PER_RESPONSE_TOKEN = tuple(name for name in TOKEN_COLUMNS if name not in ("prompt_ids", "response_ids"))


def columns_of(stage: str) -> tuple[Column, ...]:
    """Return the columns present in the shards of a stage (eval writes those of score)."""
    last = STAGE_ORDER.index("score" if stage == "eval" else stage)
    return tuple(column for column in COLUMNS if STAGE_ORDER.index(column.stage) <= last)


def schema_of(stage: str) -> pa.Schema:
    """Return the Arrow schema of a stage's shards, with the schema version in its metadata."""
    fields = [pa.field(column.name, column.type, nullable=column.nullable) for column in columns_of(stage)]
    return pa.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA_VERSION).encode()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool that the model wrote, well formed or not."""

    tool: str | None
    """None where the call could not be read."""
    args: Any = None
    result: str | None = None
    ok: bool
    error: str | None = None
    """A kind that can be counted, such as `malformed` or `unknown_tool`; None where ok."""


TOOL_CALL_FIELDS = tuple(f.name for f in dataclasses.fields(ToolCall))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy did once, and what the environment answered."""

    action: str
    observation: str
    reward: float | None = None
    """The environment's own word; None where it says nothing."""
    done: bool
    tool_calls: Sequence[ToolCall] = ()
    first_token: int | None = None
    """Index into response_ids of the first token sampled in this turn; None without token ids."""
    token_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One row in Python, for environments, scorers and tests; batches of tokens stay in Arrow."""

    trajectory_id: str
    step_index: int = 0
    is_last_step: bool = True
    group_id: str
    sample: int
    env: str
    task_id: str
    split: str
    seed: int
    policy_version: int | None
    policy_digest: str | None
    temperature: float
    top_p: float
    top_k: int
    logprobs_mode: str
    prompt_ids: np.ndarray | None
    """[P] int32"""
    response_ids: np.ndarray | None
    """[T] int32"""
    loss_mask: np.ndarray | None
    """[T] int8"""
    logprobs: np.ndarray | None
    """[T] float32 nats, NaN where loss_mask is 0"""
    prompt: str
    response: str
    messages: list[dict[str, Any]]
    turns: Sequence[Turn]
    status: str
    stop_reason: str
    error: str | None = None
    trainable: bool
    prompt_tokens: int | None
    """None where the engine does not say."""
    completion_tokens: int | None
    metadata: dict[str, Any] = field(default_factory=dict)
    reward: float | None = None
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    success: bool | None = None
    score_status: str | None = None
    """None before `score`."""


def to_json(value: Any) -> str:
    """Return JSON text for a column; a lone surrogate, which UTF-8 cannot hold, is kept as an escape."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN and infinity are not JSON
        value = _without_nan(value)
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
    """Return text that UTF-8 can hold: lone surrogates become `?`."""
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
        type=_tokens(of),
        mask=pa.array(null_rows) if null_rows.any() else None,
    )


def to_table(rows: Iterable[Trajectory], stage: str = "rollout") -> pa.Table:
    """Build and check the Arrow table of these rows, with the columns of `rollout` or `score`."""
    rows = list(rows)
    _check_lengths(rows)
    try:
        arrays = [_to_array(rows, column) for column in columns_of(stage)]
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise InputError(f"a row does not fit the table: {error}", hint="docs/trajectory.md lists the types") from error
    table = pa.Table.from_arrays(arrays, schema=schema_of(stage))
    check(table, stage)
    return table


def _to_array(rows: Sequence[Trajectory], column: Column) -> pa.Array:
    values = [getattr(row, column.name) for row in rows]
    if column.name == "logprobs":
        valid = [None if row.logprobs is None or row.loss_mask is None else row.loss_mask != 0 for row in rows]
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
        for name in ("loss_mask", "logprobs"):
            found, wanted = getattr(row, name), row.response_ids
            if found is not None and (wanted is None or len(found) != len(wanted)):
                raise InputError(
                    f"trajectory {row.trajectory_id}: `{name}` has {len(found)} elements and response_ids "
                    f"{'is null' if wanted is None else len(wanted)}",
                    hint="Token lists of a row are null or equally long",
                )
        if row.logprobs is not None and row.loss_mask is None:
            raise InputError(f"trajectory {row.trajectory_id} has logprobs without a loss_mask", hint="Write both")


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
    tokens = {name: row_arrays(table.column(name)) for name in names if name in TOKEN_COLUMNS}
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
        row.update({name: arrays[index] for name, arrays in tokens.items()})
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


def check(table: pa.Table, stage: str) -> None:
    """Raise unless the table keeps every promise of this module for shards of `stage`.

    Raises:
        InputError: names the column, the row and what was found.
    """
    expected = schema_of(stage)
    if not _fits(table.schema, expected):
        _explain_schema(table.schema, expected)
    if SCHEMA_KEY not in (table.schema.metadata or {}):
        raise InputError("the table carries no schema version", hint="Build tables with `schema_of`")
    for column in columns_of(stage):
        if not column.nullable and table.column(column.name).null_count:
            row = _first(pc.is_null(table.column(column.name)))
            raise InputError(f"column `{column.name}` is null in row {row}", hint="Only nullable columns may be")
    _check_words(table, "status", STATUSES)
    _check_words(table, "split", SPLITS)
    _check_words(table, "stop_reason", tuple(STOP_REASONS))
    _check_words(table, "logprobs_mode", LOGPROBS_MODES)
    if "score_status" in table.column_names:
        _check_words(table, "score_status", SCORE_STATUSES)
    for row, (status, reason) in enumerate(
        zip(*(table.column(c).to_pylist() for c in ("status", "stop_reason")), strict=True)
    ):
        if STOP_REASONS[reason] != status:
            raise InputError(
                f"row {row} has status `{status}` with stop_reason `{reason}`",
                hint=f"It must be `{STOP_REASONS[reason]}`",
            )
    keys = list(zip(table.column("trajectory_id").to_pylist(), table.column("step_index").to_pylist(), strict=True))
    if len(set(keys)) != len(keys):
        raise InputError("two rows share (trajectory_id, step_index)", hint="Each row must have a pair of its own")
    _check_tokens(table)
    _check_ends(table)
    if "reward" in table.column_names:
        _refuse(
            pc.invert(pc.is_finite(table.column("reward"))),
            lambda row: f"the reward of row {row} is NaN or infinite",
            "A reward that is not known is null",
        )
    if "kept" in table.column_names:
        _check_verdicts(table)


def _fits(found: pa.Schema, expected: pa.Schema) -> bool:
    """Say whether a schema is the expected one, or says "never null" where it might be null."""
    return found.names == expected.names and all(
        one.type == other.type and (other.nullable or not one.nullable)
        for one, other in zip(found, expected, strict=True)
    )


def withheld(table: pa.Table, parts: Sequence[dict[str, float | None]]) -> pa.Table:
    """Return scored rows without any text or token: ids, grades and counts are left.

    Args:
        table: Rows with the columns of `score`.
        parts: What is kept beside each reward, in place of `reward_parts`.
    """
    schema = schema_of("score")
    rows = table.num_rows
    gone = (*WITHHELD, "prompt_ids", "response_ids", "loss_mask", "logprobs")
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


def _check_words(table: pa.Table, name: str, allowed: Sequence[str]) -> None:
    for word in pc.unique(table.column(name)).to_pylist():
        if word not in allowed:
            raise InputError(f"column `{name}` holds `{word}`", hint=f"It must be one of {', '.join(allowed)}")


def _check_tokens(table: pa.Table) -> None:
    response = table.column("response_ids")
    lengths = pc.list_value_length(response)
    trainable = table.column("trainable")
    for name in ("prompt_ids", "response_ids", "loss_mask", *WITHHELD):
        _refuse(
            pc.and_(trainable, pc.is_null(table.column(name))),
            lambda row, name=name: f"row {row} is trainable but has no `{name}`",
            "Set trainable to false, or write the tokens",
        )
    for name in TOKEN_COLUMNS:
        if name in table.column_names and name != "logprobs" and _flat(table, name).null_count:
            raise InputError(f"column `{name}` has a null element", hint="Only logprobs may, where loss_mask is 0")
    for name in PER_RESPONSE_TOKEN:
        if name not in table.column_names:
            continue
        found = pc.list_value_length(table.column(name))
        # A list that is null as a whole is allowed, and compares as null here.
        unfit = pc.or_(
            pc.fill_null(pc.not_equal(found, lengths), False),
            pc.and_(pc.is_valid(table.column(name)), pc.is_null(response)),
        )
        _refuse(
            unfit,
            lambda row, name=name, found=found: (
                f"row {row}: `{name}` has {found[row]} elements and response_ids {lengths[row]}"
            ),
            "Token lists of a row are null or equally long",
        )
    _refuse(
        pc.and_(pc.is_valid(table.column("logprobs")), pc.is_null(table.column("loss_mask"))),
        lambda row: f"row {row} has logprobs without a loss_mask",
        "Write both",
    )
    mask = _flat(table, "loss_mask")
    if not pc.all(pc.is_in(mask, pa.array([0, 1], pa.int8())), min_count=0).as_py():
        raise InputError("`loss_mask` holds other numbers than 0 and 1", hint="1 where the policy sampled the token")
    with_logprobs = table.select(["logprobs", "loss_mask"]).filter(pc.is_valid(table.column("logprobs")))
    logprobs, sampled = _flat(with_logprobs, "logprobs"), pc.not_equal(_flat(with_logprobs, "loss_mask"), 0)
    if not pc.is_valid(logprobs).equals(sampled):
        raise InputError(
            "`logprobs` is null on a sampled token, or set on an observed one", hint="Null exactly where loss_mask is 0"
        )
    # NaN is not below the bound either.
    if not pc.all(pc.less_equal(logprobs, LOGPROB_LIMIT), min_count=0).as_py():
        raise InputError("`logprobs` holds NaN, or a number above 0", hint="Write the natural log of a probability")


def _check_ends(table: pa.Table) -> None:
    failed, has_error = pc.equal(table.column("status"), "failed"), pc.is_valid(table.column("error"))
    _refuse(
        pc.xor(failed, has_error),
        lambda row: f"row {row} is failed without an error, or the other way round",
        "Write both",
    )


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
    both = table.select(["advantages", "loss_mask"]).filter(pc.is_valid(advantages))
    on_observed = pc.and_(pc.not_equal(_flat(both, "advantages"), 0), pc.equal(_flat(both, "loss_mask"), 0))
    if pc.any(on_observed, min_count=0).as_py():
        raise InputError("`advantages` is not 0 on an observed token", hint="0 where loss_mask is 0")


def _refuse(flags: pa.ChunkedArray, says: Callable[[int], str], hint: str) -> None:
    if (row := _first(flags)) is not None:
        raise InputError(says(row), hint=hint)


def _flat(table: pa.Table, name: str) -> pa.Array:
    """Return the elements of a list column as one array."""
    return pa.concat_arrays(
        [chunk.flatten() for chunk in table.column(name).chunks]
        or [pa.array([], table.schema.field(name).type.value_type)]
    )


def _first(flags: pa.ChunkedArray) -> int | None:
    """Return the index of the first true element; null counts as false."""
    index = pc.index(pc.fill_null(flags, False), pa.scalar(True)).as_py()
    return None if index < 0 else index


def _explain_schema(found: pa.Schema, expected: pa.Schema) -> None:
    for wanted in expected:
        index = found.get_field_index(wanted.name)
        if index < 0:
            raise InputError(
                f"column `{wanted.name}` is missing", hint="docs/trajectory.md lists the columns of each stage"
            )
        if found.field(index).type != wanted.type:
            raise InputError(
                f"column `{wanted.name}` is {found.field(index).type}, not {wanted.type}",
                hint="docs/trajectory.md lists the types",
            )
    for name in found.names:
        if expected.get_field_index(name) < 0:
            raise InputError(
                f"column `{name}` is not known here", hint="docs/trajectory.md lists the columns of each stage"
            )
    raise InputError(
        "columns are in another order, or declared nullable where they are not", hint="Build tables with `schema_of`"
    )
