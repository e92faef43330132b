"""Rows that begin with the same tokens, as a tree: which of their tokens are computed once.

What a causal model makes of a token depends on the tokens before it alone. So rows are put in
the order of their tokens, and each row takes what it has in common with the row before it
from there: a group's prompt, the turns before in step-wise rows, a system prompt of many
groups, whole rows that were sampled twice. The same tree serves training and every other pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 4
"""Tokens that are worth taking from another row."""
TAKEN = 8
"""A token that is taken from another row weighs an eighth of one that is computed, in memory: its key and value alone
are there for each row, as without sharing."""
TAKEN_ON_GPU = 16
"""The same where cascade attention does not write them again for each row."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Rows in the order of their tokens, and what each has in common with the row before it."""

    order: list[int]
    """Where each row stood among those that came in."""
    lengths: list[int]
    """Tokens of each row, in this order."""
    shared: list[int]
    """Leading tokens that are those of the row before; 0: none, or too few."""
    taken_per_computed: int = TAKEN
    """So many of these weigh as much as one that is computed."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)

    @property
    def computed(self) -> int:
        """Tokens that are left to compute."""
        return self.tokens - sum(self.shared)

    @property
    def weights(self) -> list[int]:
        """What each row adds to a batch that holds the row before it, in tokens."""
        return [
            length - taken + -(-taken // self.taken_per_computed)
            for length, taken in zip(self.lengths, self.shared, strict=True)
        ]

    def batches(self, max_tokens: int) -> list[list[int]]:
        """Split the rows into batches whose weights add up to at most `max_tokens`; a longer row goes alone.

        A batch ends where neighbours have least in common, if half of it is filled by then: what lies on both sides
        of a cut is computed twice.

        Returns:
            Places in this order; each batch is a stretch of it.
        """
        weights, batches, start = self.weights, [], 0
        while start < len(weights):
            filled, end, ends = self.lengths[start], start + 1, []
            while end < len(weights):
                if 2 * filled >= max_tokens:
                    ends.append(end)
                if filled + weights[end] > max_tokens:
                    break
                filled += weights[end]
                end += 1
            else:
                ends = []
            if ends:
                end = min(ends, key=lambda place: (self.shared[place], -place))
            batches.append(list(range(start, end)))
            start = end
        return batches

    def shared_in(self, batch: Sequence[int]) -> list[int]:
        """Return what each row of a batch takes from the row before it there."""
        befores = [None, *batch[:-1]]
        return [self.shared[place] if place - 1 == before else 0 for place, before in zip(batch, befores, strict=True)]


def prefix_tree(rows: Sequence[np.ndarray], taken_per_computed: int = TAKEN) -> PrefixTree:
    """Return the tree of these rows.

    Args:
        rows: [T] token ids of each.
        taken_per_computed: So many tokens that are taken from another row weigh as much as one that is computed.
    """
    # Bytes of numbers of one width, the highest first, are in the order of the numbers.
    keys = [np.asarray(row).astype(">u4").tobytes() for row in rows]
    order = sorted(range(len(rows)), key=lambda row: keys[row])
    shared = [0] * len(rows)
    for place in range(1, len(rows)):
        found = in_common(rows[order[place - 1]], rows[order[place]])
        shared[place] = found if found >= LEAST else 0
    return PrefixTree(order, [len(rows[row]) for row in order], shared, taken_per_computed)


def in_common(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many leading tokens two rows have in common."""
    size = min(len(first), len(second))
    apart = np.flatnonzero(first[:size] != second[:size])
    return int(apart[0]) if len(apart) else size
