"""Inputs and outputs of verl, SkyRL, TRL and OpenRLHF, against our functions under each one's conventions.

Every result is a test of its own. Where a package does something that ours does not offer, because it is wrong, the
inputs are changed so that ours must come to the same number: a mask that is ignored becomes a mask of ones.
"""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from nanoskyrl.algos.aggregate import Totals, reduction
from nanoskyrl.algos.estimators import base as estimators
from nanoskyrl.algos.estimators.batch_std import BATCH_STD
from nanoskyrl.algos.estimators.maxrl import mean_normalized
from nanoskyrl.algos.estimators.returns import discounted_returns, gae, whiten
from nanoskyrl.algos.estimators.rloo import leave_one_out
from nanoskyrl.algos.kl import adapted, kl
from nanoskyrl.algos.off_policy import OffPolicyConfig, correction, mean_weight, negative_rows_gone
from nanoskyrl.algos.shaping import has_spread, is_overlong, overlong_punishment
from nanoskyrl.algos.surrogates.cispo import CISPO, CispoConfig
from nanoskyrl.algos.surrogates.clip import ClipConfig
from nanoskyrl.algos.surrogates.cov import CLIP_COV, KL_COV, ClipCovConfig, KlCovConfig
from nanoskyrl.algos.surrogates.dppo import DPPO_KL, DPPO_TV, DppoKlConfig, DppoTvConfig
from nanoskyrl.algos.surrogates.gmpo import GMPO, GmpoConfig
from nanoskyrl.algos.surrogates.gspo import GSPO, GspoConfig
from nanoskyrl.algos.surrogates.ppo import PPO
from nanoskyrl.algos.surrogates.reinforce import REINFORCE, ReinforceConfig
from nanoskyrl.algos.surrogates.rloo import RLOO, RlooConfig
from nanoskyrl.algos.surrogates.sapo import SAPO, SapoConfig
from nanoskyrl.algos.surrogates.value_loss import value_loss
from nanoskyrl.stages.core.metrics import grouped

GOLDEN = Path(os.environ.get("NANOSKYRL_GOLDEN") or Path(__file__).resolve().parents[1] / "golden")

KINDS = (
    "policy_loss", "advantage", "value_loss", "kl_penalty", "kl_in_reward", "aggregation", "overlong_reward",
    "overlong_filter", "dynamic_sampling", "kl_controller",
)  # fmt: skip
REDUCTIONS = {
    "token_mean": "token_mean",
    "token_sum": "seq_mean_token_sum",  # with one row in the denominator
    "seq_mean_token_mean": "sequence_mean",
    "seq_mean_token_sum": "seq_mean_token_sum",
    "seq_mean_token_sum_norm": "seq_mean_token_sum_norm",
    "prompt_mean": "prompt_mean",
    "mean_over_sequences": "seq_mean_token_sum",  # of an objective that is spread over its row
}
UNBOUNDED = float("inf")


def files():
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*.json"))]


def results(kind):
    """Return (file's algorithm, case, result) of every result of a kind, named by case and package."""
    found = [
        pytest.param(file["algorithm"], case, result, id=f"{case['id']}.{result['package']}.{index}")
        for file in files()
        if file["kind"] == kind
        for case in file["cases"]
        for index, result in enumerate(case["results"])
    ]
    return pytest.mark.parametrize(("algorithm", "case", "result"), found)


def tensor(values):
    """Return float64, whatever the vectors were made in: a peer's rounding is in its tolerance, ours adds none."""
    if isinstance(values, list):
        return torch.stack([tensor(value) for value in values]) if values else torch.zeros(0, dtype=torch.float64)
    return torch.tensor(float(values), dtype=torch.float64)  # float() reads "nan" and "inf"


def arrays(values):
    return [np.array([float(value) for value in row]) for row in values]


def rectangle(rows):
    """Return arrays of one length as a tensor, None as zeros."""
    width = max(len(row) for row in rows if row is not None)
    return torch.tensor(np.array([np.zeros(width) if row is None else row for row in rows]))


def assert_agrees(result, name, found, mask=None):
    wanted = tensor(result["outputs"][name])
    if mask is not None:
        found, wanted = found.expand_as(wanted)[mask], wanted[mask]
    torch.testing.assert_close(
        found, wanted, rtol=result["rtol"], atol=result["atol"], msg=lambda text: f"{name}: {text}"
    )


