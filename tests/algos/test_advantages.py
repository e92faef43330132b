import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from outputs import add_advantages

from nanoskyrl.algos.estimators.base import group_normalized
from nanoskyrl.algos.estimators.maxrl import mean_normalized
from nanoskyrl.algos.shaping import has_spread
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.rows import row_arrays, to_table
from nanoskyrl.stages.core.trajectory import Trajectory
from nanoskyrl.stages.learning.advantage_columns import summary
from nanoskyrl.stages.learning.advantage_config import AdvantageConfig

HALF_ROOT = math.sqrt(0.5)  # two members: the deviations are half the gap, the standard deviation gap / sqrt(2)
REWARDS = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=12)


def scored_table(*members):
    """A table of scored trajectories of two sampled tokens and an observed one, from (group, reward, status)."""
    stop = {"completed": "stop", "truncated": "length", "failed": "error"}
    return to_table(
        (
            Trajectory(
                trajectory_id=f"t{i}", group_id=group, sample=i, env="text_math", task_id=group, split="train", seed=i,
                policy_version=0, policy_digest="d", temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed",
                prompt_ids=np.array([1], np.int32), response_ids=np.array([2, 3, 4], np.int32),
                loss_mask=np.array([1, 0, 1], np.int8), rollout_logprobs=np.array([-1, np.nan, -1], np.float32),
                prompt="", response="", messages=[], turns=[], status=status, stop_reason=stop[status], trainable=True,
                prompt_tokens=1, completion_tokens=2, reward=reward,
                error="boom" if status == "failed" else None,
                score_status="skipped" if status == "failed" else "verifier_error" if reward is None else "scored",
            )
            for i, (group, reward, status) in enumerate(members)
        ),
        "score",
    )  # fmt: skip


def advantages_of(table):
    """Return each row's advantages, and why rows without were dropped."""
    values = [None if row is None else row.tolist() for row in row_arrays(table.column("advantages"))]
    return values, table.column("drop_reason").to_pylist()


# By hand


def test_two_members_get_half_the_root_of_two_either_way():
    assert group_normalized([1.0, 0.0], eps=0.0) == pytest.approx([HALF_ROOT, -HALF_ROOT])
    assert group_normalized([1.0, 0.0]) == pytest.approx([0.7071, -0.7071], abs=5e-5)
    assert group_normalized([-3.0, 5.0], eps=0.0) == pytest.approx([-HALF_ROOT, HALF_ROOT])


def test_four_members_by_hand():
    # Mean 3/4; squared deviations 3 x 1/16 + 9/16 = 3/4, over 3 is 1/4: the standard deviation is 1/2.
    assert group_normalized([1, 1, 0, 1], eps=0.0) == pytest.approx([0.5, 0.5, -1.5, 0.5])


def test_eps_is_added_to_the_standard_deviation_outside_the_root():
    # Deviations 1/2 and -3/2 over 1/2 + 1/2 of a deviation of 2 x 1/2 = 1.
    assert group_normalized([2, 2, 0, 2], eps=1.0) == pytest.approx([0.25, 0.25, -0.75, 0.25])


def test_without_the_standard_deviation_the_difference_from_the_mean_is_left():
    assert group_normalized([3, 1, 1, 1], divide_by_std=False) == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("reward", [0.0, 1.0, -3.5])
def test_a_group_of_one_gets_zero(reward):
    assert group_normalized([reward]) == [0.0]


@pytest.mark.parametrize("reward", [0.7, 0.1, 1.1, -0.3, 1e6 + 0.1, float(np.float32(0.7))])
@pytest.mark.parametrize("count", [2, 3, 12, 56])
def test_equal_rewards_get_exactly_zero(reward, count):
    assert group_normalized([reward] * count) == [0.0] * count
    assert group_normalized([reward] * count, eps=0.0) == [0.0] * count
    assert not has_spread([reward] * count)


