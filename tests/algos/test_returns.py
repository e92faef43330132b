import numpy as np
import pytest
from hypothesis import given, strategies as st

from nanoskyrl.algos.estimators.base import Batch, EstimatorConfig
from nanoskyrl.algos.estimators.batch_std import BATCH_STD
from nanoskyrl.algos.estimators.gae import GAE
from nanoskyrl.algos.estimators.reinforce_pp import REINFORCE_PP, REINFORCE_PP_BASELINE
from nanoskyrl.algos.estimators.returns import discounted_returns, gae, whiten
from nanoskyrl.algos.estimators.rloo import RLOO, leave_one_out
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.registry import ESTIMATORS, lookup

# Two action tokens, two of a tool's answer, two action tokens.
REWARDS, MASK = np.array([0, 0, 0, 0, 0, 1.0]), np.array([1, 1, 0, 0, 1, 1], np.int8)
VALUES = np.array([0.5, 0.5, 9, 9, 0.5, 0.5])
ACTIONS = MASK != 0
ROWS = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=8)


def batch(rewards, groups=None, masks=None, values=None, penalties=None):
    count = len(rewards)
    return Batch(
        groups=groups or ["a"] * count, rewards=rewards, masks=masks or [np.ones(2, np.int8)] * count,
        penalties=penalties or [None] * count, values=values or [None] * count,
    )  # fmt: skip


def test_a_return_passes_over_what_a_tool_answered():
    (found,) = discounted_returns([REWARDS], [MASK], gamma=1.0)
    assert found.tolist() == [1, 1, 0, 0, 1, 1]


def test_a_discount_counts_action_tokens_only():
    (found,) = discounted_returns([REWARDS], [MASK], gamma=0.5)
    assert found.tolist() == [0.125, 0.25, 0, 0, 0.5, 1]


@pytest.mark.parametrize("junk", [9.0, np.nan, 1e30, np.inf])
def test_gae_passes_over_what_a_tool_answered_whatever_the_critic_says_of_it(junk):
    values = np.where(ACTIONS, VALUES, junk)
    (advantages,), (returns,) = gae([REWARDS], [values], [MASK], gamma=1.0, lambd=0.95)
    # Backwards: 0.5; 0 + 0.95 x 0.5 = 0.475; 0.95^2 x 0.5 = 0.4513; 0.4287.
    assert advantages[ACTIONS] == pytest.approx([0.4287, 0.4513, 0.475, 0.5], abs=5e-5)
    assert returns[ACTIONS] == pytest.approx([0.9287, 0.9512, 0.975, 1.0], abs=6e-5)
    assert advantages[~ACTIONS].tolist() == returns[~ACTIONS].tolist() == [0, 0]


def test_gae_with_lambda_1_is_the_return_less_the_value():
    (advantages,), (returns,) = gae([REWARDS], [VALUES], [MASK], gamma=1.0, lambd=1.0)
    assert returns[ACTIONS] == pytest.approx([1, 1, 1, 1])
    assert advantages[ACTIONS] == pytest.approx([0.5] * 4)


def test_gae_with_lambda_0_is_one_step_s_surprise():
    values = np.array([0.2, 0.6, 0, 0, 0.1, 0.9])
    (advantages,), _ = gae([REWARDS], [values], [MASK], gamma=1.0, lambd=0.0)
    assert advantages[ACTIONS] == pytest.approx([0.4, -0.5, 0.8, 0.1])


