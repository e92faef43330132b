"""`skyrl filter`."""

from nanoskyrl_cli.own_stage import command

filter_rows = command(
    "filter",
    """Drop trajectories between score and advantage, by expressions over their columns.

    Example: skyrl filter --set 'filter.drop={too_long = "completion_tokens > 400"}'
    """,
)
