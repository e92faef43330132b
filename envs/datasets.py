"""Tasks from a file or folder, or a data set of the hub, of prompts and ground truths; `data_files.py` reads them.

Columns, unless `columns` names them, by the first name that is there: the prompt under `prompt`, `question` or
`problem` (text, or a list of messages); the ground truth under `ground_truth`, `final`,
`answer` or `solution` (GSM8K's text after `####` if it has one, MATH's last box), or inside
`reward_spec` (SkyRL) or `reward_model` (verl); a list, or an object that `golds.py` knows, holds
several that are right. `id` or `task_id` names the task; `env_class` (SkyRL) or `data_source`
(verl) is kept as its kind.

`hub:OWNER/NAME`, with `:CONFIG` and `@REVISION` where wanted, names a data set of the hub; the
split train or test is that of the same name. Without a revision, a later run may see other rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from nanoskyrl.envs.base import Message, Task
from nanoskyrl.envs.data_files import HINT, file_rows, folder_rows, numbered
from nanoskyrl.envs.graders.golds import golds_of
from nanoskyrl.envs.graders.reading import REASONING, last_box
from nanoskyrl.envs.messages import tidy_messages
from nanoskyrl.stages.core.checked import FILE, Checked, PositiveInt
from nanoskyrl.stages.core.digests import digest_json, digest_path
from nanoskyrl.stages.core.errors import InputError, SettingsError, did_you_mean, told_as
from nanoskyrl.stages.core.storage import as_path

ID_KEYS = ("id", "task_id")
PROMPT_KEYS = ("prompt", "question", "problem")
TRUTH_KEYS = ("ground_truth", "final", "answer", "solution")
NESTED_TRUTH_KEYS = ("reward_spec", "reward_model")
KIND_KEYS = ("data_source", "env_class")
COLUMNS = {"prompt": PROMPT_KEYS, "answer": TRUTH_KEYS, "id": ID_KEYS, "kind": KIND_KEYS}
"""What a task is made of, and the names that its columns have in files."""
HUB = "hub:"


def read_tasks(data: str, split: str, columns: Mapping[str, str] = {}) -> list[Task]:
    """Return the tasks of a file or folder, in its order; read once, while it stays as it is, and the hub once.

    Args:
        data: Where it is, or `hub:` and its name on the hub.
        split: train or test.
        columns: Names of the columns that hold COLUMNS; those that are not named are looked for.

    Raises:
        InputError: it is missing, unreadable, empty, or a row lacks prompt or ground truth.
        SettingsError: something is named that is no column of a task.
    """
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise SettingsError(
            f"`columns` names `{unknown[0]}`", hint=did_you_mean(unknown[0], COLUMNS) or f"Name {', '.join(COLUMNS)}"
        )
    digest = None
    if not data.startswith(HUB):
        with suppress(Exception):  # whatever a remote file system raises: reading says what is wrong
            digest = digest_path(as_path(data))
    return [*_tasks(data, digest, split, tuple(columns.items()))]


@lru_cache(maxsize=8)  # a loop asks again at every step
def _tasks(data: str, digest: str | None, split: str, columns: tuple[tuple[str, str], ...]) -> list[Task]:
    rows = list(_hub_rows(data.removeprefix(HUB), split)) if data.startswith(HUB) else read_rows(data, split=split)
    rows = [(place, _named(row, place, dict(columns))) for place, row in rows]
    if digest is not None and digest_path(as_path(data)) != digest:
        raise InputError(f"data set `{data}` changed while it was read", hint="Start again once it is whole")
    tasks = [_task(row, place, split) for place, row in rows]
    seen: dict[str, str] = {}
    for index, ((place, row), task) in enumerate(zip(rows, tasks, strict=True)):
        if task.task_id in seen and _id_of(row) is not None:
            raise InputError(f"{place} has the id `{task.task_id}` of {seen[task.task_id]}", hint="Ids must differ")
        if task.task_id in seen:  # the same question twice, without ids: two tasks
            tasks[index] = replace(task, task_id=f"{task.task_id}-{index}")
        seen[tasks[index].task_id] = place
    return tasks


def _named(row: dict[str, Any], place: str, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row whose columns have the names that are looked for first."""
    for name, column in columns.items():
        if column not in row:
            raise InputError(f"{place} has no column `{column}`", hint=f"It has {', '.join(map(str, row))}")
        others = [key for key in COLUMNS[name] if key != column]
        row = {**{key: value for key, value in row.items() if key not in others}, COLUMNS[name][0]: row[column]}
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSourceConfig(Checked):
    """Where the tasks of a world come from that has questions and answers: they are generated, or a data set's."""

    n_train: PositiveInt = 8192
    """Generated training tasks, at most."""
    n_test: PositiveInt = 1024
    """Generated held-out tasks, at most; no question of test is in train."""
    data: str | None = field(default=None, metadata=FILE)
    """A file or folder of prompts and ground truths, in place of generated tasks; what `datasets` reads is read."""
    test_data: str | None = field(default=None, metadata=FILE)
    """Such a file for split test; None: `data` serves both splits, and nothing is held out."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns of the data set by what they hold (prompt, answer, id or kind): { prompt = "frage" }."""
    reasoning_marks: tuple[tuple[str, str], ...] = REASONING
    """Pairs of texts between which a policy thinks; nothing there is an answer."""

    def count(self, split: str) -> int:
        """Return how many tasks of a split are generated, at most."""
        return self.n_test if split == "test" else self.n_train

    def read(self, split: str) -> list[Task] | None:
        """Return the tasks that a data set gives for a split; None: they are generated."""
        data = self.test_data if split == "test" and self.test_data is not None else self.data
        return None if data is None else read_tasks(data, split, self.columns)


