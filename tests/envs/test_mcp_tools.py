"""Tools of MCP servers in `tool_use`, against a real server."""

import shlex
import sys

import pytest

pytest.importorskip("mcp")

from mcp.shared.exceptions import McpError
from running import ROOT

from nanoskyrl.envs.base import Task
from nanoskyrl.envs.worlds.tool_use.environment import ToolUse, ToolUseConfig
from nanoskyrl.stages.core.errors import SettingsError

SERVER = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'tests' / 'mcp_server.py'))}"
TASK = Task(task_id="t", split="train", prompt="Note it.", ground_truth="x")


def call(tool, **args):
    import json

    return f"<tool_call>{json.dumps({'name': tool, 'arguments': args})}</tool_call>"


@pytest.fixture(scope="module")
def environment():
    return ToolUse(ToolUseConfig(mcp=(SERVER,), tools=("calculator",), n_train=1, mcp_timeout_seconds=120))


def test_a_server_s_tools_are_offered_beside_the_others_and_episodes_share_nothing(environment):
    environment.tasks("train")
    first, second = environment.start(), environment.start()
    try:
        offered = [tool["function"]["name"] for tool in first.reset(TASK, 0).tools]
        assert offered[:1] == ["calculator"]
        assert {"write_note", "read_note"} < set(offered)
        second.reset(TASK, 0)
        step = first.step(call("write_note", name="a", text="one") + call("calculator", expression="2 * 3"))
        assert [record.result for record in step.tool_calls] == ["wrote a", "6"]
        (read,) = first.step(call("read_note", name="a")).tool_calls
        assert (read.ok, read.result) == (True, "one")
        (read,) = second.step(call("read_note", name="a")).tool_calls
        assert (read.ok, read.error) == (False, "tool_error")
        (wrong,) = second.step(call("read_note")).tool_calls
        assert wrong.error == "tool_error"
        assert "name" in wrong.result
        with pytest.raises((ConnectionError, McpError)):  # the attempt fails: that is no mistake of the policy
            second.step(call("die"))
    finally:
        first.close()
        second.close()


def test_a_server_that_does_not_start_is_named_before_anything_is_attempted():
    with pytest.raises(SettingsError, match=r"the MCP server `no-such-program` in `tool_use\.mcp` cannot be used"):
        ToolUse(ToolUseConfig(mcp=("no-such-program",), n_train=1)).tasks("train")


def test_two_tools_of_one_name_are_refused(monkeypatch, environment):
    monkeypatch.setitem(environment.tools, "read_note", environment.tools["calculator"])
    with pytest.raises(SettingsError, match="has a tool `read_note`, which is offered already"):
        environment.start().reset(TASK, 0)