@given(st.lists(ROWS, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_rows_side_by_side_give_what_each_gives_alone(rows, gamma, lambd):
    rewards, values, masks = [], [], []
    for row in rows:
        reward, value, mask = map(np.array, zip(*row, strict=True))
        rewards.append(reward), values.append(value), masks.append(mask.astype(np.int8))
    together = gae(rewards, values, masks, gamma=gamma, lambd=lambd)
    for index in range(len(rows)):
        alone = gae([rewards[index]], [values[index]], [masks[index]], gamma=gamma, lambd=lambd)
        for both in zip(together, alone, strict=True):
            np.testing.assert_allclose(both[0][index], both[1][0], atol=1e-12)


def test_whitened_tokens_have_mean_0_and_deviation_1_and_masked_ones_are_0():
    values = [np.array([1.0, 99, 2]), np.array([np.nan, 6])]
    masks = [np.array([1, 0, 1]), np.array([0, 1])]
    first, second = whiten(values, masks)
    # Three tokens, 1, 2 and 6: mean 3, squares 4 + 1 + 9 over 2 is 7.
    assert [*first, *second] == pytest.approx([-2 / 7**0.5, 0, -1 / 7**0.5, 0, 3 / 7**0.5])
    assert whiten(values, masks, ddof=0)[1][1] == pytest.approx(3 / (14 / 3) ** 0.5)


def test_whitening_what_does_not_vary_gives_exactly_0():
    assert [row.tolist() for row in whiten([np.full(3, 0.7)], [np.ones(3)])] == [[0, 0, 0]]
    assert [row.tolist() for row in whiten([np.array([5.0])], [np.ones(1)])] == [[0]]
    assert whiten([None, np.array([1.0, 2.0])], [np.ones(2), np.zeros(2)])[0] is None


def test_one_left_out_by_hand():
    # Each against the mean of the other two.
    assert leave_one_out([3.0, 1.0, 2.0]) == pytest.approx([1.5, -1.5, 0.0])
    assert leave_one_out([1.0, None, 0.0]) == pytest.approx([1.0, None, -1.0])
    assert leave_one_out([1.0]) == [0.0]
    assert leave_one_out([1.0], singleton="raw") == [1.0]


def test_a_reward_falls_on_the_last_action_and_a_penalty_on_its_own():
    penalty = np.array([0.1, 0.2, 7, 7, 0.3, 0.4])
    found = REINFORCE_PP.estimate(batch([1.0], masks=[MASK], penalties=[penalty]), EstimatorConfig()).returns[0]
    assert found[ACTIONS] == pytest.approx([0.0, 0.1, 0.3, 0.6])


def test_the_baseline_variant_centres_groups_before_it_whitens():
    found = REINFORCE_PP_BASELINE.estimate(
        batch([1.0, 0.0, 3.0, 1.0], ["a", "a", "b", "b"]), EstimatorConfig()
    ).advantages
    # Centred 0.5, -0.5, 1, -1 on two tokens each: squares 2 x 2.5 over 7.
    scale = (5 / 7) ** 0.5
    assert [row[0] for row in found] == pytest.approx([0.5 / scale, -0.5 / scale, 1 / scale, -1 / scale])


def test_the_deviation_of_the_batch_is_of_raw_rewards():
    found = BATCH_STD.estimate(batch([1.0, 0.0, 3.0, 1.0], ["a", "a", "b", "b"]), EstimatorConfig(eps=0)).advantages
    std = np.std([1, 0, 3, 1], ddof=1)
    assert [row[0] for row in found] == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std])


def test_what_was_not_scored_gets_nothing_from_any_estimator():
    for estimator in (RLOO, BATCH_STD, REINFORCE_PP, REINFORCE_PP_BASELINE, GAE):
        found = estimator.estimate(batch([1.0, None, 0.0], values=[np.zeros(2)] * 3), EstimatorConfig())
        assert [row is None for row in found.advantages] == [False, True, False], estimator.name
        assert np.isfinite(np.concatenate([row for row in found.advantages if row is not None])).all()


MEMBERS = st.tuples(
    st.sampled_from("abc"),
    st.none() | st.floats(-2, 2).map(lambda x: round(x, 3)),
    st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=1, max_size=5),
)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(members=st.lists(MEMBERS, min_size=1, max_size=8), random=st.randoms())
def test_the_order_of_rows_and_groups_means_nothing(name, members, random):
    def estimated(order):
        groups, rewards, rows = zip(*(members[i] for i in order), strict=True)
        values = [np.array([value for value, _ in row]) for row in rows]
        masks = [np.array([int(on) for _, on in row]) for row in rows]
        if name == "maxrl":  # which refuses others
            rewards = [reward and abs(reward) for reward in rewards]
        made = batch(list(rewards), list(groups), masks, values)
        return lookup("estimator", name).estimate(made, EstimatorConfig()).advantages

    order = list(range(len(members)))
    whole = estimated(order)
    random.shuffle(order)
    for place, found in zip(order, estimated(order), strict=True):
        assert (found is None) == (whole[place] is None)
        if found is not None:
            np.testing.assert_allclose(found, whole[place], rtol=1e-6, atol=1e-6)


def test_gae_without_values_names_the_command_that_makes_them():
    with pytest.raises(SettingsError, match="values of a critic"):
        GAE.estimate(batch([1.0]), EstimatorConfig())


@pytest.mark.parametrize(
    "values", [{"gamma": 1.5}, {"lambd": -0.1}, {"eps": float("nan")}, {"std_ddof": 2}, {"singleton": "half"}], ids=str
)
def test_amounts_that_cannot_be_meant_are_refused(values):
    with pytest.raises(SettingsError, match=next(iter(values))):
        EstimatorConfig(**values)
