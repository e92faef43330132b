"""The trajectory table: the one place that knows its columns.

One row is one training sequence: a whole conversation, or one step of it. A row keeps
the tokens as they were sampled and observed, so no later stage turns text into tokens.
Every token list of a row is null as a whole or as long as `response_ids`; single
elements are null only in `rollout_logprobs`, exactly where `loss_mask` is 0.
`docs/trajectory.md` is this module as a page; `rows.py` turns rows into tables and back,
and `table_checks.py` holds every promise of this one against a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from nanoskyrl.stages.core.pipeline import OURS, STEP

SCHEMA_VERSION = 2
"""Raised when a column changes its name, type or meaning. Readers refuse newer ones."""
RENAMED = {"logprobs": "rollout_logprobs"}
"""Columns of schema 1 by the names they have now; nothing else changed in the table."""
SCHEMA_KEY = b"nanoskyrl.schema_version"
"""Where the version is in the metadata of every Parquet file."""

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
Split = Literal["train", "test"]
SPLITS = get_args(Split)
SCORE_STATUSES = ("scored", "verifier_timeout", "verifier_error", "skipped")
DROP_REASONS = ("zero_variance", "surplus", "overlong", "singleton", "failed", "unscored", "untrainable")
LogprobsMode = Literal["processed", "raw", "recomputed"]
LOGPROBS_MODES = get_args(LogprobsMode)


def tokens(of: pa.DataType) -> pa.DataType:
    """Return the type of a list with one element a token."""
    return pa.list_(pa.field("element", of))


STRING, BOOL, INT32, INT64, FLOAT64 = pa.string(), pa.bool_(), pa.int32(), pa.int64(), pa.float64()
INT32S, INT8S, FLOAT32S = tokens(pa.int32()), tokens(pa.int8()), tokens(pa.float32())
TURN_TYPE = pa.struct(
    [
        pa.field("action", STRING),
        pa.field("observation", STRING),
        pa.field("reward", FLOAT64),
        pa.field("done", BOOL),
        pa.field("tool_calls", STRING),
        pa.field("first_token", INT32),
        pa.field("token_count", INT32),
    ]
)
TURNS = pa.list_(pa.field("element", TURN_TYPE))


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its Arrow type, the stage that writes it, whether it may be null, and what it means."""

    name: str
    type: pa.DataType
    stage: str
    meaning: str
    nullable: bool = False


def column(kind: pa.DataType, stage: str, meaning: str, *, nullable: bool = False, **options: Any) -> Any:
    """Declare a field of `Trajectory` that is a column."""
    return field(metadata={"column": (kind, stage, meaning, nullable)}, **options)


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


TOOL_CALL_FIELDS = tuple(f.name for f in fields(ToolCall))


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


