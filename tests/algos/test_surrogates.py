import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanoskyrl.algos.aggregate import Totals, reduction
from nanoskyrl.algos.ratios import LOG_RATIO_LIMIT, token_log_ratio
from nanoskyrl.algos.surrogates.cispo import CISPO, CispoConfig
from nanoskyrl.algos.surrogates.clip import ClipConfig
from nanoskyrl.algos.surrogates.cov import CLIP_COV, KL_COV, ClipCovConfig, KlCovConfig, covariances
from nanoskyrl.algos.surrogates.dppo import DPPO_KL, DPPO_TV, DppoKlConfig, DppoTvConfig
from nanoskyrl.algos.surrogates.gmpo import GMPO, GmpoConfig
from nanoskyrl.algos.surrogates.grpo import GRPO
from nanoskyrl.algos.surrogates.gspo import GSPO, GspoConfig
from nanoskyrl.algos.surrogates.ppo import PPO
from nanoskyrl.algos.surrogates.rloo import RLOO, RlooConfig
from nanoskyrl.algos.surrogates.sapo import SAPO, SapoConfig
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.registry import ALGOS, lookup

ALL = [lookup("algo", name) for name in ALGOS]
every = pytest.mark.parametrize("algorithm", ALL, ids=lambda algorithm: algorithm.name)
EXAMPLES = 25  # for each of the algorithms, which share most of their code
MANY_MARKED = {
    "clip_cov": ClipCovConfig(clip_cov_ratio=0.5, clip_cov_lb=0.0), "kl_cov": KlCovConfig(kl_cov_ratio=0.5),
}  # fmt: skip
REDUCED = ["token_mean", "sequence_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
NAN, INF = float("nan"), float("inf")
TOKENS = st.tuples(st.floats(-8, 0), st.floats(-5, 5), st.booleans())  # log-prob, advantage, whether it is trained
NEAR = st.tuples(st.floats(-8, 0), st.floats(-1, 1), st.floats(-3, 3))  # log-prob, log-ratio, advantage
FAR = st.tuples(st.floats(-8, 0), st.floats(-3, 3), st.floats(-3, 3), st.booleans())  # the same, and whether trained


def marks_of(algorithm, config, logprobs, old_logprobs, advantages, mask):
    """Return what an algorithm marks of a whole mini-batch; None where it marks nothing."""
    if algorithm.marks is None:
        return None
    on, found = mask.bool(), torch.zeros_like(mask)
    tokens = [of.detach()[on][None] for of in (logprobs, old_logprobs, advantages, mask)]
    found[on] = algorithm.marks(algorithm.inputs(*tokens), config, np.random.default_rng(0))[0].to(mask.dtype)
    return found


def objective(algorithm, log_ratio, advantages, config=None):
    """Return the objective and what is reported, for tokens that are all trained and were certain before."""
    inputs = algorithm.inputs(log_ratio, torch.zeros_like(advantages), advantages, torch.ones_like(advantages))
    return algorithm.surrogate(inputs, config or algorithm.Config())


def gradient_at(algorithm, ratio, advantage, config=None):
    """Return value and slope by log-ratio of one token's objective."""
    log_ratio = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    value, reported = objective(algorithm, log_ratio, torch.tensor([[advantage]], dtype=torch.float64), config)
    value.sum().backward()
    return value.item(), log_ratio.grad.item(), {name: found.item() for name, found in reported.items()}


def loss_and_gradient(algorithm, logprobs, old_logprobs, advantages, mask, loss_reduction="token_mean", config=None):
    """Put ratio, surrogate and reduction together as `train` does."""
    logprobs = logprobs.clone().requires_grad_()
    config = config or algorithm.Config()
    marked = marks_of(algorithm, config, logprobs, old_logprobs, advantages, mask)
    inputs = algorithm.inputs(logprobs, old_logprobs, advantages, mask, marked)
    value, _ = algorithm.surrogate(inputs, config)
    weights = reduction(loss_reduction)(mask, Totals(tokens=int(mask.sum()), rows=len(mask), horizon=8), None)
    loss = -(value.masked_fill(~mask.bool(), 0.0) * weights).sum()
    loss.backward()
    return loss.detach(), logprobs.grad


# SAPO by hand


def test_two_tokens_of_sapo_by_hand():
    # Ratios 2 and 1/2: gate(2) = 4 / 1.0 * sigmoid(1.0), gate(1/2) = 4 / 1.05 * sigmoid(-0.525).
    found, _ = objective(SAPO, torch.tensor([[2.0, 0.5]]).log(), torch.tensor([[1.0, -1.0]]))
    up, down = 4 / 1.00 / (1 + math.exp(-1.0)), 4 / 1.05 / (1 + math.exp(0.525))
    torch.testing.assert_close(found, torch.tensor([[up, -down]]))


@pytest.mark.parametrize(("advantage", "tau", "value"), [(1.0, 1.0, 2.0), (-1.0, 1.05, 1.9048)])
def test_sapo_at_ratio_1_is_2_over_tau_with_slope_1(advantage, tau, value):
    found, slope, reported = gradient_at(SAPO, 1.0, advantage)
    assert found == pytest.approx(advantage * 2 / tau, rel=1e-12)
    assert found == pytest.approx(advantage * value, abs=5e-5)
    assert slope == pytest.approx(advantage, rel=1e-12)
    assert reported["gate"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("ratio", "tau", "gate"),
    # The derivative of the gate by the ratio is 1 / cosh^2(tau (r - 1) / 2); the table of shared/algorithms.md, 7.
    [
        (0.0001, 1.0, 0.786), (0.5, 1.0, 0.940), (1.5, 1.0, 0.940), (2, 1.0, 0.786), (3, 1.0, 0.420), (5, 1.0, 0.071),
        (0.0001, 1.05, 0.768), (0.5, 1.05, 0.934), (1.5, 1.05, 0.934), (2, 1.05, 0.768), (3, 1.05, 0.389),
        (0.5, 5.0, 0.280), (1.5, 5.0, 0.280), (2, 5.0, 0.027),
    ],
)  # fmt: skip
def test_sapo_lets_less_through_on_both_sides_of_ratio_1(ratio, tau, gate):
    for advantage, config in ((2.0, SapoConfig(tau_pos=tau)), (-2.0, SapoConfig(tau_neg=tau))):
        _, slope, reported = gradient_at(SAPO, ratio, advantage, config)
        assert reported["gate"] == pytest.approx(gate, abs=5e-4)
        assert slope == pytest.approx(advantage * ratio / math.cosh(tau * (ratio - 1) / 2) ** 2, rel=1e-9)


def test_sapo_at_ratio_three_halves_by_hand():
    # A mistaken sign of tau shows only away from 1: 4 * sigmoid(0.5) is 2.49, 4 * sigmoid(-0.5) would be 1.51.
    value, slope, _ = gradient_at(SAPO, 1.5, 1.0)
    assert value == pytest.approx(2.4898, abs=5e-5)
    assert slope == pytest.approx(1.5 * 0.9400, abs=2e-4)
    value, slope, _ = gradient_at(SAPO, 1.5, -1.0)
    assert value == pytest.approx(-4 / 1.05 * 0.62832, abs=5e-5)
    assert slope == pytest.approx(-1.5 * 0.9341, abs=2e-4)


def test_the_sign_of_the_advantage_picks_sapo_s_temperature():
    config = SapoConfig(tau_pos=2.0, tau_neg=8.0)
    assert gradient_at(SAPO, 1.0, 3.0, config)[0] == pytest.approx(3 * 2 / 2)
    assert gradient_at(SAPO, 1.0, -3.0, config)[0] == pytest.approx(-3 * 2 / 8)
    assert gradient_at(SAPO, 1.7, 0.0, config)[:2] == (0.0, 0.0)


def test_sapo_of_a_huge_ratio_is_finite_and_flat():
    value, slope, _ = gradient_at(SAPO, math.exp(20), 1.0)
    assert value == pytest.approx(4.0)
    assert slope == 0.0


@given(st.floats(0.01, 0.99), st.floats(0.1, 10))
def test_sapo_s_gate_is_as_wide_above_1_as_below(distance, tau):
    config = SapoConfig(tau_pos=tau)
    above, below = (gradient_at(SAPO, 1 + sign * distance, 1.0, config)[2]["gate"] for sign in (1, -1))
    assert above == pytest.approx(below, rel=1e-6)
    assert above < 1


# GRPO by hand


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (1.5, 2.0, 1.2 * 2, 0.0, 1),  # good and already much likelier: no more
        (1.5, -2.0, 1.5 * -2, 1.5 * -2, 0),  # bad and likelier: all the way back
        (0.5, 2.0, 0.5 * 2, 0.5 * 2, 0),  # good and less likely: all the way back
        (0.5, -2.0, 0.8 * -2, 0.0, 1),  # bad and already much less likely: no more
        (1.1, 2.0, 1.1 * 2, 1.1 * 2, 0),
        (1.1, -2.0, 1.1 * -2, 1.1 * -2, 0),
        (0.9, 2.0, 0.9 * 2, 0.9 * 2, 0),
        (0.9, -2.0, 0.9 * -2, 0.9 * -2, 0),
        (1.0, 2.0, 2.0, 2.0, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_grpo_clips_where_the_sign_says_by_hand(ratio, advantage, value, slope, clipped):
    found = gradient_at(GRPO, ratio, advantage)
    assert found[:2] == pytest.approx((value, slope))
    assert found[2] == {"clip_ratio": clipped}


def test_grpo_s_two_bounds_are_set_apart():
    config = ClipConfig(eps_clip_low=0.1, eps_clip_high=0.28)
    assert gradient_at(GRPO, 1.25, 1.0, config)[:2] == pytest.approx((1.25, 1.25))
    assert gradient_at(GRPO, 1.30, 1.0, config)[:2] == pytest.approx((1.28, 0.0))
    assert gradient_at(GRPO, 0.85, -1.0, config)[:2] == pytest.approx((-0.9, 0.0))
    assert gradient_at(GRPO, 0.95, -1.0, config)[:2] == pytest.approx((-0.95, -0.95))


@pytest.mark.parametrize(
    ("name", "estimator", "loss_reduction", "kl", "low", "high"),
    [
        ("ppo", "gae", "token_mean", ("reward", "k1"), 0.2, 0.2),
        ("grpo", "grpo", "sequence_mean", ("loss", "k3"), 0.2, 0.2),
        ("dapo", "grpo", "token_mean", ("none", "k3"), 0.2, 0.28),
        ("dr_grpo", "dr_grpo", "seq_mean_token_sum_norm", ("none", "k3"), 0.2, 0.2),
        ("gspo", "grpo", "sequence_mean", ("none", "k3"), 3e-4, 4e-4),
        ("rloo", "rloo", "seq_mean_token_sum", ("reward", "k1"), 0.2, 0.2),
        ("reinforce_pp", "reinforce_pp", "token_mean", ("reward", "k1"), 0.2, 0.2),
        ("reinforce_pp_baseline", "reinforce_pp_baseline", "token_mean", ("loss", "k2"), 0.2, 0.2),
        ("sapo", "grpo", "sequence_mean", ("none", "k3"), None, None),
        ("cispo", "grpo", "token_mean", ("none", "k3"), None, None),
        ("dppo_tv", "grpo", "token_mean", ("none", "k3"), None, None),
        ("dppo_kl", "grpo", "token_mean", ("none", "k3"), None, None),
        ("clip_cov", "grpo", "token_mean", ("none", "k3"), 1.0, 1.0),
        ("kl_cov", "grpo", "token_mean", ("none", "k3"), None, None),
        ("gmpo", "grpo", "sequence_mean", ("none", "k3"), None, None),
    ],
)
def test_each_algorithm_names_what_it_was_published_with(name, estimator, loss_reduction, kl, low, high):
    found, config = lookup("algo", name), lookup("algo", name).Config()
    assert (found.name, found.estimator, found.loss_reduction) == (name, estimator, loss_reduction)
    assert (found.kl_place, found.kl_estimator) == kl
    assert (getattr(config, "eps_clip_low", None), getattr(config, "eps_clip_high", None)) == (low, high)
    assert (found.needs_critic, found.dynamic_sampling) == (name == "ppo", name == "dapo")


def test_defaults_are_the_papers():
    assert (DppoTvConfig().delta_low, DppoTvConfig().delta_high, DppoTvConfig().ratio_max) == (0.2, 0.2, 20)
    assert (DppoKlConfig().delta_low, DppoKlConfig().delta_high, DppoKlConfig().ratio_max) == (0.05, 0.05, 20)
    clip_cov, kl_cov = ClipCovConfig(), KlCovConfig()
    assert (clip_cov.clip_cov_ratio, clip_cov.clip_cov_lb, clip_cov.clip_cov_ub) == (2e-4, 1.0, 5.0)
    assert (kl_cov.kl_cov_ratio, kl_cov.ppo_kl_coef) == (2e-4, 1.0)
    assert (GmpoConfig().log_clip_low, GmpoConfig().log_clip_high) == (0.4, 0.4)
    assert (SapoConfig().tau_pos, SapoConfig().tau_neg) == (1.0, 1.05)
    assert (CispoConfig().ratio_min, CispoConfig().ratio_max) == (0.0, 5.0)


# Dual clip, GSPO, CISPO and RLOO by hand


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (9.0, -2.0, 3 * -2, 0.0, 1),  # far likelier and bad: no worse than three times the advantage
        (2.0, -2.0, 2 * -2, 2 * -2, 0),
        (9.0, 2.0, 1.2 * 2, 0.0, 1),
        (0.5, -2.0, 0.8 * -2, 0.0, 1),
    ],
)
def test_a_dual_clip_bounds_what_a_bad_token_can_cost(ratio, advantage, value, slope, clipped):
    found = gradient_at(PPO, ratio, advantage, ClipConfig(clip_ratio_c=3.0))
    assert found[:2] == pytest.approx((value, slope))
    assert found[2] == {"clip_ratio": clipped}


