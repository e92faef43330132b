"""`skyrl replay`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import EXIT_FAILED, EXIT_OK
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, RunOption, emit, print_json


def replay(
    start: Annotated[str, typer.Argument(metavar="ID", help="A trajectory, by any unique start of its id.")],
    run: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    """Play the recorded actions of a trajectory in its environment again, and say what no longer matches.

    Ends with 1 if anything differs.

    Example: skyrl replay 59b6eedf --run runs/default
    """
    from nanoskyrl.stages.core.runs import Run, default_run
    from nanoskyrl.stages.looking.replay import lines, replay as played, to_plain

    found = played(Run(as_path(run or default_run())), start)
    if as_json:
        print_json(to_plain(found))
    else:
        for line in lines(found):
            emit(line)
    return EXIT_FAILED if found.differences else EXIT_OK
