"""Where two columns of the same rows differ: which rows, by how much, and the first of them in words."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanoskyrl.stages.core.manifest import differences
from nanoskyrl.stages.core.rows import row_arrays
from nanoskyrl.stages.core.safe_text import one_line, shortened

LONGEST = 60
"""Characters of a value."""
CONTEXT = 5
"""Tokens that are shown before the first that differs, and elements of a list from there on."""
FEW = 6
"""Kinds of changes that are counted, at most, of a column of words."""
DIGEST = re.compile("[0-9a-f]{64}")
Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""


@dataclass(slots=True)
class ColumnDifference:
    """How a column differs, over all parts."""

    rows: int = 0
    largest: float | None = None
    """Of numbers that stand at the same place in both."""
    first: str | None = None
    """The first row that differs, and how."""
    flips: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of a column of words: how often which became which."""

    def in_words(self, total: int) -> str:
        """Return all of it in one line."""
        by = "" if self.largest is None else f", by up to {self.largest:.4g}"
        flips = ", ".join(f"{then} -> {now} {count}" for (then, now), count in self.flips.most_common(FEW))
        return f"{self.rows} of {total} rows{by}{f' ({flips})' if flips else ''}; first {self.first}"


def shown(value: Any) -> str:
    """Return a value in a few words that a terminal may print."""
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value[:12]
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return shortened(one_line(text), LONGEST)


def compare_column(
    name: str, ours: pa.ChunkedArray, theirs: pa.ChunkedArray, tolerance: float, found: ColumnDifference,
    row_name: Callable[[int], str], decode: Decode | None,
) -> None:  # fmt: skip
    """Add to `found` where two columns of the same rows differ.

    Args:
        name: Of the column.
        ours: Its values in the one table.
        theirs: In the other.
        tolerance: Largest difference of numbers that counts as none.
        found: What is known so far.
        row_name: Names a row.
        decode: Of token ids; None: only their numbers are shown.
    """
    kind = ours.type
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        _compare_lists(name, ours, theirs, tolerance, found, row_name, decode)
        return
    if pa.types.is_floating(kind):
        rows, largest = _unequal_numbers(ours, theirs, tolerance)
        _widen(found, largest)
    elif pa.types.is_nested(kind):
        rows = [row for row, (a, b) in enumerate(zip(ours.to_pylist(), theirs.to_pylist(), strict=True)) if a != b]
    else:
        rows = np.flatnonzero(_unequal(ours, theirs)).tolist()
    pairs = [(row, ours[row].as_py(), theirs[row].as_py()) for row in rows]
    if tolerance and pa.types.is_string(kind):  # parts of a reward are numbers in JSON
        pairs = [pair for pair in pairs if _json_differs(pair[1], pair[2], tolerance)]
    if not pairs:
        return
    if pa.types.is_boolean(kind) or name.endswith(("status", "reason")):
        found.flips.update((shown(a), shown(b)) for _, a, b in pairs)
    if found.first is None:
        row, a, b = pairs[0]
        found.first = f"{row_name(row)}: {_change(a, b)}"
    found.rows += len(pairs)


def _unequal(ours: pa.ChunkedArray, theirs: pa.ChunkedArray) -> np.ndarray:
    unequal = pc.fill_null(pc.not_equal(ours, theirs), False).to_numpy()
    return unequal | (pc.is_null(ours).to_numpy() != pc.is_null(theirs).to_numpy())


def _unequal_numbers(
    ours: pa.ChunkedArray, theirs: pa.ChunkedArray, tolerance: float
) -> tuple[list[int], float | None]:
    a, b = (np.asarray(column.to_numpy(), np.float64) for column in (ours, theirs))
    rows = np.flatnonzero(_unequal(ours, theirs) & ~_within(a, b, tolerance))
    return rows.tolist(), _largest(a[rows], b[rows])


def _within(a: np.ndarray, b: np.ndarray, tolerance: float) -> np.ndarray:
    """Return where numbers are equal, or apart by no more than the tolerance; what is null in both is equal."""
    with np.errstate(invalid="ignore"):
        return (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= tolerance)


