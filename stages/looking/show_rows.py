"""Rows for a terminal: those that were found, together by group or task, their failed calls, one of them whole."""

# pyarrow makes the functions of pyarrow.compute at import, where a type checker cannot see them.
# pyright: reportAttributeAccessIssue=false

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.metrics import grouped
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.safe_text import one_line, printable
from nanoskyrl.stages.looking.console import plain_table, with_rows
from nanoskyrl.stages.looking.curve import number
from nanoskyrl.stages.looking.error_patterns import failures
from nanoskyrl.stages.looking.find_rows import SOURCE, RowSource, Selection, by_part, select, whole_rows
from nanoskyrl.stages.looking.preview import advantage_of
from nanoskyrl.stages.looking.tokens import ColorBy, token_facts, tokenizer_for
from nanoskyrl.stages.looking.trajectory_view import token_table, trajectory_blocks

TASK_WIDTH, NAME_WIDTH = 24, 32
FACTS = (
    "trajectory_id", "task_id", "env", "status", "stop_reason", "sample", "group_id", "turns", "tokens", "tool_calls",
    "failed_calls", "reward", "success", "score_status", "advantage", "drop_reason", "policy_version", "error",
)  # fmt: skip
"""Facts of a row that `--json` prints."""


def row_table(sources: Sequence[RowSource], found: Selection) -> Table:
    """Return the rows of a selection as a table."""
    has = {name for source in sources for name in source.columns}
    several = len({source.step for source in sources}) > 1
    extra = [name for name, column in (("reward", "reward"), ("advantage", "kept")) if column in has]
    columns = [
        *(Column(name, justify="right", no_wrap=True) for name in (*(("step",) if several else ()), "row")),
        Column("id", no_wrap=True), Column("task", no_wrap=True, max_width=TASK_WIDTH), Column("status", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True, min_width=len(name))
          for name in ("sample", "turns", "tokens", *extra)),
        Column("response", no_wrap=True, ratio=1),
    ]  # fmt: skip
    grid = Table(*columns, box=None, pad_edge=False, expand=True)
    rows = whole_rows(sources, found.table)
    places = found.table.select(["step", "row"]).to_pylist()
    for index, (t, place) in enumerate(zip(from_table(rows) if places else [], places, strict=True)):
        cells = {
            "step": str(place["step"]), "row": str(place["row"]), "id": t.trajectory_id[:8], "task": t.task_id,
            "status": t.status, "sample": str(t.sample), "turns": str(len(t.turns)),
            "tokens": number(t.completion_tokens, "d"),
            "reward": number(t.reward) if t.score_status == "scored" else str(t.score_status),
            "advantage": advantage_of(rows, index) if "advantage" in extra else "", "response": t.response,
        }  # fmt: skip
        grid.add_row(*(Text(one_line(cells[str(column.header)])) for column in columns))
    return grid


def rows_as_plain(sources: Sequence[RowSource], found: Selection) -> dict[str, Any]:
    """Return a selection of FACTS, JSON-ready."""
    rows = found.table.to_pylist()
    for row in rows:
        row["path"] = str(sources[row.pop(SOURCE)].path)
    return {"matched": found.matched, "rows": rows}


def group_table(lines: Sequence[dict[str, Any]]) -> Table:
    """Return what `grouped_rows` found as a table."""
    columns = (_column(name, [line[name] for line in lines]) for name in (lines[0] if lines else ()))
    rows = ([Text(_cell(value)) for value in line.values()] for line in lines)
    return with_rows(Table(*columns, box=None, pad_edge=False), rows)


def _column(name: str, values: Sequence[Any]) -> Column:
    texts = [value for value in values if isinstance(value, str)]
    least = min(NAME_WIDTH, max(map(len, texts), default=0))  # names are typed again: they are not cut short
    return Column(name.removesuffix("_calls"), justify="left" if texts else "right", no_wrap=True, min_width=least)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else one_line(str(value))


def failed_calls(sources: Sequence[RowSource], *, where: str | None) -> list[dict[str, Any]]:
    """Return every tool call that failed in the rows that meet a condition, with where it lies."""
    found = []
    names = ("trajectory_id", "task_id", "env", "policy_version")
    for source, picked in zip(sources, by_part(sources, names, where=where), strict=True):
        if "turns" not in source.columns or not picked.num_rows:
            continue
        rows = picked.drop_columns([SOURCE]).to_pylist()
        turns = source.read(["turns"]) if where is None else whole_rows(sources, picked, ["turns"])
        found += [{**rows[call.pop("row")], **call} for call in (failures(turns) if turns.num_rows else [])]
    return found


