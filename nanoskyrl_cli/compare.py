"""`skyrl compare`."""

from typing import Annotated

import typer

from nanoskyrl_cli.options import (
    ConfigOption,
    JsonOption,
    RunOption,
    SetOption,
    SourceArgument,
    data_stream,
    open_session,
    path,
    policy_path,
    print_json,
    say,
)
from nanoskyrl_cli.progress import working


def compare(
    advantages: SourceArgument = None,
    algos: Annotated[str, typer.Option(help="Names, with commas between them.")] = "grpo,sapo,gspo,dapo,cispo",
    policy: Annotated[
        str | None, typer.Option(help="Where gradients are taken; default: the policy training starts from.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the answer as a Parquet file.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(help="Trajectories to show.", min=0)] = 8,
    run: RunOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set algorithms side by side on the same shard and policy: loss, gradient, what is clipped, who is pushed.

    Example: skyrl compare --algos grpo,sapo,gspo
    """
    from nanoskyrl.stages.core.config import stage_config
    from nanoskyrl.stages.core.metrics import finite
    from nanoskyrl.stages.looking.compare import compare as compared
    from nanoskyrl.stages.looking.preview import show_comparison

    session = open_session(run, config, assignments)
    names = list(dict.fromkeys(name.strip() for name in algos.split(",") if name.strip()))
    with working("compare") as now:
        source, start = session.places.training_input(path(advantages), policy_path(policy))
        table = compared(
            source,
            names,
            stage_config(session.settings, "train"),
            policy=start,
            settings=session.settings,
            seed=session.config.seed,
            output=path(out),
            begins=lambda algo: now(f"compare: {algo}, {names.index(algo) + 1} of {len(names)}"),
        )
    if as_json:
        rows = table.drop_columns(["trajectory_id", "weight"]).to_pylist()
        print_json({"output": out, "numbers": {row["algo"]: finite(row) for row in rows}})
    else:
        show_comparison(table, limit, file=data_stream())
    if out:
        say(f"Wrote {out}")
