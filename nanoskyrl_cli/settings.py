"""`skyrl settings`."""

from dataclasses import asdict
from typing import Annotated

import typer

from nanoskyrl_cli.options import ConfigOption, JsonOption, SetOption, print_data, run_at, sources_of


def show_settings(
    run: Annotated[
        str | None, typer.Argument(help="Run directory; default $SKYRL_RUN, then runs/default.", show_default=False)
    ] = None,
    preset: Annotated[str | None, typer.Option(help="As a command with this preset.", show_default=False)] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only those that are no defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which settings hold in a run, and where each comes from: default, lag, run.toml, preset, file or flag.

    Example: skyrl settings runs/default --changed
    """
    from nanoskyrl.stages.core.config import merge
    from nanoskyrl.stages.learning.lag_defaults import of_lag
    from nanoskyrl.stages.looking.origins import DEFAULT, origins
    from nanoskyrl.stages.looking.template import toml_text
    from nanoskyrl.stages.running.run_settings import given_settings, kept_settings

    found = run_at(run)
    kept = (found.settings_file.name, kept_settings(found))
    given = [(name, given_settings(tables)) for name, tables in sources_of(config, assignments, None, preset)]
    sources = [kept, *given]
    by_lag = of_lag(merge(*(tables for _, tables in sources)))
    held = [one for one in origins([*sources, ("lag", by_lag)]) if not changed or one.source != DEFAULT]
    shown = [(one.name, "unset" if one.value is None else toml_text(one.value), one.source) for one in held]
    width, wide = (max((len(line[column]) for line in shown), default=0) for column in (0, 1))
    lines = [f"{name:<{width}}  {value:<{min(wide, 40)}}  {source}" for name, value, source in shown]
    print_data([asdict(one) for one in held], lines, as_json)