def test_gspo_s_ratio_is_the_geometric_mean_of_a_row():
    # Ratios 2 and 1/2 make 1; 4 and 1 make 2, clipped at 1.28 for a good row and free for a bad one.
    config = GspoConfig(eps_clip_low=0.2, eps_clip_high=0.28)
    log_ratio = torch.tensor([[2.0, 0.5], [4.0, 1.0], [4.0, 1.0]]).log().requires_grad_()
    value, reported = objective(GSPO, log_ratio, torch.tensor([[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0]]), config)
    torch.testing.assert_close(value.detach(), torch.tensor([[1.0, 1.0], [1.28, 1.28], [-2.0, -2.0]]))
    assert reported["clip_ratio"].tolist() == [[0, 0], [1, 1], [0, 0]]
    value.sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[1.0, 1.0], [0.0, 0.0], [-2.0, -2.0]]))


def test_gspo_s_two_forms_differ_only_where_a_row_has_several_advantages():
    log_ratio = torch.tensor([[0.1, -0.2]], dtype=torch.float64)
    gradients = []
    for advantages in ([[1.0, 1.0]], [[1.0, 0.0]]):
        for form in ("token", "sequence"):
            given = log_ratio.clone().requires_grad_()
            config = GspoConfig(eps_clip_low=0.5, eps_clip_high=0.5, form=form)
            objective(GSPO, given, torch.tensor(advantages, dtype=torch.float64), config)[0].sum().backward()
            gradients.append(given.grad)
    s = math.exp(-0.05)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[2], torch.tensor([[s, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(gradients[3], torch.tensor([[s / 2, s / 2]], dtype=torch.float64))


def test_gspo_s_small_mean_is_not_lost_beside_large_log_ratios():
    # 16 and -15.9996 have the mean 0.0002, of which float32 would keep two digits beside 16.
    logprobs, old = torch.tensor([[0.0, -16.0]]), torch.tensor([[-16.0, -0.0004]])
    inputs = GSPO.inputs(logprobs, old, torch.ones(1, 2), torch.ones(1, 2))
    value, _ = GSPO.surrogate(inputs, GspoConfig(eps_clip_high=1.0))
    assert torch.equal(value, inputs.log_ratio.mean().exp().expand(1, 2))


@pytest.mark.parametrize(("ratio", "weight", "outside"), [(2.0, 2.0, 0), (9.0, 5.0, 1), (0.1, 0.5, 1), (5.0, 5.0, 0)])
def test_a_clipped_token_of_cispo_keeps_a_bounded_gradient(ratio, weight, outside):
    _, slope, reported = gradient_at(CISPO, ratio, -2.0, CispoConfig(ratio_min=0.5))
    assert slope == pytest.approx(-2.0 * weight)
    assert reported == {"clip_ratio": outside}


def test_a_token_outside_the_bounds_can_lose_its_whole_gradient():
    config = CispoConfig(ratio_min=0.5, ratio_max=2.0, outside="drop")
    assert [gradient_at(CISPO, ratio, 1.0, config)[1] for ratio in (0.4, 0.5, 1.5, 2.0, 3.0)] == pytest.approx(
        [0, 0, 1.5, 0, 0]
    )


def test_rloo_s_ratio_is_the_product_of_a_row_spread_over_its_tokens():
    # Ratios 2 and 3 make 6: clipped at 1.2 for a good row; a bad row keeps it.
    log_ratio = torch.tensor([[2.0, 3.0], [2.0, 3.0]]).log().requires_grad_()
    value, _ = objective(RLOO, log_ratio, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    torch.testing.assert_close(value.detach(), torch.tensor([[0.6, 0.6], [-3.0, -3.0]]))
    value.sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[0.0, 0.0], [-6.0, -6.0]]))
    token = RlooConfig(ratio="token")
    assert objective(RLOO, log_ratio.detach(), torch.ones(2, 2), token)[0][0].tolist() == pytest.approx([1.2, 1.2])


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (SapoConfig, {"tau_pos": 0.0}),
        (SapoConfig, {"tau_neg": 0.0}),
        (SapoConfig, {"tau_pos": -1.0}),
        (ClipConfig, {"eps_clip_low": -0.1}),
        (ClipConfig, {"eps_clip_low": 1.1}),
        (ClipConfig, {"eps_clip_high": -0.1}),
        (ClipConfig, {"eps_clip_low": NAN}),
        (ClipCovConfig, {"clip_cov_ratio": 0.0}),
        (ClipCovConfig, {"clip_cov_lb": 5.0}),
        (ClipCovConfig, {"eps_clip_low": -0.1}),
        (KlCovConfig, {"kl_cov_ratio": 1.1}),
        (KlCovConfig, {"ppo_kl_coef": NAN}),
        (GmpoConfig, {"log_clip_low": -0.1}),
        (DppoTvConfig, {"delta_low": -0.1}),
        (DppoKlConfig, {"delta_high": NAN}),
        (DppoTvConfig, {"ratio_max": 0.5}),
        (GmpoConfig, {"log_clip_high": NAN}),
    ],
    ids=str,
)
def test_settings_that_turn_a_surrogate_round_are_refused(config, values):
    with pytest.raises(SettingsError, match=next(iter(values))):
        config(**values)


