"""Shard I/O at the size of one step on one host: 8.4 million response tokens in 16,384 rows.

Times what a stage does with a part (build its token columns from flat buffers, write it,
read it back against its digest) beside what pyarrow does when left alone
(`Table.from_pylist`, `write_table` and `read_table` with their defaults), on the same rows
in the same process. Each time is the best of `--repeats`. Run it with

    python benchmarks/shards.py                  # 20 s on two cores, 2 GB of memory
    python benchmarks/shards.py --tokens 100000  # a look

The rows are made up, and made hard to compress: no phrase comes twice.

- Groups of 16 share their prompt, of 64 to 192 tokens, which come on top. Responses have 128 to 896.
- Token ids follow Zipf's law over 151,936 ids, low ids being the frequent ones, as in a byte-pair vocabulary.
- In half of the rows a tool answers three times: spans with loss_mask 0, a fifth of the response.
- Log-probs are those of a float32 log-softmax: 85% of the sampled tokens are the likeliest one, of which most are
  within 0.1 nats of certain; the rest spread out to 20 nats. They are null where observed.
- Texts are one short sentence. With `--texts long` they are as long as their tokens (four characters each), and the
  response is in `response`, `messages` and `turns`, as in a real rollout.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanoskyrl.stages.core.digests import digest_bytes, digest_file
from nanoskyrl.stages.core.rows import list_column, to_json
from nanoskyrl.stages.core.shards import read_part, write_part
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import TOKEN_COLUMNS, schema_of

TOKENS = 16_384 * 512
PROMPT_TOKENS = (64, 192)
RESPONSE_TOKENS = (128, 896)
N_SAMPLES_PER_PROMPT = 16
VOCABULARY = 151_936
OBSERVED_SPANS = 3
TARGET_BYTES = 42_000_000
"""For 8.4 million response tokens with short texts."""
ALPHABET = "etaoin shrdlucmfwypvbgkjqxz ETAOIN 0123456789.,\n"

TokenRows = dict[str, list[np.ndarray]]


def ids_by_zipf(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return token ids that follow Zipf's law over the vocabulary, low ids being the frequent ones."""
    return np.minimum(np.searchsorted(_cumulative(), rng.random(count)), VOCABULARY - 1).astype(np.int32)


@cache
def _cumulative() -> np.ndarray:
    weight = 1 / np.arange(1, VOCABULARY + 1)
    return np.cumsum(weight / weight.sum())


def token_rows(n_rows: int, rng: np.random.Generator) -> TokenRows:
    """Return prompt_ids, response_ids, loss_mask and rollout_logprobs, one array a row; NaN where observed."""
    rows: TokenRows = {"prompt_ids": [], "response_ids": [], "loss_mask": [], "rollout_logprobs": []}
    for row in range(n_rows):
        if row % N_SAMPLES_PER_PROMPT == 0:
            prompt = ids_by_zipf(int(rng.integers(*PROMPT_TOKENS, endpoint=True)), rng)
        length = int(rng.integers(*RESPONSE_TOKENS, endpoint=True))
        mask = np.ones(length, np.int8)
        if row % 2:
            span = length // (5 * OBSERVED_SPANS) * 2  # half of the rows, so a fifth of all tokens
            for turn in range(1, OBSERVED_SPANS + 1):
                end = length * turn // (OBSERVED_SPANS + 1)
                mask[end : end + span] = 0
        rows["prompt_ids"].append(prompt)
        rows["response_ids"].append(ids_by_zipf(length, rng))
        rows["loss_mask"].append(mask)
        rows["rollout_logprobs"].append(np.where(mask != 0, log_softmax_at_sampled(length, rng), np.float32("nan")))
    return rows


