"""`skyrl report`."""

import json
import time
from typing import Annotated

import typer

from nanoskyrl_cli.options import RunOption, data_stream, path, run_at, say


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Runs of one experiment, such as its seeds; default: the run.", show_default=False),
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option("--compare", help="A run beside it; may be repeated.", show_default=False)
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="The file; default: report.html in the run.", show_default=False)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it again whenever the run has news, until Ctrl-C.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page holds as JSON.")] = False,
    run: RunOption = None,
) -> None:
    """Write one HTML page of a run, or of several: curves, errors, evaluations, trajectories, settings, lineage.

    Example: skyrl report runs/default --compare runs/other
    """
    from nanoskyrl.stages.looking.report.page import NAME, write_report

    main = [run_at(name) for name in runs or [run]]
    others = [run_at(name) for name in compare or ()]
    output = path(out) or main[0].root / NAME
    while True:
        seen = [one.metrics.stat().st_mtime if one.metrics.is_file() else 0.0 for one in (*main, *others)]
        found = write_report(main, others, output)
        if as_json:
            print(json.dumps(found), file=data_stream(), flush=True)
        say(
            f"{found['trajectories']} of {found['of']} trajectories and {found['steps']} steps,"
            f" {found['bytes'] / 1e6:.1f} MB: {output}"
        )
        if not watch:
            return
        while seen == [one.metrics.stat().st_mtime if one.metrics.is_file() else 0.0 for one in (*main, *others)]:
            time.sleep(WATCH_SECONDS)


WATCH_SECONDS = 2.0
"""Between looks at whether a run has news."""
