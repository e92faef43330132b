"""`skyrl loop`."""

from typing import Annotated

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
from nanoskyrl_cli.progress import working


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
    from nanoskyrl.stages.looking.curve import curve, report_line

    flags = {
        "run": {"policy": policy, "seed": seed, "lag": lag},
        "rollout": {"env": environments(env)},
        "train": {"algo": algo},
        "loop": {"steps": steps, "gpus_generate": gpus_generate, "gpus_train": gpus_train},
    }
    session = open_session(run, config, assignments, flags, preset=preset, lasts=force)
    found = session.run
    with working("loop") as now:
        done = session.loop(
            report=lambda step, numbers: say(report_line(step, numbers)),
            begins=lambda step, stage: now(f"step {step}: {stage}"),
            force=force,
        )
    say(curve(found) if done else f"up to date: {found.root}")
    say(f"Run: {found.root}")
    say(f"Next: skyrl show {found.root}, or skyrl show {found.root} --timing")
