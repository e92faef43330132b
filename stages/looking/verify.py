"""Proof that what lies on disk is what the stages wrote: every digest, and the chain of parents."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.code import changed_modules, code_of
from nanoskyrl.stages.core.digests import digest_file
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest, is_finished, read_manifest
from nanoskyrl.stages.core.pipeline import OURS
from nanoskyrl.stages.core.runs import EVALUATIONS, Run
from nanoskyrl.stages.models.policy import critic_digest, policy_digest, read_info


@dataclass(slots=True)
class Findings:
    """What was looked at and what was found wrong."""

    checked: int = 0
    """Files and links between manifests."""
    broken: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    """Optimizer states that were deleted to save space: no fault."""
    unfinished: list[str] = field(default_factory=list)
    other_code: list[str] = field(default_factory=list)
    """Outputs that were made by other code than there is now: no fault, but no proof that it would make them again."""

    @property
    def holds(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def expect(self, holds: bool, otherwise: str) -> None:
        """Count a link between two outputs, and note it where it is broken."""
        self.checked += 1
        if not holds:
            self.broken.append(otherwise)

    def lines(self) -> Iterator[str]:
        """Yield the findings as text."""
        found = {"broken": self.broken, "unfinished": self.unfinished}
        yield from (f"{word}: {line}" for word, lines in found.items() for line in lines)
        if self.other_code:
            more = f", and {len(self.other_code) - 1} more outputs" * (len(self.other_code) > 1)
            yield f"made by other code: {self.other_code[0]}{more}"
        pruned = f", {len(self.pruned)} pruned" if self.pruned else ""
        yield f"{self.checked} checks, {len(self.broken)} broken{pruned}"

    def to_plain(self) -> dict[str, Any]:
        """Return the findings as JSON-ready values."""
        return {**asdict(self), "holds": self.holds}


def verify(place: Path) -> Findings:
    """Check a run, or the output of one stage.

    Raises:
        InputError: there is nothing to check.
    """
    verdict = Findings()
    if is_finished(place):
        _check_files(place, read_manifest(place), verdict)
        return verdict
    run = Run(place)
    if not run.steps() and not run.policies():
        raise InputError(
            f"`{place}` is neither a run nor a finished stage", hint="Name a run directory such as runs/default"
        )
    for version in run.policies():
        _check_policy(run, version, verdict)
    for step in run.steps():
        _check_step(run, step, verdict)
    for folder in sorted(path for path in (place / EVALUATIONS).glob("*/*") if path.is_dir()):
        _check_directory(folder, verdict)
    return verdict


def _check_step(run: Run, step: int, verdict: Findings) -> None:
    manifests: dict[str, Manifest] = {}
    for stage in run.made(step):
        folder = run.stage(step, stage)
        if (manifest := _check_directory(folder, verdict)) is not None:
            manifests[stage] = manifest
    for stage, manifest in manifests.items():
        # What stood before it, which need not be one of ours; one of ours that names none has lost it.
        usual = {OURS[stage].input} if stage in OURS else set()
        for parent in sorted(manifests.keys() & (manifest.inputs.keys() or usual)):
            verdict.expect(
                manifest.inputs.get(parent) == manifests[parent].digest,
                f"{run.stage(step, stage)}: its parent `{parent}` is another than the one it was made from",
            )
    # An adaptive KL coefficient follows from the step before.
    before, made = run.stage(step - 1, "advantage"), manifests.get("advantage")
    if made is not None and "previous" in made.inputs and step and is_finished(before):
        verdict.expect(
            made.inputs["previous"] == read_manifest(before).digest,
            f"{run.stage(step, 'advantage')}: its KL coefficient is not of `{before}`",
        )
    # Every policy that a step names must be one that was published.
    rollout = manifests.get("rollout")
    if rollout is not None and rollout.policy is not None:
        verdict.expect(
            rollout.policy in _published(run),
            f"{run.stage(step, 'rollout')}: sampled from a policy that is not in this run",
        )


def _check_directory(folder: Path, verdict: Findings) -> Manifest | None:
    if not is_finished(folder):
        verdict.unfinished.append(str(folder))
        return None
    try:
        manifest = read_manifest(folder)
    except InputError as error:
        verdict.broken.append(str(error))
        return None
    _check_files(folder, manifest, verdict)
    return manifest


def _check_files(folder: Path, manifest: Manifest, verdict: Findings) -> None:
    if changed := changed_modules(code_of(manifest.stage, manifest.settings), manifest.code):
        verdict.other_code.append(f"{folder}: {', '.join(changed[:3])}{' and more' * (len(changed) > 3)} changed since")
    wanted = {part.name: part.digest for part in manifest.parts} | manifest.files
    for name, digest in wanted.items():
        path = folder / name
        verdict.checked += 1
        if not path.is_file():
            if name.startswith("state/") and not (folder / "state").exists():
                verdict.pruned.append(str(path))
            else:
                verdict.broken.append(f"{path} is missing")
        elif digest_file(path) != digest:
            verdict.broken.append(f"{path} has another digest than its manifest says")


def _check_policy(run: Run, version: int, verdict: Findings) -> None:
    place, made = run.policy(version), run.stage(version - 1, "train")
    verdict.checked += 1
    try:
        read_info(place)
    except InputError as error:
        verdict.broken.append(str(error))
        return
    if version == 0 or not is_finished(made):
        return
    try:
        facts = read_manifest(made).facts
    except InputError:  # reported with the other stages of its step
        return
    verdict.checked += 1
    if critic_digest(place) != facts.get("critic"):
        verdict.broken.append(f"the critic of {place} is not what step {version - 1} trained")
    if policy_digest(place) != facts.get("policy"):
        verdict.broken.append(f"{place} is not what step {version - 1} trained")


def _published(run: Run) -> set[str]:
    """Return the digests of the run's policies; one that cannot be read has been called broken already."""
    found = set()
    for version in run.policies():
        with contextlib.suppress(InputError):
            found.add(policy_digest(run.policy(version)))
    return found
