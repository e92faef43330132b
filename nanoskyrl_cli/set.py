"""`skyrl set`."""

import shlex
from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import say


def set_settings(
    run: Annotated[str, typer.Argument(help="Run directory.")],
    assignments: Annotated[list[str], typer.Argument(help="table.key=value; null takes a setting out.")],
) -> None:
    """Change the settings of a run: run.toml, whose comments stay.

    Example: skyrl set runs/default train.lr=1e-4
    """
    from nanoskyrl.stages.core.config import merge, parse_set
    from nanoskyrl.stages.core.runs import Run
    from nanoskyrl.stages.running.loop import RESOLVED
    from nanoskyrl.stages.running.run_settings import change_settings, given_settings, kept_settings

    found = Run(as_path(run))
    kept = kept_settings(found)  # first: it says where modules are
    changes = given_settings(merge(*(parse_set(assignment) for assignment in assignments)))
    change_settings(found, changes)
    for table, keys in changes.items():
        for key, value in keys.items():
            held = kept.get(table, {})
            say(f"{table}.{key} = {value!r} (was {repr(held[key]) if key in held else 'the default'})")
    if (found.root / RESOLVED).is_file():
        say(f"Next: skyrl loop --run {shlex.quote(str(found.root))} --force, which continues with them")
