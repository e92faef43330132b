"""The tokens of one trajectory side by side with what each stage says of them."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from nanoskyrl.stages.core.metrics import finite
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.runs import Run, step_of

ColorBy = Literal["advantage", "logprob", "ratio", "mask"]
COLORS = get_args(ColorBy)
COLUMNS = {
    "logprob": "rollout_logprobs", "advantage": "advantages", "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs", "value": "values", "return_": "returns",
}  # fmt: skip
"""What is known of a token, by the column that holds it."""
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFacts:
    """One token of a response. What nobody worked out is None."""

    index: int
    """Among the response's tokens."""
    id: int
    text: str
    """What the tokenizer adds to the text with it; empty where a character is not whole yet, or without a tokenizer."""
    sampled: bool
    """Whether the policy sampled it: loss_mask is 1."""
    logprob: float | None = None
    """Nats under the sampling policy."""
    advantage: float | None = None
    old_logprob: float | None = None
    ref_logprob: float | None = None
    value: float | None = None
    return_: float | None = None
    ratio: float | None = None
    """Probability under the policy at the start of the update over that under the sampling one."""

    def of(self, color: ColorBy) -> float | None:
        """Return the number that a token is coloured by."""
        return float(self.sampled) if color == "mask" else getattr(self, color)

    def to_plain(self) -> dict[str, Any]:
        """Return the facts, JSON-ready, those that nobody worked out left away."""
        found = {("return" if name == "return_" else name): value for name, value in asdict(self).items()}
        return {name: value for name, value in found.items() if value is not None}


def token_facts(row: pa.Table, tokenizer: Any = None) -> list[TokenFacts]:
    """Return the response's tokens of a table of one row; [] where it has none.

    Args:
        row: With the columns of rollout, score or advantage.
        tokenizer: Of the `tokenizers` package; None: no texts.
    """
    ids = _list(row, "response_ids")
    if ids is None:
        return []
    masks = _list(row, "loss_mask")
    lists = {name: _list(row, column) for name, column in COLUMNS.items()}
    texts = token_texts(tokenizer, [int(value) for value in ids])
    found = []
    for index, number in enumerate(ids):
        numbers = {name: None if values is None else finite(float(values[index])) for name, values in lists.items()}
        old, logprob = numbers["old_logprob"], numbers["logprob"]
        sampled = masks is not None and bool(masks[index])
        # Where nothing is sampled, stages write 0 for want of a number.
        numbers = {name: value if sampled else None for name, value in numbers.items()}
        ratio = None if old is None or logprob is None or not sampled else math.exp(min(20.0, old - logprob))
        found.append(
            TokenFacts(index=index, id=int(number), text=texts[index], sampled=sampled, ratio=ratio, **numbers)
        )
    return found


def _list(row: pa.Table, column: str) -> np.ndarray | None:
    return row_arrays(row.column(column))[0] if column in row.column_names else None


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text; a character of several tokens stands at its last one."""
    if tokenizer is None:
        return [""] * len(ids)
    from tokenizers.decoders import DecodeStream

    stream, found = DecodeStream(skip_special_tokens=False), []
    for number in ids:
        try:
            found.append(stream.step(tokenizer, number) or "")
        except Exception:  # tokenizers raises Exception itself, for ids and bytes that make no text
            stream = DecodeStream(skip_special_tokens=False)
            found.append(tokenizer.id_to_token(number) or "\N{REPLACEMENT CHARACTER}")
    return found


def tokenizer_for(place: Path) -> Any:
    """Return the tokenizer of the run that a file or folder lies in; None where there is none."""
    for folder in (place, *place.parents):
        policies = folder / "policies"
        if policies.is_dir():
            found = (Run(folder).policy(version) / TOKENIZER for version in Run(folder).policies())
            file = next((file for file in found if file.is_file()), None)
            return None if file is None else read_tokenizer(file)
        if step_of(folder) is None and folder != place and (folder / "run.toml").is_file():
            return None
    return None


@lru_cache(maxsize=4)
def read_tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file, which neither pads nor cuts; None where the file is none, or none is there."""
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception:  # tokenizers raises Exception itself; ids are shown without texts
        return None
    found.no_padding()
    found.no_truncation()
    return found


def shade(value: float | None, color: ColorBy, largest: float) -> float:
    """Return how far a token is from what is usual, from -1 to 1: below 0 it is held back or unlikely, above pushed.

    Args:
        value: What it is coloured by.
        color: Which number that is.
        largest: The largest magnitude of an advantage among those shown.
    """
    if value is None:
        return 0.0
    if color == "advantage":
        return value / largest if largest else 0.0
    if color == "logprob":
        return -min(1.0, -value / 5.0) if value < 0 else 0.0
    if color == "ratio":
        return max(-1.0, min(1.0, math.log(max(value, 1e-9)) / math.log(2)))
    return value