# One column, one line.
# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One row in Python, for environments, scorers and tests; batches of tokens stay in Arrow.

    Arrays have the type of their column, and NaN for null elements.
    """

    trajectory_id: str = column(STRING, "rollout", "a digest of run seed, step, env, split, task, sample and sampling round; (trajectory_id, step_index) is unique")
    step_index: int = column(INT32, "rollout", "0 for a whole conversation, else the turn this row holds", default=0)
    is_last_step: bool = column(BOOL, "rollout", "true for a whole conversation and for the last of several steps", default=True)
    group_id: str = column(STRING, "rollout", "opaque; shared by the attempts at one prompt, never parsed")
    sample: int = column(INT32, "rollout", "index in the group, 0..n_samples_per_prompt-1")
    env: str = column(STRING, "rollout", "name of the environment")
    task_id: str = column(STRING, "rollout", "the task inside its environment and split")
    split: str = column(STRING, "rollout", "train or test")
    seed: int = column(INT64, "rollout", "seeds the environment and the sampler of this trajectory")
    policy_version: int | None = column(INT32, "rollout", "N of the `policies/N` that sampled it; null outside a run", nullable=True)
    policy_digest: str | None = column(STRING, "rollout", "digest of the weights, config and tokenizer that sampled it; null for engines without", nullable=True)
    temperature: float = column(FLOAT64, "rollout", "logits were divided by it; 0 is greedy")
    top_p: float = column(FLOAT64, "rollout", "nucleus mass; 1 is off")
    top_k: int = column(INT32, "rollout", "number of candidates; 0 is off")
    logprobs_mode: str = column(STRING, "rollout", "processed: after temperature, top_k and top_p; raw: before; recomputed: left null for `advantage`")
    prompt_ids: np.ndarray | None = column(INT32S, "rollout", "tokens before the first sampled one; null for engines without token ids", nullable=True)
    response_ids: np.ndarray | None = column(INT32S, "rollout", "all tokens after the prompt, sampled and observed", nullable=True)
    loss_mask: np.ndarray | None = column(INT8S, "rollout", "1 where the policy sampled the token, 0 where it was observed", nullable=True)
    rollout_logprobs: np.ndarray | None = column(FLOAT32S, "rollout", "nats under the sampling policy; an element is null where loss_mask is 0", nullable=True)
    prompt: str = column(STRING, "rollout", "prompt_ids decoded, for reading; never encoded again; null where a benchmark withholds its text", nullable=True)
    response: str = column(STRING, "rollout", "response_ids decoded, for reading; never encoded again; null where withheld", nullable=True)
    messages: list[dict[str, Any]] = column(STRING, "rollout", "JSON: the conversation as role and content, with tool_calls apart where the template takes them so; null where withheld", nullable=True)
    turns: Sequence[Turn] = column(TURNS, "rollout", "per turn: action, observation, reward (the environment's own word, nullable), done, tool_calls (JSON: tool, args, result, ok, error), first_token (index into response_ids), token_count; null where withheld", nullable=True)
    status: str = column(STRING, "rollout", "completed, truncated, max_turns or failed")
    stop_reason: str = column(STRING, "rollout", "stop, length, max_turns, max_input_length, max_sequence_length or error")
    error: str | None = column(STRING, "rollout", "what failed; null unless status is failed", nullable=True, default=None)
    trainable: bool = column(BOOL, "rollout", "false for engines without token ids")
    prompt_tokens: int | None = column(INT32, "rollout", "as the engine counts them; null where it does not say", nullable=True)
    completion_tokens: int | None = column(INT32, "rollout", "sampled tokens, as the engine counts them; null where it does not say", nullable=True)
    metadata: dict[str, Any] = column(STRING, "rollout", "JSON: what the environment says of the task; ground truth for scoring; null where withheld", nullable=True, default_factory=dict)
    reward: float | None = column(FLOAT64, "score", "null: not scored, and never read as 0", nullable=True, default=None)
    reward_parts: dict[str, float | None] = column(STRING, "score", "JSON: the components of the reward by name", default_factory=dict)
    success: bool | None = column(BOOL, "score", "whether the task was solved; null: not known", nullable=True, default=None)
    score_status: str | None = column(STRING, "score", "scored, verifier_timeout, verifier_error, or skipped (a failed row)", default=None)
# fmt: on

    @property
    def last_action(self) -> str:
        """What the policy wrote last; empty where it wrote nothing."""
        return self.turns[-1].action if self.turns else ""


COLUMNS = (
    *(Column(f.name, *f.metadata["column"]) for f in fields(Trajectory)),
    # Of a batch, and never looked at row by row.
    Column("shaped_reward", FLOAT64, "advantage", "what the estimator saw: reward with the punishment for length and the KL; equal to reward without", True),
    Column("advantages", FLOAT32S, "advantage", "per response token, 0 where loss_mask is 0; null where the row is not kept", True),
    Column("returns", FLOAT32S, "advantage", "PPO: targets of the critic", True),
    Column("values", FLOAT32S, "advantage", "PPO: what the critic predicted", True),
    Column("old_logprobs", FLOAT32S, "advantage", "nats under the policy at the start of the update, where asked for", True),
    Column("ref_logprobs", FLOAT32S, "advantage", "nats under the frozen reference, where asked for", True),
    Column("kept", BOOL, "advantage", "whether `train` learns from the row"),
    Column("drop_reason", STRING, "advantage", "zero_variance, surplus (more groups than dynamic sampling was to fill), overlong, singleton, failed, unscored or untrainable; null where kept", True),
)  # fmt: skip

WITHHELD = ("prompt", "response", "messages", "turns", "metadata")
"""Null in rows of benchmarks whose text must not be written down, and in no others; they have no tokens either."""
STAGE_ORDER = tuple(stage.name for stage in STEP if stage.columns == stage.name)
"""Stages that add columns."""
TOKEN_COLUMNS = tuple(column.name for column in COLUMNS if pa.types.is_list(column.type) and column.name != "turns")
PER_RESPONSE_TOKEN = tuple(name for name in TOKEN_COLUMNS if name not in ("prompt_ids", "response_ids"))


@cache
def columns_of(stage: str) -> tuple[Column, ...]:
    """Return the columns present in the shards of a stage of ours."""
    last = STAGE_ORDER.index(OURS[stage].columns or stage)
    return tuple(column for column in COLUMNS if STAGE_ORDER.index(column.stage) <= last)


@cache
def schema_of(stage: str) -> pa.Schema:
    """Return the Arrow schema of a stage's shards, with the schema version in its metadata."""
    fields = [pa.field(column.name, column.type, nullable=column.nullable) for column in columns_of(stage)]
    return pa.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA_VERSION).encode()})
