"""What is dear to start and stays up from stage to stage: engines, the learner, its models of `advantage`, workers."""

import gc
import os
from pathlib import Path
from typing import Any

from nanoskyrl.stages.core.config import Settings, plugin_config, stage_config
from nanoskyrl.stages.core.storage import mirror_of
from nanoskyrl.stages.engines.base import Engine, face_of, make_engine


class KeptUp:
    """Engines and learner of one run, made when they are first asked for."""

    def __init__(self, place: Path, settings: Settings, *, keep_up: bool) -> None:
        """Start nothing.

        Args:
            place: The run's directory.
            settings: Of the run.
            keep_up: Keep them; else each stage makes its own, but for engines that are served.
        """
        self.place, self.settings, self.keep_up = place, settings, keep_up
        self._engines: dict[str, Engine] = {}
        self._learner: Any = None
        self._passes: Any = None
        self._executor: Any = None

    def executor(self) -> Any:
        """Return who makes parts of stages elsewhere; None: they are made here."""
        alone = os.environ.get("WORLD_SIZE", "1") == "1"  # a group that trains asks nobody
        if alone and stage_config(self.settings, "run").executor == "ray" and self._executor is None:
            from nanoskyrl.stages.running.cluster.executor import RayExecutor

            self._executor = RayExecutor(self.settings)
        return self._executor

    def engine(self, name: str, settings: Settings | None = None) -> Engine | None:
        """Return the engine that stays up; one of its own where the settings of an evaluation are others."""
        config = plugin_config(settings or self.settings, "engine", name)
        if (executor := self.executor()) is not None:
            return executor.engine(name, config) if face_of(name).holds_policy else None
        if not (self.keep_up or face_of(name).is_served):
            return None
        key = name if config == plugin_config(self.settings, "engine", name) else f"{name} of evaluations"
        if key not in self._engines:
            self._engines[key] = make_engine(name, config)
            self._engines[key].place = mirror_of(self.place)
        return self._engines[key]

    def learner(self) -> Any:
        """Return the learner that stays up, or one for this call."""
        from nanoskyrl.stages.learning.recipe import recipe_of

        learner = self._learner or recipe_of(stage_config(self.settings, "train"), self.settings).learner()
        if self.keep_up:
            self._learner, learner.loop_steps = learner, stage_config(self.settings, "loop").steps
        return learner

    def passes(self) -> Any:
        """Return the models of `advantage`, with the settings of training; they stay up if anything does."""
        from nanoskyrl.stages.learning.model_columns import Passes

        # On the learner that trains: it holds the policy that training starts from already.
        passes = self._passes or Passes(self.learner())
        self._passes = passes if self.keep_up else None
        return passes

    def release_learner(self) -> None:
        """Let go of the model that trains, once what it holds lies on disk."""
        self.settle()
        self._learner = self._passes = None
        gc.collect()
        import torch

        torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait for the state that the learner writes.

        Raises:
            OutputError: it could not be written.
        """
        if self._learner is not None:
            self._learner.settle()

    def close(self) -> None:
        """Stop what the engines started, and wait for what the learner writes."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()
        if self._executor is not None:
            self._executor.close()
        self.settle()
