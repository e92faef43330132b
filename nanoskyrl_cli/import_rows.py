"""`skyrl import`."""

from typing import Annotated

import typer

from nanoskyrl.stages.core.storage import as_path
from nanoskyrl_cli.options import EnvOption, ForceOption, RunOption, run_at, say


def import_rows(
    file: Annotated[str, typer.Argument(help="JSON lines with prompt_ids, response_ids, loss_mask, and the like.")],
    env: EnvOption = None,
    run: RunOption = None,
    force: ForceOption = False,
) -> None:
    """Take trajectories with token ids from JSON lines as the next step's rollout, and their rewards as its score.

    Example: skyrl import theirs.jsonl --env text_math --run runs/theirs
    """
    from nanoskyrl.stages.core.config import stage_config
    from nanoskyrl.stages.engines.task_order import sole_environment
    from nanoskyrl.stages.looking.import_rows import import_rows as imported
    from nanoskyrl.stages.running.run_settings import settings_for

    place = run_at(run)
    env = env or sole_environment(stage_config(settings_for(place), "rollout").env)
    found = imported(as_path(file), place, env, force=force)
    what = "rollout" if found.score is None else "rollout and score"
    say(f"{found.rollout.rows_out} rows of {file} are the {what} of step {found.step} of {place.root}.")
    say(f"Next: skyrl {'score' if found.score is None else 'advantage'} --run {place.root}")
