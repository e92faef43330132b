"""A run at work: its stages by name, and the engines and models that are kept up between them.

The commands and `loop` both go through here, so stages chained by hand and by the loop
give the same bytes.
"""

import contextlib
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanoskyrl.stages.core.code import OtherCode
from nanoskyrl.stages.core.config import Settings, stage_config
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import METRICS, MetricsLog
from nanoskyrl.stages.core.output import discard
from nanoskyrl.stages.core.pipeline import OURS
from nanoskyrl.stages.core.runs import EVALUATIONS, Run, is_main, is_published, version_of
from nanoskyrl.stages.core.storage import is_local, remove_tree
from nanoskyrl.stages.engines.base import face_of
from nanoskyrl.stages.engines.task_order import sole_environment
from nanoskyrl.stages.models.policy import policy_digest, resolve_policy
from nanoskyrl.stages.running.preparation import Preparation, Work
from nanoskyrl.stages.running.run_settings import names_lost_settings, remembering


class StageResult(NamedTuple):
    """What a stage left behind."""

    manifest: Manifest
    output: Path
    up_to_date: bool
    """Whether it was there already, so that nothing was done."""


class Session(Preparation):
    """A run directory, its settings, and the engine and learner that stay up."""

    def __init__(self, run: Run, settings: Settings, *, given: Settings | None = None, **how: Any) -> None:
        """Check the settings of the run; nothing is started.

        Args:
            run: Where inputs and outputs lie that are not named.
            settings: Tables, already merged.
            given: Those of them that came with the command.
            how: As in `Preparation`: `keep_up`, `ahead` and `processes`.
        """
        super().__init__(run, settings, **how)
        self.given = given or {}

    def make(self, stage: str, step: int | None = None, **named: Any) -> StageResult:
        """Let a stage work, by its name; `named` is what the method of its name takes, or `own`."""
        work = getattr(self, stage) if stage in OURS else partial(self.own, stage)
        return work(step, **named)

    @names_lost_settings
    def own(
        self,
        stage: str,
        step: int | None = None,
        *,
        source: Path | None = None,
        output: Path | None = None,
        force: bool = False,
    ) -> StageResult:
        """Let a stage of somebody's own work on a step's trajectories."""
        return self._outcome(self.own_work(stage, step, source, output), force)

    @names_lost_settings
    def rollout(
        self, step: int | None = None, *, policy: Path | None = None, output: Path | None = None, force: bool = False
    ) -> StageResult:
        """Attempt the tasks of a step; return the manifest and where it lies."""
        from nanoskyrl.stages.rollout import environment_and_tasks

        if step is None:
            step = (self.places.step_of(output) or 0) if output is not None else self.run.next_step()
        # Before anything is written: names, settings and tasks are right.
        config = self.rollout_config(step=step)
        self.engine_config(config.engine)
        environment_and_tasks(config, self.settings)
        return self._outcome(self.rollout_work(step, policy, output), force)

    @names_lost_settings
    def score(
        self,
        step: int | None = None,
        *,
        source: Path | None = None,
        output: Path | None = None,
        name: str | None = None,
        force: bool = False,
    ) -> StageResult:
        """Judge a step's trajectories; under a name beside the run's own score, which stays."""
        from nanoskyrl.stages.score import reward_code

        source, target, step = self.places.of("score", step, source, output, name)
        # The step of the run whose score this is; None: it lies elsewhere.
        own = step if step is not None and target == self.run.stage(step, "score") else None
        # Rows without a verdict are judged again, but never those that were trained on.
        again = own is None or not is_finished(self.run.stage(own, "train"))
        before = read_manifest(target).digest if is_finished(target) else None
        if own:
            _tell_changed_rewards(self.run.stage(own - 1, "score"), reward_code(stage_config(self.settings, "score")))
        outcome = self._outcome(self.score_work(step, source, target, again=again), force)
        if again and not force and before not in (None, outcome.manifest.digest):
            if own is not None:
                self._discard_behind("score", own)  # what was made without these rewards
            return outcome._replace(up_to_date=False)
        return outcome

    def _discard_behind(self, stage: str, step: int) -> None:
        """Delete the finished outputs of a step that follow from a stage's, up to what is trained."""
        behind = list(self.stages)
        for name in behind[behind.index(stage) + 1 : behind.index("train")]:
            if is_finished(self.run.stage(step, name)):
                discard(self.run.stage(step, name))

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
        score: str | None = None,
        force: bool = False,
    ) -> StageResult:
        """Estimate a step's advantages; of a named score beside the run's own advantages, which stay."""
        step, source, output = self.of_named_score(score, step, source, output)
        return self._outcome(self.advantage_work(step, source, output, policy, reference, previous), force)

    def of_named_score(
        self, score: str | None, step: int | None, source: Path | None, output: Path | None = None
    ) -> tuple[int | None, Path | None, Path | None]:
        """Return step, input and output of advantages of a named score; without a name as they are.

        Raises:
            SettingsError: an input is named, too.
            InputError: no step has the score.
        """
        if score is None:
            return step, source, output
        if source is not None:
            raise SettingsError("`--score` and an input are two of one", hint="Name the score, or its directory")
        if step is None:
            step = self.run.newest_with(self.run.beside(0, "score", score).name, f"score --name {score}")
        return step, self.run.beside(step, "score", score), output or self.run.beside(step, "advantage", score)

    def preview_advantage(
        self,
        *,
        source: Path | None = None,
        policy: Path | None = None,
        reference: Path | None = None,
        previous: Path | None = None,
        score: str | None = None,
    ) -> Any:
        """Return the table that `advantage` would write."""
        from nanoskyrl.stages.advantage import Models, needs_models, preview

        step, source, _ = self.of_named_score(score, None, source)
        source, step = self.places.source("advantage", step, source)
        config = self.advantage_config(source)
        if not needs_models(config):
            return preview(source, config)
        if step is not None and (policy is None or reference is None):
            published = [self.run.policy(version) for version in (step, 0)]
            # Nothing is published here: what is not there yet is taken from where it would come.
            found = [place if is_published(place) else resolve_policy(self.config.policy) for place in published]
            policy, reference = policy or found[0], reference or found[1]
        previous = previous or self.places.advantages_before(step, config)
        return preview(source, config, Models(policy, reference, self.kept.passes()), previous)

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
        return self._outcome(self.train_work(step, source, output, policy, state), force)

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
        source, record, step = self.places.of("sync", step, source, output)
        if target is None:
            if step is None:
                raise SettingsError("sync needs a place for the policy", hint="Name one with `--target`")
            target = self.run.policy(step + 1)
        return self._outcome(self.sync_work(step, source, record, target), force)._replace(output=target)

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
        policy = (
            (policy or self.places.policy_of(published[-1])) if face_of(rollout_config.engine).holds_policy else None
        )
        version = version_of(policy) if policy else None
        # A policy from elsewhere has no version here; its digest names the evaluation.
        place = f"{version:08d}" if version is not None else policy_digest(policy)[:8] if policy else None
        if place is None:
            model = getattr(self.engine_config(rollout_config.engine), "model", None)
            place = re.sub(r"[^\w.-]+", "_", str(model or rollout_config.engine))
        what: str = name or config.env or sole_environment(rollout_config.env)
        target = output or self.run.root / EVALUATIONS / place / what
        settings = settings_of(what, rollout_config.engine, self.settings)
        engine = self.kept.engine(rollout_config.engine, settings)
        run = partial(
            evaluate, policy, target, config, rollout_config, name=what, settings=settings, engine=engine,
            **self._elsewhere(),
        )  # fmt: skip
        return self._outcome(Work(target, version, run), force)

    def _outcome(self, work: Work, force: bool) -> StageResult:
        """Let a stage work, and return what it left behind.

        Args:
            work: The stage, and where it writes.
            force: Whether to replace an output.
        """
        output, step = work.output, work.step
        was = is_finished(output) and not force
        inside = self.run.root.resolve() in output.resolve().parents
        in_step = step is not None and output.resolve().parent == self.run.step(step).resolve()
        # What is said for output elsewhere says nothing of the run; nor does what trains beside its command.
        own = in_step and output.name in self.stages
        log = MetricsLog()
        if is_main() and in_step == own:  # numbers of a second opinion are not the step's
            log = MetricsLog(self.run.metrics if inside else output.parent / METRICS, step)
        remembers = own and is_main() and not self.places.ahead
        with remembering(self.run, self.named, self.given, output) if remembers else contextlib.nullcontext():
            return StageResult(work.run(force=force, log=log), output, was)

    def evaluated(self) -> list[str] | list[None]:
        """Return what the settings say is evaluated: benchmarks, or several environments; None: the only one."""
        config = stage_config(self.settings, "eval")
        env = config.env or stage_config(self.settings, "rollout").env
        return list(config.bench) or ([None] if isinstance(env, str) else sorted(env))

    def close(self) -> None:
        """Stop what the engines started."""
        self.kept.close()

    def prune(self, step: int, keep: int) -> None:
        """Delete the optimizer's state that is no longer among the newest that were written; `keep` 0 keeps all."""
        steps = [at for at in reversed(self.run.steps()) if at <= step] if keep else []
        if not is_local(self.run.root):  # each look there is a request, and nothing is on its way
            steps = steps[: (keep + 1) * stage_config(self.settings, "train").state_every]
        there = [state for at in steps if (state := self.run.stage(at, "train") / "state").is_dir()]
        for state in there[keep:]:
            remove_tree(state)


def _tell_changed_rewards(earlier: Path, code: Mapping[str, str]) -> None:
    """Tell which reward functions have other code than in an earlier step, whose rewards stay.

    Raises:
        OtherCode: some have, and `code.strict` is set.
    """
    then = read_manifest(earlier).settings.get("reward_code", {}) if is_finished(earlier) else {}
    if changed := sorted(name for name in code if then.get(name, code[name]) != code[name]):
        warnings.warn(OtherCode(earlier, changed, "it stays"), stacklevel=3)
