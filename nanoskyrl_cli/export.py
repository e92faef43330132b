"""`skyrl export`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import JsonOption, say, say_made


def export(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@N]",
            help="A run and a policy of it; default: its newest. With --trajectories a run, or a stage's directory.",
        ),
    ],
    to: Annotated[str, typer.Option(help="Directory or file to write; it must not be there.")],
    trajectories: Annotated[
        str | None,
        typer.Option(
            help="Rows in place of a policy: jsonl (all columns), chat (successes, for SFT) or dataset (with a card).",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: as it is.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a policy as a Hugging Face directory with a model card, or trajectories for other programs.

    Example: skyrl export runs/default@3 --to mine --merge
    """
    from nanoskyrl.stages.core.config import build
    from nanoskyrl.stages.looking.export import ExportConfig, export as stage, policy_named

    if trajectories is not None:
        from nanoskyrl.stages.looking.export_rows import export_rows

        found = export_rows(as_path(policy), as_path(to), trajectories)  # pyright: ignore[reportArgumentType]
        say(f"{found.rows} of {found.of} rows of {policy} are in {to}.")
        return
    config = build(ExportConfig, {"merge": merge, "dtype": dtype}, "export")
    run, version = policy_named(policy)
    place = stage(run, version, as_path(to), config)
    say_made(f"Policy {version} of {run.root} is in {place}.", place, as_json, {"policy": version})
