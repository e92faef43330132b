"""Trajectories of a run for other programs: JSON lines, conversations of successes for SFT, a Hugging Face data set."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from nanoskyrl.stages.core.errors import InputError, OutputError, SettingsError
from nanoskyrl.stages.core.manifest import STAYS_LOCAL, refuse_to_leave
from nanoskyrl.stages.core.rows import to_json
from nanoskyrl.stages.core.shards import read_part, write_part
from nanoskyrl.stages.core.storage import make_directory, whole_file, write_whole
from nanoskyrl.stages.core.trajectory import COLUMNS, columns_of
from nanoskyrl.stages.looking.database import FinishedOutput, telling_outputs

Form = Literal["jsonl", "chat", "dataset"]
FORMS = ("jsonl", "chat", "dataset")
JSON_COLUMNS = ("messages", "metadata", "reward_parts")
CHAT_COLUMNS = ("is_last_step", "success", "messages")
STEP = pa.field("step", pa.int32())


class Exported(NamedTuple):
    """What was written."""

    rows: int
    of: int
    """Rows that were there."""


def export_rows(place: Path, output: Path, form: Form) -> Exported:
    """Write the trajectories of a run, or of one stage; of each step those of the stage that tells most.

    Args:
        place: A run, or the directory of a stage.
        output: A file of JSON lines, or the folder of a data set; nothing must be there.
        form: `jsonl`: every column, one row a line, which `skyrl import` reads. `chat`: `messages` of successes alone.
            `dataset`: a folder that `datasets.load_dataset` reads, with a card.

    Raises:
        InputError: there are no trajectories, or their text must not leave this machine.
        OutputError: something is there already.
    """
    if form not in FORMS:
        raise SettingsError(f"`--trajectories` is {', '.join(FORMS)}, not `{form}`", hint="Name one of them")
    outputs = telling_outputs(place)
    if not outputs:
        raise InputError(f"`{place}` has no trajectories", hint="Name a run, or the directory of a stage")
    for found in outputs:
        refuse_to_leave(found.manifest.facts.get(STAYS_LOCAL), found.directory)
    if output.exists():
        raise OutputError(f"`{output}` is there already", hint="Name another place, or delete it")
    if form == "dataset":
        return _write_dataset(place, outputs, output)
    count = of = 0
    with whole_file(output) as file:
        for found, table in _tables(outputs, CHAT_COLUMNS if form == "chat" else None):
            of += table.num_rows
            for line in _conversations(table) if form == "chat" else _lines(table, found.step):
                file.write(f"{to_json(line)}\n".encode())
                count += 1
    return Exported(count, of)


def _tables(
    outputs: list[FinishedOutput], columns: tuple[str, ...] | None = None
) -> Iterator[tuple[FinishedOutput, pa.Table]]:
    """Yield the parts, each checked against its digest; columns that an output has not yet are null."""
    for found in outputs:
        known = {column.name for column in columns_of(found.columns)}
        wanted = None if columns is None else [name for name in columns if name in known]
        for part in found.manifest.parts:
            table = read_part(found.directory / part.name, part.digest, wanted)
            for name in columns or ():
                if name not in table.column_names:
                    table = table.append_column(name, pa.nulls(table.num_rows))
            yield found, table


def _lines(table: pa.Table, step: int | None) -> Iterator[dict[str, Any]]:
    """Yield each row as JSON holds it: texts of JSON are read, lists stay lists, null stays null."""
    for batch in table.to_batches(max_chunksize=256):  # a row of Python lists is large
        for row in batch.to_pylist():
            for name in JSON_COLUMNS:
                if row.get(name) is not None:
                    row[name] = json.loads(row[name])
            for turn in row["turns"] or ():
                turn["tool_calls"] = json.loads(turn["tool_calls"])
            yield {"step": step, **row}


def _conversations(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the messages of successes, up to what the policy said last."""
    for row in table.to_pylist():
        if not (row["is_last_step"] and row["success"] and row["messages"] is not None):
            continue
        messages = json.loads(row["messages"])
        while messages and messages[-1].get("role") != "assistant":
            messages.pop()
        if messages:
            yield {"messages": messages}