def is_target(result):
    """Say whether a result is a target at all; some are rounding noise of their package."""
    return result.get("comparable", True)


def totals_of(params, mask, empty_row, groups=None):
    """Return what the reductions divide by, and the tokens of each row's prompt."""
    rows = int((mask.sum(-1) > 0).sum()) if empty_row == "excluded" else len(mask)
    rows = 1 if params.get("agg") == "token_sum" else rows
    tokens_of = None
    if groups is not None:
        totals = {group: sum(mask[i].sum() for i, g in enumerate(groups) if g == group) for group in groups}
        tokens_of = torch.stack([totals[group] for group in groups])
    return Totals(int(mask.sum()), rows, params.get("horizon"), len(set(groups or ()))), tokens_of


def weights_of(params, mask, counted, empty_row, groups=None):
    """Return the weights of a reduction over `mask`, divided by what `counted` holds."""
    name = REDUCTIONS[params.get("agg", "token_mean")]
    if params.get("ratio_level") == "sequence_geometric_mean_of_clipped":
        name = "sequence_mean"  # our objective stands whole on each token of its row
    totals, tokens_of = totals_of(params, counted, empty_row, groups)
    return reduction(name)(mask, totals, tokens_of)


# Losses of the policy


def algorithm_of(params, convention, tokens):
    """Return our algorithm and its settings for what a case with so many trained tokens describes."""
    clip = {"eps_clip_low": params.get("eps_low", 0.2), "eps_clip_high": params.get("eps_high", 0.2)}
    clip["clip_ratio_c"] = params.get("dual_clip_c")
    level = params.get("ratio_level", "token")
    if "tau_pos" in params:
        return SAPO, SapoConfig(tau_pos=params["tau_pos"], tau_neg=params["tau_neg"])
    if "ratio_max" in params:
        return CISPO, CispoConfig(ratio_min=params.get("ratio_min") or 0.0, ratio_max=params["ratio_max"])
    if "keep_high" in params:
        return CISPO, CispoConfig(ratio_min=params["keep_low"], ratio_max=params["keep_high"], outside="drop")
    if "clip_cov_ratio" in params:
        scale = tokens if "divided_by_token_count" in convention["cov_on"] else 1
        lb, ub = (params[name] * scale for name in ("clip_cov_lb", "clip_cov_ub"))
        share = params["clip_cov_ratio"]
        return CLIP_COV, ClipCovConfig(**clip, clip_cov_ratio=share, clip_cov_lb=lb, clip_cov_ub=ub)
    if "kl_cov_frac" in params:
        coef = params["ppo_kl_coef"] * (1 if convention["kl_term_scaled_by_agg"] else tokens)
        return KL_COV, KlCovConfig(kl_cov_ratio=params["kl_cov_frac"], ppo_kl_coef=coef)
    if "divergence" in params:
        bounds = {"delta_low": params["delta_low"], "delta_high": params["delta_high"]}
        if params["divergence"] == "binary_kl":
            return DPPO_KL, DppoKlConfig(**bounds)
        return DPPO_TV, DppoTvConfig(**bounds)
    if level == "sequence_geometric_mean_of_clipped":
        return GMPO, GmpoConfig(log_clip_low=params["log_eps_low"], log_clip_high=params["log_eps_high"])
    if level == "none":
        return REINFORCE, ReinforceConfig()
    if level == "sequence_geometric_mean":
        form = convention.get("gradient", "gspo_token").removeprefix("gspo_")
        return GSPO, GspoConfig(**clip, form=form)
    if level == "sequence_product":
        return RLOO, RlooConfig(**clip, log_ratio_max=convention.get("log_ratio_clamp"))
    assert level == "token", f"what is a ratio of a {level}?"
    return PPO, ClipConfig(**clip)


def is_normalised(params):
    """Say whether a case divides weights by their mean, whatever it calls that."""
    return any("normal" in f"{name} {value}".lower() and value for name, value in params.items())


