"""`skyrl score`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    ConfigOption,
    ExecutorOption,
    ForceOption,
    JsonOption,
    OutOption,
    RewardOption,
    RunOption,
    SetOption,
    SourceArgument,
    finish,
    make,
    open_session,
    path,
    say,
    weights,
)
from nanoskyrl_cli.progress import working


def score(
    rollout: SourceArgument = None,
    reward: RewardOption = None,
    name: Annotated[
        str | None,
        typer.Option(help="Write a second opinion beside the run's score, as score-NAME.", show_default=False),
    ] = None,
    executor: ExecutorOption = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Give every trajectory its reward, or say why it has none.

    Example: skyrl score
    """
    flags = {"run": {"executor": executor}, "score": {"rewards": weights(reward) if reward else None}}
    session = open_session(run, config, assignments, flags)
    if name is None:
        return make(session, "score", as_json, source=path(rollout), output=path(out), force=force)
    with working("score"):
        outcome = session.score(source=path(rollout), output=path(out), name=name, force=force)
    code = finish(outcome, session, None, as_json)
    say(f"Next: skyrl diff {outcome.output.with_name('score')} {outcome.output}, or skyrl advantage --score {name}")
    return code
