"""`skyrl advantage`."""

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
    finish,
    open_session,
    path,
)


def advantage(
    scored: SourceArgument = None,
    estimator: Annotated[str | None, typer.Option(help="grpo.", show_default=False)] = None,
    old_logprobs: Annotated[
        str | None, typer.Option(help="rollout (as recorded) or recompute.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy to recompute with; default: the one training starts from.", show_default=False),
    ] = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Turn rewards into an advantage for every sampled token.

    Example: skyrl advantage
    """
    flags = {"advantage": {"estimator": estimator, "old_logprobs": old_logprobs}}
    session = open_session(run, config, assignments, flags)
    outcome = session.advantage(source=path(scored), output=path(out), policy=path(policy), force=force)
    return finish(outcome, session, "train", as_json)