def correction_of(params, convention, old, rollout, mask):
    """Return our weights and the tokens kept, under what a case describes."""
    weight = {"sequence_product": "sequence"}.get(params.get("weight", "none"), params.get("weight", "none"))
    cap = params.get("cap") or UNBOUNDED
    reject = params.get("reject", "none").removeprefix("sequence_").removesuffix("_mean")
    band = params.get("band")
    reject_band = band if reject != "none" else None
    if reject_band and convention.get("band_on") == "1/ratio":
        reject_band = [1 / reject_band[1], 1 / reject_band[0]]
    if reject != "none":
        weight = {"one": "none", "token_ratio": "token", "sequence_product": "sequence"}[
            convention.get("weight_on_kept", "one")
        ]
    config = OffPolicyConfig(
        weight=weight, cap=cap, reject=reject,
        band=tuple(band) if band and reject == "none" else None,
        reject_band=tuple(reject_band) if reject_band else None,
    )  # fmt: skip
    weights, kept = correction(old, rollout, mask, config, limit=convention.get("log_ratio_clamp"))
    if is_normalised(params):
        weights = weights / mean_weight(weights, mask)
    return weights, kept


def loss_of(case, result, logprobs, rows):
    """Return the share of some rows in the loss of the whole batch, and what else was computed of them."""
    inputs, params, convention = case["inputs"], case["params"], result["convention"]
    whole = tensor(inputs["mask"])
    old, advantages = tensor(inputs["old_log_prob"]), tensor(inputs["advantage"])
    rollout = tensor(inputs["rollout_log_prob"]) if "rollout_log_prob" in inputs else None
    if "rollout_log_prob" in str(params.get("ratio_of", "")):
        old, rollout = rollout, None
    weights, kept = torch.ones_like(whole), whole
    if rollout is not None:
        weights, kept = correction_of(params, convention, old, rollout, whole)
    counted = kept if convention.get("denominator") == "kept_tokens" else whole
    algorithm, config = algorithm_of(params, convention, int(whole.sum()))
    mask = whole[rows]
    limit = convention.get("log_ratio_clamp")
    inputs_of = type(algorithm).inputs
    guarded = algorithm if algorithm.log_ratio_limit == limit else _with_limit(algorithm, limit)
    marked = marks_of(guarded, config, logprobs, old, advantages, whole)
    seen = inputs_of(guarded, logprobs[rows], old[rows], advantages[rows], mask, marked[rows])
    objective, _ = algorithm.surrogate(seen, config)
    if str(convention.get("surrogate", "")).endswith("log_prob"):  # which has another value, and no other slope
        objective = objective + objective.detach() * (seen.logprobs.detach() - 1)
    outside = params.get("band") is not None and "reject" not in params
    found = {"weight": weights, "kept_mask": kept * (weights != 0) if outside else kept}
    if "kl_threshold" in params:
        keep = negative_rows_gone(logprobs, old, advantages, whole, params["kl_threshold"])
        weights, found["sequence_keep"] = weights * keep, keep[:, 0]
    reduce = weights_of(params, mask, counted, convention.get("empty_row"), inputs.get("group"))
    loss = -((objective * weights[rows]).masked_fill(~mask.bool(), 0.0) * reduce).sum()
    if "kl_coef" in params:
        ref = tensor(inputs["ref_log_prob"])[rows]
        term = kl(
            logprobs[rows], ref, mask, params["kl_estimator"],
            log_limit=convention.get("kl_log_clamp"), value_limit=convention.get("kl_value_clamp"),
        )  # fmt: skip
        if convention.get("kl_times_ratio"):
            term = term * seen.log_ratio.exp()
        agg = convention.get("kl_agg", "same_as_policy")
        kl_params = params if agg == "same_as_policy" else {**params, "agg": agg}
        found["kl_term"] = (term * weights_of(kl_params, mask, whole, convention.get("empty_row"))).sum()
        loss = loss + params["kl_coef"] * found["kl_term"]
    return loss, found


def marks_of(algorithm, config, logprobs, old, advantages, mask):
    """Return the marks of a whole batch."""
    found = torch.zeros_like(mask)
    if algorithm.marks is not None:
        on = mask.bool()
        flat = algorithm.inputs(*(of.detach()[on][None] for of in (logprobs, old, advantages, mask)))
        found[on] = algorithm.marks(flat, config, np.random.default_rng(0))[0]
    return found


def _with_limit(algorithm, limit):
    import dataclasses

    return dataclasses.replace(algorithm, log_ratio_limit=limit)