@pytest.mark.parametrize(
    ("config", "values"),
    [(SapoConfig, {"tau_pos": NAN}), (SapoConfig, {"tau_neg": NAN}), (ClipConfig, {"eps_clip_high": NAN})],
    ids=str,
)
def test_settings_that_are_no_number_are_refused(config, values):
    with pytest.raises(SettingsError, match=next(iter(values))):
        config(**values)


def moved(algorithm, old, new, advantage, config=None):
    """Return value, slope by log-prob and share of one token that went from one probability to another."""
    logprobs = torch.tensor([[new]], dtype=torch.float64).log().requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.float64)
    inputs = algorithm.inputs(logprobs, (old * ones).log(), advantage * ones, ones)
    value, reported = algorithm.surrogate(inputs, config or algorithm.Config())
    value.sum().backward()
    return value.item(), logprobs.grad.item(), reported["clip_ratio"].item()


@pytest.mark.parametrize(
    ("old", "new", "advantage", "left_out"),
    [
        (0.30, 0.49, 1.0, False), (0.30, 0.51, 1.0, True),  # good, and up by more than 0.2
        (0.50, 0.31, -1.0, False), (0.50, 0.29, -1.0, True),  # bad, and down by more than 0.2
        (0.30, 0.90, -1.0, False), (0.90, 0.30, 1.0, False),  # the way back is free
        (1e-4, 1e-3, 1.0, False),  # ten times as likely, and nothing has changed
    ],
)  # fmt: skip
def test_dppo_leaves_out_what_moved_too_far_in_probability_by_hand(old, new, advantage, left_out):
    kept = 0.0 if left_out else new / old * advantage
    assert moved(DPPO_TV, old, new, advantage) == pytest.approx((kept, kept, int(left_out)))


