"""Inputs and outputs of verl, SkyRL, TRL and OpenRLHF, against our functions under each one's conventions.

Every result is a test of its own. One that cannot be expressed here is skipped with its reason, so that `pytest -rs`
lists by name what was not compared.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from nanoskyrl.algos.advantages import ZERO_SPREAD, group_normalized
from nanoskyrl.algos.aggregate import Totals, reduction
from nanoskyrl.algos.base import SurrogateInputs
from nanoskyrl.algos.grpo import GRPO, GrpoConfig
from nanoskyrl.algos.ratios import LOG_RATIO_LIMIT, token_log_ratio
from nanoskyrl.algos.sapo import SAPO, SapoConfig

ROOT = Path(__file__).resolve().parents[2]
PLACES = [Path(place) for place in (os.environ.get("NANOSKYRL_GOLDEN"), ROOT.parent / "shared" / "golden") if place]
GOLDEN = next((place for place in PLACES if place.is_dir()), None)
if GOLDEN is None:
    pytest.skip(f"no golden vectors at {' or '.join(map(str, PLACES))}", allow_module_level=True)

ADVANTAGES, AGGREGATION = ("adv_grpo", "adv_dr_grpo"), ("aggregation",)
CLIPPED, GATED = ("grpo", "ppo_clip", "dapo", "dr_grpo"), ("sapo",)
COMPARED = (*ADVANTAGES, *AGGREGATION, *CLIPPED, *GATED)

# Ours by the vectors' names, with the horizon and rows that make it the same sum.
REDUCTIONS = {
    "token_mean": ("token_mean", {}),
    "seq_mean_token_mean": ("sequence_mean", {}),
    "seq_mean_token_sum_norm": ("seq_mean_token_sum_norm", {}),
    "seq_mean_token_sum": ("seq_mean_token_sum_norm", {"horizon": 1}),
    "token_sum": ("seq_mean_token_sum_norm", {"horizon": 1, "rows": 1}),
}
PARAMS = {"ratio_level", "eps_low", "eps_high", "dual_clip_c", "agg", "horizon", "tau_pos", "tau_neg"}
PARAMS |= {"divide_by_std", "std_ddof"}
CONVENTIONS = {"log_ratio_clamp", "empty_row", "empty_batch", "eps", "singleton"}


def results(names):
    """Return (case, result) of every result in these files, named `case.package`, numbered where a package has two."""
    found = []
    for name in names:
        path = GOLDEN / f"{name}.json"
        if not path.is_file():
            found.append(pytest.param(None, None, marks=pytest.mark.skip(f"no {path}"), id=name))
            continue
        for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
            for index, result in enumerate(case["results"]):
                found.append(pytest.param(case, result, id=f"{case['id']}.{result['package']}.{index}"))
    return pytest.mark.parametrize(("case", "result"), found)


def tensor(values):
    """Return float64, whatever the vectors were made in: a peer's rounding is in its tolerance, ours adds none."""
    if isinstance(values, list):
        return torch.stack([tensor(value) for value in values]) if values else torch.zeros(0, dtype=torch.float64)
    return torch.tensor(float(values), dtype=torch.float64)  # float() reads "nan" and "inf"


def skip_unless_offered(case, result):
    """Skip, saying why, what our functions do not do."""
    if not result["comparable"]:
        pytest.skip("rounding noise of the package, not a target")
    for known, given in ((PARAMS, case["params"]), (CONVENTIONS, result["convention"])):
        unknown = {name: value for name, value in given.items() if name not in known and value is not None}
        if unknown:
            pytest.skip(f"not offered: {unknown}")
    params = case["params"]
    if params.get("dual_clip_c") is not None:
        pytest.skip("not offered: dual clip")
    if params.get("ratio_level", "token") != "token":
        pytest.skip(f"not offered: ratio of a {params['ratio_level']}")
    if params.get("agg", "token_mean") not in REDUCTIONS:
        pytest.skip(f"not offered: reduction {params['agg']}")
    if params.get("std_ddof", 1) != 1:
        pytest.skip("not offered: standard deviation without Bessel's correction")
    if result["outputs"].get("loss") == "nan":
        pytest.skip("not offered: NaN as the loss of an empty batch, ours is 0")


