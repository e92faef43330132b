"""A run at work: which directories a stage of a step reads and writes, and what is kept up between stages.

The commands and `loop` both go through here, so stages chained by hand and by the loop
give the same bytes.
"""

import contextlib
import gc
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nanoskyrl.stages.core.code import OtherCode
from nanoskyrl.stages.core.config import Settings, merge, plugin_config, stage_config, to_plain
from nanoskyrl.stages.core.errors import InputError, OutputError, SettingsError
from nanoskyrl.stages.core.manifest import Manifest, is_begun, is_finished, read_manifest
from nanoskyrl.stages.core.metrics import METRICS, MetricsLog
from nanoskyrl.stages.core.registry import BUILTIN, lookup
from nanoskyrl.stages.core.runs import EVALUATIONS, INPUT_OF, Run, RunConfig, is_main, step_of, version_of
from nanoskyrl.stages.core.storage import is_local, make_directory, remove_tree, write_whole
from nanoskyrl.stages.engines.base import AsyncEngine, Engine, TokenEngine, make_engine
from nanoskyrl.stages.models.policy import (
    cached_digest,
    check_policy,
    policy_digest,
    publish,
    read_info,
    resolve_policy,
)

WITHOUT_POLICY = ("scripted", "openai")
"""Built-in engines that hold no policy of ours."""
SERVED = "vllm"
"""The engine that lives in servers; one of a run is met again by the next command."""
NOT_REMEMBERED = ("rollout.tasks",)
"""Settings that are meant for one command."""


