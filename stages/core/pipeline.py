"""The stages of a step: one record each, in the one order that commands, loop, `show` and `verify` go by.

Each works on the output of the one before. A stage of somebody's own takes its place in a
run behind the stage whose tables it works on, and passes them on: the same columns, and
perhaps fewer rows.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.registry import load_attribute, lookup

LEARNER, ENGINE = "learner", "engine"
NAME = re.compile("[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: what the toolkit has to know of it."""

    name: str
    """Of its folder in a step, and of its lines in metrics.jsonl."""
    input: str | None
    """The stage of the step whose output it works on; None: it begins a step, or belongs to none."""
    run: str | Callable[..., Any]
    """Where the function of a stage of ours stands; beside it, `head` says what it would record. Of somebody's own: a
    function of a table and the settings, which returns the rows that stay and how many were dropped, by reason. It gets
    a part at a time, in which groups are whole."""
    columns: str | None = None
    """Its shards hold the columns of this stage and of those before; None: no trajectories, but of somebody's own those
    of its input."""
    config: str | type | None = None
    """Its settings: a dataclass, or where one stands."""
    needs: frozenset[str] = frozenset()
    """What is kept up for it from step to step: the engine that generates, the learner that trains."""
    called: str = ""
    """The name by which a run's settings ask for one of somebody's own, which is its command and its table, too."""

    @property
    def table(self) -> str:
        """The stage whose outputs are distinguished by what they hold: of somebody's own, whose tables it passes on."""
        return self.columns or self.name

    @property
    def command(self) -> str:
        """What is typed after `skyrl`, and the table of its settings."""
        return self.called or self.name

    def function(self, name: str | None = None) -> Callable[..., Any]:
        """Return the function of a stage of ours, or another one of its module."""
        assert isinstance(self.run, str)
        module, _, own = self.run.partition(":")
        return load_attribute(f"{module}:{name or own}", what="stage")


STEP = (
    Stage(
        name="rollout", input=None, columns="rollout", needs=frozenset({ENGINE}),
        config="nanoskyrl.stages.engines.rollout_config:RolloutConfig", run="nanoskyrl.stages.rollout:rollout",
    ),
    Stage(
        name="score", input="rollout", columns="score",
        config="nanoskyrl.stages.score:ScoreConfig", run="nanoskyrl.stages.score:score",
    ),
    Stage(
        name="advantage", input="score", columns="advantage", needs=frozenset({LEARNER}),
        config="nanoskyrl.stages.learning.advantage_config:AdvantageConfig",
        run="nanoskyrl.stages.advantage:advantage",
    ),
    Stage(
        name="train", input="advantage", needs=frozenset({LEARNER}),
        config="nanoskyrl.stages.learning.train_config:TrainConfig", run="nanoskyrl.stages.train:train",
    ),
    Stage(
        name="sync", input="train", needs=frozenset({ENGINE}),
        config="nanoskyrl.stages.sync:SyncConfig", run="nanoskyrl.stages.sync:sync",
    ),
)  # fmt: skip
"""Those of every step, in their order."""
EVAL = Stage(
    name="eval", input=None, columns="score", needs=frozenset({ENGINE}),
    config="nanoskyrl.stages.eval:EvalConfig", run="nanoskyrl.stages.eval:evaluate",
)  # fmt: skip
OURS = {stage.name: stage for stage in (*STEP, EVAL)}
STAGES = tuple(stage.name for stage in STEP)
RESERVED = frozenset({*OURS, "loop", "startup", "collapse", "state", "critic", "reference", "previous"})
"""Names of our stages, of other lines in metrics.jsonl, and of other inputs that manifests name."""


def pipeline(added: Sequence[str] = ()) -> dict[str, Stage]:
    """Return the stages of a step by their names, in their order.

    Args:
        added: Those of somebody's own, as `run.stages` names them; several behind one stage come in this order.

    Raises:
        SettingsError: one is unknown, no stage, or works on what holds no trajectories.
    """
    found = list(STEP)
    for called in added:
        stage = own_stage(called)
        place = next((place for place, one in enumerate(found) if one.name == stage.input), None)
        if place is None or found[place].columns is None:
            raise SettingsError(
                f"stage `{called}` works on `{stage.input}`, which gives it no trajectories in this run",
                hint=f"Its input is one of {', '.join(one.name for one in found if one.columns)}",
            )
        if any(one.name == stage.name for one in found):
            raise SettingsError(f"`run.stages` has two stages `{stage.name}`", hint="Leave out one of them")
        columns = found[place].columns
        while found[place + 1].called:
            place += 1
        found.insert(place + 1, replace(stage, columns=columns))
    return {found[0].name: found[0], **{two.name: replace(two, input=one.name) for one, two in pairwise(found)}}


def own_stage(called: str) -> Stage:
    """Return a stage of somebody's own: one that ships, an installed one, or `module:attribute`.

    Raises:
        SettingsError: there is none, or it is no stage, or has a name that is taken.
    """
    stage = lookup("stage", called)
    if not isinstance(stage, Stage) or not callable(stage.run):
        raise SettingsError(f"`{called}` is no Stage", hint="docs/extending.md shows one")
    if stage.name in RESERVED or not NAME.fullmatch(stage.name):
        raise SettingsError(
            f"stage `{called}` cannot be named `{stage.name}`",
            hint="Give it small letters, digits and _, and no name of ours",
        )
    return replace(stage, called=called)


def training_half(stages: dict[str, Stage]) -> list[str]:
    """Return the stages between those that generate and those that publish: from the first to the last that learns."""
    learns = [place for place, stage in enumerate(stages.values()) if LEARNER in stage.needs]
    return list(stages)[learns[0] : learns[-1] + 1]
