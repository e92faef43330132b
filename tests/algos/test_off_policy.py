import pytest
import torch

from nanoskyrl.algos.kl import kl
from nanoskyrl.algos.off_policy import OffPolicyConfig, correction, mean_weight, negative_rows_gone, trusted
from nanoskyrl.stages.core.errors import SettingsError

# Ratios of old to sampling policy: 3, 0.5 and a masked one; then 1.1 and 1.2.
RATIOS = torch.tensor([[3.0, 0.5, 9.0], [1.1, 1.2, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)


def found(**settings):
    weights, kept = correction(RATIOS.log(), torch.zeros_like(RATIOS), MASK, OffPolicyConfig(**settings))
    return weights.tolist(), kept.tolist()


def near(rows):
    return [pytest.approx(row) for row in rows]


def test_by_default_nothing_is_weighed():
    assert found() == ([[1, 1, 0], [1, 1, 0]], MASK.tolist())


def test_token_weights_are_cut_at_the_cap():
    assert found(weight="token")[0] == near([[2, 0.5, 0], [1.1, 1.2, 0]])


def test_sequence_weights_are_the_product_cut_at_the_cap():
    assert found(weight="sequence", cap=1.4)[0] == near([[1.4, 1.4, 0], [1.32, 1.32, 0]])


def test_outside_the_band_a_token_weighs_nothing_and_inside_its_ratio():
    assert found(weight="token", band=(0.6, 5.0))[0] == near([[3, 0, 0], [1.1, 1.2, 0]])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"reject": "product", "reject_band": (0.5, 1.4)}, [0, 1]),  # 1.5 and 1.32
        ({"reject": "product", "reject_band": (1.4, 2.0)}, [1, 0]),
        ({"reject": "geometric", "reject_band": (1.0, 1.2)}, [0, 1]),  # 1.22 and 1.15
        ({"reject": "any_token", "reject_band": (0.6, 5.0)}, [0, 1]),
        ({"reject": "any_token", "reject_band": (0.4, 5.0)}, [1, 1]),
    ],
    ids=str,
)
def test_whole_rows_are_left_out(settings, kept):
    weights, mask = found(**settings)
    assert [max(row) for row in mask] == kept
    assert [row[:2] for row in weights] == [[of, of] for of in kept]


def test_the_mean_weight_is_of_trained_tokens():
    assert mean_weight(torch.tensor([[2.0, 0.5, 7.0]]), torch.tensor([[1.0, 1.0, 0.0]])) == pytest.approx(1.25)
    assert mean_weight(torch.zeros(1, 2), torch.ones(1, 2)) == 1.0  # all are left out: nothing is divided by 0


def test_huge_and_missing_log_probs_leave_finite_weights():
    old = torch.tensor([[0.0, float("nan"), -1.0]])
    weights, _ = correction(
        old, torch.tensor([[-500.0, 0, -1]]), torch.tensor([[1.0, 0, 1]]), OffPolicyConfig(weight="sequence")
    )
    assert weights.tolist() == [[2.0, 0.0, 2.0]]


def test_bad_rows_that_the_policy_has_left_behind_are_gone():
    sampled, now = torch.full((3, 2), -1.0), torch.tensor([[-2.0, -2.0], [-2.0, -2.0], [-1.1, -1.1]])
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    assert negative_rows_gone(now, sampled, advantages, torch.ones(3, 2), 0.5).tolist() == [[0], [1], [1]]


# Ratios of trained to sampling policy: pushed up, pushed down, neither; the last is of padding.
MOVED = torch.tensor([[1.3, 1.1, 0.7, 1.0, 9.0]], dtype=torch.float64)
TRAINED = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("advantage", "kept"),
    [(1.0, [0, 1, 1, 1, 1]), (-1.0, [1, 1, 0, 1, 1]), (0.0, [1, 1, 1, 1, 1])],
)
def test_a_token_leaves_the_trust_band_only_the_way_it_is_pushed(advantage, kept):
    ones = torch.ones_like(MOVED)
    assert trusted(MOVED.log(), 0 * ones, advantage * ones, TRAINED, (0.8, 1.2)).tolist() == [kept]


def test_the_trust_band_lets_go_where_the_clip_has_no_gradient():
    from nanoskyrl.algos.surrogates.clip import ClipConfig
    from nanoskyrl.algos.surrogates.ppo import PPO

    ratios = torch.linspace(0.05, 3, 400, dtype=torch.float64)[None]
    ones = torch.ones_like(ratios)
    for advantage in (1.0, -1.0):
        now = ratios.log().requires_grad_()
        PPO.surrogate(PPO.inputs(now, 0 * ones, advantage * ones, ones), ClipConfig())[0].sum().backward()
        assert now.grad is not None
        assert ((now.grad != 0).double() == trusted(now, 0 * ones, advantage * ones, ones, (0.8, 1.2))).all()


def test_the_pull_to_the_sampler_has_the_slope_of_the_log_ratio():
    now = MOVED.log().requires_grad_()
    estimate = kl(now, torch.zeros_like(MOVED), TRAINED, "k2")
    estimate.sum().backward()
    expected = [0.26236426446749106, 0.09531017980432493, -0.35667494393873245, 0, 0]
    assert now.grad is not None
    assert now.grad.tolist() == near([expected])
    assert estimate.tolist() == near([[x * x / 2 for x in expected]])


def test_on_policy_neither_band_nor_pull_does_anything():
    same = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    signs, mask = torch.tensor([[1.0], [-1.0], [0.0]]).expand(3, 7), torch.ones(3, 7)
    assert trusted(same, same.detach(), signs, mask, (1.0, 1.0)).min() == 1
    estimate = kl(same, same.detach(), mask, "k2")
    estimate.sum().backward()
    assert estimate.abs().max() == 0
    assert same.grad is not None
    assert same.grad.abs().max() == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"weight": "word"}, {"reject": "sum"}, {"denominator": "half"}, {"cap": 0.0}, {"cap": float("nan")},
        {"band": (2.0, 1.0), "weight": "token"}, {"band": (0.5, 2.0)}, {"reject": "product"},
        {"reject_band": (0.5, 2.0)}, {"normalize": True}, {"denominator": "kept"},
        {"negative_threshold": float("nan")}, {"negative_threshold": -1.0},
        {"trust_band": (1.2, 0.8)}, {"kl_coef": -0.1},
    ],
    ids=str,
)  # fmt: skip
def test_rules_that_mean_nothing_are_refused(settings):
    with pytest.raises(SettingsError, match="off_policy"):
        OffPolicyConfig(**settings)
