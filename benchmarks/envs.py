"""Steps per second of every environment, and what the agent layer adds to a turn.

python benchmarks/envs.py [seconds for each figure]

Each line gives a ratio against something measured in the same run: 64 episodes at once against one, and a turn's work
against the target of 1 ms.
"""

import itertools
import os
import sys
import time
from typing import Any

import numpy as np

from nanoskyrl.stages.core.config import plugin_config
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.registry import ENVS, lookup
from nanoskyrl.stages.engines.base import Generation, SamplingParams, TokenEngine
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits, play
from nanoskyrl.stages.models.loading import load_tokenizer
from nanoskyrl.stages.models.policy import STARTER, resolve_policy
from nanoskyrl.stages.models.rendering import Renderer

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
OUTSIDE = ("openenv", "fleet", "skyrl_gym")
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "tool_use": [{"kinds": [kind]} for kind in ("calculator", "search", "multi_hop", "data", "mixed")]
}


def steps_per_second(environment: Any, at_once: int) -> float:
    """Play the expert's actions, `at_once` episodes in turns, and return steps a second, resets included."""
    tasks = environment.tasks("train")
    scripts = [environment.expert(task) for task in tasks[:256]]
    order = itertools.cycle(range(len(scripts)))
    live: list[tuple[Any, list[str]]] = []
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        while len(live) < at_once:
            which = next(order)
            episode = environment.start()
            episode.reset(tasks[which], which)
            live.append((episode, list(scripts[which])))
        still = []
        for episode, script in live:
            step = episode.step(script.pop(0))
            steps += 1
            if step.done or not script:
                episode.close()
            else:
                still.append((episode, script))
        live = still
    return steps / (time.perf_counter() - begun)


class Expert(TokenEngine):
    """Answers at once with the tokens of the expert's actions."""

    def __init__(self, renderer: Renderer, actions: list[list[int]]) -> None:
        """Keep each turn's tokens."""
        self.renderer, self.actions, self.turn, self.context_length = renderer, actions, 0, 1 << 20

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self.renderer.turn_end_id or 0})

    def load(self, policy: Any) -> None: ...

    def logprobs(self, token_ids: Any) -> list[float]:
        return []

    def generate(self, requests: Any, sampling: SamplingParams) -> list[Generation]:
        ids = self.actions[self.turn]
        self.turn += 1
        nats = np.zeros(len(ids), np.float32)
        return [Generation(token_ids=ids, rollout_logprobs=nats, finish_reason="stop") for _ in requests]


def milliseconds_a_turn(environment: Any, renderer: Renderer) -> float:
    """Return what parsing, rendering and recording add to a turn, without the engine and without the environment."""
    tasks = environment.tasks("train")[:64]
    limits = TurnLimits(
        max_turns=64, max_generate_length=1 << 16, max_input_length=1 << 20, max_sequence_length=1 << 20
    )
    spent, turns, begun = 0.0, 0, time.perf_counter()
    for task in itertools.cycle(tasks):
        if time.perf_counter() - begun > SECONDS:
            break
        script = environment.expert(task)
        end = renderer.turn_end_id or 0
        engine = Expert(renderer, [[*renderer.encode(action), end] for action in script])
        plain = environment.start()
        plain.reset(task, 0)
        started = time.perf_counter()
        for action in script:
            plain.step(action)
        alone = time.perf_counter() - started
        identity = Identity(
            trajectory_id="t", group_id="g", sample=0, env="e", seed=0, policy_version=0, policy_digest="d"
        )
        started = time.perf_counter()
        attempt = Attempt(task, identity, environment, engine, SamplingParams(), limits, stepwise=False)
        play([attempt], engine, SamplingParams(), Stopwatch())
        attempt.rows()
        spent += time.perf_counter() - started - alone
        turns += len(script)
    return 1000 * spent / turns


def main() -> None:
    """Print every figure."""
    renderer = Renderer(load_tokenizer(resolve_policy(STARTER)))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("environment                 steps/s, 1    steps/s, 64   ratio   agent layer, ms a turn")
    for name in (name for name in ENVS if name not in OUTSIDE):
        for settings in VARIANTS.get(name, [{}]):
            environment = lookup("env", name)(plugin_config({name: settings}, "env", name))
            one, many = steps_per_second(environment, 1), steps_per_second(environment, 64)
            added = milliseconds_a_turn(environment, renderer)
            label = " ".join([name, *settings.get("kinds", ())])
            print(f"{label:26} {one:12.0f} {many:14.0f} {many / one:7.2f} {added:12.2f}")


if __name__ == "__main__":
    main()