def failed_call_tables(calls: Sequence[dict[str, Any]], limit: int) -> Iterator[RenderableType]:
    """Yield failed calls counted by tool and error, then the first of them."""
    if not calls:
        yield Text("no call failed")
        return
    words = ("tool", "error", "pattern", "for instance")
    kinds = grouped(((call.get("tool"), call.get("error"), call["pattern"]), call) for call in calls)
    counted = sorted(kinds.items(), key=lambda kind: len(kind[1]), reverse=True)
    rows = ([str(len(of)), *map(_text, [text or "none" for text in kind]), _text(of[0].get("result"))]
            for kind, of in counted[:limit])  # fmt: skip
    yield plain_table(("count", *words), rows, left=words, wrapped=words[-1:])
    yield Text()
    names = ("step", "row", "id", "turn", "call", "result")
    yield plain_table(names, map(_failed, calls[:limit]), left=("id", *names[-2:]), wrapped=names[-2:])


def _failed(call: dict[str, Any]) -> list[RenderableType]:
    """Return a failed call's line."""
    args = json.dumps(call.get("args"), ensure_ascii=False)
    written = f"{call['tool']}({args})" if call.get("tool") else call["action"]
    step = "" if call["step"] is None else str(call["step"])
    place = (step, str(call["row"]), call["trajectory_id"][:8], str(call["turn"]))
    return [*place, _text(written), _text(call.get("result"))]


def _text(value: Any) -> Text:
    return Text(one_line(str(value)))


def whole_trajectory(
    sources: Sequence[RowSource], place: pa.Table, *, color: ColorBy | None, as_tokens: bool
) -> Iterator[RenderableType]:
    """Yield the rows of a selection whole."""
    rows = whole_rows(sources, place)
    indices = place.column(SOURCE).to_pylist()
    for index, t in enumerate(from_table(rows)):
        row = rows.slice(index, 1)
        tokens = token_facts(row, tokenizer_for(sources[indices[index]].path)) if color or as_tokens else []
        if as_tokens:
            yield token_table(tokens) if tokens else Text("no tokens", style="dim")
            continue
        advantage = advantage_of(rows, index) if "kept" in rows.column_names else None
        yield from trajectory_blocks(t, advantage=advantage, tokens=tokens, color=color)


def trajectory_as_plain(sources: Sequence[RowSource], place: pa.Table) -> list[dict[str, Any]]:
    """Return whole rows, JSON-ready, with their tokens one by one."""
    rows = whole_rows(sources, place)
    found = []
    for index, source in enumerate(place.column(SOURCE).to_pylist()):
        row = rows.slice(index, 1)
        tokens = token_facts(row, tokenizer_for(sources[source].path))
        lists = {field.name for field in row.schema if pa.types.is_list(field.type) and field.name != "turns"}
        plain = row.select([name for name in row.column_names if name not in lists]).to_pylist()[0]
        for name in ("messages", "metadata", "reward_parts"):
            plain[name] = json.loads(plain[name]) if plain.get(name) else None
        for turn in plain.get("turns") or ():
            turn["tool_calls"] = json.loads(turn["tool_calls"])
        found.append({**plain, "tokens": [token.to_plain() for token in tokens]})
    return found


def diagnostics_table(table: pa.Table) -> Table:
    """Return what `train` says of its rows."""
    rows = (
        [f"{v:.4g}" if isinstance(v, float) else printable(str(v))[:12] for v in row.values()]
        for row in table.to_pylist()
    )
    return plain_table(table.column_names, rows, left=("trajectory_id",))


def is_diagnostics(sources: Sequence[RowSource]) -> bool:
    """Say whether the rows are those of `train`."""
    return bool(sources) and "ratio_mean" in sources[0].columns


def row_at(sources: Sequence[RowSource], row: int) -> tuple[list[RowSource], pa.Table]:
    """Return the part that holds a row, and a selection of it by its number; negative ones count from the end.

    Raises:
        SettingsError: there is no such row.
    """
    rows = sum(source.rows for source in sources)
    if not -rows <= row < rows:
        hint = f"Rows are 0 to {rows - 1}" if rows else "There are no rows at all"
        raise SettingsError(f"there is no row {row}", hint=hint)
    source = next(one for one in sources if one.first_row <= row % rows < one.first_row + one.rows)
    return [source], select([source], ()).table.slice(row % rows - source.first_row, 1)
