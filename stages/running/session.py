"""A run at work: its stages by name, and the engines and models that are kept up between them.

The commands and `loop` both go through here, so stages chained by hand and by the loop
give the same bytes.
"""

import contextlib
import gc
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanoskyrl.stages.core.code import OtherCode
from nanoskyrl.stages.core.config import Settings, plugin_config, stage_config, to_plain
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import METRICS, MetricsLog
from nanoskyrl.stages.core.output import discard
from nanoskyrl.stages.core.registry import BUILTIN, lookup
from nanoskyrl.stages.core.runs import EVALUATIONS, Run, RunConfig, is_main, version_of
from nanoskyrl.stages.core.storage import remove_tree
from nanoskyrl.stages.engines.base import AsyncEngine, Engine, TokenEngine, make_engine
from nanoskyrl.stages.engines.task_order import sole_environment
from nanoskyrl.stages.models.policy import policy_digest, resolve_policy
from nanoskyrl.stages.running.places import Places, check_place
from nanoskyrl.stages.running.run_settings import names_lost_settings, remembering

WITHOUT_POLICY = ("scripted", "openai")
"""Built-in engines that hold no policy of ours."""
SERVED = "vllm"
"""The engine that lives in servers; one of a run is met again by the next command."""


class StageResult(NamedTuple):
    """What a stage left behind."""

    manifest: Manifest
    output: Path
    up_to_date: bool
    """Whether it was there already, so that nothing was done."""


