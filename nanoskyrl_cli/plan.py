"""`skyrl plan`."""

from nanoskyrl_cli.options import (
    ConfigOption,
    JsonOption,
    PolicyOption,
    RunOption,
    SetOption,
    emit,
    print_json,
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
    if as_json:
        print_json(report)
        return
    width = max(map(len, report))
    for name, value in report.items():
        emit(f"{name:<{width}}  {value}")
