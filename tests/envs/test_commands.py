"""Which action is in what a policy wrote."""

import pytest

from nanoskyrl.envs.commands import action_of, command_of, record


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("<action>go to desk 1</action>", "go to desk 1"),
        ("I will look.\n<action>\n  go  to\tdesk 1\n</action> Done.", "go to desk 1"),
        ("<action>look</action><action>inventory</action>", "inventory"),
        ("<answer>2</answer>", "2"),
        ("<answer><action>2</action></answer>", "2"),
        ("<think>maybe <action>look</action></think><action>help</action>", "help"),
        ("<think>maybe <action>look</action>", ""),
        ("of course</think>\nlook", "look"),
        ("First this.\nThen\n\nopen fridge 1\n\n", "open fridge 1"),
        ("<action>look", "<action>look"),
        ("<action>go</answer>", "<action>go</answer>"),
        ("<action></action>", ""),
        ("", ""),
    ],
)
def test_the_last_action_outside_reasoning_counts(text, command):
    assert command_of(text) == command


def test_an_action_keeps_its_lines_where_they_matter():
    assert action_of("<action>\nfor i in x:\n    print(i)\n</action>") == "for i in x:\n    print(i)"
    assert action_of("line 1\nline 2\n") == "line 1\nline 2"


def test_a_megabyte_is_read_in_one_go_and_its_record_is_short():
    text = "<action>" * 100_000 + "x" * 1_000_000
    call = record("", command_of(text), "Nothing happens.", "malformed")
    assert len(call.args["command"]) == 500
    assert (call.tool, call.ok) == (None, False)
