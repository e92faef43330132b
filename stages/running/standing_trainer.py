"""A trainer that stays up: it takes each step's scores as they are finished, and trains.

It makes a step's `advantage` and `train` by the same stages as the commands, with a
learner that it keeps, so the bytes are the same. It stops between stages: at SIGTERM or
SIGINT, when `train.stop` lies in the run, when enough steps are done, or when whoever
started it is gone.
"""

import os
import threading
import time
from collections.abc import Callable

from nanoskyrl.stages.core.errors import OutputError
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.pipeline import training_half
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.stopping import told_to_stop
from nanoskyrl.stages.core.storage import locked
from nanoskyrl.stages.engines.vllm.servers import alive
from nanoskyrl.stages.running.run_settings import remember
from nanoskyrl.stages.running.session import Session

STOP_FILE = "train.stop"
"""In the run directory: asks its trainer to stop. The trainer takes it away."""
LOOP_PID = "NANOSKYRL_LOOP_PID"
"""In the environment: the process whose end is the trainer's, too."""
LOOK_SECONDS = 0.2
NOTHING, STOP = -1, -2


def follow(
    session: Session,
    *,
    steps: int | None = None,
    keep_states: int = 0,
    stop: threading.Event | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Train every step of the run whose scores are finished, until stopped; return how many were done.

    Args:
        session: Of the run; with `keep_up`, so that the learner stays, and `ahead`. The run remembers its settings,
            unless a loop keeps this trainer: then they are the loop's.
        steps: Policies to train, counted from the beginning of the run; None: until stopped.
        keep_states: Optimizer states kept of the newest steps; 0 keeps all.
        stop: Ends it when it is set.
        say: Called with what happens.

    Raises:
        OutputError: another trainer follows the run.
        InputError, SettingsError: as in `advantage` and `train`.
    """
    run, world, stop = session.run, session.kept.learner().world, stop or threading.Event()
    learns = training_half(session.stages)
    waits_for = str(session.stages[learns[0]].input)
    done = 0
    held = OutputError(
        f"another trainer follows the run `{run.root}`",
        hint=f"Wait for it, or stop it with `touch {run.root / STOP_FILE}`",
    )
    with told_to_stop(stop), world.if_main(locked(run.root / STOP_FILE, held)):
        # Not before it is known that no other trainer is at work: a run remembers nothing of one that was refused.
        if world.is_main and LOOP_PID not in os.environ:
            remember(run, session.named, session.given)
        step = world.broadcast(run.next_step("train"))
        if world.is_main and step:
            session.prune(step - 1, keep_states)  # one that was killed may not have come to it
        while (steps is None or step < steps) and (found := world.broadcast(_look(run, step, waits_for, stop))) != STOP:
            if found == NOTHING:
                # Every process hears every time that there is nothing: none waits so long that it gives up.
                time.sleep(LOOK_SECONDS)
                continue
            for stage in learns:
                # With models, every process makes its share of a stage.
                if world.is_main or session.needs_learner(stage, step):
                    session.make(stage, step)
                world.barrier()
            if world.is_main:
                session.prune(step, keep_states)
                say(f"Trained step {step}")
            step, done = step + 1, done + 1
        session.kept.settle()
        world.barrier()
        if world.is_main:
            session.prune(step - 1, keep_states)
            (run.root / STOP_FILE).unlink(missing_ok=True)
    return done


def _look(run: Run, step: int, stage: str, stop: threading.Event) -> int:
    """Return the step if it can be trained, or what to do instead."""
    loop = int(os.environ.get(LOOP_PID, "0"))
    if stop.is_set() or (run.root / STOP_FILE).exists() or not alive(loop):
        return STOP
    return step if is_finished(run.stage(step, stage)) else NOTHING
