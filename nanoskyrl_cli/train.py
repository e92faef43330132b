"""`skyrl train`."""

import os
import sys
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
    finish,
    open_session,
    path,
    policy_path,
    print_numbers,
    say,
)
from nanoskyrl_cli.progress import working


def train(
    advantages: Annotated[
        list[str] | None,
        typer.Argument(
            help="Input directories, several for a replay window; default: the newest that is ready in the run.",
            show_default=False,
        ),
    ] = None,
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
    num_processes: Annotated[int, typer.Option(min=1, help="Processes that train together, one a GPU.")] = 1,
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay up, and train each step of the run as its scores are finished.")
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="With --follow: policies to train, from the run's beginning.", show_default=False),
    ] = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Update the policy once; with --follow, which takes a run in place of shards, again and again.

    Example: skyrl train --algo sapo
    """
    if follow:
        run, advantages = run or next(iter(advantages or ()), None), None
    flags = {"train": {"algo": algo, "lr": lr, "lora_rank": lora_rank, "allow_estimator": allow_estimator or None}}
    session = open_session(run, config, assignments, flags, ahead=follow)
    if num_processes > 1 and not dry_run and "WORLD_SIZE" not in os.environ:
        from nanoskyrl.stages.parallel import launch

        session.first_policy()  # once, before there are several to do it
        launch(["-m", "nanoskyrl_cli.main", *sys.argv[1:]], num_processes)
        return 0
    if follow:
        from nanoskyrl.stages.config import stage_config
        from nanoskyrl.stages.follow import follow as stage
        from nanoskyrl.stages.runs import is_main

        if is_main():
            session.begin()
            say(f"Following {session.run.root}: each step is trained when its scores are finished.")
        done = stage(session, steps=steps, keep_states=stage_config(session.settings, "loop").keep_states, say=say)
        say(f"Stopped after {done} step{'s' * (done != 1)}.")
        return 0
    if dry_run:
        print_numbers(
            session.preview_train(source=path(next(iter(advantages or ()), None)), policy=policy_path(policy)), as_json
        )
        return 0
    from nanoskyrl.stages.storage import as_path

    with working("train"):
        outcome = session.train(
            source=[as_path(name) for name in advantages or ()],
            output=path(out),
            policy=policy_path(policy),
            state=path(state),
            force=force,
        )
    return finish(outcome, session, "sync", as_json)