def test_dppo_s_coins_by_hand():
    # 0.5 ln(0.5 / 0.65) + 0.5 ln(0.5 / 0.35) is 0.0471; with 0.66 it is 0.0541. Down from 0.8 to 0.65, it is 0.0541.
    assert moved(DPPO_KL, 0.5, 0.65, 1.0) == pytest.approx((1.3, 1.3, 0))
    assert moved(DPPO_KL, 0.5, 0.66, 1.0) == (0, 0, 1)
    assert moved(DPPO_KL, 0.8, 0.65, -1.0) == (0, 0, 1)
    assert moved(DPPO_KL, 0.8, 0.65, -1.0, DppoKlConfig(delta_low=0.055))[2] == 0
    assert moved(DPPO_KL, 0.8, 0.65, 1.0)[2] == 0


def test_dppo_s_ratio_weighs_at_most_its_bound_and_keeps_its_gradient():
    assert moved(DPPO_TV, 1e-4, 0.1, -2.0) == pytest.approx((-40, -40, 0))
    assert moved(DPPO_TV, 1e-4, 0.1, -2.0, DppoTvConfig(ratio_max=5)) == pytest.approx((-10, -10, 0))


def test_dppo_sees_a_fall_that_is_past_the_bound_of_log_ratios():
    # From 0.37 to e^-30: bounded to 20, the log-ratio alone would say that it came from e^-10.
    assert moved(DPPO_TV, math.exp(-1), math.exp(-30), -1.0)[2] == 1


