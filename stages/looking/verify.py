"""Proof that what lies on disk is what the stages wrote, from the newest evaluation to the first policy.

Every file and every manifest against its digest, every number of a manifest against its rows, every reference between
outputs and policies, and what a finished step must have. Nothing is computed again and no code is imported that a run
names, unless that is asked for: then `proof/rerun.py` makes outputs again.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.runs import EVALUATIONS, Run, step_of
from nanoskyrl.stages.looking.proof.findings import Findings
from nanoskyrl.stages.looking.proof.history import folders_of, note_changes, note_origin
from nanoskyrl.stages.looking.proof.links import RunChain
from nanoskyrl.stages.looking.proof.outputs import check_output, read_rows
from nanoskyrl.stages.looking.proof.texts import Texts

if TYPE_CHECKING:
    from nanoskyrl.stages.looking.proof.rerun import Rerun


def verify(place: Path, *, rerun: "Rerun | None" = None) -> Findings:
    """Check a run, or the output of one stage.

    Args:
        place: Its directory.
        rerun: Which outputs are made again and compared; None: none is, and no code runs that the run names.

    Raises:
        InputError: there is nothing to check, or an output to be made again lies in no run.
        NanoskyrlError: `rerun` refuses.
    """
    findings = Findings()
    if is_finished(place):
        if (manifest := check_output(place, findings)) is not None:
            note_origin(place, manifest, findings)
            read_rows(place, manifest, findings, keep=False)
        if rerun is not None:
            _make_one_again(place, rerun, findings)
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
    folders = folders_of(run)
    for folder, manifest in chain.outputs():
        note_origin(folder, manifest, findings, folders)
    note_changes(chain.manifests, findings)
    if rerun is not None:
        _make_again(chain, rerun)
    return findings


def _make_again(chain: RunChain, rerun: "Rerun", steps: list[int] | None = None) -> None:
    from nanoskyrl.stages.looking.proof.rerun import make_again
    from nanoskyrl.stages.running.run_settings import kept_settings

    make_again(chain, rerun, kept_settings(chain.run), steps)


def _make_one_again(place: Path, rerun: "Rerun", findings: Findings) -> None:
    from dataclasses import replace

    step, root = step_of(place.resolve().parent), place.resolve().parent.parent
    if step is None:
        raise InputError(
            f"`{place}` lies in no step of a run", hint="Name a run, or an output as RUN/step-000000/score"
        )
    of_run = Findings()
    chain = RunChain(Run(root), of_run)
    chain.findings = findings  # what is wrong elsewhere in the run was not asked for
    _make_again(chain, replace(rerun, stage=place.resolve().name), [step])
