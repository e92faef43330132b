"""`skyrl show`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, RunOption, data_stream, print_json, run_at


def show(
    place: Annotated[
        str | None,
        typer.Argument(
            help="A run, a step, a stage's directory, a part, policies, evaluations; or a task of the run, or the start"
            " of a trajectory's id. Default: the run.",
            show_default=False,
        ),
    ] = None,
    row: Annotated[int | None, typer.Option(help="Print this row of the shards whole.", show_default=False)] = None,
    trajectory: Annotated[
        str | None,
        typer.Option("--id", help="Print the trajectory whose id begins so, or a task's attempts.", show_default=False),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(help="Rows that meet a condition: 'reward < 0 and tool_calls > 2'.", show_default=False),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="Order by a fact; with - before it, the largest first.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Lines of a table. Default 10, of steps 40.")] = None,
    by: Annotated[
        str | None, typer.Option(help="Rows together by group, task, env or step.", show_default=False)
    ] = None,
    failed_calls: Annotated[bool, typer.Option("--failed-calls", help="Tool calls that failed, and how.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="One trajectory's tokens as a table.")] = False,
    color: Annotated[
        str | None,
        typer.Option(help="One trajectory's tokens by advantage, logprob, ratio or mask.", show_default=False),
    ] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Where a run's time went.")] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What became of every row and token of a run, or of one of its steps.")
    ] = False,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at a run, a step, shards, policies, evaluations, or one trajectory.

    Example: skyrl show --where "success == False and failed_calls > 0" --sort -tokens
    """
    from nanoskyrl.stages.looking.show import View, show as stage

    root = run_at(run).root
    found = root if place is None else as_path(place)
    if place is not None and "/" not in place and trajectory is None and not found.exists() and root.is_dir():
        found, trajectory = root, place
    if ledger:
        from nanoskyrl.stages.looking.ledger import ledger_at, print_ledger

        sums = ledger_at(found)
        print_json(sums.to_plain()) if as_json else print_ledger(sums, file=data_stream())
        return
    view = View(
        row=row, trajectory=trajectory, where=where, sort=sort, limit=limit, by=by, failed_calls=failed_calls,
        tokens=tokens, color=color, timing=timing, as_json=as_json,
    )  # fmt: skip
    stage(found, view, data_stream())