def log_softmax_at_sampled(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return [count] float32 log-probs with the rounding that a softmax in float32 gives them."""
    # With the largest logit at 0, the log of the sum is log1p of what all others have together.
    others = np.where(rng.random(count) < 0.7, 10 ** rng.uniform(-7, -1, count), rng.uniform(0.1, 2, count))
    normaliser = np.log(np.float32(1) + others.astype(np.float32))
    gap = np.where(rng.random(count) < 0.85, 0, rng.exponential(2, count)).astype(np.float32)
    return -(np.minimum(gap, np.float32(20)) + normaliser)


def other_columns(tokens: TokenRows, texts: str, rng: np.random.Generator) -> dict[str, list[Any]]:
    """Return every column that is not a list of tokens, as Python values."""
    letters = np.frombuffer(ALPHABET.encode(), np.uint8)

    def text(length: int) -> str:
        words = 4 * length if texts == "long" else 60
        return letters[np.minimum(rng.geometric(0.08, words), len(letters)) - 1].tobytes().decode()

    n_rows = len(tokens["response_ids"])
    groups = [row // N_SAMPLES_PER_PROMPT for row in range(n_rows)]
    prompts = [text(len(ids)) for ids in tokens["prompt_ids"][::N_SAMPLES_PER_PROMPT]]
    prompt = [prompts[group] for group in groups]
    response = [text(len(ids)) for ids in tokens["response_ids"]]
    sampled = [int(mask.sum()) for mask in tokens["loss_mask"]]
    calls = to_json([{"tool": "calculator", "args": {"x": "6*7"}, "result": "42", "ok": True, "error": None}])

    def turn(row: int) -> dict[str, Any]:
        return {
            "action": response[row], "observation": "", "reward": None, "done": True,
            "tool_calls": calls if row % 2 else "[]", "first_token": 0, "token_count": sampled[row],
        }  # fmt: skip

    def messages(row: int) -> str:
        roles = (("user", prompt[row]), ("assistant", response[row]))
        return to_json([{"role": role, "content": content} for role, content in roles])

    return {
        "trajectory_id": [digest_bytes(f"trajectory {row}".encode())[:32] for row in range(n_rows)],
        "step_index": [0] * n_rows,
        "is_last_step": [True] * n_rows,
        "group_id": [digest_bytes(f"group {group}".encode())[:32] for group in groups],
        "sample": [row % N_SAMPLES_PER_PROMPT for row in range(n_rows)],
        "env": ["tool_use"] * n_rows,
        "task_id": [f"task-{group}" for group in groups],
        "split": ["train"] * n_rows,
        "seed": rng.integers(0, 2**63, n_rows).tolist(),
        "policy_version": [7] * n_rows,
        "policy_digest": [digest_bytes(b"policy")] * n_rows,
        "temperature": [1.0] * n_rows,
        "top_p": [1.0] * n_rows,
        "top_k": [0] * n_rows,
        "logprobs_mode": ["processed"] * n_rows,
        "prompt": prompt,
        "response": response,
        "messages": [messages(row) for row in range(n_rows)],
        "turns": [[turn(row)] for row in range(n_rows)],
        "status": ["completed"] * n_rows,
        "stop_reason": ["stop"] * n_rows,
        "error": [None] * n_rows,
        "trainable": [True] * n_rows,
        "prompt_tokens": [len(ids) for ids in tokens["prompt_ids"]],
        "completion_tokens": sampled,
        "metadata": [to_json({"ground_truth": str(group)}) for group in groups],
    }


def token_columns(tokens: TokenRows) -> dict[str, pa.Array]:
    """Return the token columns, built from flat buffers as `rollout` builds them."""
    sampled = [mask != 0 for mask in tokens["loss_mask"]]
    return {
        "prompt_ids": list_column(tokens["prompt_ids"], pa.int32()),
        "response_ids": list_column(tokens["response_ids"], pa.int32()),
        "loss_mask": list_column(tokens["loss_mask"], pa.int8()),
        "rollout_logprobs": list_column(tokens["rollout_logprobs"], pa.float32(), sampled),
    }


def python_lists(tokens: TokenRows) -> dict[str, list[list[Any]]]:
    """Return the same tokens as Python lists, None where a log-prob is null."""
    lists = {name: [row.tolist() for row in rows] for name, rows in tokens.items() if name != "rollout_logprobs"}
    logprobs = [
        [value if on else None for value, on in zip(row.tolist(), mask, strict=True)]
        for row, mask in zip(tokens["rollout_logprobs"], lists["loss_mask"], strict=True)
    ]
    return {**lists, "rollout_logprobs": logprobs}


def best_seconds(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the shortest time of several, and what the last one returned."""
    seconds, found = [], None
    for _ in range(repeats):
        found = None  # two tables at a time are one too many for small machines
        start = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - start)
    return min(seconds), found


