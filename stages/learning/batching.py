"""From Arrow rows to padded tensors: micro-batches bounded by a budget of tokens.

Index t of a row's tensors holds the values of token t + 1, which the model predicts from
tokens 0..t; prompts and observed tokens are masked out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.learning.process_group import ProcessGroup, share_out
from nanoskyrl.stages.learning.trajectories import old_or_sampler_s
from nanoskyrl.stages.models.packing import Pack, pack_of, sharing_saves
from nanoskyrl.stages.models.prefix_tree import TAKEN, TAKEN_ON_GPU, prefix_tree

PER_TOKEN = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "returns", "values")
"""Columns with one number a response token that training reads."""


@dataclass(frozen=True)  # without slots, so that counts can be kept
class Sequences:
    """Rows of the trajectory table as arrays; None where the column is null or not there."""

    groups: list[str]
    prompt_ids: list[np.ndarray]
    response_ids: list[np.ndarray]
    loss_mask: list[np.ndarray]
    rollout_logprobs: list[np.ndarray | None]
    """Nats under the policy that sampled."""
    old_logprobs: list[np.ndarray | None]
    """Nats under the policy at the start of the update."""
    ref_logprobs: list[np.ndarray | None]
    advantages: list[np.ndarray | None]
    returns: list[np.ndarray | None]
    values: list[np.ndarray | None]
    weights: list[np.ndarray | None]
    """What each token's loss is multiplied by; None: 1."""
    marked: Mapping[int, np.ndarray | None] = field(default_factory=dict)
    """Of some rows by number: 1 on response tokens that the algorithm treats apart; None: on none."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @cached_property
    def lengths(self) -> list[int]:
        """How many tokens each row has, prompt and response."""
        return [len(p) + len(r) for p, r in zip(self.prompt_ids, self.response_ids, strict=True)]

    @property
    def token_ids(self) -> list[np.ndarray]:
        """Tokens of each row, prompt and response."""
        return [np.concatenate(row) for row in zip(self.prompt_ids, self.response_ids, strict=True)]

    @cached_property
    def trained_tokens(self) -> list[int]:
        """Sampled tokens of each row."""
        return [int((mask != 0).sum()) for mask in self.loss_mask]

    def take(self, rows: Sequence[int]) -> "Sequences":
        """Return these rows, without marks."""
        names = [of.name for of in fields(self) if of.name != "marked"]
        return replace(self, **{name: [getattr(self, name)[row] for row in rows] for name in names}, marked={})


def read_sequences(table: pa.Table) -> Sequences:
    """Return the token columns of trainable rows."""

    def column(name: str) -> list[np.ndarray | None]:
        return row_arrays(table.column(name)) if name in table.column_names else [None] * table.num_rows

    def filled(name: str) -> list[np.ndarray]:
        return [np.zeros(0, np.int32) if row is None else row for row in column(name)]

    per_token: dict[str, Any] = {name: column(name) for name in PER_TOKEN}
    per_token["old_logprobs"] = old_or_sampler_s(per_token["old_logprobs"], per_token["rollout_logprobs"])
    return Sequences(
        table.column("group_id").to_pylist(),
        filled("prompt_ids"),
        filled("response_ids"),
        filled("loss_mask"),
        **per_token,
        weights=[None] * table.num_rows,
    )


def one_temperature(table: pa.Table) -> float:
    """Return the temperature that all rows were sampled at.

    Raises:
        InputError: rows differ, or were sampled greedily or from a truncated distribution.
    """
    found = sorted(set(table.column("temperature").to_pylist()))
    if len(found) != 1:
        raise InputError(
            f"rows were sampled at temperatures {', '.join(map(str, found))}", hint="Train on rows of one temperature"
        )
    if found[0] == 0:
        raise InputError(
            "rows were sampled greedily, at temperature 0", hint="Sample at a temperature above 0 to train"
        )
    return found[0]


def with_marks(sequences: Sequences, rows: Sequence[int], marked: Sequence[np.ndarray | None]) -> Sequences:
    """Return the rows with the marks of some of them, which costs nothing for the others."""
    return replace(sequences, marked=dict(zip(rows, marked, strict=True)))


def micro_batches(lengths: Sequence[int], max_tokens: int, *, packed: bool = False) -> list[list[int]]:
    """Split rows into batches of at most `max_tokens` tokens; a longer row goes alone.

    Rows of like length go together, so little is padding.

    Args:
        lengths: Tokens of each row.
        max_tokens: Of one batch; padding counts unless it is packed.
        packed: Whether rows are laid end to end.
    """
    batches: list[list[int]] = []
    filled = 0
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        # Sorted upwards, so the newest row is the widest.
        filled = filled + lengths[row] if packed else (len(batches[-1]) + 1 if batches else 1) * lengths[row]
        if batches and filled <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            filled = lengths[row]
    return batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded tensors of some rows; [B, T-1] hold the values of tokens 1..T-1."""

    rows: list[int]
    ids: Tensor
    """[B, T] int64, padded on the right with 0."""
    attention_mask: Tensor
    """[B, T] 1 for real tokens."""
    loss_mask: Tensor
    """[B, T-1] float32, 1 on sampled tokens."""
    rollout_logprobs: Tensor
    """[B, T-1] float32 nats under the sampling policy; 0 elsewhere."""
    old_logprobs: Tensor
    """[B, T-1] float32 nats under the policy at the start of the update; 0 elsewhere."""
    ref_logprobs: Tensor
    """[B, T-1] float32 nats under the frozen reference; 0 where absent."""
    advantages: Tensor
    """[B, T-1] float32"""
    returns: Tensor
    """[B, T-1] float32 what the critic is to predict; 0 where absent."""
    values: Tensor
    """[B, T-1] float32 what the critic predicted; 0 where absent."""
    weights: Tensor
    """[B, T-1] float32 what each token's loss is multiplied by; 0 where it is not trained."""
    marked: Tensor
    """[B, T-1] float32, 1 on tokens that the algorithm treats apart."""
    pack: Pack | None = None
    """Where the tokens lie packed; None: they are not."""


