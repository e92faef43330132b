"""A run directory: where each step's stages, the published policies and the numbers lie.

    runs/NAME/
      run.toml  resolved.json  metrics.jsonl
      policies/00000000/ 00000001/ ...
      step-000000/{rollout,score,advantage,train,sync}/  step-000001/...
      evals/00000000/NAME/

Stages whose input or output is not named find it here.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nanoskyrl.stages.core.checked import PATH, PATH_OR_NAME, PLACE, Checked, NonNegativeInt
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.metrics import METRICS
from nanoskyrl.stages.core.pipeline import STAGES
from nanoskyrl.stages.core.storage import entries, is_local

DEFAULT_RUN = "runs/default"
POLICY_JSON = "policy.json"
"""Of a policy, where it came from; it is put in place last."""
EVALUATIONS = "evals"
"""Folder of a run's evaluations, by policy and then by what was evaluated."""
NUMBER = re.compile("[0-9]{1,9}")
"""Of a step or a policy. Python's own idea of digits takes others too, and its int does not take all of them."""

LABEL = re.compile("[A-Za-z0-9_]{1,40}")
"""Of a second opinion: `strict` of `score-strict`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Checked):
    """What holds for a whole run."""

    seed: int = 0
    """Every seed of the run is a digest of this one and of what it is for."""
    policy: str = field(default="starter", metadata=PATH_OR_NAME)
    """What `policies/00000000` is made from: `starter`, a directory, or a hub id."""
    lag: NonNegativeInt = 0
    """Step k samples from `policies/max(0, k - lag)`; 0 samples from the newest."""
    lag_defaults: bool = field(default=True, metadata=PLACE)
    """Let a lag change defaults that nobody set, as docs/offpolicy.md says; false: train as the algorithm was
    published."""
    stages: tuple[str, ...] = ()
    """Stages besides, each behind the one that it works on: filter, or module:attribute of your own."""
    folders: tuple[str, ...] = field(default=(), metadata=PLACE | PATH)
    """Where modules are imported from that the settings name, beside Python's own folders. A command that keeps such a
    setting adds the folder that it found the module in."""
    executor: Literal["local", "ray"] = field(default="local", metadata=PLACE)
    """Who makes the parts of rollout, score, advantage and eval, and who trains: this process, or workers on a Ray
    cluster, which the table `ray` describes. The bytes are the same."""
    trust_remote_code: bool = False
    """Run code that lies in a policy's folder, as `auto_map` in its config asks; without, it is never run."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished `train` of a run, and where its inputs lie."""

    output: Path
    advantages: tuple[Path, ...]
    """The step's own come first."""
    policy: Path
    """What it started from."""
    state: Path | None
    """The optimizer's state that it started from, written or not; None: it began afresh."""


def state_digests(train: Path) -> dict[str, str]:
    """Return the digests of the files of the optimizer's state that a train left, by their names."""
    folder, files = "state/", read_manifest(train, stage="train").files
    return {name.removeprefix(folder): digest for name, digest in files.items() if name.startswith(folder)}


def has_state(train: Path) -> bool:
    """Say whether the optimizer's state that a train left is there, with all of its files."""
    state = train / "state"
    return state.is_dir() and all((state / name).is_file() for name in state_digests(train))


@dataclass(frozen=True, slots=True)
class Run:
    """One run directory."""

    root: Path

    def step(self, step: int) -> Path:
        """Return the directory of a step."""
        return self.root / f"step-{step:06d}"

    def stage(self, step: int, stage: str) -> Path:
        """Return where a stage of a step writes."""
        return self.step(step) / stage

    def policy(self, version: int) -> Path:
        """Return the directory of a published policy."""
        return self.root / "policies" / f"{version:08d}"

    @property
    def metrics(self) -> Path:
        """Where numbers are appended."""
        return self.root / METRICS

    @property
    def settings_file(self) -> Path:
        """The settings that made the run; later commands in it start from them."""
        return self.root / "run.toml"

    def steps(self) -> list[int]:
        """Return the steps that have a directory, in order."""
        found = ((step_of(path), path) for path in self.root.glob("step-*") if path.is_dir())
        return sorted(step for step, path in found if step is not None and path == self.step(step))

    def made(self, step: int) -> list[str]:
        """Return the names of the stages that have a folder in a step."""
        folders = {path.name for path in entries(self.step(step)) if path.is_dir() and "-" not in path.name}
        return [*(name for name in STAGES if name in folders), *sorted(folders.difference(STAGES))]

    def beside(self, step: int, stage: str, name: str) -> Path:
        """Return where a stage writes a second opinion under a name, which the run does not go by.

        Raises:
            SettingsError: it is no name for a folder.
        """
        if not LABEL.fullmatch(name):
            raise SettingsError(f"`{name}` cannot be a name", hint="Use letters, digits and _, such as `strict`")
        return self.stage(step, f"{stage}-{name}")

    def made_beside(self, step: int) -> list[str]:
        """Return the folders of such opinions in a step."""
        return sorted(path.name for path in entries(self.step(step)) if path.is_dir() and "-" in path.name)

    def evaluations(self, of: str = "*") -> list[Path]:
        """Return the finished evaluations in the run: of all, or of what has this name, such as 00000004."""
        return sorted(place for place in (self.root / EVALUATIONS).glob(f"{of}/*") if is_finished(place))

    def policies(self) -> list[int]:
        """Return the published versions, in order."""
        found = ((version_of(path), path) for path in (self.root / "policies").glob("*") if is_published(path))
        return sorted(version for version, path in found if version is not None and path == self.policy(version))

    def next_step(self, stage: str = "sync") -> int:
        """Return the first step without a finished sync, where `rollout` works; or without another stage."""
        step = 0
        while is_finished(self.stage(step, stage)):
            step += 1
        return step

    def newest_with(self, stage: str, command: str | None = None) -> int:
        """Return the newest step in which a stage is finished.

        Args:
            stage: The folder of one.
            command: What makes it; None: the stage's name.

        Raises:
            InputError: there is none, or the newest step's is unfinished.
        """
        for step in reversed(self.steps()):
            if is_finished(self.stage(step, stage)):
                return step
        begun = next((step for step in reversed(self.steps()) if self.stage(step, stage).is_dir()), None)
        if begun is not None:
            raise InputError(
                f"`{self.stage(begun, stage)}` is unfinished: `{stage}` did not end",
                hint=f"Run `skyrl {command or stage}` again to resume",
            )
        raise InputError(
            f"run `{self.root}` has no finished `{stage}`",
            hint=f"Run `skyrl {command or stage}` first, or name the input",
        )


def is_published(policy: Path) -> bool:
    """Say whether a policy is in its place, whole: a directory comes there by a rename, behind a URL file by file."""
    return policy.is_dir() if is_local(policy) else (policy / POLICY_JSON).is_file()


def default_run() -> str:
    """Return the run that is meant when none is named."""
    return os.environ.get("SKYRL_RUN") or DEFAULT_RUN


def is_main() -> bool:
    """Say whether this is the process that writes, of those that train together."""
    return os.environ.get("RANK", "0") == "0"


def version_of(policy: Path) -> int | None:
    """Return the N of `policies/N`, or None for a policy elsewhere."""
    return int(policy.name) if policy.parent.name == "policies" and NUMBER.fullmatch(policy.name) else None


def step_of(directory: Path) -> int | None:
    """Return the k of `step-k`, or None for another directory."""
    number = directory.name.removeprefix("step-")
    return int(number) if number != directory.name and NUMBER.fullmatch(number) else None