def weights(case, result, mask):
    params, rows = case["params"], len(mask)
    if result["convention"].get("empty_row") == "excluded":
        rows = int((mask.sum(-1) > 0).sum())
    name, divisors = REDUCTIONS[params["agg"]]
    totals = {"tokens": int(mask.sum()), "rows": rows, "horizon": params.get("horizon"), **divisors}
    return reduction(name)(mask, Totals(**totals))


def assert_agrees(result, name, found, mask=None):
    wanted = tensor(result["outputs"][name])
    if mask is not None:
        found, wanted = found[mask], wanted[mask]
    torch.testing.assert_close(
        found, wanted, rtol=result["rtol"], atol=result["atol"], msg=lambda text: f"{name}: {text}"
    )


@results((*CLIPPED, *GATED))
def test_a_loss_agrees(case, result):
    skip_unless_offered(case, result)
    inputs, params = case["inputs"], case["params"]
    mask = tensor(inputs["mask"])
    logprobs, old_logprobs = tensor(inputs["log_prob"]).requires_grad_(), tensor(inputs["old_log_prob"])
    on = mask.bool()
    largest = (logprobs.detach() - old_logprobs)[on].abs().max() if on.any() else 0
    guard = result["convention"].get("log_ratio_clamp")
    if largest > min(LOG_RATIO_LIMIT, guard or LOG_RATIO_LIMIT) and guard != LOG_RATIO_LIMIT:
        pytest.skip(f"not offered: log-ratio guard {guard}, ours is {LOG_RATIO_LIMIT}")
    if "tau_pos" in params:
        algorithm, config = SAPO, SapoConfig(tau_pos=params["tau_pos"], tau_neg=params["tau_neg"])
    else:
        algorithm, config = GRPO, GrpoConfig(eps_clip_low=params["eps_low"], eps_clip_high=params["eps_high"])
    log_ratio = token_log_ratio(logprobs, old_logprobs, mask)
    objective, _ = algorithm.surrogate(SurrogateInputs(log_ratio, tensor(inputs["advantage"]), mask), config)
    loss = -(objective.masked_fill(~on, 0.0) * weights(case, result, mask)).sum()
    loss.backward()
    assert_agrees(result, "loss", loss.detach())
    assert_agrees(result, "grad_log_prob", logprobs.grad, on)


@results(AGGREGATION)
def test_a_reduction_agrees(case, result):
    skip_unless_offered(case, result)
    mask, losses = tensor(case["inputs"]["mask"]), tensor(case["inputs"]["loss_matrix"]).requires_grad_()
    on = mask.bool()
    loss = (losses.masked_fill(~on, 0.0) * weights(case, result, mask)).sum()
    loss.backward()
    assert_agrees(result, "loss", loss.detach())
    assert_agrees(result, "grad_loss_matrix", losses.grad, on)


@results(ADVANTAGES)
def test_an_advantage_agrees(case, result):
    skip_unless_offered(case, result)
    inputs, convention = case["inputs"], result["convention"]
    rewards = [float(reward) for reward in inputs["reward"]]
    members = {group: [row for row, g in enumerate(inputs["group"]) if g == group] for group in inputs["group"]}
    found, mask, left_out = [0.0] * len(rewards), tensor(inputs["mask"]).bool(), set()
    for rows in members.values():
        of_group = [rewards[row] for row in rows]
        if len(rows) == 1 and convention.get("singleton") != "zero":
            left_out.add(f"groups of one ({convention.get('singleton')})")
            mask[rows] = False
        if 0 < max(of_group) - min(of_group) <= ZERO_SPREAD:
            left_out.add(f"groups with a spread below {ZERO_SPREAD}, which get 0 here")
            mask[rows] = False
        values = group_normalized(of_group, eps=convention["eps"], divide_by_std=case["params"]["divide_by_std"])
        for row, value in zip(rows, values, strict=True):
            found[row] = value
    assert_agrees(result, "advantage", tensor(found)[:, None].expand(mask.shape), mask)
    if left_out:
        pytest.skip(f"all agrees but what is not offered: {', '.join(sorted(left_out))}")


def test_files_that_are_not_compared_are_named():
    others = sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem not in COMPARED)
    if others:
        pytest.skip(f"not implemented: {', '.join(others)}")
