"""`skyrl advantage`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.errors import EXIT_SHORT
from nanoskyrl_cli.options import (
    AlgoOption,
    ConfigOption,
    DryRunOption,
    ExecutorOption,
    ForceOption,
    JsonOption,
    OutOption,
    RunOption,
    SetOption,
    SourceArgument,
    data_stream,
    finish,
    open_session,
    path,
    policy_path,
    print_json,
)
from nanoskyrl_cli.progress import working


def advantage(
    scored: SourceArgument = None,
    algo: AlgoOption = None,
    estimator: Annotated[
        str | None, typer.Option(help="grpo, gae, rloo, ...; default: the algorithm's.", show_default=False)
    ] = None,
    old_logprobs: Annotated[
        str | None, typer.Option(help="rollout (as recorded) or recompute.", show_default=False)
    ] = None,
    ref_logprobs: Annotated[
        bool | None, typer.Option("--ref-logprobs", help="Write log-probs under the reference.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policy that training starts from; default: the run's.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Frozen policy of the KL; default: the run's first.", show_default=False)
    ] = None,
    previous: Annotated[
        str | None,
        typer.Option(
            help="Advantages that an adaptive KL continues from; default: the step before's.", show_default=False
        ),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(help="Of `skyrl score --name`; written beside, as advantage-NAME.", show_default=False),
    ] = None,
    executor: ExecutorOption = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Turn rewards into an advantage for every sampled token.

    Example: skyrl advantage
    """
    flags = {
        "run": {"executor": executor},
        "advantage": {"estimator": estimator, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs},
        "train": {"algo": algo},
    }
    session = open_session(run, config, assignments, flags)
    start, frozen = policy_path(policy), policy_path(reference)
    if dry_run:
        from nanoskyrl.stages.looking.preview import SHOWN, show_advantages

        found = session.preview_advantage(
            source=path(scored), policy=start, reference=frozen, previous=path(previous), score=score
        )
        if as_json:
            print_json(found.select(list(SHOWN)).to_pylist())
        else:
            show_advantages(found, file=data_stream())
        return 0
    with working("advantage"):
        outcome = session.advantage(
            source=path(scored), output=path(out), policy=start, reference=frozen, previous=path(previous),
            score=score, force=force,
        )  # fmt: skip
    learnable = outcome.manifest.rows_out > sum(outcome.manifest.dropped.values())
    code = finish(outcome, session, "advantage" if learnable and score is None else None, as_json)
    return code if learnable else EXIT_SHORT
