"""`skyrl list`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import JsonOption, print_data


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="env, bench, engine, algo, estimator, tool_format, tool, family or preset; default: all.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List what can be named: environments, engines, algorithms and the like.

    Example: skyrl list env
    """
    from nanoskyrl.stages.looking.catalogue import catalogue

    found = catalogue(kind)
    print_data(found, (f"{name}: {', '.join(entries)}" for name, entries in found.items()), as_json)
