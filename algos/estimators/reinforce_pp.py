"""REINFORCE++: returns whitened over the batch, or rewards less their group's mean; arXiv 2501.03262."""

from nanoskyrl.algos.estimators.base import (
    Batch,
    Estimates,
    Estimator,
    EstimatorConfig,
    centred,
    on_tokens,
    token_rewards,
)
from nanoskyrl.algos.estimators.returns import discounted_returns, whiten


def whitened_returns(batch: Batch, config: EstimatorConfig) -> Estimates:
    """Return discounted returns, whitened; and as they are."""
    returns = discounted_returns(token_rewards(batch), batch.masks, gamma=config.gamma)
    return Estimates(whiten(returns, batch.masks, ddof=config.whiten_ddof), returns)


def whitened_differences(batch: Batch, config: EstimatorConfig) -> Estimates:
    """Return each reward less its group's mean, on every token, whitened."""
    return Estimates(whiten(on_tokens(batch, centred(batch, config)), batch.masks, ddof=config.whiten_ddof))


REINFORCE_PP = Estimator(name="reinforce_pp", estimate=whitened_returns, by_token=True)
REINFORCE_PP_BASELINE = Estimator(name="reinforce_pp_baseline", estimate=whitened_differences)
