"""GAE: a critic's values against what came of them, whitened over the batch; arXiv 1506.02438. PPO's estimator."""

from nanoskyrl.algos.estimators.base import Batch, Estimates, Estimator, EstimatorConfig, token_rewards
from nanoskyrl.algos.estimators.returns import gae, whiten
from nanoskyrl.stages.core.errors import SettingsError


def whitened_gae(batch: Batch, config: EstimatorConfig) -> Estimates:
    """Return whitened generalised advantages, and the returns that the critic is to predict.

    Raises:
        SettingsError: a trajectory has a reward and no values.
    """
    if any(reward is not None and value is None for reward, value in zip(batch.rewards, batch.values, strict=True)):
        raise SettingsError("`gae` needs the values of a critic", hint="Run `skyrl advantage --algo ppo`")
    raw, returns = gae(token_rewards(batch), batch.values, batch.masks, gamma=config.gamma, lambd=config.lambd)
    return Estimates(whiten(raw, batch.masks, ddof=config.whiten_ddof), returns)


GAE = Estimator(name="gae", estimate=whitened_gae, needs_values=True, by_token=True)
