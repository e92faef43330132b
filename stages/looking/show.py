"""Shards, runs and trajectories as a person would look at them: tables that fit the terminal."""

import json
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nanoskyrl.envs.graders.kinds import NO_ANSWER
from nanoskyrl.envs.tool_formats.own import calls_in_words
from nanoskyrl.stages import rollout as rollout_stage, score as score_stage
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import PASSES_ON, Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import latest, number_in, read_metrics, seconds_of_stages
from nanoskyrl.stages.core.pipeline import RESERVED, STAGES
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_part
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import Trajectory
from nanoskyrl.stages.looking.console import SafeConsole
from nanoskyrl.stages.looking.curve import curve, success_keys
from nanoskyrl.stages.looking.preview import advantage_of
from nanoskyrl.stages.models.policy import count_parameters, is_adapter, policy_digest, policy_files, read_info

TASK_WIDTH = 24
LEAST_WIDTH = 80
"""Every table fits into it."""


def headline(manifest: Manifest, output: Path) -> str:
    """Return one line that says what a stage's output holds."""
    lines = {
        "rollout": _rollout_line, "score": _score_line, "advantage": _advantage_line, "train": _train_line,
        "sync": _sync_line, "eval": _eval_line,
    }  # fmt: skip
    try:
        text = lines.get(manifest.stage, _own_line)(manifest, output)
    # A manifest that somebody made by hand, or an evaluation whose summary is gone.
    except (InputError, KeyError, TypeError, AttributeError, ValueError, OSError):
        text = f"{manifest.rows_out} rows of `{manifest.stage}`"
    return f"{text}: {output}"


def _rollout_line(manifest: Manifest, output: Path) -> str:
    numbers = rollout_stage.numbers_of(output, manifest)
    ends = ", ".join(f"{key.rsplit('/', 1)[1]} {value}" for key, value in numbers.items() if "/stop_reason/" in key)
    settings = manifest.settings["rollout"]
    turns, tokens = numbers["rollout/turns/mean"] or 0, numbers["rollout/response_tokens/mean"]
    each = f"{turns:.1f} turns and {'?' if tokens is None else f'{tokens:.0f}'} sampled tokens each"
    return f"{manifest.rows_out} rows of {settings['env']}, {each}, ended by {ends}"


def _score_line(manifest: Manifest, output: Path) -> str:
    numbers = score_stage.numbers_of(output, manifest)
    success, reward = _number(numbers["reward/success"]), _number(numbers["reward/avg_raw_reward"])
    others = ", ".join(f"{reason} {count}" for reason, count in manifest.dropped.items())
    scored = manifest.rows_out - sum(manifest.dropped.values())
    without = f" ({others})" if others else ""
    unjudged = manifest.facts.get("unjudged")
    why = f"; {unjudged['count']} trajectories: {unjudged['reason']}" if unjudged else ""
    of_envs = "".join(f", {name} {_number(numbers[key])}" for name, key in success_keys(numbers).items())
    return f"{scored} of {manifest.rows_out} rows scored{without}, success {success}{of_envs}, reward {reward}{why}"


def _advantage_line(manifest: Manifest, output: Path) -> str:
    kept = manifest.rows_out - sum(manifest.dropped.values())
    dropped = ", ".join(f"{reason} {count}" for reason, count in manifest.dropped.items())
    return f"{kept} of {manifest.rows_out} rows to learn from" + (f" (left out: {dropped})" if dropped else "")


