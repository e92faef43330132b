"""`skyrl doctor`."""

from dataclasses import asdict
from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    ConfigOption,
    JsonOption,
    RunOption,
    SetOption,
    emit,
    policy_path,
    print_json,
    print_numbers,
    settings_of,
)
from nanoskyrl_cli.progress import working


def doctor(
    engine: Annotated[
        str | None,
        typer.Option(help="Start this engine, hf or vllm, and try what `sync` relies on.", show_default=False),
    ] = None,
    gap: Annotated[
        str | None,
        typer.Option(help="Measure how far engine and trainer are apart with this policy.", show_default=False),
    ] = None,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say what this machine can do, and what to install for the rest; or try an engine.

    Example: skyrl doctor
    """
    if gap is not None:
        from nanoskyrl.stages.looking.gap import measure_gap

        policy = policy_path(gap)
        assert policy is not None
        _, settings = settings_of(run, config, assignments, {"rollout": {"engine": engine}})
        with working("gap"):
            numbers = measure_gap(policy, settings)
        print_numbers(numbers, as_json)
        return 0
    if engine is not None:
        from nanoskyrl.stages.looking.engine_checks import examine_engine
        from nanoskyrl.stages.models.policy import resolve_policy

        _, settings = settings_of(run, config, assignments)
        with working("doctor"):
            policy = resolve_policy(settings.get("run", {}).get("policy", "starter"))
            checks = examine_engine(engine, policy, settings)
    else:
        from nanoskyrl.stages.looking.doctor import examine

        checks = examine()
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            emit(f"{'ok  ' if check.ok else 'no  '} {check.name:<{width}}  {check.found}")
            if not check.ok and check.remedy:
                emit(f"     {'':<{width}}  {check.remedy}")
    return 0 if all(check.ok for check in checks if check.needed) else 1
