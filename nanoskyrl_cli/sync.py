"""`skyrl sync`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    ConfigOption,
    ForceOption,
    JsonOption,
    OutOption,
    RunOption,
    SetOption,
    SourceArgument,
    make,
    open_session,
    path,
)


def sync(
    trained: SourceArgument = None,
    target: Annotated[
        str | None, typer.Option(help="Place of the policy; default: the run's policies/N+1.", show_default=False)
    ] = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Publish the trained policy, and prove that the engine holds it.

    Example: skyrl sync
    """
    session = open_session(run, config, assignments)
    named = {"source": path(trained), "output": path(out), "target": path(target)}
    return make(session, "sync", as_json, **named, force=force)
