"""`skyrl train`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    AlgoOption,
    ConfigOption,
    DryRunOption,
    ForceOption,
    JsonOption,
    OutOption,
    RunOption,
    SetOption,
    SourceArgument,
    finish,
    open_session,
    path,
    policy_path,
    print_numbers,
)


def train(
    advantages: SourceArgument = None,
    algo: AlgoOption = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default=False)] = None,
    lora_rank: Annotated[int | None, typer.Option(help="0 trains the whole model.", show_default=False)] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy to start from; default: the run's.", show_default=False)
    ] = None,
    state: Annotated[
        str | None, typer.Option(help="Optimizer state to start from; default: the run's.", show_default=False)
    ] = None,
    allow_estimator: Annotated[
        bool, typer.Option(help="Take advantages of another estimator than the algorithm's.")
    ] = False,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Update the policy once.

    Example: skyrl train --algo sapo
    """
    flags = {"train": {"algo": algo, "lr": lr, "lora_rank": lora_rank, "allow_estimator": allow_estimator or None}}
    session = open_session(run, config, assignments, flags)
    if dry_run:
        print_numbers(session.preview_train(source=path(advantages), policy=policy_path(policy)), as_json)
        return 0
    outcome = session.train(
        source=path(advantages), output=path(out), policy=policy_path(policy), state=path(state), force=force
    )
    return finish(outcome, session, "sync", as_json)