def _write_dataset(place: Path, outputs: list[FinishedOutput], output: Path) -> Exported:
    """Write a Parquet file of each part and split, and the card last."""
    last = max(outputs, key=lambda found: len(columns_of(found.columns)))
    fields = [pa.field(column.name, column.type) for column in columns_of(last.columns)]
    schema = pa.schema([STEP, *fields])
    counts: Counter[str] = Counter()
    solved: list[bool] = []
    envs: set[str] = set()
    rows = 0
    make_directory(output / "data")
    for found, table in _tables(outputs):
        columns = {name: table.column(name) for name in table.column_names}
        columns["step"] = pa.array([found.step] * table.num_rows, STEP.type)
        whole = [columns.get(field.name, pa.nulls(table.num_rows, field.type)) for field in schema]
        table = pa.Table.from_arrays(whole, schema=schema)
        if "success" in columns:
            last_rows = table.filter(table.column("is_last_step")).column("success").to_pylist()
            solved += [value for value in last_rows if value is not None]
        for split in sorted(set(table.column("split").to_pylist())):
            of_split = table.filter(pa.array([name == split for name in table.column("split").to_pylist()]))
            write_part(output / "data" / f"{split}-{counts[split]:05d}.parquet", of_split)
            counts[split] += 1
        envs.update(table.column("env").to_pylist())
        rows += table.num_rows
    card = _card(place, outputs, schema, rows, sorted(counts), solved, sorted(envs))
    write_whole(output / "README.md", card.encode())
    return Exported(rows, rows)


def _card(
    place: Path, outputs: list[FinishedOutput], schema: pa.Schema, rows: int, splits: list[str], solved: list[bool],
    envs: list[str],
) -> str:  # fmt: skip
    """Return the card: where the rows come from, and what each column means."""
    meanings = {column.name: column.meaning for column in COLUMNS}
    steps = sorted({found.step for found in outputs if found.step is not None})
    policies = dict.fromkeys(found.manifest.policy for found in outputs if found.manifest.policy)
    facts = {
        "Rows": f"{rows:,}",
        "Environments": ", ".join(f"`{name}`" for name in envs),
        "Steps of the run": f"{steps[0]} to {steps[-1]}" if steps else "outside a run",
        "Policies": ", ".join(f"`{digest[:12]}`" for digest in list(policies)[:8]) + ", ..." * (len(policies) > 8),
        "Success": f"{sum(solved) / len(solved):.3f} of {len(solved):,} trajectories" if solved else "not known",
        "Digests of the shards": ", ".join(f"`{found.manifest.digest[:12]}`" for found in outputs[:8])
        + ", ..." * (len(outputs) > 8),
    }
    files = [line for split in splits for line in (f"  - split: {split}", f"    path: data/{split}-*.parquet")]
    size = next(name for limit, name in SIZES if rows < limit)
    lines = [
        "---", "task_categories: [text-generation]", "tags: [reinforcement-learning, trajectories, nanoskyrl]",
        f"size_categories: [{size}]", "configs:", "- config_name: default", "  data_files:", *files, "---", "",
        f"# Trajectories of {place.resolve().name}", "",
        "Attempts of a language model at tasks, token by token, written by nanoskyrl.", "",
        "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in facts.items()), "",
        "## Columns", "", "| Column | Type | Meaning |", "| --- | --- | --- |",
        *(f"| {one.name} | {_type(one)} | {meanings.get(one.name, 'step of the run')} |" for one in schema),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _type(field: pa.Field) -> str:
    return "list of structs" if field.name == "turns" else str(field.type).replace("<", "\\<")


SIZES = (
    (1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10_000_000, "1M<n<10M"),
    (float("inf"), "n>10M"),
)  # fmt: skip
"""Words of the hub for how many rows there are."""
