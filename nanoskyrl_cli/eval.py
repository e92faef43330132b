"""`skyrl eval`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    ConfigOption,
    EnvOption,
    ForceOption,
    JsonOption,
    OutOption,
    RunOption,
    SetOption,
    finish,
    open_session,
    path,
)


def evaluate(
    env: EnvOption = None,
    policy: Annotated[
        str | None,
        typer.Option(help="`starter`, a directory or a hub id; default: the run's newest.", show_default=False),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Held-out tasks; 0 takes all.", show_default=False)] = None,
    n_samples: Annotated[int | None, typer.Option(help="Samples of each.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=False)] = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Measure a policy on held-out tasks: success with its interval, and pass@k.

    Example: skyrl eval --env text_math --limit 500
    """
    from nanoskyrl.stages.policy import resolve_policy

    flags = {"eval": {"env": env, "limit": limit, "n_samples": n_samples, "temperature": temperature}}
    session = open_session(run, config, assignments, flags)
    named = resolve_policy(policy) if policy else None
    return finish(session.eval(policy=named, output=path(out), force=force), session, None, as_json)
