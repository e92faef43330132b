"""What the steps of a run that are not synced yet hold, and which of it was made under other settings.

A run whose settings are changed may be steps ahead: with a lag, rollouts and even trainings
are finished before their turn. What the settings in force would not make again is deleted
before anything goes on; the rest stays, byte for byte.
"""

from pathlib import Path

from nanoskyrl.stages.core.config import stage_config
from nanoskyrl.stages.core.errors import ConflictError, InputError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.runs import INPUT_OF, STAGES, Run
from nanoskyrl.stages.running.session import Session

LEARNS = ("advantage", "train")
"""Stages that may go by what the step before trained."""


def check_settings(session: Session, step: int) -> None:
    """Refuse settings under which a step could not begin.

    Raises:
        SettingsError, InputError: an unknown environment, task, reward or estimator, or too few tasks.
        OutputError: the run began with another policy.
    """
    from nanoskyrl.stages.advantage import needs_models
    from nanoskyrl.stages.rollout import environment_and_tasks
    from nanoskyrl.stages.score import scorer_of

    session.places.check_first_policy()
    environment, _ = environment_and_tasks(session.rollout_config(step=step), session.settings)
    score, judge = (stage_config(session.settings, name) for name in ("score", "judge"))
    scorer_of(score, environment, judge)
    needs_models(session.advantage_config())


def outdated(session: Session, first: int, processes: int) -> list[Path]:
    """Return the outputs of unsynced steps that the settings in force would not give; nothing changes.

    What has begun and is not finished is among them, and so is all that was made from an outdated output.

    Args:
        session: Of the run.
        first: The first step without a finished sync.
        processes: That will train together.

    Raises:
        NanoskyrlError: a stage refuses the settings.
    """
    run = session.run
    # Training beside the loop starts from what the step before left: so do these checks.
    ahead = Session(run, session.settings, ahead=True)
    found, behind = [], False
    try:
        for step in (step for step in run.steps() if step >= first):
            again = False
            for stage in STAGES:
                place = run.stage(step, stage)
                if not place.exists():
                    continue
                again = again or (behind and stage in LEARNS) or not _is_current(ahead, step, stage, processes)
                if again:
                    found.append(place)
            trained = run.stage(step, "train")
            behind = behind or trained in found or not is_finished(trained)
    finally:
        ahead.close()
    return found


def _is_current(session: Session, step: int, stage: str, processes: int) -> bool:
    """Return whether a stage would find its output up to date."""
    run = session.run
    if not _follows_from_its_input(run, step, stage):
        return False
    if stage == "sync":
        return True
    if stage == "rollout" and not run.policy(max(0, step - session.config.lag)).is_dir():
        return False  # a smaller lag asks for a policy that is not there yet
    if stage == "train":
        return session.is_trained(step, processes)
    try:
        getattr(session, stage)(step)  # does nothing: what is finished is up to date, or another
    except ConflictError:
        return False
    return True


def _follows_from_its_input(run: Run, step: int, stage: str) -> bool:
    """Return whether an output is finished, can be read, and was made from the input that is there now."""
    place, parent = run.stage(step, stage), INPUT_OF.get(stage)
    if not is_finished(place):
        return False
    try:
        made = read_manifest(place, stage=stage)
        return parent is None or made.inputs.get(parent) == read_manifest(run.stage(step, parent)).digest
    except InputError:
        return False