@results("policy_loss")
def test_a_loss_agrees(algorithm, case, result):
    mask = tensor(case["inputs"]["mask"])
    on = mask.bool()
    logprobs = tensor(case["inputs"]["log_prob"]).requires_grad_()
    loss, found = loss_of(case, result, logprobs, slice(None))
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad[~on].eq(0).all()
    if not is_target(result):
        return
    if result["outputs"]["loss"] == "nan":  # ours is 0, and gradients are no target
        assert loss == 0
        assert logprobs.grad.eq(0).all()
        return
    assert_agrees(result, "loss", loss.detach())
    assert_agrees(result, "grad_log_prob", logprobs.grad, on)
    for name in ("weight", "kept_mask"):
        if name in result["outputs"]:
            assert_agrees(result, name, found[name], on)
    for name in ("kl_term", "sequence_keep"):
        if name in result["outputs"]:
            wanted = tensor(result["outputs"][name])
            assert_agrees(result, name, found[name].detach().reshape(wanted.shape))


@results("policy_loss")
def test_a_loss_is_the_sum_of_its_micro_batches(algorithm, case, result):
    logprobs = tensor(case["inputs"]["log_prob"]).requires_grad_()
    loss, _ = loss_of(case, result, logprobs, slice(None))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    halves = [slice(0, len(logprobs) // 2), slice(len(logprobs) // 2, None)]
    parts = [loss_of(case, result, logprobs, rows)[0] for rows in halves]
    torch.testing.assert_close(sum(parts), loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), logprobs)[0], gradient, rtol=1e-9, atol=1e-12)


@results("aggregation")
def test_a_reduction_agrees(algorithm, case, result):
    mask, losses = tensor(case["inputs"]["mask"]), tensor(case["inputs"]["loss_matrix"]).requires_grad_()
    on = mask.bool()
    reduce = weights_of(case["params"], mask, mask, result["convention"].get("empty_row"), case["inputs"].get("group"))
    loss = (losses.masked_fill(~on, 0.0) * reduce).sum()
    loss.backward()
    if result["outputs"]["loss"] == "nan":
        assert loss == 0
        return
    assert_agrees(result, "loss", loss.detach())
    assert_agrees(result, "grad_loss_matrix", losses.grad, on)


@results("value_loss")
def test_a_value_loss_agrees(algorithm, case, result):
    inputs, params, convention = case["inputs"], case["params"], result["convention"]
    mask = tensor(inputs["mask"])
    on = mask.bool()
    values = tensor(inputs["new_value"]).requires_grad_()
    losses, clipped = value_loss(values, tensor(inputs["old_value"]), tensor(inputs["ret"]), mask, params["value_clip"])
    reduce = weights_of({"agg": convention.get("agg", "token_mean")}, mask, mask, convention.get("empty_row"))
    loss = (losses * reduce).sum() * params.get("factor", 0.5) / 0.5
    loss.backward()
    if result["outputs"]["loss"] == "nan":
        assert loss == 0
        return
    assert_agrees(result, "loss", loss.detach())
    assert_agrees(result, "grad_new_value", values.grad, on)
    if "clip_fraction" in result["outputs"]:
        assert_agrees(result, "clip_fraction", (clipped * mask).sum() / mask.sum())


@results("kl_penalty")
def test_a_kl_estimate_agrees(algorithm, case, result):
    inputs, convention = case["inputs"], result["convention"]
    mask = tensor(inputs["mask"])
    on = mask.bool()
    logprobs = tensor(inputs["log_prob"]).requires_grad_()
    gradient = convention.get("gradient", "own")
    found = kl(
        logprobs, tensor(inputs["ref_log_prob"]), mask, case["params"]["estimator"], straight_through=gradient != "own",
        log_limit=convention.get("log_clamp"), value_limit=convention.get("value_clamp"),
    )  # fmt: skip
    total = found.sum()
    if gradient.startswith("ratio"):  # "ratio(capped at 10, detached) * k2"
        ratio = (logprobs.detach() - tensor(inputs["old_log_prob"])).masked_fill(~on, 0.0).exp().clamp(max=10)
        total = (found * ratio).sum()
    total.backward()
    assert_agrees(result, "kl", found.detach(), on)
    assert_agrees(result, "grad_log_prob_of_masked_sum", logprobs.grad, on)