@given(st.floats(-8, 0), st.floats(-8, 0), st.sampled_from([1.0, -1.0]))
def test_dppo_s_kl_leaves_out_what_is_past_pinsker_s_bound(old, new, advantage):
    # KL >= 2 TV^2: a coin that moved by more than sqrt(0.05 / 2) the way it is pushed is out.
    went = math.exp(new) - math.exp(old)
    if went * advantage > math.sqrt(0.05 / 2) + 1e-6:
        assert moved(DPPO_KL, math.exp(old), math.exp(new), advantage)[1:] == (0, 1)


# Clip-Cov and KL-Cov

# Log-probs -1, -1, -3, -3 have the mean -2, advantages 2, -2, 2, -2 the mean 0: covariances 2, -2, -2, 2.
FOUR = [torch.tensor([of]).double() for of in ([-1.0, -1.0, -3.0, -3.0], [2.0, -2.0, 2.0, -2.0])]


def marked_of_four(algorithm, config, old_logprobs=None):
    logprobs, advantages = FOUR
    old_logprobs = logprobs if old_logprobs is None else torch.tensor([old_logprobs]).double()
    return marks_of(algorithm, config, logprobs, old_logprobs, advantages, torch.ones(1, 4)).tolist()


def test_covariances_by_hand():
    logprobs, advantages = FOUR
    for above in (0, 1):  # only distances from the means count
        inputs = KL_COV.inputs(logprobs - above, logprobs, advantages + above, torch.ones(1, 4))
        assert covariances(inputs).tolist() == [[2, -2, -2, 2]]


