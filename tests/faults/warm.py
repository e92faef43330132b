"""What a run imports on its way, loaded once in the process that killed runs are forked from; nothing of it has run."""

import peft  # noqa: F401
import transformers.optimization  # noqa: F401

import nanoskyrl.envs.worlds.text_math.environment
import nanoskyrl.stages.engines.hf
import nanoskyrl.stages.engines.scripted
import nanoskyrl.stages.eval
import nanoskyrl.stages.learning.learner
import nanoskyrl.stages.running.loop
import nanoskyrl.stages.running.standing_trainer
import nanoskyrl.stages.sync
import nanoskyrl.stages.train  # noqa: F401
from nanoskyrl.stages.core.code import code_of

for stage in ("rollout", "score", "advantage", "train", "sync", "eval"):
    code_of(stage, {})
