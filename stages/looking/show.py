"""Anything of a run as a person, or a program, would look at it: `skyrl show`."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.metrics import finite
from nanoskyrl.stages.core.runs import EVALUATIONS, Run, step_of
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.looking import eval_report, grouped_rows, numbers, show_rows, show_run
from nanoskyrl.stages.looking.console import SafeConsole
from nanoskyrl.stages.looking.environment_report import environment_reports
from nanoskyrl.stages.looking.find_rows import located_rows, of_step, select, sources_of, whole_rows
from nanoskyrl.stages.looking.headlines import headline
from nanoskyrl.stages.looking.timings import time_spent, timing_table
from nanoskyrl.stages.looking.tokens import COLORS, ColorBy
from nanoskyrl.stages.models.policy import is_adapter

LEAST_WIDTH, MOST_WIDTH = 100, 240
"""A table is drawn at least so wide, and if its numbers and names need it, wider, but not more than the second."""
STEPS, ROWS = 40, 10
"""Lines of a table that are shown without being asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of a place is asked for."""

    row: int | None = None
    trajectory: str | None = None
    """The start of an id, or a task."""
    where: str | None = None
    sort: str | None = None
    limit: int | None = None
    by: str | None = None
    failed_calls: bool = False
    tokens: bool = False
    color: str | None = None
    timing: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        if self.limit is not None and self.limit < 1:
            hint = "Leave it out for 10"
            raise SettingsError(f"`--limit` must be at least 1, not {self.limit}", hint=hint)
        for flag, value, known in (("--by", self.by, grouped_rows.BY), ("--color", self.color, COLORS)):
            if value is not None and value not in known:
                raise SettingsError(f"`{flag}` is one of {', '.join(known)}, not `{value}`", hint="Choose one")

    @property
    def asks_for_rows(self) -> bool:
        """Whether rows are asked for, and not what a place is as a whole."""
        return bool(self.where or self.sort or self.by or self.failed_calls)

    @property
    def asks_for_one(self) -> bool:
        """Whether one trajectory is asked for."""
        return self.row is not None or self.trajectory is not None


class _Screen:
    """Where things are printed: on a terminal too narrow for a table, lines run on and no number loses its digits."""

    def __init__(self, file: IO[str] | None) -> None:
        self.console = SafeConsole(file=file)

    def show(self, blocks: Iterable[RenderableType]) -> None:
        for block in blocks:
            width = self.console.width
            if isinstance(block, Table):
                least = self.console.measure(block, options=self.console.options.update(max_width=MOST_WIDTH)).minimum
                self.console.width = max(width, LEAST_WIDTH, least)
            self.console.print(block, soft_wrap=isinstance(block, Text))
            self.console.width = width

    def show_json(self, value: Any) -> None:
        self.console.file.write(json.dumps(finite(value), indent=2, ensure_ascii=True) + "\n")


def show(place: Path, view: View | None = None, file: IO[str] | None = None) -> None:
    """Print a run, a step, the output of a stage, policies, evaluations, or rows of them, on stdout or into `file`.

    Raises:
        InputError: nothing of the kind is there.
        SettingsError: there is no such row, or the view asks for what is not there.
    """
    view, screen = view or View(), _Screen(file)
    if not place.exists():
        raise InputError(
            f"there is nothing at `{place}`",
            hint="Name a run, the directory of a stage, or a part; with `--run RUN`, a task or a trajectory",
        )
    if place.suffix == ".parquet":
        _check_part(place)
    if view.asks_for_one:
        _show_one(place, view, screen)
    elif view.asks_for_rows:
        _show_found(place, view, screen)
    elif view.tokens or view.color:
        raise SettingsError("`--tokens` and `--color` are of one trajectory", hint="Name it with `--row` or by its id")
    elif place.suffix == ".parquet" or is_finished(place):
        _show_output(place, view, screen)
    else:
        _show_folder(place, view, screen)


def _check_part(place: Path) -> None:
    """Raise InputError unless a file holds trajectories, or what `train` says of them."""
    table = read_part(place)
    names = table.column_names
    if {"trajectory_id", "ratio_mean"} <= set(names):
        return
    try:
        check(table, "advantage" if "kept" in names else "score" if "score_status" in names else "rollout")
    except InputError as error:
        raise InputError(f"`{place}` holds no trajectories: {error}", hint=error.hint) from error


def _show_one(place: Path, view: View, screen: _Screen) -> None:
    """Print one trajectory whole, or the attempts at a task."""
    if view.trajectory is not None:
        sources, found = located_rows(place, view.trajectory)
        ids = set(found.column("trajectory_id").to_pylist())
        if len(ids) > 1:
            kept = select(sources, show_rows.FACTS, where=f"task_id == {view.trajectory!r}", limit=view.limit)
            _show_rows(sources, kept, view, screen)
            return
    else:
        if not (place.suffix == ".parquet" or is_finished(place)):
            raise SettingsError("a run has no rows", hint="Name a stage's directory, such as `step-000000/score`")
        sources = sources_of(place)
        sources, found = show_rows.row_at(sources, view.row or 0)
    if show_rows.is_diagnostics(sources):
        rows = whole_rows(sources, found)
        _either(screen, view, rows.to_pylist, lambda: [show_rows.diagnostics_table(rows)])
        return
    if view.as_json and view.trajectory is None:
        (with_tokens,) = show_rows.trajectory_as_plain(sources, found)
        (row,) = whole_rows(sources, found).to_pylist()
        screen.show_json({**row, "tokens": with_tokens["tokens"]})
        return
    color: ColorBy | None = next((name for name in COLORS if name == view.color), None)
    _either(
        screen,
        view,
        lambda: show_rows.trajectory_as_plain(sources, found),
        lambda: show_rows.whole_trajectory(sources, found, color=color, as_tokens=view.tokens),
    )


def _show_found(place: Path, view: View, screen: _Screen) -> None:
    """Print the rows that are asked for."""
    sources, limit = sources_of(place), view.limit or ROWS
    if view.failed_calls:
        calls = show_rows.failed_calls(sources, where=view.where)
        _either(screen, view, lambda: calls, lambda: show_rows.failed_call_tables(calls, limit))
        if not view.as_json and len(calls) > limit:
            screen.show([Text(f"{len(calls) - limit} more; `--limit` shows them", style="dim")])
        return
    by: grouped_rows.By | None = next((name for name in grouped_rows.BY if name == view.by), None)
    if by is not None:
        lines, count = grouped_rows.grouped_rows(sources, by, where=view.where, sort=view.sort, limit=limit)
        _either(screen, view, lambda: lines, lambda: [show_rows.group_table(lines)])
        if not view.as_json and count > limit:
            screen.show([Text(f"{count - limit} more; `--limit` shows them", style="dim")])
        return
    names = () if show_rows.is_diagnostics(sources) else show_rows.FACTS if view.as_json else ()
    found = select(sources, names, where=view.where, sort=view.sort, limit=limit)
    _show_rows(sources, found, view, screen)


def _show_rows(sources: list, found: Any, view: View, screen: _Screen) -> None:
    if show_rows.is_diagnostics(sources):
        rows = whole_rows(sources, found.table)
        _either(screen, view, rows.to_pylist, lambda: [show_rows.diagnostics_table(rows)])
    else:
        _either(
            screen, view, lambda: show_rows.rows_as_plain(sources, found), lambda: [show_rows.row_table(sources, found)]
        )
    if not view.as_json:
        rest = found.matched - found.table.num_rows
        more = f"{rest} more; `--limit` shows them" if rest > 0 else f"{found.matched} rows"
        screen.show([Text(f"{more}; `--row N` or the start of an id prints one whole", style="dim")])


def _show_output(place: Path, view: View, screen: _Screen) -> None:
    """Print what a stage, or a part, holds."""
    manifest = read_manifest(place) if place.suffix != ".parquet" else None
    sources = sources_of(place)
    names = show_rows.FACTS if view.as_json and not show_rows.is_diagnostics(sources) else ()
    found = select(sources, names, limit=view.limit or ROWS) if sources else None
    if found is not None and manifest is not None:
        found = type(found)(found.table, manifest.rows_out)
    if view.as_json:
        rows = show_rows.rows_as_plain(sources, found) if found is not None else {}
        screen.show_json({"output": str(place), **({} if manifest is None else numbers.plain(place)), **rows})
        return
    if manifest is not None:
        screen.show([Text(headline(manifest, place))])
        if manifest.stage == "eval":
            screen.show(_summary(place, manifest.settings))
    if found is not None:
        _show_rows(sources, found, view, screen)


def _summary(place: Path, settings: Mapping[str, Any]) -> Iterable[Text]:
    """Yield an evaluation's numbers; of a summary that cannot be read, which `verify` names, nothing."""
    try:
        yield Text(f"{eval_report.table({settings['rollout']['env']: eval_report.summary_of(place)})}\n")
    except (InputError, KeyError, TypeError, AttributeError, ValueError):
        return


