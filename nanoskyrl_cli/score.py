"""`skyrl score`."""

from nanoskyrl_cli.options import (
    ConfigOption,
    ForceOption,
    JsonOption,
    OutOption,
    RewardOption,
    RunOption,
    SetOption,
    SourceArgument,
    make,
    open_session,
    path,
    weights,
)


def score(
    rollout: SourceArgument = None,
    reward: RewardOption = None,
    run: RunOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> int:
    """Give every trajectory its reward, or say why it has none.

    Example: skyrl score
    """
    session = open_session(run, config, assignments, {"score": {"rewards": weights(reward) if reward else None}})
    return make(session, "score", as_json, source=path(rollout), output=path(out), force=force)
