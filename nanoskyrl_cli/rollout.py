"""`skyrl rollout`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    AlgoOption,
    BatchOption,
    ConfigOption,
    DataOption,
    EngineOption,
    EnvOption,
    ExecutorOption,
    ForceOption,
    JsonOption,
    LengthOption,
    OutOption,
    PolicyOption,
    RunOption,
    SamplesOption,
    SeedOption,
    SetOption,
    TemperatureOption,
    ToolsOption,
    TurnsOption,
    environments,
    make,
    open_session,
    path,
)


def rollout(
    env: EnvOption = None,
    algo: AlgoOption = None,
    policy: PolicyOption = None,
    engine: EngineOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Task ids, separated by commas; default: the next of the run.", show_default=False),
    ] = None,
    data: DataOption = None,
    tools: ToolsOption = None,
    sandbox: Annotated[
        str | None, typer.Option(help="Where python_exec runs: monty or bwrap.", show_default=False)
    ] = None,
    train_batch_size: BatchOption = None,
    n_samples_per_prompt: SamplesOption = None,
    temperature: TemperatureOption = None,
    trajectory_mode: Annotated[
        str | None, typer.Option(help="whole, step, or auto: by the chat template.", show_default=False)
    ] = None,
    max_turns: TurnsOption = None,
    max_generate_length: LengthOption = None,
    seed: SeedOption = None,
    lag: Annotated[
        int | None, typer.Option(help="Sample from the policy of that many steps ago.", show_default=False)
    ] = None,
    executor: ExecutorOption = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Attempt tasks with a policy and write every token down.

    Example: skyrl rollout --env tool_use
    """
    named = [task.strip() for task in tasks.split(",")] if tasks else None
    flags = {
        "run": {"policy": policy, "seed": seed, "lag": lag, "executor": executor},
        "train": {"algo": algo},
        "rollout": {
            "env": environments(env), "engine": engine, "tasks": named, "temperature": temperature,
            "train_batch_size": train_batch_size, "n_samples_per_prompt": n_samples_per_prompt, "max_turns": max_turns,
            "max_generate_length": max_generate_length, "trajectory_mode": trajectory_mode,
        },
    }  # fmt: skip
    offered = [tool.strip() for tool in tools.split(",")] if tools else None
    of_env = {"data": data, "tools": offered, "sandbox": sandbox}
    session = open_session(run, config, assignments, flags, of_env=of_env)
    return make(session, "rollout", as_json, output=path(out), force=force)
