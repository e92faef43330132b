"""`skyrl train`."""

import os
import sys
from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import (
    AlgoOption,
    ConfigOption,
    DryRunOption,
    ExecutorOption,
    ForceOption,
    JsonOption,
    LoraOption,
    LrOption,
    OutOption,
    RunOption,
    SetOption,
    finish,
    make,
    open_session,
    path,
    policy_path,
    print_numbers,
    run_at,
    say,
)


def train(
    advantages: Annotated[
        list[str] | None,
        typer.Argument(
            help="Input directories, several for a replay window; default: the newest that is ready in the run.",
            show_default=False,
        ),
    ] = None,
    algo: AlgoOption = None,
    lr: LrOption = None,
    lora_rank: LoraOption = None,
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
    executor: ExecutorOption = None,
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
    _check_options(
        follow, advantages, run, steps=steps is not None,
        others={"--out": out, "--policy": policy, "--state": state, "--force": force, "--dry-run": dry_run},
    )  # fmt: skip
    if dry_run:
        _refuse_beside(
            "`--dry-run`, which loads no optimizer and writes nothing",
            {"--out": out, "--state": state, "--force": force, "--num-processes": num_processes > 1},
        )
    if follow:
        run, advantages = run or next(iter(advantages or ()), None), None
        _check_run(run)
    flags = {
        "run": {"executor": executor},
        "train": {"algo": algo, "lr": lr, "lora_rank": lora_rank, "allow_estimator": allow_estimator or None},
    }
    session = open_session(run, config, assignments, flags, ahead=follow)
    if num_processes > 1 and "WORLD_SIZE" not in os.environ:
        from nanoskyrl.stages.learning.process_group import launch

        session.places.first_policy()  # once, before there are several to do it
        launch(["-m", "nanoskyrl_cli.main", *sys.argv[1:]], num_processes)
        return 0
    if follow:
        from nanoskyrl.stages.core.config import stage_config
        from nanoskyrl.stages.running.standing_trainer import follow as stage

        say(f"Following {session.run.root}: each step is trained when its scores are finished.")
        done = stage(session, steps=steps, keep_states=stage_config(session.settings, "loop").keep_states, say=say)
        say(f"Stopped after {done} step{'s' * (done != 1)}.")
        return 0

    source = [as_path(name) for name in advantages or ()]
    if dry_run:
        print_numbers(session.preview_train(source=source, policy=policy_path(policy)), as_json)
        return 0
    named = {"source": source, "output": path(out), "policy": policy_path(policy), "state": path(state)}
    if session.config.executor == "ray" and "WORLD_SIZE" not in os.environ:
        from nanoskyrl.stages.core.manifest import read_manifest
        from nanoskyrl.stages.running.cluster.learner import train_on_ray
        from nanoskyrl.stages.running.session import StageResult

        place = train_on_ray(session, **named, force=force)
        return finish(StageResult(read_manifest(place), place, False), session, "train", as_json)
    return make(session, "train", as_json, **named, force=force)


def _check_options(
    follow: bool, advantages: list[str] | None, run: str | None, *, steps: bool, others: dict[str, object]
) -> None:
    """Refuse what would be dropped in silence."""

    if not follow:
        if steps:
            raise SettingsError("`--steps` goes with `--follow`", hint="Add `--follow`, or leave `--steps` out")
        return
    if len(advantages or ()) + (run is not None) > 1:
        raise SettingsError(
            f"`--follow` takes one run, and no shards such as `{(advantages or [''])[-1]}`",
            hint="Name the run alone: each of its steps is trained",
        )
    _refuse_beside("`--follow`, which trains each step in its place in the run", others)


def _refuse_beside(what: str, others: dict[str, object]) -> None:
    """Refuse the first of the other options that was given."""

    if given := next((name for name, value in others.items() if value), None):
        raise SettingsError(f"`{given}` does not go with {what}", hint="Leave out one of the two")


def _check_run(run: str | None) -> None:
    """Refuse to follow what is no run: nothing would ever come."""
    from nanoskyrl.stages.core.manifest import is_finished

    place = run_at(run).root
    if not place.is_dir():
        raise InputError(f"there is no run `{place}` to follow", hint="Begin it with `skyrl rollout`, or `skyrl init`")
    if is_finished(place):
        raise InputError(f"`{place}` is the output of a stage, and no run to follow", hint="Name the run it lies in")
