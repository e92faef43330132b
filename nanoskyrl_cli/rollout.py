"""`skyrl rollout`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    AlgoOption,
    ConfigOption,
    EnvOption,
    ForceOption,
    JsonOption,
    OutOption,
    PolicyOption,
    RunOption,
    SeedOption,
    SetOption,
    environments,
    make,
    open_session,
    path,
)


def rollout(
    env: EnvOption = None,
    algo: AlgoOption = None,
    policy: PolicyOption = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm, openai or scripted.", show_default=False)] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Task ids, separated by commas; default: the next of the run.", show_default=False),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="JSONL or Parquet file of prompts and ground truths.", show_default=False)
    ] = None,
    tools: Annotated[
        str | None,
        typer.Option(help="Tools on offer: names or module:function, separated by commas.", show_default=False),
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="Where python_exec runs: monty or bwrap.", show_default=False)
    ] = None,
    train_batch_size: Annotated[int | None, typer.Option(help="Prompts in the step.", show_default=False)] = None,
    n_samples_per_prompt: Annotated[int | None, typer.Option(help="Attempts at each.", show_default=False)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default=False)] = None,
    trajectory_mode: Annotated[
        str | None, typer.Option(help="whole, step, or auto: by the chat template.", show_default=False)
    ] = None,
    max_turns: Annotated[int | None, typer.Option(help="Turns of an attempt.", show_default=False)] = None,
    max_generate_length: Annotated[int | None, typer.Option(help="Tokens of a turn.", show_default=False)] = None,
    seed: SeedOption = None,
    lag: Annotated[
        int | None, typer.Option(help="Sample from the policy of that many steps ago.", show_default=False)
    ] = None,
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
        "run": {"policy": policy, "seed": seed, "lag": lag},
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
