"""What a lag changes of the defaults; docs/offpolicy.md has the measurements that these were chosen by.

The algorithm stays the published surrogate, with the policy that an update starts from as the old one. A lag weighs
each token by how much likelier that policy makes it than the one that sampled, ends a batch's optimizer steps at a KL
bound, and pulls the policy back to the one that sampled. What somebody set holds, and at lag 0 nothing is changed.
"""

from nanoskyrl.stages.core.config import Settings, merge, stage_config

TARGET_KL = 0.02
"""Nats a token that the updates between sampling and training may add up to: half of what M2PO (arXiv 2510.01161)
allows the mean squared log-ratio, 0.04. A lag of L puts L + 1 updates there, so each gets its part."""
KL_COEF = 0.1
"""Of the pull to the policy that sampled."""


def of_lag(settings: Settings) -> Settings:
    """Return the defaults that a run's lag changes, without those that are set.

    Args:
        settings: Tables, merged.
    """
    run = stage_config(settings, "run")
    if not (run.lag and run.lag_defaults):
        return {}
    defaults: Settings = {
        "train": {"target_kl": float(f"{TARGET_KL / (1 + run.lag):.2g}")},
        "off_policy": {"kl_coef": KL_COEF},
    }
    unweighted = settings.get("off_policy", {}).get("weight") == "none"
    if not unweighted and settings.get("advantage", {}).get("old_logprobs") != "rollout":
        # Recomputed log-probs without weights are worse than neither: whoever wants one of them off has both off.
        defaults = merge(defaults, {"off_policy": {"weight": "token"}, "advantage": {"old_logprobs": "recompute"}})
    found = {
        table: {key: value for key, value in keys.items() if settings.get(table, {}).get(key) is None}
        for table, keys in defaults.items()
    }
    return {table: keys for table, keys in found.items() if keys}


def described(defaults: Settings) -> str:
    """Return the defaults in one line, as they are set by hand."""
    return " ".join(f"{table}.{key}={value}" for table, keys in defaults.items() for key, value in keys.items())
