"""The learning curve in the terminal."""

import pytest

from nanoskyrl.stages.core.metrics import MetricsLog
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.looking.curve import curve


@pytest.mark.parametrize(("success", "plotted"), [([0.2, 0.4, 0.9], "success"), ([None, None, None], "reward")])
def test_rewards_that_say_nothing_of_success_are_plotted_themselves(tmp_path, success, plotted):
    run = Run(tmp_path)
    for step, (share, reward) in enumerate(zip(success, [0.5, 1.5, 2.5], strict=True)):
        MetricsLog(run.metrics, step).write("score", {"reward/success": share, "reward/avg_raw_reward": reward})
    assert f"sampled {plotted} of training tasks, by step" in curve(run)
    assert ("2.5" in curve(run)) == (plotted == "reward")


def test_a_run_that_scored_nothing_says_so(tmp_path):
    run = Run(tmp_path)
    MetricsLog(run.metrics, 0).write("rollout", {"rollout/rows": 4})
    assert curve(run) == f"no finished step in {tmp_path}"
