"""Proof that what lies on disk is what the stages wrote, from the newest evaluation to the first policy.

Every file and every manifest against its digest, every number of a manifest against its rows, every reference between
outputs and policies, and what a finished step must have. Nothing is computed again and no code is imported that a run
names: that is `proof/rerun.py`.
"""

from pathlib import Path

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.runs import EVALUATIONS, Run
from nanoskyrl.stages.looking.proof.findings import Findings
from nanoskyrl.stages.looking.proof.history import note_changes, note_origin
from nanoskyrl.stages.looking.proof.links import RunChain
from nanoskyrl.stages.looking.proof.outputs import check_output, read_rows
from nanoskyrl.stages.looking.proof.texts import Texts


def verify(place: Path) -> Findings:
    """Check a run, or the output of one stage.

    Raises:
        InputError: there is nothing to check.
    """
    findings = Findings()
    if is_finished(place):
        if (manifest := check_output(place, findings)) is not None:
            note_origin(place, manifest, findings)
            read_rows(place, manifest, findings)
        return findings
    run = Run(place)
    if not run.steps() and not run.policies():
        raise InputError(
            f"`{place}` is neither a run nor a finished stage", hint="Name a run directory such as runs/default"
        )
    chain, texts = RunChain(run, findings), Texts()
    for folder in sorted((path for path in (place / EVALUATIONS).glob("*/*") if path.is_dir()), reverse=True):
        chain.check_evaluation(folder)
    for step in reversed(run.steps()):
        tables = chain.check_step(step)
        if (rollout := tables.get("rollout")) is not None:
            version = chain.sampler_of(step)
            texts.look(rollout, run.policy(version if version is not None else 0))
    texts.note(findings)
    for folder, manifest in chain.outputs():
        note_origin(folder, manifest, findings)
    note_changes(chain.manifests, findings)
    return findings
