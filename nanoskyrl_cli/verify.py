"""`skyrl verify`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, RunOption, path, print_json, say


def verify(
    place: Annotated[
        str | None, typer.Argument(help="A run, or one stage's directory; default: the run.", show_default=False)
    ] = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check every digest, and that each stage's inputs are what its parents wrote.

    Example: skyrl verify runs/default
    """
    from nanoskyrl.stages.core.runs import default_run
    from nanoskyrl.stages.looking.verify import verify as stage

    report = stage(path(place) or as_path(run or default_run()))
    if as_json:
        print_json(report.to_plain())
    for line in report.lines():
        say(line)
    return 0 if report.holds else 1
