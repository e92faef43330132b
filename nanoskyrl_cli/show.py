"""`skyrl show`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import RunOption, data_stream, path


def show(
    place: Annotated[
        str | None, typer.Argument(help="A run, a stage's directory or a policy; default: the run.", show_default=False)
    ] = None,
    row: Annotated[int | None, typer.Option(help="Print this row of the shards whole.", show_default=False)] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Where a run's time went.")] = False,
    limit: Annotated[int, typer.Option(help="Rows of a table.")] = 10,
    run: RunOption = None,
) -> None:
    """Look at a run, at shards, or at one trajectory.

    Example: skyrl show runs/default/step-000000/score --row 3
    """
    from nanoskyrl.stages.core.runs import default_run
    from nanoskyrl.stages.looking.show import show as stage

    stage(path(place) or as_path(run or default_run()), row=row, timing=timing, limit=limit, file=data_stream())
