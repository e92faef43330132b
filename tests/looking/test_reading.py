"""What a run's numbers are said to mean."""

import pytest
from looked_at import told_run

from nanoskyrl.stages.looking.reading import remarks
from nanoskyrl.stages.looking.step_numbers import outliers, step_numbers


def said(run):
    return [remark.text for remark in remarks(*step_numbers(run))]


def test_a_kl_of_232_between_thousandths_stands_out_and_two_in_a_row_both():
    assert outliers("kl", [0.001, 0.003, 232.0, 0.008, 0.002]) == [False, False, True, False, False]
    assert outliers("kl", [0.001, 0.003, 232.0, 240.0, 0.002, 0.001, 0.002]) == [
        *[False] * 2,
        *[True] * 2,
        *[False] * 3,
    ]


def test_what_learns_or_is_noisy_by_nature_does_not_stand_out():
    assert not any(outliers("success", [0.5, 0.75, 0.85, 0.9, 0.88, 0.95]))
    assert not any(outliers("entropy", [0.152, 0.088, 0.059, 0.039, 0.034, 0.022, 0.018]))
    assert not any(outliers("kl", [0.0088, 0.0011, 0.0037, 0.0005, 0.0033, 0.0004]))
    assert not any(outliers("kl", [None, None, None]))


def test_a_collapse_between_good_steps_stands_out():
    assert outliers("success", [0.8, 0.82, 0.2, 0.81, 0.83]) == [False, False, True, False, False]


def test_a_stall_without_signal_is_explained_by_it(tmp_path):
    run = told_run(tmp_path, success=[0.2, 0.3, *[0.5] * 12], signal=[1.0, 0.8, *[0.1] * 12])
    texts = said(run)
    assert texts[0].startswith("It stalls: success went from 0.2 to 0.5")
    assert any("10% of the groups have signal, where it began with 100%" in text for text in texts)
    assert any("either always solved or never" in text for text in texts)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"success": [0.05] * 12, "signal": [0.1] * 12}, "easier tasks"),
        ({"success": [0.97] * 12, "signal": [0.9, *[0.1] * 11]}, "harder tasks"),
        ({"success": [0.5] * 12, "cut": [0.0, *[0.6] * 11]}, "60% of the attempts are cut off"),
        ({"success": [0.5] * 12, "failed": [0.1, *[0.5] * 11]}, "50% of the tool calls fail"),
        ({"success": [0.5] * 12, "entropy": [1.0, *[0.01] * 11]}, "entropy fell from 1 to 0.01"),
        ({"success": [0.5] * 12, "tokens": [100.0, *[300.0] * 11]}, "attempts grew from 100 to 300"),
        ({"success": [0.5] * 12, "kl": [*[0.002] * 6, 232.0, *[0.002] * 5]}, "stands out: 232 at step 6"),
        ({"success": [0.9, *[0.8] * 6, *[0.4] * 5]}, "It gets worse"),
    ],
)
def test_each_cause_of_a_stall_is_named_with_its_numbers(tmp_path, numbers, says):
    assert any(says in text for text in said(told_run(tmp_path, **numbers)))


def test_a_run_that_learns_gets_no_excuses(tmp_path):
    texts = said(told_run(tmp_path, success=[0.1 * step for step in range(10)], signal=[0.9] * 10))
    assert len(texts) == 1
    assert texts[0].startswith("It learns")


def test_of_a_few_steps_nothing_is_said(tmp_path):
    assert said(told_run(tmp_path, success=[0.1, 0.2])) == []
