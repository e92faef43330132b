"""`skyrl plan`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    ConfigOption,
    ExecutorOption,
    JsonOption,
    PolicyOption,
    RunOption,
    SetOption,
    print_numbers,
    settings_of,
)


def plan(
    policy: PolicyOption = None,
    gpus_generate: Annotated[
        str | None, typer.Option(help="Where rollouts would run: 0-3, 0,2 or cpu.", show_default=False)
    ] = None,
    gpus_train: Annotated[str | None, typer.Option(help="Where training would run.", show_default=False)] = None,
    lag: Annotated[
        int | None, typer.Option(help="Sample from the policy of that many steps ago.", show_default=False)
    ] = None,
    executor: ExecutorOption = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Print what to type on each of these, as node1,node2, to train together.", show_default=False
        ),
    ] = None,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what the next stages would do, where, and how much memory they need; start nothing.

    Example: skyrl plan --policy starter
    """
    from nanoskyrl.stages.looking.plan import plan as stage

    flags = {
        "run": {"policy": policy, "lag": lag, "executor": executor},
        "loop": {"gpus_generate": gpus_generate, "gpus_train": gpus_train},
    }
    found, settings = settings_of(run, config, assignments, flags)
    if hosts is not None:
        from nanoskyrl.stages.looking.hosts import host_commands

        print_numbers(host_commands(found, settings, [host.strip() for host in hosts.split(",")]), as_json)
        return
    print_numbers(stage(found, settings), as_json)
