"""What each stage of a run would work on, and with which settings: nothing is done here.

The same answers serve to run a stage and to ask whether its output is current.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanoskyrl.stages.core.code import OtherCode
from nanoskyrl.stages.core.config import Settings, merge, plugin_config, stage_config, to_plain
from nanoskyrl.stages.core.manifest import Head, Manifest, read_manifest
from nanoskyrl.stages.core.output import is_current
from nanoskyrl.stages.core.own_stage import head_of_own, run_own
from nanoskyrl.stages.core.pipeline import LEARNER, OURS
from nanoskyrl.stages.core.registry import lookup
from nanoskyrl.stages.core.runs import Run, RunConfig, has_state
from nanoskyrl.stages.engines.base import face_of
from nanoskyrl.stages.learning.lag_defaults import of_lag
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.models.remote_code import allow_code
from nanoskyrl.stages.running.kept_up import KeptUp
from nanoskyrl.stages.running.places import Places


class Work(NamedTuple):
    """A stage and all that it works on."""

    output: Path
    step: int | None
    """Of its numbers; None outside a run."""
    run: Callable[..., Manifest]
    """Takes where its numbers go, and whether to replace an output made otherwise."""
    head: Callable[..., Head] = Head
    """Returns what it would record before it begins."""


Alive = Callable[[], Mapping[str, Any]]


class Preparation:
    """The stages of a run, by what they would be called with."""

    def __init__(
        self, run: Run, settings: Settings, *, keep_up: bool = False, ahead: bool = False, processes: int = 1
    ) -> None:
        """Check the settings of the run; nothing is started.

        Args:
            run: Where inputs and outputs lie that are not named.
            settings: Tables, already merged.
            keep_up: Keep engine and learner from stage to stage.
            ahead: Start from the previous step's unpublished policy and leave run.toml alone. Used by the trainer that
                runs in parallel with the loop.
            processes: That would train together.
        """
        self.run, self.processes = run, processes
        self.config: RunConfig = stage_config(settings, "run")
        self.named = settings
        """Without what follows from the lag: what a run remembers."""
        self.of_lag = of_lag(settings)
        self.settings = merge(settings, self.of_lag)
        warnings.simplefilter("error" if stage_config(settings, "code").strict else "default", OtherCode)
        allow_code(self.config.trust_remote_code)
        self.places = Places(run, self.config, ahead=ahead)
        self.stages = self.places.stages
        self.kept = KeptUp(run.root, self.settings, keep_up=keep_up)

    def _elsewhere(self) -> dict[str, Any]:
        """Return who makes the parts of a stage, as it takes them; of processes that train together none is asked."""
        executor = self.kept.executor() if self.processes == 1 else None
        return {} if executor is None else {"executor": executor}

    def engine_config(self, name: str) -> Any:
        """Return the settings of an engine."""
        return plugin_config(self.settings, "engine", name)

    def rollout_work(self, step: int, policy: Path | None = None, output: Path | None = None) -> Work:
        """Return what attempting the tasks of a step is called with."""
        config = self.rollout_config(step=step)
        if policy is None and face_of(config.engine).holds_policy:
            policy = self.places.sampler_of(step) if output is None else resolve_policy(self.config.policy)
        return self._work_of(
            "rollout", policy, output or self.run.stage(step, "rollout"), config, step,
            lambda: {"engine": self.kept.engine(config.engine), **self._elsewhere()}, settings=self.settings,
        )  # fmt: skip

    def rollout_config(self, **flags: Any) -> Any:
        """Return the settings of `rollout`, with what is left to the algorithm decided."""
        config = stage_config(self.settings, "rollout", seed=self.config.seed, **flags)
        if config.dynamic_sampling is None:
            algorithm = lookup("algo", stage_config(self.settings, "train").algo)
            config = replace(config, dynamic_sampling=algorithm.dynamic_sampling)
        return config

    def score_work(
        self, step: int | None, source: Path | None = None, output: Path | None = None, *, again: bool = True
    ) -> Work:
        """Return what judging a step's trajectories is called with."""
        source, target, step = self.places.of("score", step, source, output)
        config = stage_config(self.settings, "score")
        return self._work_of(
            "score", source, target, config, step, lambda: {"again": again, **self._elsewhere()}, settings=self.settings
        )  # fmt: skip

    def advantage_work(
        self,
        step: int | None,
        source: Path | None = None,
        output: Path | None = None,
        policy: Path | None = None,
        reference: Path | None = None,
        previous: Path | None = None,
    ) -> Work:
        """Return what estimating a step's advantages is called with."""
        from nanoskyrl.stages.advantage import needs_models

        source, target, step = self.places.of("advantage", step, source, output)
        config, passes = self.advantage_config(source), None
        previous = previous or self.places.advantages_before(step, config)
        if needs_models(config):
            policy, reference = self.places.models_of(step, policy, reference)
            passes = self.kept.passes()
        return self._work_of(
            "advantage", source, target, config, step, self._elsewhere, policy=policy, reference=reference,
            previous=previous, passes=passes,
        )  # fmt: skip

    def advantage_config(self, source: Path | None = None) -> Any:
        """Return the settings of `advantage` with what was left open decided.

        Args:
            source: Scored shards, whose manifest says how they were sampled; None: by rollouts still to come.
        """
        from nanoskyrl.stages.learning.advantage_config import Sampling, sampling_of, settled

        sampling = sampling_of(to_plain(self.rollout_config()))
        if source is not None:
            sampling = read_manifest(source, stage="score").facts.get("sampling") or sampling
        train = stage_config(self.settings, "train")
        return settled(
            stage_config(self.settings, "advantage"), lookup("algo", train.algo), train, Sampling(**sampling)
        )

    def train_work(
        self,
        step: int | None,
        source: Path | Sequence[Path] | None = None,
        output: Path | None = None,
        policy: Path | None = None,
        state: Path | None = None,
    ) -> Work:
        """Return what updating the policy of a step is called with."""
        named = self.places.newest_first(source)
        newest, target, step = self.places.of("train", step, named[0] if named else None, output)
        config = stage_config(self.settings, "train")
        policy = policy or self.places.start_of(step)
        named_state, state = state, state or self.places.state_of(step, policy)

        def alive() -> dict[str, Any]:
            lacks = named_state is None and state is not None and not has_state(state.parent)
            in_run = step is not None and target == self.run.stage(step, "train")
            done = (step or 0) + 1
            return {
                "engine": self.kept.learner(),
                "since": self.places.updates_since(step) if lacks else [],
                "with_state": done % (config.state_every if in_run else 1) == 0,
                # Nothing follows a run's last step that could make its state again.
                "beside": in_run and self.kept.keep_up and done < stage_config(self.settings, "loop").steps,
            }

        work = self._work_of(
            "train", [newest, *named[1:]], target, config, step, alive,
            policy=policy, state=state, settings=self.settings, seed=self.config.seed,
        )  # fmt: skip
        return work._replace(head=partial(work.head, processes=self.processes))

    def sync_work(
        self, step: int | None, source: Path | None = None, output: Path | None = None, target: Path | None = None
    ) -> Work:
        """Return what publishing a step's policy is called with."""
        source, record, step = self.places.of("sync", step, source, output)
        config = stage_config(self.settings, "sync")
        if config.engine is None:
            # What has to be proved is that the engine that generates holds the policy.
            generates = stage_config(self.settings, "rollout").engine
            config = replace(config, engine=generates if face_of(generates).holds_policy else "hf")
        return self._work_of(
            "sync", source, record, config, step,
            lambda: {"target": target, "settings": self.settings, "engine": self.kept.engine(config.engine)},
        )  # fmt: skip

    def needs_learner(self, stage: str, step: int) -> bool:
        """Say whether a stage of a step is made with models that train, in every process that trains."""
        from nanoskyrl.stages.advantage import needs_models

        if stage == "advantage":
            return needs_models(self.advantage_config(self.places.source(stage, step, None)[0]))
        return LEARNER in self.stages[stage].needs

    def own_work(self, stage: str, step: int | None, source: Path | None = None, output: Path | None = None) -> Work:
        """Return what a stage of somebody's own is called with."""
        source, target, step = self.places.of(stage, step, source, output)
        record = self.stages[stage]
        config = plugin_config(self.settings, "stage", record.command)
        return Work(
            target, step, partial(run_own, record, source, target, config), partial(head_of_own, record, source, config)
        )

    def _work_of(
        self, stage: str, source: Any, output: Path, config: Any, step: int | None, alive: Alive = dict, **given: Any
    ) -> Work:
        """Return the work of a stage of ours.

        Args:
            stage: Its name.
            source: What it works on.
            output: Where it writes.
            config: Its settings.
            step: Of its numbers; None outside a run.
            alive: Returns what it needs besides to work, such as an engine.
            given: What else says what it will make.
        """
        function, head = OURS[stage].function(), OURS[stage].function("head")
        return Work(
            output, step, lambda **how: function(source, output, config, **given, **alive(), **how),
            partial(head, source, config, **given),
        )  # fmt: skip

    def is_current(self, stage: str, step: int) -> bool:
        """Say whether the finished output of a stage is what it would make now: a comparison, in which nothing runs.

        Raises:
            NanoskyrlError: the settings are refused, or the input is not there.
        """
        work = self.own_work(stage, step) if self.stages[stage].called else getattr(self, f"{stage}_work")(step)
        return is_current(work.output, work.head())