class Outcome(NamedTuple):
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
        self.run, self.settings, self.given, self.keep_up, self.ahead = run, settings, given or {}, keep_up, ahead
        self.config: RunConfig = stage_config(settings, "run")
        warnings.simplefilter("error" if stage_config(settings, "code").strict else "default", OtherCode)
        self._engines: dict[str, Engine] = {}
        self._learner: Any = None
        self._passes: Any = None

    def begin(self) -> None:
        """Create the run directory, and keep the settings that made it."""
        make_directory(self.run.root)
        if not self.run.settings_file.exists():
            write_whole(self.run.settings_file, as_toml(self.settings).encode())

    def settle(self) -> None:
        """Make the settings in force the run's own, in place of those that it began with."""
        write_whole(self.run.settings_file, as_toml(self.settings).encode())

    def remember(self) -> None:
        """Keep the settings that were given now and on which the run has not settled yet, for its next steps."""
        import tomlkit

        self.begin()
        if not self.given:
            return
        document = tomlkit.parse(self.run.settings_file.read_text(encoding="utf-8"))
        changed = False
        for table, keys in self.given.items():
            if table in ("eval", "loop"):
                continue
            for key, value in keys.items():
                if value is None or f"{table}.{key}" in NOT_REMEMBERED or key in document.get(table, {}):
                    continue
                document.setdefault(table, tomlkit.table()).add(key, list(value) if isinstance(value, tuple) else value)
                changed = True
        if changed:
            write_whole(self.run.settings_file, tomlkit.dumps(document).encode())

    def first_policy(self) -> Path:
        """Return `policies/00000000`, published if it is not there yet."""
        if not check_first_policy(self.run, self.config.policy):
            publish(resolve_policy(self.config.policy), self.run.policy(0), name=self.config.policy)
        return self.run.policy(0)

    def policy_of(self, version: int) -> Path:
        """Return a published policy.

        Raises:
            InputError: it has not been published.
        """
        if version == 0:
            return self.first_policy()
        path = self.run.policy(version)
        if not path.is_dir():
            raise InputError(
                f"policy {version} of run `{self.run.root}` is not published", hint="Run `skyrl sync` first"
            )
        check_policy(path)
        return path

    def start_of(self, step: int) -> Path:
        """Return the policy that a step's training starts from."""
        trained = self.run.stage(step - 1, "train")
        if self.ahead and step and not self.run.policy(step).is_dir() and is_finished(trained):
            return trained / "policy"
        return self.policy_of(step)

    def newest_policy(self, name: str | None = None) -> Path:
        """Return the policy of this name; without one the newest that is published, or what the run begins with."""
        if name is not None:
            return resolve_policy(name)
        published = self.run.policies()
        return self.policy_of(published[-1]) if published else resolve_policy(self.config.policy)

    def engine_config(self, name: str) -> Any:
        """Return the settings of an engine."""
        return plugin_config(self.settings, "engine", name)

    def rollout(
        self, step: int | None = None, *, policy: Path | None = None, output: Path | None = None, force: bool = False
    ) -> Outcome:
        """Attempt the tasks of a step; return the manifest and where it lies."""
        from nanoskyrl.stages.rollout import environment_and_tasks, rollout

        if step is None:
            step = (self._step_of(output) or 0) if output is not None else self.run.next_step()
        config = self.rollout_config(step=step)
        # Before anything is written: names, settings and tasks are right.
        self.engine_config(config.engine)
        environment_and_tasks(config, self.settings)
        if policy is None and holds_policy(config.engine):
            policy = self._policy_for(step) if output is None else resolve_policy(self.config.policy)
        target = output or self.run.stage(step, "rollout")
        was = is_finished(target) and not force
        engine, log = self._engine_for(config.engine), self._log(target, step)
        with self._remembering(target, step if output is None else None):
            manifest = rollout(policy, target, config, settings=self.settings, engine=engine, force=force, log=log)
        return Outcome(manifest, target, was)

    def rollout_config(self, **flags: Any) -> Any:
        """Return the settings of `rollout`, with what is left to the algorithm decided."""
        config = stage_config(self.settings, "rollout", seed=self.config.seed, **flags)
        if config.dynamic_sampling is None:
            algorithm = lookup("algo", stage_config(self.settings, "train").algo)
            config = replace(config, dynamic_sampling=algorithm.dynamic_sampling)
        return config

    def _policy_for(self, step: int) -> Path:
        self.first_policy()  # refuses a run that began with another
        return self.policy_of(max(0, step - self.config.lag))

    def score(
        self, step: int | None = None, *, source: Path | None = None, output: Path | None = None, force: bool = False
    ) -> Outcome:
        """Judge a step's trajectories."""
        from nanoskyrl.stages.score import score

        source, target, step = self._places("score", step, source, output)
        config = stage_config(self.settings, "score")
        was, log = is_finished(target) and not force, self._log(target, step)
        with self._remembering(target, step):
            manifest = score(source, target, config, settings=self.settings, force=force, log=log)
        return Outcome(manifest, target, was)

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
    ) -> Outcome:
        """Estimate a step's advantages."""
        from nanoskyrl.stages.advantage import advantage, needs_models

        source, target, step = self._places("advantage", step, source, output)
        config, passes = self.advantage_config(source), None
        previous = previous or self._before(step, config)
        if needs_models(config):
            policy, reference = self._models(step, policy, reference)
            passes = self._passes_up()
        was, log = is_finished(target) and not force, self._log(target, step)
        with self._remembering(target, step):
            manifest = advantage(
                source, target, config, policy=policy, reference=reference, previous=previous, passes=passes,
                force=force, log=log,
            )  # fmt: skip
        return Outcome(manifest, target, was)

    def _before(self, step: int | None, config: Any) -> Path | None:
        """Return the advantages that an adaptive KL coefficient follows from; None where it begins, or is fixed.

        Raises:
            InputError: the step before has not finished its own.
        """
        if not step or config.kl_ctrl == "fixed":
            return None
        place = self.run.stage(step - 1, "advantage")
        if not is_finished(place):
            raise InputError(
                f"the KL coefficient of step {step} follows from `{place}`, which is not finished",
                hint="Run `skyrl advantage` on that step's scores first, or set `advantage.kl_ctrl = fixed`",
            )
        return place

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
        algorithm = lookup("algo", train.algo)
        return settled(stage_config(self.settings, "advantage"), algorithm, train, Sampling(**sampling))

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

        source, step = self._source("advantage", None, source)
        config = self.advantage_config(source)
        if not needs_models(config):
            return preview(source, config)
        if step is not None and (policy is None or reference is None):
            published = [self.run.policy(version) for version in (step, 0)]
            # Nothing is published here: what is not there yet is taken from where it would come.
            found = [place if place.is_dir() else resolve_policy(self.config.policy) for place in published]
            policy, reference = policy or found[0], reference or found[1]
        previous = previous or self._before(step, config)
        return preview(source, config, Models(policy, reference, self._passes_up()), previous)

    def _models(self, step: int | None, policy: Path | None, reference: Path | None) -> tuple[Path | None, Path | None]:
        """Return what training starts from and the reference, as far as a run can say."""
        if step is not None:
            there = step == 0 or self.ahead or self.run.policy(step).is_dir()
            policy = policy or (self.start_of(step) if there else None)
            reference = reference or self.first_policy()
        return policy, reference

    def _passes_up(self) -> Any:
        """Return the models of `advantage`, with the settings of training; they stay up if anything does."""
        from nanoskyrl.stages.learning.model_columns import Passes
        from nanoskyrl.stages.learning.recipe import recipe_of

        config = stage_config(self.settings, "train")
        if not self.keep_up:
            return Passes(recipe_of(config, self.settings).learner())
        if self._passes is None:
            # On the learner that trains: it holds the policy that training starts from already.
            self._passes = Passes(self._learner_for(config))
        return self._passes

    def train(
        self,
        step: int | None = None,
        *,
        source: Path | Sequence[Path] | None = None,
        output: Path | None = None,
        policy: Path | None = None,
        state: Path | None = None,
        force: bool = False,
    ) -> Outcome:
        """Update the policy of a step; several sources are a replay window, and the newest step is trained."""
        from nanoskyrl.stages.train import train

        named = self._newest_first(source)
        source, target, step = self._places("train", step, named[0] if named else None, output)
        config = stage_config(self.settings, "train")
        policy = self._start(step, policy)
        if state is None and step:
            state = self._state_of(step, policy)
        learner = self._learner_for(config)
        was, log = is_finished(target) and not force, self._log(target, step)
        with self._remembering(target, step):
            manifest = train(
                [source, *named[1:]], target, config, policy=policy, state=state, settings=self.settings,
                seed=self.config.seed, engine=learner, force=force, log=log,
            )  # fmt: skip
        return Outcome(manifest, target, was)

    def is_trained(self, step: int, processes: int = 1) -> bool:
        """Return whether a step's finished train is what this many processes would make of its advantages now."""
        from nanoskyrl.stages.train import is_trained

        source, output, _ = self._places("train", step, None, None)
        policy = self.start_of(step)
        return is_trained(
            source, output, stage_config(self.settings, "train"), policy=policy,
            state=self._state_of(step, policy) if step else None, settings=self.settings, seed=self.config.seed,
            processes=processes,
        )  # fmt: skip

    def preview_train(
        self, *, source: Path | Sequence[Path] | None = None, policy: Path | None = None
    ) -> dict[str, Any]:
        """Return the terms of the loss that training on these sources would meet."""
        from nanoskyrl.stages.train import preview

        named = self._newest_first(source)
        newest, start = self.training_input(named[0] if named else None, policy)
        return preview(
            [newest, *named[1:]], stage_config(self.settings, "train"), policy=start,
            settings=self.settings, seed=self.config.seed,
        )  # fmt: skip

    def _newest_first(self, source: Path | Sequence[Path] | None) -> list[Path]:
        """Return the sources that are named; the newest step's own, which is trained, come first."""
        named = [source] if isinstance(source, Path) else list(source or ())
        return sorted(named, key=lambda place: -(self._step_of(place) or 0))

    def training_input(self, source: Path | None = None, policy: Path | None = None) -> tuple[Path, Path]:
        """Return the advantages that training would read, the newest step's unless named, and where it would start."""
        source, step = self._source("train", None, source)
        return source, self._start(step, policy)

    def _start(self, step: int | None, policy: Path | None) -> Path:
        """Return the policy that training starts from."""
        if policy is None:
            if step is None:
                raise SettingsError(
                    "train needs a policy to start from", hint="Name it with `--policy`, or its run with `--run`"
                )
            policy = self.start_of(step)
        return policy

    @contextlib.contextmanager
    def _remembering(self, target: Path, step: int | None) -> Iterator[None]:
        """Keep what was given before a stage's work, so that a killed one goes on without being told again.

        Where the work does not even begin, nothing is kept. `step` is None outside a run.
        """
        if step is None or not is_main() or self.ahead:  # not the command that goes on in the run
            yield
            return
        file = self.run.settings_file
        before = file.read_bytes() if file.is_file() else None
        begun = is_begun(target)
        if not begun:
            self.remember()
        try:
            yield
        except BaseException:
            if not is_begun(target):
                if before is None:
                    file.unlink(missing_ok=True)
                else:
                    write_whole(file, before)
            raise
        if begun:  # perhaps under other settings, which would have been refused
            self.remember()

    def _state_of(self, step: int, policy: Path) -> Path | None:
        """Return the optimizer's state that belongs to a policy; None if no train of this run made it."""
        made = self.run.stage(step - 1, "train")
        if not is_finished(made):
            if policy == self.run.policy(step):
                raise InputError(
                    f"`{policy}` was made by `{made}`, which is not finished: there is no state to go on from",
                    hint=f"Train it again: `skyrl train --run {self.run.root} {self.run.stage(step - 1, 'advantage')}`",
                )
            return None
        manifest = read_manifest(made)
        if manifest.facts.get("policy") == policy_digest(policy):
            _check_state(made, manifest)
            return made / "state"
        if policy == self.run.policy(step):
            raise InputError(
                f"`{policy}` is not what step {step - 1} trained", hint="Its files were changed: see `skyrl verify`"
            )
        return None

    def sync(
        self,
        step: int | None = None,
        *,
        source: Path | None = None,
        output: Path | None = None,
        target: Path | None = None,
        force: bool = False,
    ) -> Outcome:
        """Publish the policy that a step trained."""
        from nanoskyrl.stages.sync import sync

        source, record, step = self._places("sync", step, source, output)
        config = stage_config(self.settings, "sync")
        if config.engine is None:
            # Where servers generate, what has to be proved is that they hold the policy.
            generates = stage_config(self.settings, "rollout").engine
            config = replace(config, engine=generates if generates == SERVED else "hf")
        if target is None:
            if step is None:
                raise SettingsError("sync needs a place for the policy", hint="Name one with `--target`")
            target = self.run.policy(step + 1)
        was, log = is_finished(record) and not force, self._log(record, step)
        manifest = sync(
            source, record, config, target=target, settings=self.settings,
            engine=self._engine_for(config.engine), force=force, log=log,
        )  # fmt: skip
        return Outcome(manifest, target, was)

    def eval(
        self, name: str | None = None, *, policy: Path | None = None, output: Path | None = None, force: bool = False
    ) -> Outcome:
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
        if not holds_policy(rollout_config.engine):
            policy = None
        elif policy is None:
            policy = self.policy_of((self.run.policies() or [0])[-1])
        version = version_of(policy) if policy else None
        # A policy from elsewhere has no version here; its digest names the evaluation.
        place = f"{version:08d}" if version is not None else policy_digest(policy)[:8] if policy else None
        if place is None:
            model = self.engine_config("openai").model if rollout_config.engine == "openai" else None
            place = re.sub(r"[^\w.-]+", "_", str(model or rollout_config.engine))
        what: str = name or config.env or rollout_config.env
        target = output or self.run.root / EVALUATIONS / place / what
        was, log = is_finished(target) and not force, self._log(target, version)
        settings = settings_of(what, rollout_config.engine, self.settings)
        engine = self._engine_for(rollout_config.engine, settings)
        manifest = evaluate(
            policy, target, config, rollout_config, name=what, settings=settings, engine=engine, force=force, log=log
        )
        return Outcome(manifest, target, was)

    def benches(self) -> list[str]:
        """Return the benchmarks that the settings name."""
        return list(stage_config(self.settings, "eval").bench)

    def _places(
        self, stage: str, step: int | None, source: Path | None, output: Path | None
    ) -> tuple[Path, Path, int | None]:
        """Return input, output and step of a stage: those named, or those of the run's newest step that is ready."""
        source, step = self._source(stage, step, source)
        if output is None:
            if step is None:
                raise SettingsError(
                    f"`{stage}` needs a place for its output", hint="Name one with `--out`, or the run with `--run`"
                )
            output = self.run.stage(step, stage)
        return source, output, step

    def _source(self, stage: str, step: int | None, source: Path | None) -> tuple[Path, int | None]:
        """Return input and step of a stage."""
        if source is None:
            if step is None:
                step = self.run.newest_with(INPUT_OF[stage])
            source = self.run.stage(step, INPUT_OF[stage])
        elif step is None:
            read_manifest(source, stage=INPUT_OF[stage])
            step = self._step_of(source)
        if step is not None:
            self._check_parent(step, INPUT_OF[stage])
        return source, step

    def _check_parent(self, step: int, stage: str) -> None:
        """Refuse an input of this run that was made from what has been replaced since.

        Raises:
            InputError: its own input is another now.
        """
        parent = INPUT_OF.get(stage)
        if parent is None:
            return
        made, now = self.run.stage(step, stage), self.run.stage(step, parent)
        if (
            is_finished(made)
            and is_finished(now)
            and read_manifest(made).inputs.get(parent) != read_manifest(now).digest
        ):
            raise InputError(
                f"`{made}` was made from another `{parent}` than `{now}` holds now",
                hint=f"Run `skyrl {stage} --force` first",
            )

    def _step_of(self, path: Path) -> int | None:
        """Return the step of a stage's directory inside this run, or None elsewhere."""
        parent = path.resolve().parent if "://" not in str(path) else path.parent
        return step_of(parent) if parent.parent == self.run.root.resolve() else None

    def _log(self, output: Path, step: int | None) -> MetricsLog:
        if not is_main():
            return MetricsLog()
        inside = self.run.root.resolve() in output.resolve().parents
        return MetricsLog(self.run.metrics if inside else output.parent / METRICS, step)

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
        return self._learner_for(stage_config(self.settings, "train")).world

    def prune(self, step: int, keep: int) -> None:
        """Delete the optimizer's state of the step that is no longer among the newest; `keep` 0 keeps all."""
        if keep and step - keep >= 0:
            remove_tree(self.run.stage(step - keep, "train") / "state")

    def release_learner(self) -> None:
        """Let go of the model that trains: what it holds lies on disk."""
        self._learner = self._passes = None
        gc.collect()
        if "torch" in sys.modules:
            import torch

            torch.cuda.empty_cache()

    def close(self) -> None:
        """Stop what the engines started."""
        for engine in self._engines.values():
            if isinstance(engine, AsyncEngine):
                engine.close()
        self._engines.clear()

    def _learner_for(self, config: Any) -> Any:
        if not self.keep_up:
            return None
        if self._learner is None:
            from nanoskyrl.stages.learning.recipe import recipe_of

            self._learner = recipe_of(config, self.settings).learner()
        return self._learner


