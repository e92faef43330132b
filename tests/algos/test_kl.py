import math
from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st

from nanoskyrl.algos.kl import KlEstimator, adapted, kl
from nanoskyrl.algos.surrogates.value_loss import value_loss

ONE = torch.ones(1, 1, dtype=torch.float64)


def at(difference, estimator, **options):
    """Return value and slope of an estimate at this log-ratio."""
    logprobs = torch.tensor([[difference]], dtype=torch.float64, requires_grad=True)
    found = kl(logprobs, torch.zeros_like(logprobs), ONE, estimator, **options)
    found.sum().backward()
    return found.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("abs", 0.5, 1.0),
    ],
)
def test_each_estimate_and_its_slope_by_hand(estimator, value, slope):
    assert at(0.5, estimator) == pytest.approx((value, slope))


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_straight_through_keeps_the_value_and_takes_the_slope_of_k2(estimator):
    assert at(-0.7, estimator, straight_through=True) == pytest.approx((at(-0.7, estimator)[0], -0.7))


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
@given(junk=st.sampled_from([float("nan"), float("inf"), -1e30, 99.0]))
def test_what_stands_behind_the_mask_changes_nothing(estimator, junk):
    logprobs = torch.tensor([[-1.0, junk]], requires_grad=True)
    found = kl(logprobs, torch.tensor([[-2.0, -junk]]), torch.tensor([[1.0, 0.0]]), estimator)
    found.sum().backward()
    assert found[0, 1] == 0
    assert logprobs.grad[0, 1] == 0
    assert torch.isfinite(found).all()


def test_a_forgotten_token_costs_no_more_than_the_limit():
    assert at(-50.0, "k3", value_limit=10.0) == (10.0, 0.0)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    means = {
        name: float((p * kl(p.log()[None], q.log()[None], torch.ones(1, 3), name)[0]).sum())
        for name in ("k1", "k2", "k3")
    }
    assert means["k1"] == pytest.approx(exact)
    assert means["k3"] == pytest.approx(exact)
    assert means["k2"] != pytest.approx(exact, rel=1e-3)


def values(new, old, returns, clip):
    given = torch.tensor([[new]], requires_grad=True)
    loss, clipped = value_loss(given, torch.tensor([[old]]), torch.tensor([[returns]]), torch.ones(1, 1), clip)
    loss.sum().backward()
    return loss.item(), given.grad.item(), clipped.item()


@pytest.mark.parametrize(
    ("new", "old", "returns", "clip", "found"),
    [
        (0.5, 0.0, 1.0, None, (0.125, -0.5, 0)),
        (0.5, 0.0, 1.0, 0.2, (0.32, 0.0, 1)),  # moved too far towards the return: the clipped 0.2 is worse, and counts
        (0.1, 0.0, 1.0, 0.2, (0.405, -0.9, 0)),
        (-0.5, 0.0, 1.0, 0.2, (1.125, -1.5, 0)),  # moved away: the whole way back
    ],
)
def test_a_value_counts_as_having_moved_no_further_than_the_clip(new, old, returns, clip, found):
    assert values(new, old, returns, clip) == pytest.approx(found)


# A coefficient that adapts


def test_an_adaptive_coefficient_by_hand():
    # Target 0.1: a KL of 0.11 is a tenth too much, 0.2 counts as a fifth, 0 as a fifth too little.
    steer = {"target": 0.1, "horizon": 100}
    assert adapted(2.0, 0.11, 100, **steer) == pytest.approx(2.2)
    assert adapted(2.0, 0.2, 100, **steer) == pytest.approx(2.4)
    assert adapted(2.0, 0.0, 50, **steer) == pytest.approx(1.8)
    assert adapted(2.0, -0.3, 100, **steer) == pytest.approx(1.6)  # k1's mean can be negative
    assert adapted(2.0, 0.1, 100, **steer) == 2.0
    assert adapted(2.0, 0.2, 0, **steer) == 2.0


@given(st.floats(1e-6, 10), st.floats(-5, 50), st.integers(0, 10**6), st.floats(1e-4, 10), st.integers(1, 10**5))
def test_an_adaptive_coefficient_moves_towards_its_target_by_at_most_a_fifth(coef, kl, rows, target, horizon):
    found = adapted(coef, kl, rows, target=target, horizon=horizon)
    assert 0.8 * coef * (1 - 1e-12) <= found <= 1.2 * coef * (1 + 1e-12)
    assert (found >= coef) if kl >= target else (found <= coef)


def test_k3_of_a_small_difference_is_not_rounding():
    logprobs = torch.full((1, 64), -1.0)
    found = kl(logprobs + 1e-4, logprobs, torch.ones(1, 64), "k3")
    torch.testing.assert_close(found, torch.full((1, 64), 5e-9), rtol=0.1, atol=0)
