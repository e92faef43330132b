"""What a lag changes of the defaults; docs/offpolicy.md has the measurements that these were chosen by.

The algorithm stays the published surrogate: a lag changes how rows are weighed and left out, what ratios are taken
against, and when a batch's optimizer steps end. What somebody set holds, and at lag 0 nothing is changed.
"""

from nanoskyrl.stages.core.config import Settings, stage_config


def of_lag(settings: Settings) -> Settings:
    """Return the defaults that a run's lag changes, without those that are set.

    Args:
        settings: Tables, merged.
    """
    run = stage_config(settings, "run")
    if not (run.lag and run.lag_defaults):
        return {}
    defaults: Settings = {"train": {"target_kl": 0.02}}
    found = {
        table: {key: value for key, value in keys.items() if key not in settings.get(table, {})}
        for table, keys in defaults.items()
    }
    return {table: keys for table, keys in found.items() if keys}


def described(defaults: Settings) -> str:
    """Return the defaults in one line, as they are set by hand."""
    return " ".join(f"{table}.{key}={_word(value)}" for table, keys in defaults.items() for key, value in keys.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
