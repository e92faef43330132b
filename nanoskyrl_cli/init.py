"""`skyrl init`."""

import shlex
from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import ForceOption, JsonOption, RunOption, SetOption, say, say_made, settings_of


def init(
    run: RunOption = None,
    preset: Annotated[str | None, typer.Option(help="Begin from a preset: see skyrl list.", show_default=False)] = None,
    env: Annotated[
        str | None,
        typer.Option(help="Write an environment with one tool, and its test, into this file.", show_default=False),
    ] = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    rebuild_starter: Annotated[
        bool, typer.Option("--rebuild-starter", help="Make the starter policy again; about ten minutes on two cores.")
    ] = False,
    starter_out: Annotated[
        str | None, typer.Option(help="Where to put it; default: the package's own place.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run.toml with every setting and what it means; or with --env an environment to begin from.

    Example: skyrl init --run runs/mine
    """
    if rebuild_starter:
        from nanoskyrl.stages.models.policy import STARTER_DIRECTORY
        from nanoskyrl.stages.models.starter import build_starter

        place = as_path(starter_out) if starter_out else STARTER_DIRECTORY
        build_starter(place, report=say)
        say_made(f"Made the starter policy at {place}", place, as_json)
        return
    if env is not None:
        from nanoskyrl.stages.looking.scaffold import class_of, write_environment

        file, test = write_environment(as_path(env))
        say_made(f"Wrote {file} and {test}", file, as_json)
        say(f"Next: skyrl rollout --env {shlex.quote(f'{file.stem}:{class_of(file)}')} --engine scripted")
        return
    from nanoskyrl.stages.looking.template import write_settings

    found, settings = settings_of(run, None, assignments, preset=preset, lasts=True)
    written = write_settings(found, settings, force=force)
    say_made(f"Wrote {written}", written, as_json)
    say(f"Next: skyrl loop --run {shlex.quote(str(found.root))}")