def test_clip_cov_marks_between_its_bounds_and_not_what_is_clipped_already():
    assert marked_of_four(CLIP_COV, ClipCovConfig(clip_cov_ratio=1.0)) == [[1, 0, 0, 1]]
    assert marked_of_four(CLIP_COV, ClipCovConfig(clip_cov_ratio=1.0, clip_cov_lb=2.0)) == [[0, 0, 0, 0]]
    assert marked_of_four(CLIP_COV, ClipCovConfig(clip_cov_ratio=1.0, clip_cov_ub=2.0)) == [[0, 0, 0, 0]]
    narrow = ClipCovConfig(clip_cov_ratio=1.0, eps_clip_low=0.2, eps_clip_high=0.2)
    assert marked_of_four(CLIP_COV, narrow, [-1.5, -1.0, -3.0, -3.0]) == [[0, 0, 0, 1]]


def test_clip_cov_draws_so_many_and_others_another_time():
    config = ClipCovConfig(clip_cov_ratio=0.25)
    logprobs, advantages = FOUR
    inputs = CLIP_COV.inputs(logprobs, logprobs, advantages, torch.ones(1, 4))
    drawn = [tuple(CLIP_COV.marks(inputs, config, np.random.default_rng(seed))[0].tolist()) for seed in range(50)]
    assert set(drawn) == {(1, 0, 0, 0), (0, 0, 0, 1)}
    assert 10 < drawn.count((1, 0, 0, 0)) < 40


def test_kl_cov_marks_the_largest_covariances_and_of_equal_ones_the_first():
    assert marked_of_four(KL_COV, KlCovConfig(kl_cov_ratio=0.5)) == [[1, 0, 0, 1]]
    assert marked_of_four(KL_COV, KlCovConfig(kl_cov_ratio=0.25)) == [[1, 0, 0, 0]]
    assert marked_of_four(KL_COV, KlCovConfig()) == [[1, 0, 0, 0]]  # at least one


def test_a_marked_token_loses_its_gradient_under_clip_cov_and_is_drawn_back_under_kl_cov():
    # Ratio 2 and A = 3: slope 6; under KL-Cov less the coefficient, with the sign of the way it went.
    ratio = torch.tensor([[2.0, 2.0, 0.5, 1.0]]).double()
    ones, marked = torch.ones(1, 4).double(), torch.tensor([[1.0, 0.0, 1.0, 1.0]]).double()
    found = {}
    for algorithm, config in ((CLIP_COV, ClipCovConfig()), (KL_COV, KlCovConfig(ppo_kl_coef=0.5))):
        logprobs = ratio.log().requires_grad_()
        inputs = algorithm.inputs(logprobs, 0 * ones, 3 * ones, ones, marked)
        value, reported = algorithm.surrogate(inputs, config)
        value.sum().backward()
        found[algorithm.name] = value.tolist()[0], logprobs.grad.tolist()[0], next(iter(reported.items()))
    value, slope, (name, share) = found["clip_cov"]
    assert (value, slope, name, share.tolist()) == ([0, 6, 0, 0], [0, 6, 0, 0], "clip_ratio", [[1, 0, 1, 1]])
    value, slope, (name, share) = found["kl_cov"]
    assert value == pytest.approx([6 - math.log(2) / 2, 6, 1.5 - math.log(2) / 2, 3])
    assert slope == pytest.approx([6 - 0.5, 6, 1.5 + 0.5, 3])
    assert (name, share.tolist()) == ("held_ratio", marked.tolist())


@given(st.lists(st.tuples(st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=30), st.floats(0.01, 1))
def test_marks_are_as_many_as_asked_for_and_none_is_passed_over(tokens, share):
    logprobs, advantages = torch.tensor([tokens], dtype=torch.float64).unbind(-1)
    ones = torch.ones_like(logprobs)
    inputs = KL_COV.inputs(logprobs, logprobs, advantages, ones)
    found, asked = covariances(inputs), max(int(share * len(tokens)), 1)
    assert float(found.sum()) == pytest.approx(
        float((logprobs * advantages).sum() - logprobs.sum() * advantages.mean()), abs=1e-6
    )
    held = marks_of(KL_COV, KlCovConfig(kl_cov_ratio=share), logprobs, logprobs, advantages, ones).bool()
    assert held.sum() == asked
    if (~held).any():
        assert found[held].min() >= found[~held].max()
    config = ClipCovConfig(clip_cov_ratio=share, clip_cov_lb=-1.0, clip_cov_ub=1.0)
    taken = marks_of(CLIP_COV, config, logprobs, logprobs, advantages, ones).bool()
    between = (found > -1) & (found < 1)
    assert taken.sum() == min(asked, int(between.sum()))
    assert not (taken & ~between).any()


# GMPO and the row's mean


def test_gmpo_clips_a_token_before_the_mean_and_lets_the_others_of_its_row_go_on():
    # Log-ratios 0.8 and 0 have the mean 0.4, or 0.2 if 0.8 counts as 0.4; a bad row keeps 0.8, and loses -0.8.
    log_ratio = torch.tensor([[0.8, 0.0], [0.8, 0.0], [-0.8, 0.0], [-0.8, 0.0]]).double().requires_grad_()
    advantages = torch.tensor([[2.0, 2.0], [-2.0, -2.0], [2.0, 2.0], [-2.0, -2.0]]).double()
    value, reported = objective(GMPO, log_ratio, advantages)
    means = torch.tensor([0.2, 0.4, -0.4, -0.2]).double().exp()
    torch.testing.assert_close(value.detach(), means[:, None] * advantages)
    assert reported["clip_ratio"].tolist() == [[1, 0], [0, 0], [0, 0], [1, 0]]
    value.sum().backward()
    lets_through = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    torch.testing.assert_close(log_ratio.grad, lets_through * means[:, None] * advantages)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.sampled_from([1.0, -1.0]))
