"""`skyrl show`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, RunOption, data_stream, path, print_json


def show(
    place: Annotated[
        str | None, typer.Argument(help="A run, a stage's directory or a policy; default: the run.", show_default=False)
    ] = None,
    row: Annotated[int | None, typer.Option(help="Print this row of the shards whole.", show_default=False)] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Where a run's time went.")] = False,
    limit: Annotated[int, typer.Option(help="Rows of a table.")] = 10,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What became of every row and token of a run, or of one of its steps.")
    ] = False,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at a run, at shards, or at one trajectory.

    Example: skyrl show runs/default/step-000000/score --row 3
    """
    from nanoskyrl.stages.core.runs import default_run
    from nanoskyrl.stages.looking.show import show as stage

    found = path(place) or as_path(run or default_run())
    if ledger:
        from nanoskyrl.stages.looking.ledger import ledger_at, print_ledger

        sums = ledger_at(found)
        print_json(sums.to_plain()) if as_json else print_ledger(sums, file=data_stream())
    elif as_json:
        from nanoskyrl.stages.looking.numbers import plain, plain_row

        print_json(plain(found) if row is None else plain_row(found, row))
    else:
        stage(found, row=row, timing=timing, limit=limit, file=data_stream())
