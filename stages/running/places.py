"""Which directories a stage of a step reads and writes in a run, and which policy it starts from.

A directory that is named is taken as it is. One that is not is the newest step's that is
ready, and is refused where its own input has been replaced since.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.errors import InputError, OutputError, SettingsError
from nanoskyrl.stages.core.leftovers import scratch_beside
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.pipeline import pipeline
from nanoskyrl.stages.core.runs import Run, RunConfig, Trained, has_state, is_published, step_of
from nanoskyrl.stages.core.storage import mirror_of
from nanoskyrl.stages.models.policy import (
    another_policy,
    check_policy,
    check_trained,
    is_adapter,
    policy_digest,
    publish,
    read_info,
    resolve_policy,
)


class Places:
    """The directories of one run."""

    def __init__(self, run: Run, config: RunConfig, *, ahead: bool = False) -> None:
        """Look at nothing yet.

        Args:
            run: Its directory.
            config: Names the first policy and the lag.
            ahead: A step's training starts from what the step before left, before `sync` has published it.
        """
        self.run, self.config, self.ahead = run, config, ahead
        self.stages = pipeline(config.stages)
        """Of each step, in their order."""

    def check_first_policy(self) -> bool:
        """Say whether the run has its first policy; refuse a name that stands for another one.

        Raises:
            OutputError: the run began with another policy.
        """
        name, place = self.config.policy, self.run.policy(0)
        if not is_published(place):
            return False
        began = read_info(place)
        if began.source != name and policy_digest(resolve_policy(name)) not in (policy_digest(place), began.merged):
            raise OutputError(
                f"run `{self.run.root}` began with the policy `{began.source}`, not `{name}`",
                hint="Start another run with `--run`",
            )
        return True

    def first_policy(self) -> Path:
        """Return `policies/00000000`, published if it is not there yet; an adapter is merged into its base for it."""
        if not self.check_first_policy():
            name, place = self.config.policy, self.run.policy(0)
            source = resolve_policy(name)
            if is_adapter(source):
                from nanoskyrl.stages.models.merging import merge_adapter

                with scratch_beside(mirror_of(place).with_name("merging")) as scratch:
                    merge_adapter(source, scratch)
                    publish(scratch, place, name=name, merged=policy_digest(source))
            else:
                publish(source, place, name=name)
        return self.run.policy(0)

    def policy_of(self, version: int) -> Path:
        """Return a published policy.

        Raises:
            InputError: it has not been published.
        """
        if version == 0:
            return self.first_policy()
        path = self.run.policy(version)
        if not is_published(path):
            raise InputError(
                f"policy {version} of run `{self.run.root}` is not published", hint="Run `skyrl sync` first"
            )
        check_policy(path)
        check_trained(self.run, version)
        return path

    def newest_policy(self, name: str | None = None) -> Path:
        """Return the policy of this name; without one the newest that is published, or what the run begins with."""
        if name is not None:
            return resolve_policy(name)
        published = self.run.policies()
        return self.policy_of(published[-1]) if published else resolve_policy(self.config.policy)

    def sampler_of(self, step: int) -> Path:
        """Return the policy that a step's rollouts are sampled from."""
        self.first_policy()  # refuses a run that began with another
        return self.policy_of(max(0, step - self.config.lag))

    def start_of(self, step: int | None) -> Path:
        """Return the policy that a step's training starts from."""
        if step is None:
            raise SettingsError(
                "train needs a policy to start from", hint="Name it with `--policy`, or its run with `--run`"
            )
        trained = self.run.stage(step - 1, "train")
        if self.ahead and step and not is_published(self.run.policy(step)) and is_finished(trained):
            return trained / "policy"
        return self.policy_of(step)

    def state_of(self, step: int | None, policy: Path) -> Path | None:
        """Return the optimizer's state that belongs to a policy; None if no train of this run made it."""
        if not step:
            return None
        made = self.run.stage(step - 1, "train")
        manifest = read_manifest(made) if is_finished(made) else None
        if manifest is not None and manifest.facts.get("policy") == policy_digest(policy):
            return made / "state"
        if policy != self.run.policy(step):
            return None
        if manifest is None:
            raise InputError(
                f"`{policy}` was made by `{made}`, which is not finished: there is no state to resume from",
                hint=f"Train it again: `skyrl train --run {self.run.root} {self.run.stage(step - 1, 'advantage')}`",
            )
        raise another_policy(policy, step - 1)

    def updates_since(self, step: int | None) -> list[Trained]:
        """Return the updates before a step whose states are not there, the oldest first.

        A state is not written at every step, is pruned, or was on its way when its trainer was killed.
        """
        found: list[Trained] = []
        while step:
            step -= 1
            made = self.run.stage(step, "train")
            if not is_finished(made) or has_state(made):
                break
            manifest = read_manifest(made, stage="train")
            before = self.run.stage(step - 1, "train")
            policy = self.run.policy(step)
            found.append(
                Trained(
                    output=made, advantages=self._advantages_of(step, manifest),
                    policy=policy if is_published(policy) else before / "policy",
                    state=before / "state" if "state" in manifest.inputs else None,
                )
            )  # fmt: skip
            if found[-1].state is None:
                break
        return found[::-1]

    def _advantages_of(self, step: int, manifest: Manifest) -> tuple[Path, ...]:
        """Return where the advantages lie that an update learnt from: the step's own, and others of the run."""
        source = str(self.stages["train"].input)
        wanted = [digest for name, digest in manifest.inputs.items() if name.startswith(f"{source}.")]
        places = [self.run.stage(other, source) for other in self.run.steps()] if wanted else []
        there = {read_manifest(place).digest: place for place in places if is_finished(place)}
        if gone := [digest for digest in wanted if digest not in there]:
            raise InputError(
                f"the state of step {step} is not there, and advantages that it learnt from are gone, too: {gone[0]}",
                hint="Begin another run with its policy, or train that step again",
            )
        return self.run.stage(step, source), *(there[digest] for digest in wanted)

    def models_of(
        self, step: int | None, policy: Path | None, reference: Path | None
    ) -> tuple[Path | None, Path | None]:
        """Return what training starts from and the reference, as far as a run can say."""
        if step is not None:
            there = step == 0 or self.ahead or is_published(self.run.policy(step))
            policy = policy or (self.start_of(step) if there else None)
            reference = reference or self.first_policy()
        return policy, reference

    def advantages_before(self, step: int | None, config: Any) -> Path | None:
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

    def newest_first(self, source: Path | Sequence[Path] | None) -> list[Path]:
        """Return the sources that are named; the newest step's own, which is trained, come first."""
        named = [source] if isinstance(source, Path) else list(source or ())
        return sorted(named, key=lambda place: -(self.step_of(place) or 0))

    def training_input(self, source: Path | None = None, policy: Path | None = None) -> tuple[Path, Path]:
        """Return the advantages that training would read, the newest step's unless named, and where it would start."""
        source, step = self.source("train", None, source)
        return source, policy or self.start_of(step)

    def of(
        self,
        stage: str,
        step: int | None = None,
        source: Path | None = None,
        output: Path | None = None,
        name: str | None = None,
    ) -> tuple[Path, Path, int | None]:
        """Return input, output and step of a stage: those named, or those of the run's newest step that is ready.

        Args:
            stage: Its name.
            step: Whose; None: that of the source, or the newest.
            source: Its input.
            output: Where it writes; None: its place in the step.
            name: Of a second opinion, whose place is beside the stage's.
        """
        source, step = self.source(stage, step, source)
        if output is None:
            if step is None:
                raise SettingsError(
                    f"`{stage}` needs a place for its output", hint="Name one with `--out`, or the run with `--run`"
                )
            output = self.run.beside(step, stage, name) if name is not None else self.run.stage(step, stage)
        return source, output, step

    def source(self, stage: str, step: int | None, source: Path | None) -> tuple[Path, int | None]:
        """Return input and step of a stage; no step for an input outside the run."""
        before = str(self.stages[stage].input)
        if source is None:
            if step is None:
                step = self.run.newest_with(before)
            source = self.run.stage(step, before)
        elif step is None:
            read_manifest(source, stage=self.stages[before].table)
            step = self.step_of(source)
        if step is not None:
            self._check_parent(step, before)
        return source, step

    def _check_parent(self, step: int, stage: str) -> None:
        """Refuse an input of this run that was made from what has been replaced since.

        Raises:
            InputError: its own input is another now.
        """
        parent = self.stages[stage].input
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

    def step_of(self, path: Path) -> int | None:
        """Return the step of a stage's directory inside this run, or None elsewhere."""
        parent = path.resolve().parent if "://" not in str(path) else path.parent
        return step_of(parent) if parent.parent == self.run.root.resolve() else None
