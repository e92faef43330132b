"""Runs from Python: open one, run its stages, read what they wrote. The commands go through here, too.

with open_run("runs/mine", {"rollout": {"env": "tool_use"}}) as run:
    run.rollout()
    run.score()
    print(run.frame("score")["reward"].mean())
"""

import os
from typing import TYPE_CHECKING

import pyarrow as pa

from nanoskyrl.stages.core.config import Settings
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.runs import Run, default_run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.storage import as_path
from nanoskyrl.stages.running.loop import Begins, Report, loop
from nanoskyrl.stages.running.run_settings import given_settings, settings_for
from nanoskyrl.stages.running.session import Session

if TYPE_CHECKING:
    import pandas as pd


class OpenRun(Session):
    """A run with its settings; engines and models stay up until it is closed, as by the end of `with`.

    Its stages are methods: `rollout`, `score`, `advantage`, `train`, `sync` and `eval`. Each takes the newest step that
    is ready unless another is named, and returns the manifest, the output, and whether it was up to date.
    """

    def __enter__(self) -> "OpenRun":
        """Return the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what the engines started."""
        self.close()

    def table(self, stage: str, step: int | None = None) -> pa.Table:
        """Return all rows that a stage wrote; the columns are those of docs/trajectory.md.

        Args:
            stage: rollout, score, advantage or train.
            step: Whose; None: the newest in which the stage is finished.

        Raises:
            InputError: the stage is not finished, or its parts are not those it wrote.
        """
        step = self.run.newest_with(stage) if step is None else step
        place = self.run.stage(step, stage)
        return pa.concat_tables(read_parts(place, read_manifest(place, stage=stage)))

    def frame(self, stage: str, step: int | None = None) -> "pd.DataFrame":
        """Return the same as a pandas frame."""
        return self.table(stage, step).to_pandas()

    def loop(
        self,
        *,
        force: bool = False,
        report: Report = lambda step, numbers: None,
        begins: Begins = lambda step, stage: None,
    ) -> int:
        """Run all stages, step after step, as `loop` does, and return how many steps were done now."""
        return loop(self.run, self.named, given=self.given, report=report, begins=begins, force=force)


def open_run(
    place: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    *,
    keep_up: bool = True,
    ahead: bool = False,
    lasts: bool = False,
) -> OpenRun:
    """Return a run; nothing is started or written.

    Args:
        place: Its directory, new or begun; None: $SKYRL_RUN, then runs/default.
        settings: Table to key to value; they win over those of the run. What the run does not have yet it keeps, once
            a stage works in it.
        keep_up: Keep engine and learner from stage to stage.
        ahead: Start from the previous step's unpublished policy; see `Preparation`.
        lasts: The run is about to take the settings as its own; else a Notice tells which differ from the run's.

    Raises:
        SettingsError: a setting does not exist or is outside its type, or the run lies behind a URL.
    """
    run = Run(as_path(place or default_run()))
    given = given_settings(settings or {})
    return OpenRun(run, settings_for(run, given, told=not lasts), given=given, keep_up=keep_up, ahead=ahead)
