"""`skyrl verify`."""

import sys
from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import EXIT_FAILED, EXIT_OK, EXIT_SHORT, SettingsError
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, RunOption, path, print_json, run_at, say
from nanoskyrl_cli.progress import working


def verify(
    place: Annotated[
        str | None, typer.Argument(help="A run, or one stage's directory; default: the run.", show_default=False)
    ] = None,
    stage: Annotated[
        str | None, typer.Argument(help="With --rerun: the only stage to make again.", show_default=False)
    ] = None,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Make outputs again and compare bytes: runs code that the run names.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --rerun: run that code without asking.")] = False,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check every digest, and that each stage's inputs are what its parents wrote.

    Example: skyrl verify runs/default --rerun score
    """
    from nanoskyrl.stages.looking.verify import verify as check

    if not rerun:
        if stage is not None or yes:
            raise SettingsError(
                f"`{stage or '--yes'}` goes with `--rerun`", hint="Add `--rerun`, which makes outputs again"
            )
        report = check(path(place) or run_at(run).root)
    else:
        from nanoskyrl.stages.looking.proof.rerun import Rerun

        # `--rerun score` alone, or before the run.
        if place is not None and "/" not in place and not as_path(place).exists():
            place, stage = stage, place
        with working("verify") as now:
            again = Rerun(
                stage=stage,
                allow=lambda code: _allow(code, yes),
                begins=lambda step, name: now(f"step {step}: {name}, again"),
            )
            report = check(path(place) or run_at(run).root, rerun=again)
    if as_json:
        print_json(report.to_plain())
    for line in report.lines():
        say(line)
    return EXIT_FAILED if not report.holds else EXIT_SHORT if report.left else EXIT_OK


def _allow(code: list[str], yes: bool) -> None:
    """List the code that would run, and ask for it where nobody has said yes.

    Raises:
        SettingsError: nobody says yes.
    """
    if not code:
        return
    say("This runs code that the run names, in this process and as you:")
    for line in code:
        say(f"  {line}")
    if yes:
        return
    if not (sys.stdin.isatty() and typer.confirm("Run it?", err=True)):
        raise SettingsError("code that the run names was not run", hint="Look at it, then add `--yes`")
