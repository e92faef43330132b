"""What a lag changes of the defaults; docs/offpolicy.md has the measurements that these were chosen by.

The algorithm stays the published surrogate. A lag ends a batch's optimizer steps at a KL bound, and pulls the policy
back to the one that sampled. What somebody set holds, and at lag 0 nothing is changed.
"""

from nanoskyrl.stages.core.config import Settings, stage_config

TARGET_KL = 0.02
"""Nats a token: half of what M2PO (arXiv 2510.01161) allows the mean squared log-ratio, 0.04."""
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
    defaults: Settings = {"train": {"target_kl": TARGET_KL}, "off_policy": {"kl_coef": KL_COEF}}
    found = {
        table: {key: value for key, value in keys.items() if key not in settings.get(table, {})}
        for table, keys in defaults.items()
    }
    return {table: keys for table, keys in found.items() if keys}


def described(defaults: Settings) -> str:
    """Return the defaults in one line, as they are set by hand."""
    return " ".join(f"{table}.{key}={value}" for table, keys in defaults.items() for key, value in keys.items())
