"""Tasks from a JSONL or Parquet file, or a data set of the hub, of prompts and ground truths.

Columns, by the first name that is there: the prompt under `prompt`, `question` or
`problem` (text, or a list of messages); the ground truth under `ground_truth`, `final`,
`answer` or `solution` (GSM8K's text after `####` if it has one, MATH's last box), or inside
`reward_spec` (SkyRL) or `reward_model` (verl). `id` or `task_id` names the task;
`env_class` (SkyRL) or `data_source` (verl) is kept as its kind.

`hub:OWNER/NAME`, with `:CONFIG` and `@REVISION` where wanted, names a data set of the hub; the
split train or test is that of the same name. Without a revision, a later run may see other rows.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoskyrl.envs.base import Message, Task
from nanoskyrl.envs.graders.grade_math import last_box
from nanoskyrl.envs.messages import tidy_messages
from nanoskyrl.stages.core.digests import digest_json
from nanoskyrl.stages.core.errors import InputError, told_as
from nanoskyrl.stages.core.storage import as_path

ID_KEYS = ("id", "task_id")
PROMPT_KEYS = ("prompt", "question", "problem")
TRUTH_KEYS = ("ground_truth", "final", "answer", "solution")
NESTED_TRUTH_KEYS = ("reward_spec", "reward_model")
KIND_KEYS = ("data_source", "env_class")
HUB = "hub:"


def read_tasks(data: str, split: str) -> list[Task]:
    """Return the tasks of a file, in its order.

    Raises:
        InputError: the file is missing, unreadable, empty, or a row lacks prompt or ground truth.
    """
    rows = list(_hub_rows(data.removeprefix(HUB), split)) if data.startswith(HUB) else read_rows(data)
    tasks = [_task(row, place, split) for place, row in rows]
    seen: dict[str, str] = {}
    for index, ((place, row), task) in enumerate(zip(rows, tasks, strict=True)):
        if task.task_id in seen and _id_of(row) is not None:
            raise InputError(f"{place} has the id `{task.task_id}` of {seen[task.task_id]}", hint="Ids must differ")
        if task.task_id in seen:  # the same question twice, without ids: two tasks
            tasks[index] = replace(task, task_id=f"{task.task_id}-{index}")
        seen[tasks[index].task_id] = place
    return tasks


def data_of(split: str, data: str | None, test_data: str | None) -> str | None:
    """Return the file or data set that a split is read from; None: its tasks are generated."""
    return test_data if split == "test" and test_data is not None else data


def read_rows(
    name: str, what: str = "data set", holds: str = "prompts and ground truths"
) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a JSONL or Parquet file as they are, each with the place that an error names.

    Args:
        name: Where it is; a local path or an address.
        what: What it is, for messages.
        holds: What it should hold, for messages.

    Raises:
        InputError: the file is missing, unreadable or empty.
    """
    path = as_path(name)
    with told_as(
        InputError, f"{what} `{name}` cannot be reached", Exception, hint="Check the address and the network"
    ):  # remote file systems raise whatever their client does
        there = path.is_file()
    if not there:
        raise InputError(f"no {what} at `{name}`", hint=f"Name a .jsonl or .parquet file of {holds}")
    rows = list(_parquet_rows(path) if path.suffix == ".parquet" else json_rows(path))
    if not rows:
        raise InputError(f"{what} `{name}` is empty", hint=f"Give at least one row of {holds}")
    return rows


def _id_of(row: dict[str, Any]) -> Any:
    return next((row[key] for key in ID_KEYS if row.get(key) is not None), None)


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a JSONL file, with the place that an error names.

    Raises:
        InputError: the file is no UTF-8 text, or a line is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"`{path}` is not UTF-8 text: {error.reason}", hint="Save it as UTF-8 JSON lines") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"line {number} of `{path}`"
        with told_as(
            InputError, f"{place} is not JSON", ValueError, RecursionError, hint="Write one JSON object a line"
        ):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise InputError(f"{place} is not a JSON object", hint="Write one JSON object a line")
        yield place, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        told_as(
            InputError,
            f"`{path}` cannot be read as Parquet",
            pa.ArrowException,
            OSError,
            hint="Write it again, or use JSON lines",
        ),
        path.open("rb") as file,
    ):
        table = pq.ParquetFile(file).read(use_threads=False)  # as shards are read: no pool at exit
    for number, row in enumerate(table.to_pylist()):
        yield f"row {number} of `{path}`", row


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    address, _, revision = name.partition("@")
    name, _, config = address.partition(":")
    try:
        table = datasets.load_dataset(name, config or None, split=split, revision=revision or None)
    except Exception as error:  # the library, its clients and the network raise what they like
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"data set `{name}` cannot be had from the hub: {type(error).__name__}: {reason}",
            hint="Check its name, config and split and the network; some need `hf auth login`",
        ) from error
    for number, row in enumerate(table):
        yield f"row {number} of `{name}`", dict(row)


def _task(row: dict[str, Any], place: str, split: str) -> Task:
    prompt = next((row[key] for key in PROMPT_KEYS if row.get(key)), None)
    if prompt is None:
        raise InputError(f"{place} has no prompt", hint=f"Add one of the columns {', '.join(PROMPT_KEYS)}")
    truth = _truth(row)
    if truth is None:
        raise InputError(
            f"{place} has no ground truth",
            hint=f"Add a column {', '.join(TRUTH_KEYS)}, or {' or '.join(NESTED_TRUTH_KEYS)} with ground_truth",
        )
    messages: Sequence[Message] = () if isinstance(prompt, str) else _messages(prompt, place)
    text = str(messages[-1]["content"] or "") if messages else str(prompt)
    task_id = _id_of(row)
    if task_id is None:
        task_id = digest_json([text, truth])[:16]
    # A prompt of plain text gets our instruction, to answer in tags; messages bring one of their own.
    metadata = {"grader": "stated_answer" if messages else "final_answer"}
    kind = next((row[key] for key in KIND_KEYS if isinstance(row.get(key), str)), None)
    metadata |= {"kind": kind} if kind else {}
    return Task(
        task_id=str(task_id), split=split, prompt=text, ground_truth=truth, messages=messages, metadata=metadata
    )


def _truth(row: dict[str, Any]) -> str | None:
    value = next((row[key] for key in TRUTH_KEYS if row.get(key) is not None), None)
    if value is None:
        nested = (_as_dict(row.get(key)).get("ground_truth") for key in NESTED_TRUTH_KEYS)
        value = next((truth for truth in nested if truth is not None), None)
    if value is None:
        return None
    if "####" not in str(value) and (boxed := last_box(str(value))) is not None:
        return boxed
    return str(value).rsplit("####", 1)[-1].strip()


def _as_dict(value: Any) -> dict[str, Any]:
    """Return a nested column; some files hold it as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _messages(prompt: Any, place: str) -> tuple[dict[str, Any], ...]:
    hint = "Give text, or a list of role and content"
    if not isinstance(prompt, list) or not all(
        isinstance(message, dict) and "role" in message and message.keys() & {"content", "tool_calls"}
        for message in prompt
    ):
        raise InputError(f"{place} has a prompt that is neither text nor messages", hint=hint)
    with told_as(InputError, f"{place} has a prompt that cannot be shown", TypeError, hint=hint):
        return tuple(tidy_messages(prompt))
