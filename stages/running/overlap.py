"""The loop on two sets of devices: rollouts here, training in a process beside.

With lag L the rollout of step k needs policy k - L alone, so while step k trains, up to L
later steps are generated. Each policy is published, and brought to the engine, when the
first rollout needs it: the engine never goes back to an older one. The stages are those of
the loop, so are the bytes.
"""

import time
from collections.abc import Callable
from typing import Protocol

from nanoskyrl.stages.core.metrics import MetricsLog
from nanoskyrl.stages.core.pipeline import training_half
from nanoskyrl.stages.running.session import Session


class StepTrainer(Protocol):
    """Trains beside the loop: a process of this machine, or a group on Ray."""

    def start(self) -> None:
        """Start it."""

    def wait_for(self, step: int) -> None:
        """Wait until a step is trained; raises where that will never be."""

    def stop(self) -> None:
        """See to it that it stops."""


def overlapped(
    session: Session,
    trainer: StepTrainer,
    first: int,
    steps: int,
    done: Callable[[int], None],
    begins: Callable[[int, str], None] = lambda step, stage: None,
) -> None:
    """Generate and score steps here while the trainer trains them.

    Args:
        session: Of the run.
        trainer: Not started yet.
        first: The first step without a finished sync.
        steps: Where to end.
        done: Called when a step's policy is published.
        begins: Called when a stage begins here.

    Raises:
        EngineError: the trainer ended.
    """
    began = time.perf_counter()
    published = first
    names, learns = list(session.stages), training_half(session.stages)
    generating, publishing = names[: names.index(learns[0])], names[names.index(learns[-1]) + 1 :]

    def make(stages: list[str], step: int) -> None:
        for stage in stages:
            begins(step, stage)
            session.make(stage, step)

    def publish(until: int) -> None:
        nonlocal published, began
        while published < until:
            waiting = time.perf_counter()
            begins(published, "waiting for train")
            trainer.wait_for(published)
            waited = time.perf_counter() - waiting
            make(publishing, published)
            now = time.perf_counter()
            MetricsLog(session.run.metrics, published).write(
                "loop", {"timing/total": now - began, "timing/waited_for_training": waited}
            )
            began = now
            done(published)
            published += 1

    trainer.start()
    try:
        for step in range(first, steps):
            publish(max(first, step - session.config.lag))
            make(generating, step)
        publish(steps)
    finally:
        trainer.stop()