def _check_state(made: Path, manifest: Manifest) -> None:
    """Raise InputError if an optimizer's state is not the one that was written; a pruned one is not looked at."""
    for name, digest in manifest.files.items():
        path = made / name
        if name.startswith("state/") and path.is_file() and cached_digest(path) != digest:
            raise InputError(f"`{path}` has another digest than its manifest says", hint="Train that step again")


def check_place(run: Run) -> None:
    """Raise SettingsError if a run does not lie in this machine's file system."""
    if not is_local(run.root):
        raise SettingsError(
            f"a run lies on this machine, not at `{run.root}`", hint="Single stages take URLs, by `--out`"
        )


def holds_policy(engine: str) -> bool:
    """Say whether an engine of this name is given a policy of ours; the others sample from something else."""
    # The class of a built-in one would load torch, also where a stage is up to date.
    if engine in BUILTIN["engine"]:
        return engine not in WITHOUT_POLICY
    return issubclass(lookup("engine", engine), TokenEngine)


def as_toml(settings: Settings) -> str:
    """TOML has no null; a key that is not there means the default, which is None where None is allowed."""
    import tomlkit

    return tomlkit.dumps(
        {
            table: {k: list(v) if isinstance(v, tuple) else v for k, v in keys.items() if v is not None}
            for table, keys in settings.items()
            if keys
        }
    )


def check_first_policy(run: Run, name: str) -> bool:
    """Say whether the run has its first policy; refuse a name that stands for another one.

    Raises:
        OutputError: the run began with another policy.
    """
    place = run.policy(0)
    if not place.is_dir():
        return False
    source = read_info(place).source
    if source != name and policy_digest(resolve_policy(name)) != policy_digest(place):
        raise OutputError(
            f"run `{run.root}` began with the policy `{source}`, not `{name}`", hint="Start another run with `--run`"
        )
    return True


def settings_for(run: Run, *sources: Settings) -> Settings:
    """Return the settings of a command in a run: those that made the run, then those given now."""
    from nanoskyrl.stages.core.config import read_file

    kept = read_file(run.settings_file) if run.settings_file.is_file() else {}
    return merge(kept, *sources)