@results("kl_in_reward")
def test_a_penalised_reward_agrees(algorithm, case, result):
    inputs, params = case["inputs"], case["params"]
    mask = tensor(inputs["mask"])
    penalty = kl(
        tensor(inputs["old_log_prob"]), tensor(inputs["ref_log_prob"]), mask, params["estimator"],
        value_limit=result["convention"].get("value_clamp"),
    )  # fmt: skip
    batch = estimators.Batch(
        groups=[str(i) for i in range(len(mask))], rewards=[float(reward) for reward in inputs["reward"]],
        masks=list(mask.numpy()), penalties=list((params["beta"] * penalty).numpy()), values=[None] * len(mask),
    )  # fmt: skip
    assert_agrees(result, "kl", penalty, mask.bool())
    assert_agrees(result, "token_level_reward", rectangle(estimators.token_rewards(batch)), mask.bool())


@results("kl_controller")
def test_an_adaptive_coefficient_agrees(algorithm, case, result):
    params, coef, found = case["params"], case["params"]["init"], []
    for measured, count in case["inputs"]["kl_and_count"]:
        coef = adapted(coef, measured, count, target=params["target"], horizon=params["horizon"])
        found.append(coef)
    assert_agrees(result, "coefficient_after_each_update", tensor(found))


# Advantages


def groups_of(inputs):
    return [str(group) for group in inputs["group"]]


def by_group(inputs, of_group):
    rewards = [float(reward) for reward in inputs["reward"]]
    mask = tensor(inputs["mask"])
    batch = estimators.Batch(
        groups=groups_of(inputs), rewards=rewards, masks=list(mask.numpy()), penalties=[None] * len(mask),
        values=[None] * len(mask),
    )  # fmt: skip
    return estimators.on_tokens(batch, estimators.by_group(batch, of_group))


def as_they_see_them(inputs, convention):
    """Return rewards, masks and, for a mask that is reset in holes, the pieces that rows fall into.

    Ours skips what is not trained. Others run through it, and the mask that makes ours do so is all ones.
    """
    rewards, masks = arrays(inputs["token_level_reward"]), arrays(inputs["mask"])
    how = convention.get("masked_positions", "skipped")
    if how.startswith(("skipped", "carried")):
        return rewards, masks
    ones = [np.ones(len(mask)) for mask in masks]
    if "ignored" in how:
        return rewards, ones
    if "multiplied" in how or "zeroed" in how:
        return [reward * mask for reward, mask in zip(rewards, masks, strict=True)], ones
    raise AssertionError(f"what is done with masked positions: {how}?")


def in_pieces(rewards, masks, gamma):
    """Return returns that begin anew before each hole of the mask."""
    found = []
    for reward, mask in zip(rewards, masks, strict=True):
        line = np.zeros(len(mask))
        for piece in np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1):
            line[piece] = discounted_returns([reward[piece]], [mask[piece]], gamma=gamma)[0]
        found.append(line)
    return found


