"""`skyrl loop`."""

import contextlib
import sys
from typing import Annotated, Any

import typer

from nanoskyrl_cli.options import (
    AlgoOption,
    ConfigOption,
    EnvOption,
    PolicyOption,
    RunOption,
    SeedOption,
    SetOption,
    environments,
    open_session,
    say,
)


def loop(
    steps: Annotated[
        int | None, typer.Option(help="Policies to train, from the beginning of the run.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Settings that ship with nanoskyrl: see skyrl list.", show_default=False)
    ] = None,
    env: EnvOption = None,
    algo: AlgoOption = None,
    policy: PolicyOption = None,
    lag: Annotated[
        int | None, typer.Option(help="Sample from the policy of that many steps ago.", show_default=False)
    ] = None,
    gpus_generate: Annotated[
        str | None, typer.Option(help="Where rollouts run: 0-3, 0,2 or cpu.", show_default=False)
    ] = None,
    gpus_train: Annotated[
        str | None, typer.Option(help="Where training runs, in processes of its own.", show_default=False)
    ] = None,
    seed: SeedOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Continue under other settings than before.")] = False,
) -> None:
    """Run rollout, score, advantage, train and sync, step after step; resume where a killed run stopped.

    Example: skyrl loop --preset quickstart
    """
    from nanoskyrl.stages.core.config import stage_config
    from nanoskyrl.stages.looking.curve import curve, report_line
    from nanoskyrl.stages.looking.live import live_loop

    flags = {
        "run": {"policy": policy, "seed": seed, "lag": lag},
        "rollout": {"env": environments(env)},
        "train": {"algo": algo},
        "loop": {"steps": steps, "gpus_generate": gpus_generate, "gpus_train": gpus_train},
    }
    session = open_session(run, config, assignments, flags, preset=preset, lasts=force)
    found = session.run
    wanted = stage_config(session.settings, "loop").steps
    with live_loop(found, wanted) if sys.stderr.isatty() else contextlib.nullcontext() as view:

        def report(step: int, numbers: dict[str, Any]) -> None:
            say(report_line(step, numbers))
            if view is not None:
                view.reported()

        begins = view.begins if view is not None else lambda step, stage: None
        done = session.loop(report=report, begins=begins, force=force)
    say(curve(found) if done else f"up to date: {found.root}")
    say(f"Run: {found.root}")
    say(f"Next: skyrl show {found.root}, or skyrl show {found.root} --timing")