class Session:
    """A run directory, its settings, and the engine and learner that stay up."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        *,
        given: Settings | None = None,
        keep_up: bool = False,
        ahead: bool = False,
    ) -> None:
        """Check the settings of the run; nothing is started.

        Args:
            run: Where inputs and outputs lie that are not named.
            settings: Tables, already merged.
            given: Those of them that came with the command.
            keep_up: Keep engine and learner from stage to stage.
            ahead: Train beside another command of the run: from what the step before left, without waiting until
                `sync` has published it, and without a word in the run's settings.
        """
        check_place(run)
        self.run, self.settings, self.given, self.keep_up = run, settings, given or {}, keep_up
        self.config: RunConfig = stage_config(settings, "run")
        warnings.simplefilter("error" if stage_config(settings, "code").strict else "default", OtherCode)
        self.places = Places(run, self.config, ahead=ahead)
        self._engines: dict[str, Engine] = {}
        self._learner: Any = None
        self._passes: Any = None

    def engine_config(self, name: str) -> Any:
        """Return the settings of an engine."""
        return plugin_config(self.settings, "engine", name)

    @names_lost_settings
    def rollout(
        self, step: int | None = None, *, policy: Path | None = None, output: Path | None = None, force: bool = False
    ) -> StageResult:
        """Attempt the tasks of a step; return the manifest and where it lies."""
        from nanoskyrl.stages.rollout import environment_and_tasks, rollout

        if step is None:
            step = (self.places.step_of(output) or 0) if output is not None else self.run.next_step()
        config = self.rollout_config(step=step)
        # Before anything is written: names, settings and tasks are right.
        self.engine_config(config.engine)
        environment_and_tasks(config, self.settings)
        if policy is None and holds_policy(config.engine):
            policy = self.places.sampler_of(step) if output is None else resolve_policy(self.config.policy)
        target = output or self.run.stage(step, "rollout")
        work = partial(rollout, policy, target, config, settings=self.settings, engine=self._engine_for(config.engine))
        return self._outcome(work, target, step, force)

    def rollout_config(self, **flags: Any) -> Any:
        """Return the settings of `rollout`, with what is left to the algorithm decided."""
        config = stage_config(self.settings, "rollout", seed=self.config.seed, **flags)
        if config.dynamic_sampling is None:
            algorithm = lookup("algo", stage_config(self.settings, "train").algo)
            config = replace(config, dynamic_sampling=algorithm.dynamic_sampling)
        return config

    @names_lost_settings
    def score(
        self, step: int | None = None, *, source: Path | None = None, output: Path | None = None, force: bool = False
    ) -> StageResult:
        """Judge a step's trajectories."""
        from nanoskyrl.stages.score import reward_code, score

        source, target, step = self.places.of("score", step, source, output)
        # The step of the run whose score this is; None: it lies elsewhere.
        own = step if step is not None and target == self.run.stage(step, "score") else None
        # Rows without a verdict are judged again, but never those that were trained on.
        again = own is None or not is_finished(self.run.stage(own, "train"))
        before = read_manifest(target).digest if is_finished(target) else None
        config = stage_config(self.settings, "score")
        if own:
            _tell_changed_rewards(self.run.stage(own - 1, "score"), reward_code(config))
        work = partial(score, source, target, config, settings=self.settings, again=again)
        outcome = self._outcome(work, target, step, force)
        if again and not force and before not in (None, outcome.manifest.digest):
            if own is not None and is_finished(self.run.stage(own, "advantage")):
                discard(self.run.stage(own, "advantage"))  # it was estimated without these rewards
            return outcome._replace(up_to_date=False)
        return outcome

    @names_lost_settings
    def advantage(
        self,
        step: int | None = None,
        *,
        source: Path | None = None,
        output: Path | None = None,
        policy: Path | None = None,
        reference: Path | None = None,
        previous: Path | None = None,
        force: bool = False,
    ) -> StageResult:
        """Estimate a step's advantages."""
        from nanoskyrl.stages.advantage import advantage, needs_models

        source, target, step = self.places.of("advantage", step, source, output)
        config, passes = self.advantage_config(source), None
        previous = previous or self.places.advantages_before(step, config)
        if needs_models(config):
            policy, reference = self.places.models_of(step, policy, reference)
            passes = self._passes_up()
        work = partial(
            advantage, source, target, config, policy=policy, reference=reference, previous=previous, passes=passes
        )
        return self._outcome(work, target, step, force)

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

    def preview_advantage(
        self,
        *,
        source: Path | None = None,
        policy: Path | None = None,
        reference: Path | None = None,
        previous: Path | None = None,
    ) -> Any:
        """Return the table that `advantage` would write."""
        from nanoskyrl.stages.advantage import Models, needs_models, preview

        source, step = self.places.source("advantage", None, source)
        config = self.advantage_config(source)
        if not needs_models(config):
            return preview(source, config)
        if step is not None and (policy is None or reference is None):
            published = [self.run.policy(version) for version in (step, 0)]
            # Nothing is published here: what is not there yet is taken from where it would come.
            found = [place if place.is_dir() else resolve_policy(self.config.policy) for place in published]
            policy, reference = policy or found[0], reference or found[1]
        previous = previous or self.places.advantages_before(step, config)
        return preview(source, config, Models(policy, reference, self._passes_up()), previous)

    def _passes_up(self) -> Any:
        """Return the models of `advantage`, with the settings of training; they stay up if anything does."""
        from nanoskyrl.stages.learning.model_columns import Passes

        # On the learner that trains: it holds the policy that training starts from already.
        passes = self._passes or Passes(self._learner_up())
        self._passes = passes if self.keep_up else None
        return passes

    @names_lost_settings
    def train(
        self,
        step: int | None = None,
        *,
        source: Path | Sequence[Path] | None = None,
        output: Path | None = None,
        policy: Path | None = None,
        state: Path | None = None,
        force: bool = False,
    ) -> StageResult:
        """Update the policy of a step; several sources are a replay window, and the newest step is trained."""
        from nanoskyrl.stages.train import train

        named = self.places.newest_first(source)
        source, target, step = self.places.of("train", step, named[0] if named else None, output)
        config = stage_config(self.settings, "train")
        policy, since = policy or self.places.start_of(step), []
        if state is None and (state := self.places.state_of(step, policy)) is not None and not state.is_dir():
            since = self.places.updates_since(step)
        every = config.state_every if step is not None and target == self.run.stage(step, "train") else 1
        work = partial(
            train, [source, *named[1:]], target, config, policy=policy, state=state, since=since,
            with_state=((step or 0) + 1) % every == 0, settings=self.settings, seed=self.config.seed,
            engine=self._learner_up(),
        )  # fmt: skip
        return self._outcome(work, target, step, force)

    def is_trained(self, step: int, processes: int = 1) -> bool:
        """Return whether a step's finished train is what this many processes would make of its advantages now."""
        from nanoskyrl.stages.train import is_trained

        source, output, _ = self.places.of("train", step)
        policy = self.places.start_of(step)
        return is_trained(
            source, output, stage_config(self.settings, "train"), policy=policy,
            state=self.places.state_of(step, policy), settings=self.settings, seed=self.config.seed,
            processes=processes,
        )  # fmt: skip

    def preview_train(
        self, *, source: Path | Sequence[Path] | None = None, policy: Path | None = None
    ) -> dict[str, Any]:
        """Return the terms of the loss that training on these sources would meet."""
        from nanoskyrl.stages.train import preview

        named = self.places.newest_first(source)
        newest, start = self.places.training_input(named[0] if named else None, policy)
        return preview(
            [newest, *named[1:]], stage_config(self.settings, "train"), policy=start,
            settings=self.settings, seed=self.config.seed,
        )  # fmt: skip

    def sync(
        self,
        step: int | None = None,
        *,
        source: Path | None = None,
        output: Path | None = None,
        target: Path | None = None,
        force: bool = False,
    ) -> StageResult:
        """Publish the policy that a step trained."""
        from nanoskyrl.stages.sync import sync

        source, record, step = self.places.of("sync", step, source, output)
        config = stage_config(self.settings, "sync")
        if config.engine is None:
            # Where servers generate, what has to be proved is that they hold the policy.
            generates = stage_config(self.settings, "rollout").engine
            config = replace(config, engine=generates if generates == SERVED else "hf")
        if target is None:
            if step is None:
                raise SettingsError("sync needs a place for the policy", hint="Name one with `--target`")
            target = self.run.policy(step + 1)
        work = partial(
            sync, source, record, config, target=target, settings=self.settings, engine=self._engine_for(config.engine)
        )
        return self._outcome(work, record, step, force)._replace(output=target)

    @names_lost_settings
    def eval(
        self, name: str | None = None, *, policy: Path | None = None, output: Path | None = None, force: bool = False
    ) -> StageResult:
        """Evaluate a policy, the newest published one unless named, or an endpoint.

        Args:
            name: A benchmark or an environment; None: the environment of the settings.
            policy: Its directory.
            output: Where the shards go; None: their place in the run.
            force: Replace an output made under other settings.
        """
        from nanoskyrl.stages.eval import evaluate, settings_of

        config = stage_config(self.settings, "eval")
        rollout_config = stage_config(self.settings, "rollout", seed=self.config.seed)
        published = self.run.policies() or [0]
        policy = (policy or self.places.policy_of(published[-1])) if holds_policy(rollout_config.engine) else None
        version = version_of(policy) if policy else None
        # A policy from elsewhere has no version here; its digest names the evaluation.
        place = f"{version:08d}" if version is not None else policy_digest(policy)[:8] if policy else None
        if place is None:
            model = self.engine_config("openai").model if rollout_config.engine == "openai" else None
            place = re.sub(r"[^\w.-]+", "_", str(model or rollout_config.engine))
        what: str = name or config.env or sole_environment(rollout_config.env)
        target = output or self.run.root / EVALUATIONS / place / what
        settings = settings_of(what, rollout_config.engine, self.settings)
        engine = self._engine_for(rollout_config.engine, settings)
        work = partial(evaluate, policy, target, config, rollout_config, name=what, settings=settings, engine=engine)
        return self._outcome(work, target, version, force)

    def _outcome(self, work: Callable[..., Manifest], output: Path, step: int | None, force: bool) -> StageResult:
        """Let a stage work, and return what it left behind.

        Args:
            work: The stage; called with where its numbers go, and whether to replace an output made otherwise.
            output: Where it writes.
            step: Of its numbers; None outside a run.
            force: Whether to replace an output.
        """
        was = is_finished(output) and not force
        inside = self.run.root.resolve() in output.resolve().parents
        log = MetricsLog(self.run.metrics if inside else output.parent / METRICS, step) if is_main() else MetricsLog()
        # What is said for output elsewhere says nothing of the run; nor does what trains beside its command.
        own = step is not None and output.resolve().parent == self.run.step(step).resolve()
        remembers = own and is_main() and not self.places.ahead
        with remembering(self.run, self.settings, self.given, output) if remembers else contextlib.nullcontext():
            return StageResult(work(force=force, log=log), output, was)

    def evaluated(self) -> list[str] | list[None]:
        """Return what the settings say is evaluated: benchmarks, or several environments; None: the only one."""
        config = stage_config(self.settings, "eval")
        env = config.env or stage_config(self.settings, "rollout").env
        return list(config.bench) or ([None] if isinstance(env, str) else sorted(env))

    def _engine_for(self, name: str, settings: Settings | None = None) -> Engine | None:
        """Return the engine that stays up; one of its own where the settings of an evaluation are others."""
        if not self.keep_up and name != SERVED:
            return None
        config = plugin_config(settings or self.settings, "engine", name)
        key = name if config == self.engine_config(name) else f"{name} of evaluations"
        if key not in self._engines:
            engine = make_engine(name, config)
            if hasattr(engine, "place"):  # it finds servers of the run, and writes logs there
                engine.place = self.run.root  # type: ignore[union-attr]
            self._engines[key] = engine
        return self._engines[key]

    @property
    def world(self) -> Any:
        """The processes that train together."""
        return self._learner_up().world

    def prune(self, step: int, keep: int) -> None:
        """Delete the optimizer's state that is no longer among the newest that were written; `keep` 0 keeps all."""
        every = stage_config(self.settings, "train").state_every
        old = (step + 1) // every * every - 1 - keep * every  # the step whose state the newest one replaces
        if keep and old >= 0:
            remove_tree(self.run.stage(old, "train") / "state")

    def release_learner(self) -> None:
        """Let go of the model that trains: what it holds lies on disk."""
        self._learner = self._passes = None
        gc.collect()
        import torch

        torch.cuda.empty_cache()

    def close(self) -> None:
        """Stop what the engines started."""
        for engine in self._engines.values():
            if isinstance(engine, AsyncEngine):
                engine.close()
        self._engines.clear()

    def _learner_up(self) -> Any:
        """Return the learner that stays up, or one for this call."""
        from nanoskyrl.stages.learning.recipe import recipe_of

        learner = self._learner or recipe_of(stage_config(self.settings, "train"), self.settings).learner()
        self._learner = learner if self.keep_up else None
        return learner


def holds_policy(engine: str) -> bool:
    """Say whether an engine of this name is given a policy of ours; the others sample from something else."""
    # The class of a built-in one would load torch, also where a stage is up to date.
    if engine in BUILTIN["engine"]:
        return engine not in WITHOUT_POLICY
    return issubclass(lookup("engine", engine), TokenEngine)


def _tell_changed_rewards(earlier: Path, code: Mapping[str, str]) -> None:
    """Tell which reward functions have other code than in an earlier step, whose rewards stay.

    Raises:
        OtherCode: some have, and `code.strict` is set.
    """
    then = read_manifest(earlier).settings.get("reward_code", {}) if is_finished(earlier) else {}
    if changed := sorted(name for name in code if then.get(name, code[name]) != code[name]):
        warnings.warn(OtherCode(earlier, changed, "it stays"), stacklevel=3)
