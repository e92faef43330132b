"""What holds for every environment that is registered, whatever it is about."""

import dataclasses
from collections import Counter
from functools import cache

import pytest
from envs_rows import row_for
from hypothesis import HealthCheck, given, settings
from nasty import TEXTS, actions, check_answered

from nanoskyrl.envs.actions import final_answer
from nanoskyrl.envs.base import check_metadata, check_observation
from nanoskyrl.stages.core.config import plugin_config
from nanoskyrl.stages.core.registry import ENVS, lookup
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.engines.rollout_parts import summary
from nanoskyrl.stages.score import judge

OUTSIDE = {
    "openenv": "wants a server", "fleet": "wants task files", "skyrl_gym": "wants the name of one of its own",
    "verifiers": "wants the name of a package",
}  # fmt: skip
"""Environments whose world is elsewhere: their own tests put the same texts to it."""
INSIDE = [name for name in ENVS if name not in OUTSIDE]
SETTINGS = {
    "tool_use": {"kinds": ["calculator", "search", "multi_hop", "data", "mixed"], "n_train": 32, "n_test": 8},
    "text_math": {"n_train": 32, "n_test": 8},
}


@cache
def environment(name):
    return lookup("env", name)(plugin_config({name: SETTINGS.get(name, {})}, "env", name))


def test_there_are_two_hundred_nasty_actions():
    assert len(actions()) >= 200


@pytest.mark.parametrize("name", INSIDE)
def test_every_nasty_action_is_answered(name):
    env = environment(name)
    task, kinds, valid = env.tasks("train")[0], Counter(), 0
    episode = env.start()
    check_observation(episode.reset(task, 0))
    for action in actions():
        step = episode.step(action)
        check_answered(step)
        kinds.update(call.error for call in step.tool_calls if call.error)
        if all(call.ok for call in step.tool_calls):
            valid += 1
            assert step.tool_calls or final_answer(action) is not None, action[:80]
        else:
            assert step.observation, action[:80]
        if step.done:
            episode.close()
            episode = env.start()
            episode.reset(task, 0)
    check_metadata(episode.close() or {})
    assert sum(kinds.values()) >= len(actions()) - valid
    assert valid < len(actions()) / 3


@pytest.mark.parametrize("name", INSIDE)
def test_no_text_raises(name):
    env = environment(name)
    task = env.tasks("train")[0]

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def anything(text):
        episode = env.start()
        episode.reset(task, 0)
        check_answered(episode.step(text))
        episode.close()

    anything()


def test_tool_use_counts_mistakes_by_kind():
    env = environment("tool_use")
    episode = env.start()
    episode.reset(env.tasks("train")[0], 0)
    kinds = Counter(call.error for action in actions() for call in episode.step(action).tool_calls if call.error)
    assert set(kinds) == {"malformed", "bad_arguments", "unknown_tool", "tool_error", "too_many_calls", "no_answer"}


def test_a_missing_answer_is_not_counted_as_a_call():
    env = environment("tool_use")
    task = env.tasks("train")[0]
    rows = [row_for(env, task, actions) for actions in (["no idea"], [*env.expert(task)[:-1], "no idea"])]
    rows = [dataclasses.replace(row, trajectory_id=str(i)) for i, row in enumerate(rows)]
    numbers = summary(iter([to_table(rows)]))
    assert (numbers["rollout/turns_with_tool_calls"], numbers["rollout/tool_calls"]) == (1, 1)
    assert numbers["rollout/failed_calls"] == 0


def test_calls_that_failed_are_counted_among_the_calls():
    env = environment("tool_use")
    task = env.tasks("train")[0]
    row = row_for(env, task, ['<tool_call>{"tool": "nothing", "args": {"ok": false}}</tool_call>', *env.expert(task)])
    numbers = summary(iter([to_table([row, dataclasses.replace(row, trajectory_id="other")])]))
    assert (numbers["rollout/tool_calls"], numbers["rollout/failed_calls"]) == (4, 2)


@pytest.mark.parametrize("name", INSIDE)
def test_what_was_answered_can_be_stored_and_scored(name):
    env = environment(name)
    task = env.tasks("train")[0]
    rows = [
        dataclasses.replace(row_for(env, task, [action]), trajectory_id=str(i)) for i, action in enumerate(actions())
    ]
    verdicts = judge(to_table(rows), env.score)
    assert {status for _, status in verdicts.values()} == {"scored"}
    assert not any(verdict.success for verdict, _ in verdicts.values())
