"""The Learner of a run on Ray: the processes that train together, started and placed by Ray Train.

Each of them runs what `skyrl train --follow` runs, so the bytes are those of as many processes under accelerate.
`train` is all or nothing: where a process is lost, the group is started again, and begins the step again.
"""

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.config import Settings, merge
from nanoskyrl.stages.core.errors import EngineError, NanoskyrlError
from nanoskyrl.stages.core.manifest import is_finished
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.storage import as_path, is_local, write_whole
from nanoskyrl.stages.running.cluster.config import ClusterShape
from nanoskyrl.stages.running.cluster.workers import Surroundings, answers
from nanoskyrl.stages.running.session import Session
from nanoskyrl.stages.running.standing_trainer import LOOP_PID, STOP_FILE, follow

LOOK_SECONDS, LOOK_FAR_SECONDS = 0.05, 0.5
"""Between two looks whether a step is trained, here and behind a URL."""
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a group is started for; all of it can be pickled."""

    surroundings: Surroundings
    shape: ClusterShape
    root: str
    """The run's place."""
    settings: Settings
    losses: int
    """How often the group is started again."""
    follows: dict[str, Any] | None = None
    """Arguments of `follow`; None: one step is trained."""
    named: dict[str, Any] | None = None
    """Of that step: what `Session.train` takes."""


def training_of(session: Session, **what: Any) -> Training:
    """Return the training of a run; `what` is `follows` or `named`."""
    executor = session.kept.executor()
    return Training(
        surroundings=executor.surroundings, shape=executor.shape, root=str(session.run.root.absolute()),
        # Inside a group nobody asks the cluster for workers.
        settings=merge(session.settings, {"run": {"executor": "local"}}), losses=executor.config.losses, **what,
    )  # fmt: skip


def learn(given: dict[str, Training]) -> None:
    """Train, as one process of the group."""
    training = given["training"]
    training.surroundings.enter()
    os.environ[LOOP_PID] = "0"  # the run's settings are the loop's
    follows = training.follows is not None
    session = Session(Run(as_path(training.root)), training.settings, keep_up=True, ahead=follows)
    if follows:
        follow(session, **training.follows or {})
    else:
        session.train(**training.named or {})
        session.kept.settle()


def fit(training: Training) -> None:
    """Start the group, and again where it was lost; returns when it has ended.

    Raises:
        NanoskyrlError: what a process raised.
        EngineError: the group was lost too often.
    """
    from fsspec.implementations.memory import MemoryFileSystem
    from pyarrow.fs import FSSpecHandler, PyFileSystem
    from ray.train import RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchTrainer

    shape = training.shape
    each = {"CPU": 1} | ({"GPU": 1} if shape.learner_gpus else {})
    # Ray Train wants a place for checkpoints that all hosts share. Ours are the stage's output: it keeps none.
    nowhere = PyFileSystem(FSSpecHandler(MemoryFileSystem()))
    for trial in range(training.losses + 1):
        name = f"learner-{secrets.token_hex(4)}"
        trainer = TorchTrainer(
            learn,
            train_loop_config={"training": training},
            scaling_config=ScalingConfig(
                num_workers=shape.learner_workers, use_gpu=bool(shape.learner_gpus), resources_per_worker=each
            ),
            run_config=RunConfig(name=name, storage_path="/nanoskyrl", storage_filesystem=nowhere),
        )
        try:
            trainer.fit()
            return
        except WorkerGroupError as error:
            causes = [_cause(failure) for failure in error.worker_failures.values()]
            if ours := next((cause for cause in causes if isinstance(cause, NanoskyrlError)), None):
                raise ours from error
            if trial == training.losses:
                said = str(causes[0] if causes else error).strip().split("\n")[-1]
                raise EngineError(f"training was lost {trial + 1} times: {said}", hint="See what Ray says") from error


def _cause(error: BaseException) -> BaseException:
    """Return what a worker raised, out of what Ray wraps it in."""
    inner = getattr(error, "cause", None) or getattr(error, "_base_exc", None) or error.__cause__
    return error if inner is None or isinstance(error, NanoskyrlError) else _cause(inner)


def train_on_ray(session: Session, **named: Any) -> Path:
    """Train one step in a group of Learners, and return where it lies."""
    import ray

    work = session.train_work(None, **{name: named[name] for name in ("source", "output", "policy", "state")})
    session.places.first_policy()  # once, before there are several to do it
    session.kept.executor().join()
    try:
        answers(ray.remote(fit).options(num_cpus=0).remote(training_of(session, named=named)))
    finally:
        session.close()
    return work.output


class RayTrainer:
    """The trainer of a loop, as `TrainerProcess` is."""

    def __init__(self, session: Session, steps: int, keep_states: int) -> None:
        """Say what is to be started: policies to train, and the optimizer states that it keeps."""
        self.session, self.run = session, session.run
        self._follows = {"steps": steps, "keep_states": keep_states}
        self._ref: Any = None

    def start(self) -> None:
        """Start it."""
        import ray

        self.session.kept.executor().join()
        (self.run.root / STOP_FILE).unlink(missing_ok=True)
        training = training_of(self.session, follows=self._follows)
        self._ref = ray.remote(fit).options(num_cpus=0).remote(training)

    def wait_for(self, step: int) -> None:
        """Wait until a step is trained.

        Raises:
            NanoskyrlError: what the trainer raised.
            EngineError: it ended without the step.
        """
        import ray

        place = self.run.stage(step, "train")
        seconds = LOOK_SECONDS if is_local(place) else LOOK_FAR_SECONDS
        while not is_finished(place):
            ended, _ = ray.wait([self._ref], timeout=0)
            if ended and not is_finished(place):
                answers(self._ref)
                raise EngineError(f"the trainer ended before step {step} was trained", hint="Run the loop again")
            time.sleep(seconds)

    def stop(self) -> None:
        """Ask it to stop, and see to it that it does."""
        import ray

        if self._ref is None or ray.wait([self._ref], timeout=0)[0]:
            return
        write_whole(self.run.root / STOP_FILE, b"")
        if not ray.wait([self._ref], timeout=STOP_SECONDS)[0]:
            ray.cancel(self._ref, force=True)
        (self.run.root / STOP_FILE).unlink(missing_ok=True)