def _own_line(manifest: Manifest, output: Path) -> str:
    """Return what a stage of somebody's own did to the rows that it passed on."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in manifest.dropped.items())
    left = (
        f"{manifest.rows_out} of {manifest.rows_in} rows of {manifest.facts[PASSES_ON]} passed on by {manifest.stage}"
    )
    return left + (f" (dropped: {dropped})" if dropped else "")


def _train_line(manifest: Manifest, output: Path) -> str:
    settings, facts = manifest.settings["train"], manifest.facts
    how = f"LoRA rank {facts['lora_rank']}" if facts["lora_rank"] else "the whole model"
    if "trained_parameters" in facts:
        how += f" ({facts['trained_parameters'] / facts['parameters']:.2%} of {facts['parameters']:,} weights)"
    steps = "1 optimizer step" if facts["optimizer_steps"] == 1 else f"{facts['optimizer_steps']} optimizer steps"
    shared = ""
    if computed := facts.get("computed_tokens"):
        shared = f"; shared {1 - computed / facts['tokens']:.0%}, limit {facts['tokens'] / computed:.1f}x"
    return f"policy trained with {settings['algo']}, {steps} on {how}, lr {facts['lr']:g}{shared}"


def _sync_line(manifest: Manifest, output: Path) -> str:
    version = manifest.facts.get("version")
    same = ", the same as before" if manifest.facts.get("changed") is False else ""
    return f"policy {version if version is not None else manifest.facts['policy'][:12]} published and proved{same}"


def _eval_line(manifest: Manifest, output: Path) -> str:
    from nanoskyrl.stages.looking.eval_report import summary_of

    numbers = summary_of(output)
    low, high = numbers["success_95"] or (None, None)
    env = manifest.settings["rollout"]["env"]
    # A benchmark has no other tasks than these.
    tasks = "tasks" if "benchmark" in numbers else "held-out tasks" if numbers["held_out"] else "training tasks"
    success = f"success {_number(numbers['success'])} [{_number(low)}, {_number(high)}]"
    return f"{success} on {numbers['tasks']} {tasks} of {env}"


def _show_summary(console: Console, manifest: Manifest, output: Path) -> None:
    """Print an evaluation's numbers; of a summary that cannot be read, which `verify` names, nothing."""
    from nanoskyrl.stages.looking.eval_report import summary_of, table  # only here: every command prints headlines

    try:
        text = table({manifest.settings["rollout"]["env"]: summary_of(output)})
    except (InputError, KeyError, TypeError, AttributeError, ValueError):
        return
    console.print(Text(f"{text}\n"), soft_wrap=True)


def _number(value: Any) -> str:
    return "?" if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def show(
    place: Path, *, row: int | None = None, timing: bool = False, limit: int = 10, file: IO[str] | None = None
) -> None:
    """Print a run, the output of a stage, one part, or one row of it, on stdout or into `file`.

    Raises:
        InputError: nothing of the kind is there.
        SettingsError: there is no such row.
    """
    if limit < 1:
        raise SettingsError(f"`--limit` must be at least 1, not {limit}", hint="Leave it out for 10")
    console = SafeConsole(file=file)
    if place.suffix == ".parquet":
        _show_rows(console, place, read_part(place), row, limit)
        return
    if is_finished(place):
        manifest = read_manifest(place)
        if row is None:
            console.print(escape(headline(manifest, place)), soft_wrap=True)
            if manifest.stage == "eval":
                _show_summary(console, manifest, place)
        if manifest.parts:
            _show_parts(console, place, manifest, row, limit)
        return
    if not place.is_dir():
        raise InputError(f"there is nothing at `{place}`", hint="Name a run, the directory of a stage, or a part")
    run = Run(place)
    if (place / "config.json").is_file() or is_adapter(place):
        _show_policy(console, place)
        return
    if not run.steps() and not run.policies():
        if run.settings_file.is_file():
            console.print(
                f"no step yet in {place}; `skyrl loop --run {place}` or `skyrl rollout --run {place}` begins one"
            )
            return
        read_manifest(place)  # says what is wrong with a stage's directory
    if row is not None:
        raise SettingsError("a run has no rows", hint="Name a stage's directory, such as `step-000000/score`")
    if timing:
        _print_table(console, timing_table(run))
        return
    _print_table(console, _run_table(run, limit))
    console.print(Text(curve(run)))


def _show_parts(console: Console, place: Path, manifest: Manifest, row: int | None, limit: int) -> None:
    """Print the rows of a stage's output that are asked for, and read no part that holds none of them."""
    total = sum(part.rows for part in manifest.parts)
    first, count = (0, min(limit, total)) if row is None else (_checked_row(row, total), 1)
    tables, start = [], 0
    for part in manifest.parts:
        begin = max(first, start)
        if begin < min(first + count, start + part.rows):
            tables.append(read_part(place / part.name, part.digest).slice(begin - start, first + count - begin))
        start += part.rows
    if not tables:  # an output without rows
        tables = [read_part(place / manifest.parts[0].name, manifest.parts[0].digest)]
    _show_rows(console, place, pa.concat_tables(tables), None if row is None else 0, limit, total)


def _show_rows(
    console: Console, place: Path, table: pa.Table, row: int | None, limit: int, total: int | None = None
) -> None:
    """Print one row of a table of whatever stage whole, or the first of `total` in lines."""
    total = table.num_rows if total is None else total
    if {"trajectory_id", "ratio_mean"} <= set(table.column_names):  # of `train`, whose module would load torch
        _show_diagnostics(console, table, limit)
        return
    _check_part(place, table)
    if row is None:
        _show_table(console, table, limit, total)
    else:
        _show_trajectory(console, next(from_table(table.slice(_checked_row(row, table.num_rows), 1))))


