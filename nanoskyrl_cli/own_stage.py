"""The command of a stage of somebody's own: `skyrl NAME`, or `skyrl module:attribute`."""

from collections.abc import Callable
from typing import Any

from nanoskyrl_cli.options import (
    ConfigOption,
    ForceOption,
    JsonOption,
    OutOption,
    RunOption,
    SetOption,
    SourceArgument,
    finish,
    open_session,
    path,
)
from nanoskyrl_cli.progress import working


def command(called: str, *, load: bool) -> Callable[..., Any]:
    """Return the command of a stage.

    Args:
        called: The name by which settings ask for it.
        load: Let its help say what the stage's function says of itself.

    Raises:
        SettingsError: there is no such stage.
    """
    words = "A stage that a run has where `run.stages` names it."
    if load:
        from nanoskyrl.stages.core.pipeline import own_stage

        words = (own_stage(called).run.__doc__ or words).split("Raises:")[0]

    def work(
        source: SourceArgument = None,
        run: RunOption = None,
        out: OutOption = None,
        config: ConfigOption = None,
        assignments: SetOption = None,
        force: ForceOption = False,
        as_json: JsonOption = False,
    ) -> int:
        session = open_session(run, config, assignments, own=called)
        stage = next(stage.name for stage in session.stages.values() if stage.called == called)
        with working(stage):
            outcome = session.own(stage, source=path(source), output=path(out), force=force)
        return finish(outcome, session, stage, as_json)

    work.__doc__ = words
    return work
