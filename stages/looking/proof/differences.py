"""The first place where an output that was made again is another: row, column and token, or tensor and element."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanoskyrl.stages.core.manifest import Manifest, first_difference
from nanoskyrl.stages.looking.diff_columns import ColumnDifference, compare_column


def difference(then: Path, recorded: Manifest, now: Path, made: Manifest) -> str | None:
    """Return where an output differs from one that was made again, in words; None: they are equal, byte for byte.

    Which code and libraries made them, and the digests of their inputs, are not looked at.

    Args:
        then: The recorded output.
        recorded: Its manifest.
        now: What was made again.
        made: Its manifest.
    """
    digests = [{part.name: part.digest for part in manifest.parts} for manifest in (recorded, made)]
    start = 0
    for part in recorded.parts:
        if part.name in digests[1] and digests[1][part.name] != part.digest:
            return _in_tables(pq.read_table(then / part.name), pq.read_table(now / part.name), start)
        start += part.rows
    if digests[0].keys() != digests[1].keys():
        return f"{len(digests[0])} parts were recorded, and {len(digests[1])} come out"
    kept_state = any(name.startswith("state/") for name in recorded.files)  # see `train.state_every`
    made_files = {name for name in made.files if kept_state or not name.startswith("state/")}
    for name in sorted({*recorded.files, *made_files}):
        if recorded.files.get(name) != made.files.get(name):
            return _in_files(then / name, now / name, name)
    facts = [(m.facts, m.rows_in, m.dropped, m.policy) for m in (recorded, made)]
    for name, ours, theirs in zip(("facts", "rows_in", "dropped", "policy"), *facts, strict=True):
        if found := first_difference(ours, theirs, name):
            return f"`{found[0]}`: {found[1]} was recorded, and {found[2]} comes out"
    return None


def _in_tables(then: pa.Table, now: pa.Table, start: int) -> str:
    """Return the first difference of two tables, column by column; rows are counted from `start`."""
    if then.column_names != now.column_names:
        return f"its columns are not {', '.join(sorted({*then.column_names} ^ {*now.column_names}))}"
    if then.num_rows != now.num_rows:
        return f"from row {start} on, {then.num_rows} rows were recorded, and {now.num_rows} come out"
    for name in then.column_names:
        found = ColumnDifference()
        place = lambda row, name=name: f"column `{name}`, row {start + row}"  # noqa: E731 - of this column
        compare_column(name, then.column(name), now.column(name), 0.0, found, place, None)
        if found.first is not None:
            return f"{found.first} in its place"
    return f"from row {start} on, the values are the same and the bytes are not"


def _in_files(then: Path, now: Path, name: str) -> str:
    """Return the first difference of two files; of weights, the tensor and its element."""
    if not (then.is_file() and now.is_file()):
        gone = not now.is_file()
        return f"`{name}` {'was recorded, and does not come out' if gone else 'comes out, and was not recorded'}"
    if then.suffix != ".safetensors":
        return f"`{name}` has other bytes"
    import torch
    from safetensors.torch import load_file

    ours, theirs = load_file(then), load_file(now)
    for tensor in sorted({*ours, *theirs}):
        a, b = ours.get(tensor), theirs.get(tensor)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            return f"`{name}`, tensor `{tensor}`: one has it otherwise, or not at all"
        if not torch.equal(a, b):
            at = int((a.flatten() != b.flatten()).nonzero()[0])
            values = f"{a.flatten()[at].item()!r} was recorded, and {b.flatten()[at].item()!r} comes out"
            return f"`{name}`, tensor `{tensor}`, element {at}: {values}"
    return f"`{name}` has the same tensors and other bytes"
