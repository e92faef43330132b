"""What the steps of a run that are not synced yet hold, and which of it was made under other settings.

A run whose settings are changed may be steps ahead: with a lag, rollouts and even trainings
are finished before their turn. What the settings in force would not make again is deleted
before anything continues; the rest stays, byte for byte.
"""

from pathlib import Path

from nanoskyrl.stages.core.config import stage_config
from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.manifest import is_finished, read_manifest
from nanoskyrl.stages.core.pipeline import training_half
from nanoskyrl.stages.core.runs import is_published
from nanoskyrl.stages.running.preparation import Preparation


def check_settings(session: Preparation, step: int) -> None:
    """Refuse settings under which a step could not begin.

    Raises:
        SettingsError, InputError: an unknown environment, task, reward or estimator, or too few tasks.
        OutputError: the run began with another policy.
    """
    from nanoskyrl.stages.advantage import needs_models
    from nanoskyrl.stages.rollout import environment_and_tasks
    from nanoskyrl.stages.score import scoring

    session.places.check_first_policy()
    environment, _ = environment_and_tasks(session.rollout_config(step=step), session.settings)
    scoring(stage_config(session.settings, "score"), environment, session.settings)
    needs_models(session.advantage_config())


def outdated(session: Preparation, first: int, processes: int) -> list[Path]:
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
    ahead = Preparation(run, session.settings, ahead=True, processes=processes)
    learns = training_half(ahead.stages)  # by what the step before trained
    found, behind = [], False
    for step in (step for step in run.steps() if step >= first):
        again = False
        for stage in (stage for stage in ahead.stages if run.stage(step, stage).exists()):
            again = again or (behind and stage in learns) or not _is_current(ahead, step, stage)
            if again:
                found.append(run.stage(step, stage))
        found += [run.stage(step, stage) for stage in run.made(step) if stage not in ahead.stages]
        trained = run.stage(step, "train")
        behind = behind or trained in found or not is_finished(trained)
    return found


def _is_current(prepared: Preparation, step: int, stage: str) -> bool:
    """Return whether a stage would find its output up to date."""
    run, parent = prepared.run, prepared.stages[stage].input
    if not is_finished(run.stage(step, stage)):
        return False
    try:
        made = read_manifest(run.stage(step, stage), stage=stage)
        if parent is not None and made.inputs.get(parent) != read_manifest(run.stage(step, parent)).digest:
            return False
    except InputError:
        return False
    if parent is None and not is_published(run.policy(max(0, step - prepared.config.lag))):
        return False  # a smaller lag asks for a policy that is not there yet
    return prepared.is_current(stage, step)
