"""Attempts on an engine that samples one by one: nobody waits for anybody else.

Who is slow here waits for the others: one that held them up would wait until PATIENCE ends.
"""

import asyncio
import threading
import time
from functools import partial

import numpy as np
import pytest

from nanoskyrl.envs.base import Observation, Step, Task
from nanoskyrl.stages.core.errors import EngineError
from nanoskyrl.stages.core.metrics import Stopwatch
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.engines.base import AsyncTokenEngine, Generation, SamplingParams
from nanoskyrl.stages.engines.concurrent_turns import play_concurrently
from nanoskyrl.stages.engines.turns import Attempt, Identity, TurnLimits
from nanoskyrl.stages.models.loading import load_tokenizer
from nanoskyrl.stages.models.policy import resolve_policy
from nanoskyrl.stages.models.rendering import Renderer

LIMITS = TurnLimits(max_turns=3, max_generate_length=64, max_input_length=4096, max_sequence_length=4096)
RENDERER = Renderer(load_tokenizer(resolve_policy("starter")))
PATIENCE = 120.0


class Engine(AsyncTokenEngine):
    """Says `ok` once so many have asked at once, or never; counts them, and the seconds in which it was asked."""

    context_length = 8192
    renderer = RENDERER

    def __init__(self, capacity=64, together=1, breaks=False):
        self.capacity, self.together, self.breaks = capacity, together, breaks
        self.now = self.most = self.verified = 0
        self.asked_seconds = self.first = 0.0
        self.met = asyncio.Event()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    @property
    def stop_ids(self):
        return frozenset({RENDERER.turn_end_id})

    def load(self, policy): ...

    def logprobs(self, token_ids): ...

    def facts(self):
        return {}

    def close(self): ...

    def verify(self):
        self.verified += 1

    def submit(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def sample(self, request, sampling):
        if self.breaks:
            raise EngineError("no server is left", hint="")
        began = time.perf_counter()
        self.now += 1
        self.most = max(self.most, self.now)
        self.first = self.first or began
        if self.now == self.together:  # for as long again as that took
            self.loop.call_later(began - self.first, self.met.set)
        await self.met.wait()
        self.now -= 1
        self.asked_seconds += time.perf_counter() - began
        ids = [*RENDERER.encode("ok"), RENDERER.turn_end_id]
        return Generation(token_ids=ids, rollout_logprobs=np.full(len(ids), -0.5, np.float32), finish_reason="stop")


class Env:
    """Waits in every step for what it is given; ends after two."""

    def __init__(self, waits_for=None, breaks=False):
        self.waits_for, self.breaks, self.steps = waits_for, breaks, 0

    def start(self):
        return self

    def reset(self, task, seed):
        return Observation(messages=[{"role": "user", "content": task.prompt}])

    def step(self, action):
        self.steps += 1
        if self.waits_for is not None:
            assert self.waits_for.wait(PATIENCE)
        if self.breaks:
            raise ConnectionError("lost")
        return Step(messages=[{"role": "tool", "content": "heard"}], done=self.steps == 2)

    def close(self): ...


def begin(engine, environment, name):
    identity = Identity(
        trajectory_id=name, group_id="g", sample=0, env="e", seed=7, policy_version=0, policy_digest="d" * 64
    )
    task = Task(task_id="t", split="train", prompt="Say something.", ground_truth="x")
    return partial(Attempt, task, identity, environment, engine, SamplingParams(), LIMITS, stepwise=False)


def played(engine, *parts, **options):
    watch = Stopwatch()
    found = list(play_concurrently(parts, engine, SamplingParams(), watch, **options))
    for _, attempts in found:
        to_table([row for attempt in attempts for row in attempt.rows()])
    return found, watch


def test_a_slow_environment_holds_no_other_attempt_up():
    engine, left, all_ended = Engine(), [8], threading.Event()

    class Quick(Env):
        def close(self):
            left[0] -= 1
            if not left[0]:
                all_ended.set()

    slow, quick = Env(waits_for=all_ended), [Quick() for _ in range(8)]
    ((_, attempts),), _ = played(engine, [begin(engine, one, f"a{i}") for i, one in enumerate([slow, *quick])])
    assert {attempt.error for attempt in attempts} == {None}


def test_a_part_is_handed_over_when_it_is_done_and_attempts_keep_their_order():
    engine, handed_over = Engine(), threading.Event()
    parts = [
        [begin(engine, Env(waits_for=handed_over), "slow"), begin(engine, Env(), "quick")],
        [begin(engine, Env(), "b0"), begin(engine, Env(), "b1")],
    ]
    names = {}
    for index, attempts in play_concurrently(parts, engine, SamplingParams(), Stopwatch()):
        names[index] = [attempt.identity.trajectory_id for attempt in attempts]
        assert {attempt.error for attempt in attempts} == {None}
        handed_over.set()
    assert list(names.items()) == [(1, ["b0", "b1"]), (0, ["slow", "quick"])]
    assert engine.verified == 2


def test_no_more_attempts_are_alive_than_the_engine_has_use_for():
    engine = Engine(capacity=3, together=3)
    played(engine, [begin(engine, Env(), f"a{i}") for i in range(12)])
    assert engine.most == 3


def test_an_environment_that_breaks_fails_its_own_attempt_alone():
    engine = Engine()
    ((_, (broken, sound)),), _ = played(engine, [begin(engine, Env(breaks=True), "a"), begin(engine, Env(), "b")])
    assert (broken.stop_reason, broken.error) == ("error", "ConnectionError: lost")
    assert (sound.stop_reason, sound.error) == ("stop", None)


@pytest.mark.parametrize("where", ["engine", "environment"])
def test_an_attempt_past_its_deadline_fails_and_leaves_a_row_that_is_whole(where):
    released = threading.Event()
    engine = Engine(together=2 if where == "engine" else 1)  # a second one never asks
    engine.trajectory_seconds = 0.2
    environment = Env(waits_for=released if where == "environment" else None)
    ((_, (late,)),), _ = played(engine, [begin(engine, environment, "a")])
    released.set()  # which nobody waited for
    (row,) = late.rows()
    assert (row.status, row.error) == ("failed", "the attempt took more than 0.2 seconds")
    assert len(row.response_ids) == len(row.loss_mask) == len(row.rollout_logprobs)


def test_what_ends_the_rollout_ends_it_at_once():
    engine = Engine(breaks=True)
    with pytest.raises(EngineError, match="no server is left"):
        played(engine, [begin(engine, Env(), f"a{i}") for i in range(8)])


def test_an_environment_that_says_so_steps_one_episode_at_a_time():
    engine = Engine()
    at_once = []
    running = []

    class Alone(Env):
        def step(self, action):
            running.append(1)
            at_once.append(len(running))
            time.sleep(0.01)
            running.pop()
            return super().step(action)

    played(engine, [begin(engine, Alone(), f"a{i}") for i in range(6)], threads=1)
    assert max(at_once) == 1


def test_the_time_in_which_anything_is_generated_is_counted_once():
    engine = Engine(together=20)
    _, watch = played(engine, [begin(engine, Env(), f"a{i}") for i in range(20)])
    assert engine.most == 20
    assert 0 < watch.seconds["generate"] < engine.asked_seconds / 2  # which counts twenty at once twenty times