def time_pylist(columns: dict[str, list[Any]], schema: pa.Schema, repeats: int) -> tuple[float, pa.Table]:
    """Time `Table.from_pylist` on one dictionary a row, which are made before the clock starts."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return best_seconds(lambda: pa.Table.from_pylist(rows, schema), repeats)


def bytes_by_column(path: Path) -> dict[str, int]:
    """Return the compressed bytes of each column, the leaves of a nested one together."""
    metadata = pq.ParquetFile(path).metadata
    sizes: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            name = chunk.path_in_schema.split(".")[0]
            sizes[name] = sizes.get(name, 0) + chunk.total_compressed_size
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Shard I/O beside pyarrow's defaults.")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="response tokens, about (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="each time is the best of so many (%(default)s)")
    parser.add_argument("--texts", choices=("short", "long"), default="short", help="length of the texts (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the made-up rows (%(default)s)")
    options = parser.parse_args(argv)
    rng = np.random.default_rng(options.seed)
    schema = schema_of("rollout")
    tokens = token_rows(max(1, 2 * options.tokens // sum(RESPONSE_TOKENS)), rng)
    others = other_columns(tokens, options.texts, rng)
    n_rows = len(tokens["response_ids"])
    n_prompt, n_response = (sum(len(row) for row in tokens[name]) for name in ("prompt_ids", "response_ids"))
    n_sampled = sum(others["completion_tokens"])

    def whole_table() -> pa.Table:
        columns = token_columns(tokens) | {name: pa.array(of, schema.field(name).type) for name, of in others.items()}
        return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)

    columns_seconds, columns = best_seconds(lambda: token_columns(tokens), options.repeats)
    build_seconds, table = best_seconds(whole_table, options.repeats)
    check_seconds, _ = best_seconds(lambda: check(table, "rollout"), options.repeats)

    lists = python_lists(tokens)
    token_schema = pa.schema([schema.field(name) for name in columns])
    pylist_columns_seconds, _ = time_pylist(lists, token_schema, options.repeats)
    pylist_seconds, plain = time_pylist(others | lists, schema, options.repeats)
    assert plain.equals(table), "both ways must build the same table"

    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "part-00000.parquet", Path(folder) / "defaults.parquet"
        write_seconds, _ = best_seconds(lambda: write_part(ours, table), options.repeats)
        plain_write_seconds, _ = best_seconds(lambda: pq.write_table(plain, theirs), options.repeats)
        digest = digest_file(ours)
        read_seconds, found = best_seconds(lambda: read_part(ours, digest), options.repeats)
        plain_read_seconds, _ = best_seconds(lambda: pq.read_table(theirs), options.repeats)
        assert found.equals(table), "what is read must be what was written"
        our_bytes, their_bytes = ours.stat().st_size, theirs.stat().st_size
        our_columns, their_columns = bytes_by_column(ours), bytes_by_column(theirs)

    print(
        f"{n_rows:,} rows, {n_response:,} response tokens ({n_sampled:,} sampled), {n_prompt:,} prompt tokens, "
        f"{options.texts} texts\n{os.cpu_count()} cores, pyarrow {pa.__version__}, "
        f"best of {options.repeats}"
    )
    print(f"{'':32}{'nanoskyrl':>12}{'defaults':>12}{'ratio':>8}")
    for name, mine, other in (
        ("build token columns, s", columns_seconds, pylist_columns_seconds),
        ("build whole table, s", build_seconds, pylist_seconds),
        ("write (ours with fsync), s", write_seconds, plain_write_seconds),
        ("read (ours with digest), s", read_seconds, plain_read_seconds),
        ("file, MB", our_bytes / 1e6, their_bytes / 1e6),
    ):
        print(f"{name:32}{mine:12.3f}{other:12.3f}{other / mine:7.1f}x")
    print(f"{'check the table, s':32}{check_seconds:12.3f}")
    print(f"{'file, bytes per response token':32}{our_bytes / n_response:12.2f}{their_bytes / n_response:12.2f}")
    texts = [name for name in others if name in ("prompt", "response", "messages", "turns")]
    named = [*TOKEN_COLUMNS, *texts]
    for name in (name for name in named if name in our_columns):
        print(f"{'  ' + name + ', MB':32}{our_columns[name] / 1e6:12.3f}{their_columns[name] / 1e6:12.3f}")
    mine, other = (sum(size for name, size in of.items() if name not in named) for of in (our_columns, their_columns))
    print(f"{'  all others, MB':32}{mine / 1e6:12.3f}{other / 1e6:12.3f}")
    if options.tokens == TOKENS and options.texts == "short":
        print(f"target {TARGET_BYTES / 1e6:.0f} MB: {'met' if our_bytes <= TARGET_BYTES else 'missed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