def _show_folder(place: Path, view: View, screen: _Screen) -> None:
    """Print a run, a step, policies, one policy, or evaluations."""
    run = Run(place)
    step = step_of(place)
    if step is not None and place == Run(place.parent).step(step):
        blocks = lambda: show_run.step_blocks(Run(place.parent), step)  # noqa: E731
        _either(screen, view, lambda: _step_as_plain(Run(place.parent), step), blocks)
    elif (place / "config.json").is_file() or is_adapter(place):
        policy = show_run.policy_as_plain(place)
        _either(screen, view, lambda: policy, lambda: [show_run.policy_table(policy)])
    elif place.name == "policies" and Run(place.parent).policies():
        policies = show_run.policies_as_plain(Run(place.parent))
        _either(screen, view, lambda: policies, lambda: [show_run.policies_table(policies)])
    elif place.name == EVALUATIONS or place.parent.name == EVALUATIONS:
        _show_evaluations(place, view, screen)
    elif run.steps() or run.policies():
        _show_run(run, view, screen)
    elif run.settings_file.is_file():
        begin = f"`skyrl loop --run {place}` or `skyrl rollout --run {place}` begins one"
        _either(screen, view, lambda: {"steps": []}, lambda: [Text(f"no step yet in {place}; {begin}")])
    else:
        read_manifest(place)  # says what is wrong with a stage's directory


