"""`skyrl plan`."""

from nanoskyrl_cli.options import (
    ConfigOption,
    JsonOption,
    PolicyOption,
    RunOption,
    SetOption,
    print_numbers,
    settings_of,
)


def plan(
    policy: PolicyOption = None,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what the next stages would do, where, and how much memory they need; start nothing.

    Example: skyrl plan --policy starter
    """
    from nanoskyrl.stages.plan import plan as stage

    found, settings, _ = settings_of(run, config, assignments, {"run": {"policy": policy}})
    report = stage(found, settings)
    print_numbers(report, as_json)
