"""`skyrl diff`."""

from dataclasses import asdict
from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import EXIT_FAILED, EXIT_OK
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, print_data


def diff(
    first: Annotated[str, typer.Argument(help="A run, a step of one, a stage's directory or a policy.")],
    second: Annotated[str, typer.Argument(help="Another of the same kind.")],
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of numbers that counts as none; settings are exact.", min=0.0)
    ] = 0.0,
    limit: Annotated[int, typer.Option(help="Differences to print.", min=1)] = 40,
    as_json: JsonOption = False,
) -> int:
    """Say what differs between two runs, outputs or policies, in the order in which it came about.

    Ends with 1 if anything does.

    Example: skyrl diff runs/default/step-000000/score runs/default/step-000000/score-strict
    """
    from nanoskyrl.stages.looking.diff import diff as compared, lines

    found = compared(as_path(first), as_path(second), tolerance=tolerance)
    print_data(asdict(found), lines(found, limit), as_json)
    return EXIT_FAILED if found.differences else EXIT_OK