def test_gmpo_s_ratio_is_bounded_on_the_side_that_would_be_pushed_further(distances, advantage):
    value, _ = objective(GMPO, torch.tensor([distances]).double(), torch.full((1, len(distances)), advantage).double())
    ratio = value / advantage
    assert (ratio <= math.exp(0.4) + 1e-9).all() if advantage > 0 else (ratio >= math.exp(-0.4) - 1e-9).all()


# On policy


def one_advantage_a_row(algorithm, advantages, mask):
    """A row that has one ratio has one advantage: that is all it can be pushed by."""
    return advantages[:, :1].expand_as(mask) if algorithm in (RLOO, GMPO) else advantages


@every
@settings(max_examples=EXAMPLES)
@given(
    rows=st.lists(st.lists(TOKENS, min_size=4, max_size=4), min_size=1, max_size=3),
    loss_reduction=st.sampled_from(REDUCED),
)
def test_on_policy_loss_has_reinforce_s_gradient_whatever_the_reduction(algorithm, rows, loss_reduction):
    logprobs, advantages, mask = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    advantages = one_advantage_a_row(algorithm, advantages, mask)
    # Clip-Cov takes some tokens out, on policy too.
    config = ClipCovConfig(clip_cov_lb=1e3, clip_cov_ub=1e4) if algorithm is CLIP_COV else None
    _, gradient = loss_and_gradient(algorithm, logprobs, logprobs, advantages, mask, loss_reduction, config)
    weights = reduction(loss_reduction)(mask, Totals(tokens=int(mask.sum()), rows=len(mask), horizon=8), None)
    torch.testing.assert_close(gradient, -weights * advantages)


def test_cispo_whose_bounds_leave_1_out_is_not_reinforce():
    assert gradient_at(CISPO, 1.0, 1.0, CispoConfig(ratio_min=1.5))[1] == pytest.approx(1.5)


@every
@settings(max_examples=EXAMPLES)
@given(
    rows=st.lists(
        st.lists(NEAR, min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
)
def test_float32_stays_close_to_float64_while_log_ratios_are_at_most_1(algorithm, rows):
    logprobs, distance, advantages = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    # Made in float32 first, so that both see the same numbers.
    single = [tensor.float() for tensor in (logprobs, logprobs - distance, advantages)]
    double = [tensor.double() for tensor in single]
    # A ratio that lies on a bound may fall to either side of it.
    config = _off_the_bounds(algorithm)
    mask = torch.ones_like(logprobs)
    _, found = loss_and_gradient(algorithm, *single, mask.float(), "sequence_mean", config)
    _, wanted = loss_and_gradient(algorithm, *double, mask, "sequence_mean", config)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()) + 1e-12)


def _off_the_bounds(algorithm):
    """Return settings whose clips lie past every ratio that is tried."""
    if algorithm in (DPPO_TV, DPPO_KL):
        return algorithm.Config(delta_low=1e3, delta_high=1e3)
    if algorithm is GMPO:
        return GmpoConfig(log_clip_low=2.0, log_clip_high=2.0)
    if issubclass(algorithm.Config, ClipConfig):
        return algorithm.Config(eps_clip_low=1.0, eps_clip_high=1e4)
    return None


@every
@settings(max_examples=EXAMPLES)
@given(
    rows=st.lists(
        st.lists(FAR, min_size=4, max_size=4),
        min_size=2,
        max_size=6,
    ),
    cuts=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    loss_reduction=st.sampled_from(REDUCED),
)
def test_however_a_batch_is_cut_the_gradient_is_the_same(algorithm, rows, cuts, loss_reduction):
    logprobs, distance, advantages, mask = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    totals = Totals(tokens=int(mask.sum()), rows=len(mask), horizon=8)
    config = MANY_MARKED.get(algorithm.name) or algorithm.Config()
    marked = marks_of(algorithm, config, logprobs, logprobs - distance, advantages, mask)

    def gradient_of(chosen):
        given = logprobs[chosen].requires_grad_()
        inputs = algorithm.inputs(
            given, (logprobs - distance)[chosen], advantages[chosen], mask[chosen],
            None if marked is None else marked[chosen],
        )  # fmt: skip
        value, _ = algorithm.surrogate(inputs, config)
        (value * reduction(loss_reduction)(mask[chosen], totals, None)).sum().backward()
        return given.grad

    whole = gradient_of(list(range(len(rows))))
    for cut in set(cuts[: len(rows)]):
        chosen = [row for row in range(len(rows)) if cuts[row] == cut]
        torch.testing.assert_close(gradient_of(chosen), whole[chosen], rtol=1e-9, atol=1e-12)


