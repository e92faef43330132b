"""`skyrl browse`."""

import sys
from typing import Annotated

import typer

from nanoskyrl_cli.options import run_at


def browse(
    run: Annotated[
        str | None, typer.Argument(help="A run; default: $SKYRL_RUN, then runs/default.", show_default=False)
    ] = None,
) -> None:
    """Walk through a run in the whole terminal: steps, trajectories, turns and tokens, with search and keys.

    Example: skyrl browse runs/default
    """
    from nanoskyrl.stages.core.errors import InputError, SettingsError, told_as

    found = run_at(run)
    if not found.root.is_dir() or not found.steps():
        raise InputError(f"`{found.root}` is no run, or has no step yet", hint="Name the directory of a run")
    if not sys.stdin.isatty():
        raise SettingsError("`skyrl browse` needs a terminal", hint="`skyrl show` prints the same")
    with told_as(
        SettingsError, "`skyrl browse` is drawn by textual", ImportError, hint="pip install 'nanoskyrl[looking]'"
    ):
        from nanoskyrl.stages.looking.browse.app import Browser
    Browser(found).run()