def _checked_row(row: int, count: int) -> int:
    """Return the index of a row, which may be counted from the end.

    Raises:
        SettingsError: there is none.
    """
    if not -count <= row < count:
        hint = f"Rows are 0 to {count - 1}" if count else "There are no rows at all"
        raise SettingsError(f"there is no row {row}", hint=hint)
    return row % count


def _check_part(place: Path, table: pa.Table) -> None:
    """Raise InputError unless these are trajectories; the columns say of which stage."""
    names = table.column_names
    try:
        check(table, "advantage" if "kept" in names else "score" if "score_status" in names else "rollout")
    except InputError as error:
        raise InputError(f"`{place}` holds no trajectories: {error}", hint=error.hint) from error


def _print_table(console: Console, grid: Table) -> None:
    """Print a table; on a terminal too narrow for it, lines run on and no number loses its digits."""
    width = console.width
    console.width = max(width, LEAST_WIDTH)
    console.print(grid)
    console.width = width


def _print_facts(console: Console, facts: dict[str, str]) -> None:
    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        grid.add_row(name, escape(value))
    console.print(grid)


def _show_policy(console: Console, place: Path) -> None:
    info = read_info(place)
    facts = {
        "policy": str(place),
        "digest": policy_digest(place),
        "parent": info.parent or "none",
        "made from": info.source or "unknown",
        "parameters": f"{count_parameters(place):,}" + (" (adapter)" if is_adapter(place) else ""),
        "files": ", ".join(file.name for file in policy_files(place)),
    }
    _print_facts(console, facts)


def _show_table(console: Console, table: pa.Table, limit: int, total: int) -> None:
    grid = Table(box=None, pad_edge=False, expand=True)
    extra = [
        name
        for name in ("reward", "advantage")
        if {"reward": "reward", "advantage": "kept"}[name] in table.column_names
    ]
    grid.add_column("row", justify="right", no_wrap=True)
    grid.add_column("task", no_wrap=True, max_width=TASK_WIDTH)
    grid.add_column("status", no_wrap=True)
    for name in ("sample", "turns", "tokens", *extra):
        grid.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    grid.add_column("response", no_wrap=True, ratio=1)
    head = table.slice(0, min(limit, table.num_rows))
    for index, t in enumerate(from_table(head)):
        cells = [str(index), t.task_id, t.status, str(t.sample), str(len(t.turns)), _count(t.completion_tokens)]
        if "reward" in extra:
            cells.append(_number(t.reward) if t.score_status == "scored" else str(t.score_status))
        if "advantage" in extra:
            cells.append(advantage_of(head, index))
        grid.add_row(*map(escape, [*cells, " ".join(t.response.split())]))
    _print_table(console, grid)
    if total > limit:
        console.print(f"{total - limit} more; --limit shows them, --row N prints one whole")


def _reward_of(t: Trajectory) -> str:
    if t.score_status is None:
        return "not scored yet"
    if t.score_status != "scored":
        return ", ".join([t.score_status, *t.reward_parts])
    return f"{t.reward:.3f}  " + ", ".join(f"{name} {_number(value)}" for name, value in t.reward_parts.items())


def _show_trajectory(console: Console, t: Trajectory) -> None:
    facts = {
        "trajectory": t.trajectory_id,
        "task": f"{t.env} {t.split} {t.task_id}",
        "group, sample": f"{t.group_id}, {t.sample}",
        "policy": f"version {t.policy_version}, digest {(t.policy_digest or 'none')[:12]}",
        "sampled at": f"temperature {t.temperature:g}, top_p {t.top_p:g}, top_k {t.top_k}, seed {t.seed}",
        "ended": f"{t.status} ({t.stop_reason})",
        "tokens": f"{_count(t.prompt_tokens)} prompt, {_count(t.completion_tokens)} sampled",
        "reward": _reward_of(t),
        "success": str(t.success) if t.score_status else "not scored yet",
        "metadata": json.dumps(t.metadata, ensure_ascii=False),
    }
    _print_facts(console, facts)
    colours = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
    for message in t.messages:
        role = str(message.get("role"))
        text = Text(calls_in_words(str(message.get("content") or ""), message.get("tool_calls") or ()))
        console.print(Panel(text, title=escape(role), title_align="left", border_style=colours.get(role, "white")))
    for number, turn in enumerate(t.turns):
        for call in turn.tool_calls:
            args = json.dumps(call.args, ensure_ascii=False)
            outcome = "ok" if call.ok else f"failed: {call.error}"
            nothing = "neither a call nor an answer" if call.error == NO_ANSWER else "a call that cannot be read"
            written = f"{call.tool}({args})" if call.tool else nothing
            console.print(escape(f"turn {number}: {written} -> {call.result!r}, {outcome}"))
    if t.error:
        console.print(escape(f"error: {t.error}"), style="red")


