"""A run from its newest evaluation to its first policy: every reference of every manifest is followed.

What a reference must be follows from where the output stands: the input is of the same step, the policy that training
starts from is the step's, its optimizer's state that of the step before.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import Manifest
from nanoskyrl.stages.core.pipeline import OURS, RESERVED
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.learning.advantage_config import sampling_of
from nanoskyrl.stages.looking.ledger import COLUMNS, check_ledger, keys_of
from nanoskyrl.stages.looking.proof.findings import Findings
from nanoskyrl.stages.looking.proof.outputs import check_numbers_of, check_output, read_rows
from nanoskyrl.stages.models.policy import (
    POLICY_JSON,
    PolicyInfo,
    critic_digest,
    is_adapter,
    policy_digest,
    read_info,
    same_weights,
)

Tables = dict[str, pa.Table]


def parent_of(manifest: Manifest) -> str | None:
    """Return the stage that an output names as its input, or the usual one if it names none; None: it begins a step."""
    usual = OURS[manifest.stage].input if manifest.stage in OURS else None
    if manifest.stage in OURS and usual is None:
        return None
    named = (name for name in manifest.inputs if name not in RESERVED - OURS.keys() and "." not in name)
    return next(named, usual)


def _as_written(content: bytes, info: PolicyInfo) -> bool:
    """Say whether a policy.json is what was written of it; an earlier version wrote fewer keys, and no seal."""
    if content == info.to_bytes():
        return info.seal in (None, info.sealed().seal)
    held = json.loads(content)
    return "seal" not in held and held.keys() < asdict(info).keys()


class RunChain:
    """The manifests and policies of a run, and the references between them."""

    def __init__(self, run: Run, findings: Findings) -> None:
        """Read every manifest and every policy, and check each by itself."""
        self.run, self.findings = run, findings
        self.manifests: dict[tuple[int, str], Manifest] = {}
        for step in run.steps():
            for stage in run.made(step):
                folder = run.stage(step, stage)
                if (manifest := check_output(folder, findings)) is not None:
                    self._expect(manifest.stage == stage, f"{folder} was written by `{manifest.stage}`")
                    self.manifests[step, stage] = manifest
        self.beside = {
            step: {
                stage: manifest
                for stage in run.made_beside(step)
                if (manifest := check_output(run.stage(step, stage), findings)) is not None
            }
            for step in run.steps()
        }
        self.policies = {version: self._policy(version) for version in run.policies()}
        self.evaluations: dict[Path, Manifest] = {}

    def _expect(self, holds: bool, otherwise: str) -> bool:
        return self.findings.expect("references", holds, otherwise)

    def digest(self, step: int, stage: str) -> str | None:
        """Return the digest of a step's manifest; None where there is none that can be read."""
        manifest = self.manifests.get((step, stage))
        return manifest and manifest.digest

    def outputs(self) -> Iterator[tuple[Path, Manifest]]:
        """Yield every finished output that was read, steps first."""
        yield from ((self.run.stage(step, stage), manifest) for (step, stage), manifest in self.manifests.items())
        yield from (
            (self.run.stage(step, stage), manifest)
            for step, made in self.beside.items()
            for stage, manifest in made.items()
        )
        yield from self.evaluations.items()

    def sampler_of(self, step: int) -> int | None:
        """Return the version of the policy that a step's rollout names; None where it is none of this run."""
        policy = self.manifests[step, "rollout"].policy
        return next((version for version, digest in self.policies.items() if digest == policy), None)

    # Policies

    def _policy(self, version: int) -> str | None:
        """Check a published policy against the train that made it; return its digest."""
        place, made = self.run.policy(version), self.manifests.get((version - 1, "train"))
        try:
            info = read_info(place)
            digest = policy_digest(place)
        except (InputError, OSError) as error:
            self.findings.broken.append(str(error))
            return None
        file = place / POLICY_JSON
        as_written = file.is_file() and _as_written(file.read_bytes(), info)
        self.findings.expect("policies", as_written, f"{file} is not as it was written")
        critic_holds = info.critic == critic_digest(place)
        if version == 0:
            self.findings.expect("policies", critic_holds, f"the critic of {place} is not the one it was saved with")
            if info.seal is None:
                self.findings.recorded.append(f"{file} has no seal: it was made by an earlier version")
            self.findings.recorded.append(f"{place} came from outside, as `{info.source}`")
            return digest
        trained = self.run.stage(version - 1, "train")
        if made is None:
            how = "not finished" if trained.is_dir() else "gone"
            self.findings.broken.append(f"{place} was made by {trained}, which is {how}")
            return digest
        of_train = f"is not what step {version - 1} trained"
        self.findings.expect("policies", digest == made.facts.get("policy"), f"{place} {of_train}")
        self.findings.expect(
            "policies", critic_holds and info.critic == made.facts.get("critic"), f"the critic of {place} {of_train}"
        )
        written = made.files.get(f"policy/{POLICY_JSON}")
        self.findings.expect("policies", file.is_file() and self.findings.digest(file) == written, f"{file} {of_train}")
        synced = self.run.stage(version - 1, "sync").is_dir()
        self._expect(synced, f"{place} was published by {self.run.stage(version - 1, 'sync')}, which is gone")
        return digest

    def _is_policy(self, digest: str | None, version: int) -> bool:
        return digest is not None and self.policies.get(version) == digest

    # Steps

    def check_step(self, step: int) -> Tables:
        """Check what the outputs of a step say of each other and of the step before; return their rows."""
        made = {stage: self.manifests[step, stage] for stage in self.run.made(step) if (step, stage) in self.manifests}
        self._check_present(step, made)
        rows = {}
        for stage, manifest in made.items():
            if (table := read_rows(self.run.stage(step, stage), manifest, self.findings)) is not None:
                rows[stage] = table
            parent = parent_of(manifest)
            if parent in made:
                folder = self.run.stage(step, stage)
                self._expect(
                    manifest.inputs.get(parent) == made[parent].digest,
                    f"{folder}: its parent `{parent}` is another than the one it was made from",
                )
                if stage != "train":
                    said = f"{folder} says that it was given {manifest.rows_in} rows, and {parent} has"
                    self._expect(manifest.rows_in == made[parent].rows_out, f"{said} {made[parent].rows_out}")
        for stage in made:
            if stage in OURS:
                getattr(self, f"_check_{stage}")(step, made, rows)
            else:
                self._check_own(step, stage, made, rows)
        self._check_beside(step, made)
        return rows

    def _check_beside(self, step: int, made: dict[str, Manifest]) -> None:
        """Check second opinions: their rows, and that they were made from this step's own output or another of them."""
        beside = self.beside.get(step, {})
        for stage, manifest in beside.items():
            folder, parent = self.run.stage(step, stage), parent_of(manifest)
            read_rows(folder, manifest, self.findings, keep=False)
            sources = [held.digest for name, held in (made | beside).items() if name.split("-")[0] == parent]
            self._expect(
                parent is not None and manifest.inputs.get(parent) in sources,
                f"{folder}: its parent `{parent}` is another than the one it was made from",
            )

    def _check_present(self, step: int, made: dict[str, Manifest]) -> None:
        """Name what the step must have: every input of a finished output, and what comes before a finished step."""
        for stage, manifest in made.items():
            parent = parent_of(manifest)
            if parent is not None and parent not in made:
                folder = self.run.stage(step, parent)
                how = "not finished, or cannot be read" if folder.is_dir() else "gone"
                self.findings.broken.append(f"{self.run.stage(step, stage)} was made from {folder}, which is {how}")
        if "sync" in made:
            place = self.run.policy(step + 1)
            self._expect(place.is_dir(), f"{self.run.stage(step, 'sync')} published {place}, which is gone")
        if step and made.keys() & {"train", "sync"}:
            before = self.run.stage(step - 1, "sync" if "sync" in made else "train")
            there = (step - 1, before.name) in self.manifests
            self._expect(there, f"step {step} was trained after {before}, which is gone or not finished")

    def _check_rollout(self, step: int, made: dict[str, Manifest], rows: Tables) -> None:
        manifest, folder = made["rollout"], self.run.stage(step, "rollout")
        of_step = manifest.settings.get("rollout", {}).get("step", step)
        self._expect(of_step == step, f"{folder} is the rollout of step {of_step}")
        self._check_sampler(folder, manifest, rows.get("rollout"), step)

    def _check_sampler(self, folder: Path, manifest: Manifest, table: pa.Table | None, newest: int) -> None:
        """Follow the policy that rows say sampled them."""
        if manifest.policy is None:
            return
        known = [
            version for version, digest in self.policies.items() if digest == manifest.policy and version <= newest
        ]
        self._expect(bool(known), f"{folder}: sampled from a policy that is not in this run, or was not yet")
        if table is None or not table.num_rows:
            return
        digests, versions = (set(table.column(name).to_pylist()) for name in ("policy_digest", "policy_version"))
        self._expect(digests == {manifest.policy}, f"{folder}: its rows name another policy than its manifest")
        if known:
            self._expect(
                versions <= set(known),
                f"{folder}: its rows say policy {next(iter(versions - set(known)), None)}, its digest {known[0]}",
            )

    def _check_score(self, step: int, made: dict[str, Manifest], rows: Tables) -> None:
        self._check_passed_on(step, "score", made, rows)
        if "rollout" in made:
            folder, found = self.run.stage(step, "score"), made["score"].facts.get("sampling")
            wanted = sampling_of(made["rollout"].settings["rollout"])
            self._expect(found in (None, wanted), f"{folder} says that its rows were sampled otherwise than they were")

    def _check_advantage(self, step: int, made: dict[str, Manifest], rows: Tables) -> None:
        manifest, folder = made["advantage"], self.run.stage(step, "advantage")
        recomputed = manifest.settings.get("advantage", {}).get("old_logprobs") == "recompute"
        if recomputed:
            self._expect(
                self._is_policy(manifest.policy, step),
                f"{folder}: its old log-probs are not of {self.run.policy(step)}",
            )
        self._check_passed_on(step, "advantage", made, rows, policy=not recomputed)
        if "previous" in manifest.inputs:
            before = self.run.stage(step - 1, "advantage")
            same = manifest.inputs["previous"] == self.digest(step - 1, "advantage")
            self._expect(same, f"{folder}: its KL coefficient is not of `{before}`")
        if "reference" in manifest.inputs and manifest.inputs["reference"] not in self.policies.values():
            self.findings.recorded.append(f"{folder}: its reference policy is not in this run")
        if "critic" in manifest.inputs:
            critic = manifest.facts.get("critic")
            of_start = critic_digest(self.run.policy(step)) if self.run.policy(step).is_dir() else None
            same = manifest.inputs["critic"] == (critic or "untrained") and critic == of_start
            self._expect(same, f"{folder}: its values are of another critic than that of {self.run.policy(step)}")

    def _check_passed_on(
        self, step: int, stage: str, made: dict[str, Manifest], rows: Tables, *, policy: bool = True
    ) -> None:
        """Compare what a stage passed on with what it was given: columns, and the policy that sampled."""
        parent, folder = parent_of(made[stage]), self.run.stage(step, stage)
        if parent is None or parent not in made:
            return
        if policy:
            same = made[stage].policy == made[parent].policy
            self._expect(same, f"{folder} names another policy than its `{parent}`")
        if parent in rows and stage in rows:
            differs = [name for name in rows[parent].column_names if not _same(rows[parent], rows[stage], name)]
            self.findings.expect(
                "columns", not differs, f"{folder}: `{', '.join(differs)}` is not what `{parent}` wrote"
            )

    def _check_own(self, step: int, stage: str, made: dict[str, Manifest], rows: Tables) -> None:
        """Check a stage of somebody's own: what it passes on are rows of its input, all but those that it dropped."""
        manifest, folder, parent = made[stage], self.run.stage(step, stage), parent_of(made[stage])
        left = manifest.rows_in - sum(manifest.dropped.values())
        said = f"{folder} says that {left} of {manifest.rows_in} rows were left, and has {manifest.rows_out}"
        self.findings.expect("counts", left == manifest.rows_out, said)
        if parent in rows and stage in rows:
            strangers = len(set(keys_of(rows[stage])) - set(keys_of(rows[parent])))
            self._expect(not strangers, f"{folder} has {strangers} rows that `{parent}` did not write")

    def _check_train(self, step: int, made: dict[str, Manifest], rows: Tables) -> None:
        manifest, folder = made["train"], self.run.stage(step, "train")
        self._expect(self._is_policy(manifest.policy, step), f"{folder} did not start from {self.run.policy(step)}")
        if step:
            before = self.run.stage(step - 1, "train")
            same = manifest.inputs.get("state") == self.digest(step - 1, "train")
            self._expect(same, f"{folder}: its optimizer did not continue from {before}")
        self._check_trained_policy(folder, manifest)
        sources, given_by = self.sources_of(manifest), parent_of(manifest)
        strangers = [name for name, source in sources.items() if source is None and name != given_by]
        self.findings.recorded += [f"{folder}: `{name}` is not in this run" for name in strangers]
        known = {name: source for name, source in sources.items() if source is not None}
        if len(known) < len(sources):
            return
        given = sum(self.manifests[source].rows_out for source in known.values())
        said = f"{folder} says that it was given {manifest.rows_in} rows, and its inputs have {given}"
        self._expect(manifest.rows_in == given, said)
        if "train" in rows and given_by in rows:
            others = [source for name, source in known.items() if name != given_by]
            tables = [
                table.select(COLUMNS)
                for source in others
                for table in read_parts(self.run.stage(*source), self.manifests[source])
            ]
            for holds, otherwise in check_ledger(
                folder,
                rows["train"],
                pa.concat_tables([rows[given_by].select(COLUMNS), *tables]),
                manifest.facts.get("stale_rows", 0),
            ):
                self.findings.expect("ledger counts", holds, otherwise)

    def sources_of(self, train: Manifest) -> dict[str, tuple[int, str] | None]:
        """Return step and stage of each table that a train was given, by its name there; None: not of this run."""
        known = {manifest.digest: place for place, manifest in self.manifests.items()}
        given_by = parent_of(train)
        return {
            name: known.get(digest)
            for name, digest in sorted(train.inputs.items())
            if name.partition(".")[0] == given_by
        }

    def _check_trained_policy(self, folder: Path, manifest: Manifest) -> None:
        place = folder / "policy"
        try:
            info, found, critic = read_info(place), policy_digest(place), critic_digest(place)
        except (InputError, OSError) as error:
            self.findings.broken.append(str(error))
            return
        facts = manifest.facts
        same = found == facts.get("policy") and critic == facts.get("critic") == info.critic
        self.findings.expect("policies", same, f"{place} is not the policy that its manifest names")
        self._expect(info.parent == manifest.policy, f"{place} names another parent than {folder} started from")
        if is_adapter(place):
            self._expect(info.base in self.policies.values(), f"{place}: its base model is not in this run")

    def _check_sync(self, step: int, made: dict[str, Manifest], rows: Tables) -> None:
        manifest, folder, train = made["sync"], self.run.stage(step, "sync"), made.get("train")
        facts, place = manifest.facts, self.run.policy(step + 1)
        if train is not None:
            same = manifest.policy == facts.get("policy") == train.facts.get("policy")
            self._expect(same, f"{folder} proved another policy than step {step} trained")
            self._expect(
                facts.get("parent", train.policy) == train.policy, f"{folder} names another parent of its policy"
            )
        self._expect(facts.get("version", step + 1) == step + 1, f"{folder} published another policy than {place}")
        start = self.run.policy(step)
        if "changed" in facts and start.is_dir() and place.is_dir() and not is_adapter(place):
            changed = not same_weights(start, place)
            self._expect(
                facts["changed"] in (None, changed), f"{folder} is wrong about whether the step changed weights"
            )

    # Evaluations

    def check_evaluation(self, folder: Path) -> None:
        """Check an evaluation: its rows, its numbers, and that its policy is the one it is filed under."""
        manifest = check_output(folder, self.findings)
        if manifest is None:
            return
        self.evaluations[folder] = manifest
        table = read_rows(folder, manifest, self.findings)
        self._expect(manifest.stage == "eval", f"{folder} was written by `{manifest.stage}`")
        name, place = manifest.settings.get("rollout", {}).get("env"), folder.parent.name
        self._expect(name == folder.name, f"{folder} is an evaluation of `{name}`")
        if manifest.policy is not None:
            version = int(place) if re.fullmatch("[0-9]{8}", place) else None
            ours = version is not None and self._is_policy(manifest.policy, version)
            # A policy from elsewhere has its place by the head of its digest.
            holds = ours or manifest.policy.startswith(place)
            self._expect(holds, f"{folder} is of another policy than its place says")
            if ours and version is not None:
                self._check_sampler(folder, manifest, table, version)
            elif holds:
                self.findings.recorded.append(f"{folder}: its policy is not in this run")
        if table is not None:
            check_numbers_of(folder, manifest, table, self.findings)


def _same(ours: pa.Table, theirs: pa.Table, name: str) -> bool:
    """Say whether two tables hold the same in a column, number for number."""
    return name in theirs.column_names and theirs.column(name).equals(ours.column(name))