@results("advantage")
def test_an_advantage_agrees(algorithm, case, result):
    inputs, params, convention = case["inputs"], case["params"], result["convention"]
    masks = arrays(inputs["mask"])
    on = tensor(inputs["mask"]).bool()
    raw = "raw" if str(convention.get("singleton", "")).startswith("raw") else "zero"
    ddof = {"ddof": params["std_ddof"]} if "std_ddof" in params else {}
    whiten_ddof = convention.get("whiten_ddof", 1)
    returns, unwhitened = None, None
    if algorithm in ("adv_grpo", "adv_dr_grpo"):
        divide, eps = params["divide_by_std"], convention["eps"]

        def of_group(rewards):
            if len(rewards) == 1 and raw == "raw" and divide:
                return [rewards[0] / (1 + eps)]  # mean 0 and deviation 1, by their rule
            # Peers have no tolerance: only where ours calls rewards equal that differ, it is left out.
            apart = max(rewards) - min(rewards) > 0 and not estimators.has_spread(rewards)
            exact = {"tolerance": 0} if apart else {}
            return estimators.group_normalized(rewards, eps=eps, divide_by_std=divide, singleton=raw, **ddof, **exact)

        found = by_group(inputs, of_group)
    elif algorithm == "adv_batch_std":
        config = estimators.EstimatorConfig(eps=convention["eps"], std_ddof=params.get("std_ddof", 1))
        batch = estimators.Batch(
            groups=groups_of(inputs), rewards=[float(r) for r in inputs["reward"]], masks=masks,
            penalties=[None] * len(masks), values=[None] * len(masks),
        )  # fmt: skip
        found = BATCH_STD.estimate(batch, config).advantages
    elif algorithm == "adv_maxrl":
        found = by_group(inputs, lambda rewards: mean_normalized(rewards, eps=convention["eps"], singleton=raw))
    elif algorithm == "adv_rloo":
        found = by_group(inputs, lambda rewards: leave_one_out(rewards, singleton=raw))
    elif algorithm == "adv_reinforce_pp_baseline":
        centred = by_group(
            inputs, lambda rewards: estimators.group_normalized(rewards, divide_by_std=False, singleton=raw)
        )
        found = whiten(centred, masks, ddof=whiten_ddof)
    elif algorithm == "adv_reinforce_pp":
        if "reset" in convention["masked_positions"]:
            returns = in_pieces(arrays(inputs["token_level_reward"]), masks, params["gamma"])
        else:
            returns = discounted_returns(*as_they_see_them(inputs, convention), gamma=params["gamma"])
        found = whiten(returns, masks, ddof=whiten_ddof)
    else:
        assert algorithm == "adv_gae", f"what is {algorithm}?"
        rewards, ones = as_they_see_them(inputs, convention)
        values = arrays(inputs["value"])
        if "multiplied" in convention["masked_positions"]:
            values = [value * mask for value, mask in zip(values, masks, strict=True)]
        unwhitened, returns = gae(rewards, values, ones, gamma=params["gamma"], lambd=params["lam"])
        found = whiten(unwhitened, masks, ddof=whiten_ddof)
        if "none" in str(convention.get("whiten", "")):
            found = unwhitened
    assert all(row is None or np.isfinite(row).all() for row in found)
    if not is_target(result):
        return
    for name, rows in (("advantage", found), ("return", returns), ("raw_advantage", unwhitened)):
        if name in result["outputs"] and rows is not None:
            assert_agrees(result, name, rectangle(rows), on)


# Shaping


@results("overlong_reward")
def test_an_overlong_punishment_agrees(algorithm, case, result):
    params, above = case["params"], result["convention"].get("above_max", "-factor")
    found = []
    for length in case["inputs"]["length"]:
        value = overlong_punishment(
            length, max_length=params["max_length"], buffer_length=params["buffer"], factor=params["factor"]
        )
        if "growing" in above and length > params["max_length"]:
            value = (params["max_length"] - params["buffer"] - length) / params["buffer"] * params["factor"]
        if above == "-1" and length > params["max_length"]:
            value = -1.0
        found.append(value)
    assert_agrees(result, "penalty", tensor(found))


@results("overlong_filter")
def test_an_overlong_filter_agrees(algorithm, case, result):
    inputs = case["inputs"]
    assert "stop_reason" in result["convention"].get("truncated_when", "stop_reason")
    for mask, reason, wanted in zip(inputs["mask_rows"], inputs["stop_reason"], result["outputs"]["mask"], strict=True):
        assert [0] * len(mask) == wanted if is_overlong(reason) else mask == wanted


@results("dynamic_sampling")
def test_the_groups_that_are_kept_agree(algorithm, case, result):
    inputs, rule = case["inputs"], result["convention"].get("rule", "")
    assert "std" in rule or "max - min" in rule, f"what is the rule {rule}?"
    groups = groups_of(inputs)
    tolerance = float(result["convention"].get("tol", 0) or 0)
    members = grouped(zip(groups, map(float, inputs["reward"]), strict=True))
    kept = [group for group, rewards in members.items() if len(rewards) < 2 or has_spread(rewards, tolerance)]
    assert sorted(kept) == sorted(str(group) for group in result["outputs"]["kept_groups"])
    if "kept_rows" in result["outputs"]:
        rows = [index for index, group in enumerate(groups) if group in kept]
        assert rows == [int(row) for row in result["outputs"]["kept_rows"]]


def test_every_kind_is_compared():
    unknown = [file["algorithm"] for file in files() if file["kind"] not in KINDS]
    assert not unknown, f"kinds that are not compared: {unknown}"


def test_the_vectors_hold_what_is_compared():
    assert {file["kind"] for file in files()} == set(KINDS), f"no vectors of every kind in {GOLDEN}"
    assert not any(math.isnan(result["rtol"]) for file in files() for c in file["cases"] for result in c["results"])