def _show_diagnostics(console: Console, table: pa.Table, limit: int) -> None:
    grid = Table(box=None, pad_edge=False)
    for name in table.column_names:
        grid.add_column(name, justify="left" if name == "trajectory_id" else "right")
    for row in table.slice(0, min(limit, table.num_rows)).to_pylist():
        grid.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value)[:12] for value in row.values()))
    _print_table(console, grid)


def _run_table(run: Run, limit: int) -> Table:
    lines = read_metrics(run.metrics)
    grid = Table(box=None, pad_edge=False)
    names = ("step", "finished", "success", "reward", "loss", "entropy", "kl", "grad norm", "seconds")
    for name in names:
        grid.add_column(name, justify="right", no_wrap=name == "finished")
    scores, trains, loops = (latest(lines, stage) for stage in ("score", "train", "loop"))
    for step in run.steps()[-limit:]:
        finished = {name: found for name in run.made(step) if (found := _readable(run.stage(step, name)))}
        used = {name for manifest in finished.values() for name in manifest.inputs}
        last = [name for name in finished if name not in used]
        done = "all" if {*STAGES} <= {*finished} else f"to {last[-1]}" if last else "none"
        score, train, loop = scores.get(step, {}), trains.get(step, {}), loops.get(step, {})
        values = (
            number_in(score, "reward/success"),
            number_in(score, "reward/avg_raw_reward"),
            number_in(train, "train/loss"),
            number_in(train, "policy/policy_entropy"),
            number_in(train, "policy/ppo_kl"),
            number_in(train, "train/grad_norm"),
            number_in(loop, "timing/total") or seconds_of_stages(lines, step, _stages_in(lines)),
        )
        grid.add_row(str(step), done, *("" if value is None else f"{value:.3g}" for value in values))
    return grid


def _readable(directory: Path) -> Manifest | None:
    """Return the manifest of a stage that ended here; None if there is none, or one that `verify` calls broken."""
    try:
        return read_manifest(directory) if is_finished(directory) else None
    except InputError:
        return None


def _stages_in(lines: list[dict[str, Any]]) -> list[str]:
    """Return the stages of a step that left numbers: those of every run, and those of somebody's own."""
    return sorted({str(line.get("stage")) for line in lines} - (RESERVED - {*STAGES}))


def timing_table(run: Run) -> Table:
    """Return where a run's time went: generating, training, and everything else by name."""
    seconds = time_spent(run)
    total = sum(seconds.values())
    grid = Table(box=None, pad_edge=False)
    grid.add_column("what")
    grid.add_column("seconds", justify="right")
    grid.add_column("share", justify="right")
    for name, value in seconds.items():
        grid.add_row(name, f"{value:.1f}", f"{value / total:.1%}" if total else "")
    other = total - seconds["generating"] - seconds["training"]
    grid.add_row()
    grid.add_row("in all", f"{total:.1f}", "")
    grid.add_row("of it neither generating nor training", f"{other:.1f}", f"{other / total:.1%}" if total else "")
    return grid


def time_spent(run: Run) -> dict[str, float]:
    """Return a run's seconds by what they were spent on; a step done again counts as often as it was done."""
    lines = read_metrics(run.metrics)

    def spent(stage: str, name: str = "total") -> float:
        return sum(number_in(line, f"timing/{name}") or 0.0 for line in lines if line.get("stage") == stage)

    generating, training = spent("rollout", "generate") + spent("eval", "generate"), spent("train", "train")
    environments = spent("rollout", "env") + spent("eval", "env")
    return {
        "generating": generating,
        "training": training,
        "start-up and imports": spent("startup", "startup"),
        "environments": environments,
        "rollout, besides": spent("rollout") - spent("rollout", "generate") - spent("rollout", "env"),
        "score": spent("score"),
        **{stage: spent(stage) for stage in _stages_in(lines) if stage not in STAGES},
        "advantage": spent("advantage"),
        "train, besides": spent("train") - training,
        "sync": spent("sync"),
        "eval, besides": spent("eval") - spent("eval", "generate") - spent("eval", "env"),
        "loop, besides": max(0.0, spent("loop") - sum(map(spent, _stages_in(lines)))) if spent("loop") else 0.0,
    }
