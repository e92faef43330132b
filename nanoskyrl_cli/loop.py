"""`skyrl loop`."""

import contextlib
import shlex
import sys
from typing import Annotated, Any

import typer

from nanoskyrl_cli.options import (
    AlgoOption,
    BatchOption,
    ConfigOption,
    DataOption,
    EngineOption,
    EnvOption,
    ExecutorOption,
    JsonOption,
    LengthOption,
    LoraOption,
    LrOption,
    PolicyOption,
    RewardOption,
    RunOption,
    SamplesOption,
    SeedOption,
    SetOption,
    TemperatureOption,
    ToolsOption,
    TurnsOption,
    environments,
    open_session,
    print_json,
    say,
    weights,
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
    engine: EngineOption = None,
    data: DataOption = None,
    tools: ToolsOption = None,
    reward: RewardOption = None,
    lr: LrOption = None,
    lora_rank: LoraOption = None,
    train_batch_size: BatchOption = None,
    n_samples_per_prompt: SamplesOption = None,
    temperature: TemperatureOption = None,
    max_turns: TurnsOption = None,
    max_generate_length: LengthOption = None,
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
    executor: ExecutorOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Continue under other settings than before.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run rollout, score, advantage, train and sync, step after step; resume where a killed run stopped.

    Example: skyrl loop --preset quickstart
    """
    from nanoskyrl.stages.core.config import stage_config
    from nanoskyrl.stages.looking.curve import curve, report_line
    from nanoskyrl.stages.looking.live import live_loop

    flags = {
        "run": {"policy": policy, "seed": seed, "lag": lag, "executor": executor},
        "rollout": {
            "env": environments(env), "engine": engine, "temperature": temperature, "max_turns": max_turns,
            "train_batch_size": train_batch_size, "n_samples_per_prompt": n_samples_per_prompt,
            "max_generate_length": max_generate_length,
        },
        "score": {"rewards": weights(reward) if reward else None},
        "train": {"algo": algo, "lr": lr, "lora_rank": lora_rank},
        "loop": {"steps": steps, "gpus_generate": gpus_generate, "gpus_train": gpus_train},
    }  # fmt: skip
    of_env = {"data": data, "tools": [tool.strip() for tool in tools.split(",")] if tools else None}
    session = open_session(run, config, assignments, flags, of_env=of_env, preset=preset, lasts=force)
    found = session.run
    wanted = stage_config(session.settings, "loop").steps
    with live_loop(found, wanted) if sys.stderr.isatty() else contextlib.nullcontext() as view:

        def report(step: int, numbers: dict[str, Any]) -> None:
            say(report_line(step, numbers))
            if view is not None:
                view.reported()

        begins = view.begins if view is not None else lambda step, stage: None
        done = session.loop(report=report, begins=begins, force=force)
    if as_json:
        from nanoskyrl.stages.looking.numbers import plain

        print_json(plain(found.root))
    say(curve(found) if done else f"up to date: {found.root}")
    say(f"Run: {found.root}")
    place = shlex.quote(str(found.root))
    say(f"Next: skyrl show {place}, or skyrl show {place} --timing")
