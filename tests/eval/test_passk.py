import math
from itertools import combinations

import pytest
from hypothesis import given, strategies as st

from nanoskyrl.eval.passk import mean_interval, pass_at_k


@pytest.mark.parametrize(
    ("n", "correct", "k", "chance"),
    [
        (1, 1, 1, 1.0),
        (1, 0, 1, 0.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),
        (4, 2, 2, 5 / 6),  # of six pairs, one holds two wrong ones
        (5, 2, 3, 9 / 10),  # of ten triples, one holds three wrong ones
        (4, 2, 3, 1.0),  # two wrong ones cannot fill three places
        (4, 0, 4, 0.0),
        (4, 4, 2, 1.0),
        (10, 3, 1, 3 / 10),
    ],
)
def test_pass_at_k_by_hand(n, correct, k, chance):
    assert pass_at_k(n, correct, k) == pytest.approx(chance)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(case):
    n, correct, k = case
    subsets = list(combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@given(st.integers(2, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n - 1))))
def test_more_tries_or_more_right_samples_never_hurt(case):
    n, correct, k = case
    assert 0 <= pass_at_k(n, correct, k) <= pass_at_k(n, correct, k + 1) <= 1
    if correct < n:
        assert pass_at_k(n, correct, k) <= pass_at_k(n, correct + 1, k)


def test_pass_at_1_of_many_samples_is_their_mean():
    assert pass_at_k(10_000, 1234, 1) == pytest.approx(0.1234)


def test_many_samples_overflow_nothing():
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


@pytest.mark.parametrize(("n", "k"), [(4, 5), (1, 2), (0, 1), (4, 0), (4, -1)])
def test_more_tries_than_samples_say_nothing(n, k):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, 0, k)


def test_more_right_samples_than_samples_are_refused():
    with pytest.raises(ValueError):  # noqa: PT011
        pass_at_k(3, 4, 1)


def test_fewer_right_samples_than_none_are_refused():
    with pytest.raises(ValueError):  # noqa: PT011
        pass_at_k(3, -1, 1)


# Intervals


def test_nothing_has_no_mean():
    assert mean_interval([]) is None


def test_wilson_s_interval_by_hand():
    # 8 of 10, z = 1.96: (0.8 + 0.19208) / 1.38416 = 0.71674, and 1.96 * sqrt(0.016 + 0.009604) / 1.38416 = 0.22658.
    assert mean_interval([1.0] * 8 + [0.0] * 2) == pytest.approx((0.8, 0.4902, 0.9433), abs=2e-4)


def test_all_right_is_not_certain():
    # z^2 = 3.8415: the lower end is n / (n + z^2).
    assert mean_interval([1.0] * 10) == pytest.approx((1.0, 10 / 13.8415, 1.0), abs=1e-5)
    assert mean_interval([0.0] * 10) == pytest.approx((0.0, 0.0, 3.8415 / 13.8415), abs=1e-5)
    assert mean_interval([1.0]) == pytest.approx((1.0, 1 / 4.8415, 1.0), abs=1e-5)


def test_shares_of_tasks_have_the_normal_interval_by_hand():
    # Mean 1/2; variance (1/16 + 1/16) / 2 = 1/16 over 3 tasks: 1.96 * sqrt(1/48) = 0.28290.
    assert mean_interval([0.25, 0.5, 0.75]) == pytest.approx((0.5, 0.2171, 0.7829), abs=1e-4)


def test_one_share_says_nothing_about_the_spread_between_tasks():
    assert mean_interval([0.5]) == (0.5, 0.0, 1.0)


def test_two_tasks_alike_are_not_certain():
    mean, low, high = mean_interval([0.5, 0.5])
    assert low < mean < high


@given(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_mean_and_stays_within_0_and_1(values):
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(math.fsum(values) / len(values))
    assert 0 <= low <= mean + 1e-12
    assert mean - 1e-12 <= high <= 1


def test_more_tasks_make_it_narrower():
    widths = [high - low for _, low, high in (mean_interval([0.0, 1.0] * n) for n in (5, 50, 500))]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.07
