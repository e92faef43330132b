import pytest

from nanoskyrl.algos.shaping import first_groups, groups_with_spread, metric_of, overlong_punishment


@pytest.mark.parametrize(("length", "value"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (150, -1)])
def test_a_punishment_grows_over_the_buffer_and_stays(length, value):
    assert overlong_punishment(length, max_length=100, buffer_length=20) == pytest.approx(value)
    assert overlong_punishment(length, max_length=100, buffer_length=20, factor=0.5) == pytest.approx(value / 2)


def test_groups_whose_metric_varies_are_found():
    groups, metrics = list("aabbccdde"), [1, 0, 1, 1, None, 0, None, None, 1]
    assert groups_with_spread(groups, metrics) == {"a"}
    assert groups_with_spread(["a", "a"], [0.5, 0.5 + 1e-7]) == set()


def test_the_metric_is_success_before_reward():
    assert metric_of(True, 0.3) == 1.0
    assert metric_of(None, 0.3) == 0.3
    assert metric_of(None, None) is None


def test_the_first_groups_are_those_that_came_first():
    assert first_groups(list("bbacc"), {"a", "b", "c"}, 2) == {"b", "a"}
    assert first_groups(list("bbacc"), {"a", "c"}, None) == {"a", "c"}
