"""Outputs for tests: a small stage that writes parts and crashes, files edited afterwards, advantages of a table."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from nanoskyrl.stages.advantage import preview
from nanoskyrl.stages.core.manifest import Head
from nanoskyrl.stages.core.output import open_output
from nanoskyrl.stages.core.shards import read_part, write_part
from nanoskyrl.stages.learning.advantage_inputs import NO_MODELS

HEAD = Head(
    stage="rollout",
    settings={"rollout": {"seed": 0, "temperature": 1.0, "tasks": ("a", "b")}},
    inputs={"tasks": "d0"},
    policy="p0",
)
PARTS = 3


def table(index):
    """Return part `index`: so many rows and one more, of which the first is dropped."""
    return pa.table({"x": list(range(index + 1)), "dropped": [True] + [False] * index})


def count_dropped(part):
    return {"failed": sum(part.column("dropped").to_pylist())}


def work(directory, head=HEAD, *, crash_before=None, **options):
    """Do what a stage does, and return the numbers of the parts that were not there yet."""
    written = []
    with open_output(directory, head, dropped=count_dropped, **options) as output:
        if output.manifest is not None:
            return None
        for index in range(PARTS):
            if index == crash_before:
                raise RuntimeError("out of memory")
            if not output.has_part(index):
                output.write_part(index, table(index))
                written.append(index)
        output.finish(rows_in=10, facts={"groups": 2})
    return written


def crash(directory, head=HEAD, before=2, **options):
    with pytest.raises(RuntimeError, match="out of memory"):
        work(directory, head, crash_before=before, **options)


def contents(directory):
    """Return the bytes of every file, by name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_part(path: Path, column: str, change: Callable[[list[Any]], None]) -> None:
    """Rewrite a column of a part; its manifest stays as it was."""
    table = read_part(path)
    values = table.column(column).to_pylist()
    change(values)
    field = table.schema.field(column)
    write_part(path, table.set_column(table.column_names.index(column), field, pa.array(values, field.type)))


def add_advantages(scored, config, models=NO_MODELS):
    """Return what `advantage` would write of a table of scored rows."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "score"
        with open_output(place, Head(stage="score", settings={})) as output:
            output.write_part(0, scored)
            output.finish(rows_in=scored.num_rows)
        return preview(place, config, models)