def _largest(a: np.ndarray, b: np.ndarray) -> float | None:
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    apart = apart[~np.isnan(apart)]
    return float(apart.max()) if len(apart) else None


def _widen(found: ColumnDifference, largest: float | None) -> None:
    if largest is not None:
        found.largest = max(found.largest or 0.0, largest)


def _compare_lists(
    name: str, ours: pa.ChunkedArray, theirs: pa.ChunkedArray, tolerance: float, found: ColumnDifference,
    row_name: Callable[[int], str], decode: Decode | None,
) -> None:  # fmt: skip
    floating = pa.types.is_floating(ours.type.value_type)
    for row, (a, b) in enumerate(zip(row_arrays(ours), row_arrays(theirs), strict=True)):
        if a is None and b is None:
            continue
        if a is None or b is None or len(a) != len(b):
            apart = None
        else:
            if np.array_equal(a, b):
                continue
            where = np.flatnonzero(~_within(a, b, tolerance if floating else 0.0))
            if not len(where):
                continue
            apart = a[where].astype(np.float64), b[where].astype(np.float64)
        found.rows += 1
        if floating and apart is not None:
            _widen(found, _largest(*apart))
        if found.first is None:
            found.first = f"{row_name(row)}: {_first_element(name, a, b, tolerance if floating else 0.0, decode)}"


def _first_element(
    name: str, a: np.ndarray | None, b: np.ndarray | None, tolerance: float, decode: Decode | None
) -> str:
    """Return the first place where two lists differ; of tokens with the text around it."""
    if a is None or b is None:
        return f"{_length(a)} -> {_length(b)}"
    both = min(len(a), len(b))
    apart = np.flatnonzero(~_within(a[:both], b[:both], tolerance))
    at = int(apart[0]) if len(apart) else both
    lengths = f"{len(a)}" if len(a) == len(b) else f"{len(a)} -> {len(b)}"
    before = f"token {at} of {lengths}"
    if not name.endswith("_ids"):
        return f"{before}: {_element(a, at)} -> {_element(b, at)}"
    if decode is None:
        return f"{before}: {_element(a, at)} -> {_element(b, at)}, after {a[max(0, at - CONTEXT) : at].tolist()}"
    after = decode(a[max(0, at - CONTEXT) : at].tolist())
    texts = [json.dumps(decode(side[at : at + CONTEXT].tolist()), ensure_ascii=False) for side in (a, b)]
    words = one_line(f"{texts[0]} -> {texts[1]}, after {json.dumps(after, ensure_ascii=False)}")
    return f"{before}: {_element(a, at)} -> {_element(b, at)}, {words}"


def _length(of: np.ndarray | None) -> str:
    return "null" if of is None else f"{len(of)} tokens"


def _element(of: np.ndarray, at: int) -> str:
    if at >= len(of):
        return "the end"
    value = of[at].item()
    if isinstance(value, float):
        return "null" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def _json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text


def _json_differs(a: Any, b: Any, tolerance: float) -> bool:
    return any(not close(x, y, tolerance) for _, x, y in differences(_json(a), _json(b)))


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Say whether two values are numbers that are no further apart than the tolerance."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return numbers and abs(a - b) <= tolerance


def _change(a: Any, b: Any) -> str:
    """Return how a value changed; of JSON, turns and texts only what did."""
    x, y = _json(a), _json(b)
    if isinstance(x, dict) and isinstance(y, dict):
        name, x, y = next(differences(x, y), ("", a, b))
        return f"{name} {shown(x)} -> {shown(y)}"
    if isinstance(x, list) and isinstance(y, list):
        at = next((i for i, (one, other) in enumerate(zip(x, y, strict=False)) if one != other), min(len(x), len(y)))
        if at >= min(len(x), len(y)):
            return f"{len(x)} -> {len(y)} entries"
        deeper = _change(x[at], y[at])
        return f"entry {at}: {deeper}"
    if isinstance(a, str) and isinstance(b, str) and max(len(a), len(b)) > LONGEST and not DIGEST.fullmatch(a):
        at = next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
        start = max(0, at - LONGEST // 3)
        return f"character {at}: {shown(a[start:])} -> {shown(b[start:])}"
    return f"{shown(a)} -> {shown(b)}"