def _show_run(run: Run, view: View, screen: _Screen) -> None:
    if view.timing:
        _either(screen, view, lambda: time_spent(run), lambda: [timing_table(run)])
        return
    plain = lambda: {**numbers.plain(run.root), **show_run.run_as_plain(run)}  # noqa: E731
    _either(screen, view, plain, lambda: show_run.run_blocks(run, view.limit or STEPS))


def _step_as_plain(run: Run, step: int) -> dict[str, Any]:
    numbers = next((line for line in show_run.run_as_plain(run)["steps"] if line["step"] == step), {"step": step})
    reports = environment_reports(of_step(run, step))
    return {**numbers, "environments": {name: report.to_plain() for name, report in reports.items()}}


def _show_evaluations(place: Path, view: View, screen: _Screen) -> None:
    found = show_run.evaluations_in(place)
    if not found:
        raise InputError(f"no evaluation in `{place}` is finished", hint="`skyrl eval` makes one")
    _either(screen, view, lambda: found, lambda: [Text(eval_report.table(found))])


def _either(
    screen: _Screen, view: View, plain: Callable[[], Any], blocks: Callable[[], Iterable[RenderableType]]
) -> None:
    """Print JSON, or what people read."""
    if view.as_json:
        screen.show_json(plain())
    else:
        screen.show(blocks())
