"""Token ids of shards against the model that is to read them: one that it does not embed is found before it runs."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.models.policy import text_config

TOKEN_IDS = ("prompt_ids", "response_ids")


def check_token_ids(table: pa.Table, place: Path, policy: Path) -> None:
    """Refuse rows with a token that a policy has no embedding for.

    Args:
        table: Rows, kept or not.
        place: The directory that they were read from.
        policy: The model that is to read them; where its config gives no vocabulary, nothing is refused.

    Raises:
        InputError: names the directory, the trajectory, the token and the size of the vocabulary.
    """
    size = text_config(policy).get("vocab_size")
    if not isinstance(size, int):
        return
    for name in TOKEN_IDS:
        extremes = pc.min_max(pc.list_flatten(table.column(name)))
        low, high = extremes["min"].as_py(), extremes["max"].as_py()
        if low is None or (low >= 0 and high < size):
            continue
        for row, ids in enumerate(row_arrays(table.column(name))):
            wrong = np.zeros(0, np.int32) if ids is None else ids[(ids < 0) | (ids >= size)]
            if len(wrong):
                raise InputError(
                    f"trajectory `{table.column('trajectory_id')[row]}` of `{place}` holds the token {wrong[0]} in "
                    f"`{name}`, and the vocabulary of `{policy}` has {size}",
                    hint="Name the policy that sampled the rows, or one with the same tokenizer",
                )