def read_rows(
    name: str, what: str = "data set", holds: str = "prompts and ground truths", split: str = "train"
) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of a file or folder as they are, each with the place that an error names.

    Args:
        name: Where it is; a local path or an address.
        what: What it is, for messages.
        holds: What it should hold, for messages.
        split: Which rows of a folder with several splits.

    Raises:
        InputError: it is missing, unreadable or empty.
    """
    path = as_path(name)
    with told_as(
        InputError, f"{what} `{name}` cannot be reached", Exception, hint="Check the address and the network"
    ):  # remote file systems raise whatever their client does
        is_file, is_folder = path.is_file(), path.is_dir()
    if not (is_file or is_folder):
        raise InputError(f"no {what} at `{name}`", hint=f"Name what holds {holds}. {HINT}")
    rows = list(file_rows(path) if is_file else folder_rows(path, split))
    if not rows:
        raise InputError(f"{what} `{name}` is empty", hint=f"Give at least one row of {holds}")
    return rows


def _id_of(row: dict[str, Any]) -> Any:
    return next((row[key] for key in ID_KEYS if row.get(key) is not None), None)


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
    yield from numbered(table, name)


def _task(row: dict[str, Any], place: str, split: str) -> Task:
    prompt = next((row[key] for key in PROMPT_KEYS if row.get(key)), None)
    if prompt is None:
        raise InputError(f"{place} has no prompt", hint=f"Add one of the columns {', '.join(PROMPT_KEYS)}")
    truth = _truth(row, place)
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


def _truth(row: dict[str, Any], place: str) -> str | list[str] | None:
    """Return the right answer, or all of them where a column holds a list or an object."""
    value = next((row[key] for key in TRUTH_KEYS if row.get(key) is not None), None)
    if value is None:
        nested = (_as_dict(row.get(key)).get("ground_truth") for key in NESTED_TRUTH_KEYS)
        value = next((truth for truth in nested if truth is not None), None)
    if value is None:
        return None
    with told_as(
        InputError, f"the ground truth of {place}", ValueError, hint="Give a text, a list of texts, or a known object"
    ):
        texts = [_answer_of(text) for text in golds_of(value if isinstance(value, list | dict) else str(value))]
    return texts if len(texts) > 1 else texts[0]


def _answer_of(text: str) -> str:
    if "####" not in text and (boxed := last_box(text)) is not None:
        return boxed
    return text.rsplit("####", 1)[-1].strip()


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
