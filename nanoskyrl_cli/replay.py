"""`skyrl replay`."""

from dataclasses import asdict
from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import EXIT_FAILED, EXIT_OK
from nanoskyrl_cli.options import JsonOption, RunOption, print_data, run_at


def replay(
    start: Annotated[str, typer.Argument(metavar="ID", help="A trajectory, by any unique start of its id.")],
    run: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    """Play the recorded actions of a trajectory in its environment again, and say what no longer matches.

    Ends with 1 if anything differs.

    Example: skyrl replay 59b6eedf --run runs/default
    """
    from nanoskyrl.stages.looking.replay import lines, replay as played

    found = played(run_at(run), start)
    print_data(asdict(found), lines(found), as_json)
    return EXIT_FAILED if found.differences else EXIT_OK