@every
def test_the_order_of_rows_means_nothing(algorithm):
    torch.manual_seed(0)
    logprobs, old, advantages = -torch.rand(5, 4), -torch.rand(5, 4), torch.randn(5, 4)
    mask = torch.ones(5, 4)
    order = torch.tensor([3, 1, 4, 0, 2])
    loss, gradient = loss_and_gradient(algorithm, logprobs, old, advantages, mask)
    same, moved = loss_and_gradient(algorithm, logprobs[order], old[order], advantages[order], mask)
    torch.testing.assert_close(same, loss)
    torch.testing.assert_close(moved, gradient[order])


# Log-ratios and what is masked


def test_a_log_ratio_is_the_difference_on_trained_tokens_and_0_elsewhere():
    found = token_log_ratio(
        torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, -9.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    )
    torch.testing.assert_close(found, torch.tensor([[0.5, -1.0, 0.0]]))


def test_a_log_ratio_past_the_limit_is_bounded_and_carries_no_gradient():
    logprobs = torch.tensor([[0.0, -90.0, -1.0]], requires_grad=True)
    found = token_log_ratio(logprobs, torch.tensor([[-90.0, 0.0, -2.0]]), torch.ones(1, 3))
    torch.testing.assert_close(found.detach(), torch.tensor([[LOG_RATIO_LIMIT, -LOG_RATIO_LIMIT, 1.0]]))
    found.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 1.0]]
    assert torch.isfinite(found.exp()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_huge_ratio_behind_the_mask_reaches_neither_value_nor_gradient(dtype):
    logprobs = torch.tensor([[0.0, 99.0]], dtype=dtype, requires_grad=True)
    ratio = token_log_ratio(logprobs, torch.zeros(1, 2, dtype=dtype), torch.tensor([[1.0, 0.0]])).exp()
    ratio[:, 0].sum().backward()
    assert ratio.tolist() == [[1.0, 1.0]]
    assert logprobs.grad.tolist() == [[1.0, 0.0]]


@every
def test_a_missing_log_prob_behind_the_mask_leaves_a_finite_loss(algorithm):
    mask = torch.tensor([[1.0, 0.0]])
    loss, gradient = loss_and_gradient(algorithm, torch.zeros(1, 2), torch.tensor([[0.0, NAN]]), mask, mask)
    assert torch.isfinite(loss)
    assert gradient.tolist() == [[-1.0, 0.0]]


@every
@settings(max_examples=EXAMPLES)
@given(
    garbage=st.lists(st.sampled_from([NAN, INF, -INF, 99.0, -99.0, 1e30]), min_size=9, max_size=9),
    loss_reduction=st.sampled_from(REDUCED),
)
def test_what_stands_behind_the_mask_changes_nothing(algorithm, garbage, loss_reduction):
    clean = torch.tensor([
        [[-1.0, -2.0, -0.5], [-1.5, 0.0, 0.0]],  # logprobs
        [[-1.1, -1.0, -0.6], [-1.0, 0.0, 0.0]],  # old logprobs
        [[0.5, 0.5, 0.5], [-2.0, 0.0, 0.0]],  # advantages
    ])  # fmt: skip
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    dirty = clean.clone()
    dirty[:, ~mask.bool()] = torch.tensor(garbage).reshape(3, 3)
    loss, gradient = loss_and_gradient(algorithm, *clean, mask, loss_reduction)
    same_loss, same_gradient = loss_and_gradient(algorithm, *dirty, mask, loss_reduction)
    assert torch.equal(same_loss, loss)
    assert torch.equal(same_gradient, gradient)
    assert gradient[~mask.bool()].tolist() == [0.0, 0.0, 0.0]


@every
@pytest.mark.parametrize("loss_reduction", REDUCED)
def test_padding_on_the_right_changes_nothing(algorithm, loss_reduction):
    rows = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    narrow = (rows, rows - 0.1, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    wide = [torch.nn.functional.pad(tensor, (0, 3)) for tensor in narrow]
    loss, gradient = loss_and_gradient(algorithm, *narrow, loss_reduction)
    same_loss, same_gradient = loss_and_gradient(algorithm, *wide, loss_reduction)
    torch.testing.assert_close(same_loss, loss)
    torch.testing.assert_close(same_gradient[:, :2], gradient)
    assert same_gradient[:, 2:].abs().sum() == 0