def collate(
    sequences: Sequences, rows: list[int], device: str, *, packed: bool = False, shared: Sequence[int] | None = None
) -> MicroBatch:
    """Return the tensors of these rows.

    Args:
        sequences: The table's rows.
        rows: Which of them.
        device: Where tensors go.
        packed: Whether they are laid end to end.
        shared: Leading tokens that each row takes from the one before it; None: rows are packed as they are.
    """
    lengths = [len(sequences.prompt_ids[row]) + len(sequences.response_ids[row]) for row in rows]
    shape = (len(rows), max(lengths))
    ids, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    per_token = np.zeros((3 + len(PER_TOKEN), *shape), np.float32)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        start = len(sequences.prompt_ids[row])
        ids[index, :start] = sequences.prompt_ids[row]
        ids[index, start:length] = sequences.response_ids[row]
        attention[index, :length] = 1
        sampled = sequences.loss_mask[row] != 0
        columns = [getattr(sequences, name)[row] for name in PER_TOKEN]
        weights = sequences.weights[row]
        weights, marked = sampled if weights is None else weights, sequences.marked.get(row)
        for place, values in enumerate((sampled, *columns, weights, marked)):
            if values is not None:
                # What stands on observed tokens, NaN in rollout_logprobs, never gets into a tensor.
                per_token[place, index, start:length] = np.where(sampled, values, 0)
    tensors = torch.from_numpy(per_token[:, :, 1:]).to(device)
    pack = pack_of(lengths, shape[1], device, shared) if packed else None
    return MicroBatch(
        rows, torch.from_numpy(ids).to(device), torch.from_numpy(attention).to(device), *tensors, pack=pack
    )


def idle_batch(device: str, *, packed: bool = False) -> MicroBatch:
    """Return a micro-batch of no row, for a pass whose loss is nothing."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    nothing = torch.zeros(1, 1, device=device)
    tensors = [nothing] * (2 + len(PER_TOKEN))
    pack = pack_of([2], 2, device) if packed else None
    return MicroBatch([], ids, torch.ones_like(ids), torch.ones_like(nothing), *tensors, pack=pack)


def response_part(sequences: Sequences, row: int, line: np.ndarray) -> np.ndarray:
    """Return the numbers of a row's response tokens from a line of a micro-batch's [T-1]."""
    start = len(sequences.prompt_ids[row]) - 1
    return line[start : start + len(sequences.response_ids[row])].copy()


def collate_all(
    sequences: Sequences,
    rows: Sequence[int],
    max_tokens: int,
    device: str,
    *,
    packed: bool = False,
    shares: bool = False,
    world: ProcessGroup = ProcessGroup(),
) -> Iterator[MicroBatch | None]:
    """Yield this process's micro-batches of these rows.

    Args:
        sequences: The table's rows.
        rows: Which of them.
        max_tokens: Of one micro-batch.
        device: Where tensors go.
        packed: Whether padding is not computed, and does not count.
        shares: Whether prefixes that rows share are computed once, where that saves time.
        world: All processes; each yields as many. None stands for a pass with nothing to do.
    """
    weight = TAKEN_ON_GPU if device.startswith("cuda") else TAKEN
    tree = prefix_tree(sequences.take(rows).token_ids, weight) if packed and shares else None
    if tree is not None and sharing_saves(tree, device):
        for batch in share_out(tree.batches(max_tokens), tree.weights, world):
            taken = [rows[tree.order[place]] for place in batch]
            yield collate(sequences, taken, device, packed=True, shared=tree.shared_in(batch)) if batch else None
        return
    # Of these rows alone: each mini-batch may bring marks, and with them sequences that have counted nothing yet.
    lengths = [len(sequences.prompt_ids[row]) + len(sequences.response_ids[row]) for row in rows]
    for batch in share_out(micro_batches(lengths, max_tokens, packed=packed), lengths, world):
        yield collate(sequences, [rows[index] for index in batch], device, packed=packed) if batch else None