def test_rewards_apart_only_by_rounding_count_as_equal():
    assert group_normalized([0.1 + 0.2, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert group_normalized([0.7, float(np.float32(0.7))]) == [0.0, 0.0]


@pytest.mark.parametrize("reward", [1.0, 0.7, -40.0, 1e-3])
@pytest.mark.parametrize(("difference", "spread"), [(1e-15, False), (0.9e-6, False), (1.1e-6, True), (1e-3, True)])
def test_a_group_has_spread_where_rewards_differ_by_more_than_a_millionth_of_the_largest(reward, difference, spread):
    rewards = [reward, reward * (1 - difference), reward]
    assert rewards[0] != rewards[1]
    assert has_spread(rewards) == spread
    assert any(group_normalized(rewards)) == spread


def test_a_missing_reward_enters_no_mean_and_gets_nothing():
    assert group_normalized([1.0, 0.0, None, None]) == pytest.approx([HALF_ROOT, -HALF_ROOT, None, None], abs=2e-6)


@pytest.mark.parametrize("rewards", [[1.0, None], [None, 0.0], [None, None, 0.7, None]])
def test_one_scored_member_gets_zero_and_the_others_nothing(rewards):
    assert group_normalized(rewards) == [None if reward is None else 0.0 for reward in rewards]


def test_a_group_without_rewards_gets_nothing():
    assert group_normalized([None, None]) == [None, None]
    assert group_normalized([]) == []


def test_failures_as_zeros_would_be_another_number():
    # What six failures entered as 0 would give: mean 1/8, standard deviation sqrt(1/8).
    as_zeros = group_normalized([1, 0] + [0] * 6)
    assert as_zeros[:2] == pytest.approx([2.475, -0.354], abs=1e-3)
    assert group_normalized([1, 0] + [None] * 6)[:2] == pytest.approx([HALF_ROOT, -HALF_ROOT], abs=2e-6)


# As the stage uses it


def test_failed_members_leave_their_group_even_with_a_reward():
    members = [("a", 1.0, "completed"), ("a", 0.0, "completed")] + [("a", 0.0, "failed")] * 6
    values, reasons = advantages_of(add_advantages(scored_table(*members), AdvantageConfig()))
    assert values[0] == pytest.approx([HALF_ROOT, 0, HALF_ROOT], abs=2e-6)
    assert values[1] == pytest.approx([-HALF_ROOT, 0, -HALF_ROOT], abs=2e-6)
    assert values[2:] == [None] * 6
    assert reasons == [None, None] + ["failed"] * 6


def test_unscored_members_carry_no_loss():
    members = [("a", reward, "completed") for reward in (1.0, 0.0, None, None)]
    table = add_advantages(scored_table(*members), AdvantageConfig())
    values, reasons = advantages_of(table)
    assert [value and value[0] for value in values] == pytest.approx([HALF_ROOT, -HALF_ROOT, None, None], abs=2e-6)
    assert reasons == [None, None, "unscored", "unscored"]
    assert table.column("kept").to_pylist() == [True, True, False, False]


def test_a_group_of_one_gets_zero_and_is_counted():
    members = [("a", 1.0, "completed"), ("b", 1.0, "completed"), ("a", 0.0, "completed")]
    table = add_advantages(scored_table(*members), AdvantageConfig())
    values, _ = advantages_of(table)
    assert values[1] == [0.0, 0.0, 0.0]
    assert values[0] == pytest.approx([HALF_ROOT, 0, HALF_ROOT], abs=2e-6)
    assert summary([table])["advantage/singleton_groups"] == 1


def test_the_share_of_groups_without_spread_is_counted():
    members = [("a", 0.7, "completed")] * 12 + [("b", 1.0, "completed"), ("b", 0.0, "completed")]
    table = add_advantages(scored_table(*members), AdvantageConfig())
    values, _ = advantages_of(table)
    assert values[:12] == [[0.0, 0.0, 0.0]] * 12
    assert summary([table])["advantage/zero_variance_groups"] == 1 / 2


# By property


@given(REWARDS)
def test_advantages_have_mean_zero_and_deviation_one(rewards):
    values = group_normalized(rewards, eps=0.0)
    assert math.fsum(values) == pytest.approx(0, abs=1e-6)
    if has_spread(rewards):
        assert math.fsum(value**2 for value in values) == pytest.approx(len(values) - 1)


@given(REWARDS, st.floats(-100, 100), st.floats(0.5, 100))
def test_shifting_and_stretching_rewards_changes_nothing(rewards, shift, factor):
    moved = group_normalized([factor * reward + shift for reward in rewards], eps=0.0)
    assert moved == pytest.approx(group_normalized(rewards, eps=0.0), abs=1e-6)


@given(REWARDS, st.randoms())
def test_the_order_of_members_means_nothing(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = group_normalized([rewards[i] for i in order])
    assert shuffled == [group_normalized(rewards)[i] for i in order]


@given(st.lists(st.none() | st.floats(0, 1), max_size=12))
def test_missing_rewards_change_nothing_for_the_others(rewards):
    values = group_normalized(rewards)
    assert [value is None for value in values] == [reward is None for reward in rewards]
    scored = [reward for reward in rewards if reward is not None]
    assert [value for value in values if value is not None] == group_normalized(scored)


# MaxRL


def test_maxrl_divides_by_the_mean_by_hand():
    # Mean 1/4: 3/4 over it is 3, -1/4 over it is -1. Mean 1/2 with eps 1/2: halves stay halves.
    assert mean_normalized([1.0, 0.0, 0.0, 0.0], eps=0.0) == pytest.approx([3, -1, -1, -1])
    assert mean_normalized([1.0, None, 0.0], eps=0.5) == pytest.approx([0.5, None, -0.5])


def test_maxrl_of_a_group_that_went_alike_is_0_also_where_the_mean_is():
    assert mean_normalized([0.0, 0.0, None]) == [0.0, 0.0, None]
    assert mean_normalized([0.7] * 12) == [0.0] * 12
    assert mean_normalized([0.5, None]) == [0.0, None]
    assert mean_normalized([0.5, None], singleton="raw") == [0.5, None]
    assert mean_normalized([]) == []


@given(st.integers(1, 15), st.integers(1, 15), st.floats(0.01, 100))
def test_maxrl_gives_successes_the_inverse_share_of_successes_whatever_they_are_worth(good, bad, worth):
    # The gradient of log p is that of p over p: a success of a group with share p weighs (1 - p) / p, a failure -1.
    found = mean_normalized([worth] * good + [0.0] * bad, eps=0.0)
    assert found == pytest.approx([bad / good] * good + [-1.0] * bad)
    assert sum(found) == pytest.approx(0, abs=1e-9)


def test_maxrl_refuses_a_negative_reward_and_names_it():
    table = scored_table(("a", 1.0, "completed"), ("a", -0.5, "completed"))
    with pytest.raises(SettingsError, match=r"divides by a group's mean reward, and a reward is -0\.5") as caught:
        add_advantages(table, AdvantageConfig(estimator="maxrl"))
    assert "0 or more" in caught.value.hint


def test_maxrl_is_written_on_every_trained_token():
    table = scored_table(
        ("a", 1.0, "completed"), ("a", 0.0, "completed"), ("a", 0.0, "completed"), ("b", 1.0, "failed")
    )
    values, _ = advantages_of(add_advantages(table, AdvantageConfig(estimator="maxrl")))
    assert values[:3] == [pytest.approx([v, 0, v], abs=1e-5) for v in (2, -1, -1)]
