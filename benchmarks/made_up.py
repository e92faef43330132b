"""Made-up runs for every benchmark of stages on files: a finished `rollout` of so many trajectories, in parts.

    python benchmarks/made_up.py DIRECTORY --rows 1000000

Groups of 16 attempts at sums of `text_math`, prompts of 68 tokens and responses of 1 to 63, mean 32: 100 tokens a
trajectory. Token ids follow Zipf's law, log-probs are those of `shards.py`; texts are short. An answer is right in a
share of a group's attempts that is drawn for the group. Rows are made a part at a time, from the seed and the part's
number, so that a million of them cost no more memory than one part.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from shards import ids_by_zipf, log_softmax_at_sampled

from nanoskyrl.stages.core.manifest import Head
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.rows import list_column
from nanoskyrl.stages.core.trajectory import schema_of
from nanoskyrl.stages.engines.rollout_config import ROWS_PER_PART

GROUP = 16
PROMPT_TOKENS = 68
RESPONSE_TOKENS = (1, 63)


def made_up_rollout(directory: Path, rows: int, *, rows_per_part: int = ROWS_PER_PART, seed: int = 0) -> None:
    """Write a finished rollout, unless it is there."""
    settings = {
        "rollout": {"env": "text_math", "seed": seed, "train_batch_size": rows // GROUP, "max_generate_length": 64},
        "made_up": {"rows": rows, "rows_per_part": rows_per_part},
    }
    with open_output(directory, Head(stage="rollout", settings=settings)) as out:
        if out.manifest is None:
            for index, start in enumerate(range(0, rows, rows_per_part)):
                if not out.has_part(index):
                    out.write_part(index, made_up_part(start, min(rows_per_part, rows - start), seed))
            out.finish(rows_in=rows)


def made_up_part(start: int, count: int, seed: int = 0) -> pa.Table:
    """Return the rows from `start` on, which is a multiple of the group's size."""
    rng = np.random.default_rng([seed, start])
    rows = range(start, start + count)
    groups = [row // GROUP for row in rows]
    lengths = rng.integers(*RESPONSE_TOKENS, count, endpoint=True)
    prompts = np.repeat(ids_by_zipf(PROMPT_TOKENS * -(-count // GROUP), rng).reshape(-1, PROMPT_TOKENS), GROUP, axis=0)
    responses = np.split(ids_by_zipf(int(lengths.sum()), rng), np.cumsum(lengths)[:-1])
    logprobs = np.split(log_softmax_at_sampled(int(lengths.sum()), rng), np.cumsum(lengths)[:-1])
    right = rng.random(count) < np.repeat(rng.random(-(-count // GROUP)), GROUP)[:count]
    answers = [
        f"<answer>{group % 199 + (not is_right)}</answer>" for group, is_right in zip(groups, right, strict=True)
    ]
    questions = [f"What is {group % 100} + {group % 199 - group % 100}?" for group in groups]
    sampled = lengths.tolist()
    values: dict[str, Any] = {
        "trajectory_id": [f"{row:032x}" for row in rows], "step_index": [0] * count, "is_last_step": [True] * count,
        "group_id": [f"{group:032x}" for group in groups], "sample": [row % GROUP for row in rows],
        "env": ["text_math"] * count, "task_id": [f"addition-1-{group:06d}" for group in groups],
        "split": ["train"] * count, "seed": list(rows), "policy_version": [0] * count,
        "policy_digest": ["d" * 64] * count, "temperature": [1.0] * count, "top_p": [1.0] * count,
        "top_k": [0] * count, "logprobs_mode": ["processed"] * count,
        "prompt_ids": list_column(list(prompts[:count]), pa.int32()),
        "response_ids": list_column(responses, pa.int32()),
        "loss_mask": list_column([np.ones(length, np.int8) for length in sampled], pa.int8()),
        "rollout_logprobs": list_column(logprobs, pa.float32()),
        "prompt": questions, "response": answers,
        "messages": [
            f'[{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}]'
            for question, answer in zip(questions, answers, strict=True)
        ],
        "turns": [
            [{
                "action": answer, "observation": "", "reward": None, "done": True, "tool_calls": "[]",
                "first_token": 0, "token_count": length,
            }]
            for answer, length in zip(answers, sampled, strict=True)
        ],
        "status": ["completed"] * count, "stop_reason": ["stop"] * count, "error": [None] * count,
        "trainable": [True] * count, "prompt_tokens": [PROMPT_TOKENS] * count, "completion_tokens": sampled,
        "metadata": [f'{{"ground_truth": "{group % 199}", "kind": "addition"}}' for group in groups],
    }  # fmt: skip
    schema = schema_of("rollout")
    columns = [
        value if isinstance(value, pa.Array) else pa.array(value, schema.field(name).type)
        for name, value in ((name, values[name]) for name in schema.names)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def main(argv: Sequence[str] | None = None) -> int:
    """Write one."""
    parser = argparse.ArgumentParser(description="A made-up rollout.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=100_000, help="trajectories (%(default)s)")
    parser.add_argument("--rows-per-part", type=int, default=ROWS_PER_PART, help="of each part (%(default)s)")
    options = parser.parse_args(argv)
    made_up_rollout(options.directory, options.rows, rows_per_part=options.rows_per_part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
