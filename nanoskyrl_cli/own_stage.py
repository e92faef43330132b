"""The command of a stage of somebody's own: `skyrl NAME`, or `skyrl module:attribute`."""

import contextlib
from collections.abc import Callable
from typing import Any

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.pipeline import own_stage
from nanoskyrl_cli.options import (
    ConfigOption,
    ForceOption,
    JsonOption,
    OutOption,
    RunOption,
    SetOption,
    SourceArgument,
    make,
    open_session,
    path,
    settings_of,
)


def command(called: str) -> Callable[..., Any]:
    """Return the command of a stage.

    Args:
        called: The name by which settings ask for it.
    """
    words = None
    with contextlib.suppress(SettingsError):  # the run may say where its module lies; if not, the session refuses it
        words = own_stage(called).run.__doc__

    def work(
        source: SourceArgument = None,
        run: RunOption = None,
        out: OutOption = None,
        config: ConfigOption = None,
        assignments: SetOption = None,
        force: ForceOption = False,
        as_json: JsonOption = False,
    ) -> int:
        stages = settings_of(run, config, assignments, lasts=True)[1].get("run", {}).get("stages", ())
        if stages and called not in stages:
            raise SettingsError(
                f"the run's stages are {', '.join(stages)}, and not `{called}`", hint="Name all of them in `run.stages`"
            )
        session = open_session(run, config, assignments, {"run": {"stages": None if stages else [called]}})
        stage = next(stage.name for stage in session.stages.values() if stage.called == called)
        return make(session, stage, as_json, source=path(source), output=path(out), force=force)

    work.__doc__ = (words or "").split("Raises:")[0]
    return work
