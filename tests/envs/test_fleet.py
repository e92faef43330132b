"""`fleet`: Fleet's task pattern on a real MCP server, started on standard streams and on loopback."""

import gc
import inspect
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from nasty import TEXTS, actions, check_answered

pytest.importorskip("mcp", reason="the extra `fleet` is not installed")

from nanoskyrl.envs.base import check_observation
from nanoskyrl.envs.outside.fleet import Fleet, FleetConfig, read_task_configs
from nanoskyrl.envs.outside.fleet_task import CloudBackend, LocalBackend, make_fleet_task_env
from nanoskyrl.envs.outside.mcp_session import McpSession
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.rollout import rollout
from nanoskyrl.stages.score import ScoreConfig, score

SERVER = Path(__file__).parent.parent / "mcp_server.py"
COMMAND = (sys.executable, str(SERVER))
VERIFIER = "def verify(state):\n    return 1.0 if state.get('a') == 'hello' else 0.25 * len(state)\n"
WRITE = '<tool_call>{"tool": "write_note", "args": {"name": "a", "text": "hello"}}</tool_call>'
FLEETS = '<tool_call>{"name": "write_note", "arguments": {"name": "b", "text": "x"}}</tool_call>'


def config(**changes):
    return {
        "task_key": "note-1", "prompt": "Write hello into note a.", "env_key": "notes", "verifier_code": VERIFIER,
        "task_modality": "tool_use", **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def env(server):
    made = []

    def make(max_steps=50, **changes):
        made.append(make_fleet_task_env(config(**changes), backend=LocalBackend(url=server), max_steps=max_steps))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_shape_of_fleets_task_env(env):
    task = env()
    first = task.reset(seed=3)
    assert {key: first[key] for key in ("prompt", "observation", "step", "task_key", "modality")} == {
        "prompt": "Write hello into note a.", "observation": {}, "step": 0, "task_key": "note-1",
        "modality": "tool_use",
    }  # fmt: skip
    assert [tool["function"]["name"] for tool in first["tools"]] == ["write_note", "read_note", "die", "wait"]
    seen, reward, done, info = task.step({"tool": "write_note", "params": {"name": "a", "text": "hello"}})
    assert (seen["observation"], reward, done, info["tool_result"]) == ("wrote a", 0.0, False, "wrote a")
    seen, reward, done, info = task.step({"tool": "read_note", "params": {"name": "z"}})
    assert "no note z" in seen["observation"]["error"]
    assert "no note z" in info["tool_error"]
    seen, reward, done, info = task.step({"done": True})
    assert (reward, done, info["done_reason"], task.final_reward) == (1.0, True, "agent_done", 1.0)
    with pytest.raises(RuntimeError, match="over"):
        task.step({"done": True})


def test_an_orphaned_episode_is_verified_when_it_is_closed(env):
    task = env()
    task.reset()
    task.step({"tool": "write_note", "params": {"name": "b", "text": "x"}})
    task.close()
    assert task.final_reward == 0.25
    task.close()
    with pytest.raises(RuntimeError, match="closed"):
        task.reset()


def test_an_instance_that_nobody_closes_goes_with_its_environment(server):
    task = make_fleet_task_env(config(), backend=LocalBackend(url=server))
    task.reset()
    session = vars(task._instance)["_session"]
    assert session.list_tools()
    del task
    gc.collect()
    with pytest.raises(ConnectionError, match="ended"):
        session.list_tools()


def test_the_limit_of_steps_ends_and_verifies(env):
    task = env(max_steps=2)
    task.reset()
    task.step({})
    assert task.step({})[1:3] == (0.0, True)
    assert task.final_reward == 0.0


def test_instances_do_not_share_their_state(env):
    one, two = env(), env()
    one.reset()
    two.reset()
    one.step({"tool": "write_note", "params": {"name": "a", "text": "hello"}})
    assert two.step({"done": True})[1] == 0.0
    assert one.step({"done": True})[1] == 1.0


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def verify(state):\n    raise ValueError('no idea')", "no idea"),
        ("def check(state):\n    return 1.0", "verify"),
        ("def verify(state):\n    return None", "returned None"),
        pytest.param("def verify(state):\n    while True:\n        pass", "failed", marks=pytest.mark.slow),
        ("def verify(state): return (", "failed"),
    ],
)
def test_a_verifier_that_fails_is_no_zero(env, code, says):
    task = env(verifier_code=code)
    task.reset()
    with pytest.raises(RuntimeError, match=says):
        task.step({"done": True})
    assert task.final_reward is None
    task.final_reward = -1.0  # so that closing does not ask it again


def episode_of(server, tmp_path, **settings):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"tasks": [config()]}))
    environment = Fleet(FleetConfig(data=str(path), backend="local", url=server, **settings))
    episode = environment.start()
    observation = episode.reset(environment.tasks("train")[0], 0)
    check_observation(observation)
    return environment, episode, observation


def test_a_conversation_calls_tools_and_ends_where_the_policy_says(server, tmp_path, make_trajectory):
    environment, episode, first = episode_of(server, tmp_path)
    assert "<done>" in first.messages[0]["content"]
    assert "computer" not in [tool["function"]["name"] for tool in first.tools]
    step = episode.step(f"I write. {WRITE}{FLEETS}")
    assert [message["content"] for message in step.messages] == ["wrote a", "wrote b"]
    assert (step.done, step.reward) == (False, None)
    step = episode.step("<think>am I <done>?</think>Let me see.")
    assert (step.done, step.tool_calls[0].error) == (False, "malformed")
    step = episode.step('<tool_call>{"tool": "write_note", "args": {"name": "c", "text": "<done>"}}</tool_call>')
    assert not step.done
    step = episode.step("All is well. <done>")
    assert (step.done, step.reward, step.truncated, step.metadata) == (True, 1.0, False, {"final_reward": 1.0})
    assert episode.close() == {"final_reward": 1.0}
    verdict = environment.score(make_trajectory(metadata=step.metadata))
    assert (verdict.reward, verdict.success, verdict.parts) == (1.0, True, {"verifier": 1.0})
    assert environment.score(make_trajectory(metadata={"final_reward": None})).reward is None


def test_mistakes_in_calls_come_back_by_kind(server, tmp_path):
    _, episode, _ = episode_of(server, tmp_path)
    for text, kind in (
        ('<tool_call>{"tool": "fly", "args": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"tool": "computer", "args": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"tool": "read_note", "args": {"nam": "a"}}</tool_call>', "bad_arguments"),
        ('<tool_call>{"tool": "read_note", "args": {"name": "zz"}}</tool_call>', "tool_error"),
        ('<tool_call>{"tool": "read_note"', "malformed"),
        ('<tool_call>{"tool": "read_note", "args": []}</tool_call>', "bad_arguments"),
    ):
        step = episode.step(text)
        assert step.observation.startswith("error: ")
        assert (step.tool_calls[0].error, step.done) == (kind, False)
    step = episode.step(WRITE * 20)
    assert [call.error for call in step.tool_calls] == [None] * 16 + ["too_many_calls"]
    assert "only 16 are carried out" in step.observation
    episode.close()


def test_no_text_raises(server, tmp_path):
    _, episode, _ = episode_of(server, tmp_path, max_steps=10**6)
    for text in actions():
        step = episode.step(text)
        check_answered(step)
        assert step.tool_calls, text[:80]
        assert any(call.error for call in step.tool_calls), text[:80]
        if "think>" in text:  # what comes before it would be reasoning, the call's tag included
            continue
        arguments = json.dumps({"tool": "write_note", "args": {"name": "n", "text": text[:1000]}})
        step = episode.step(f"<tool_call>{arguments}</tool_call>")
        assert step.tool_calls[0].ok, text[:20]
    episode.close()


def test_no_text_that_is_drawn_raises(server, tmp_path):
    _, episode, _ = episode_of(server, tmp_path, max_steps=10**6)

    @settings(max_examples=50)
    @given(TEXTS.filter(lambda text: "<done>" not in text))
    def anything(text):
        step = episode.step(text)
        check_answered(step)
        assert any(call.error for call in step.tool_calls)

    anything()
    episode.close()


def test_through_the_loop_every_end_is_told_apart(server, tmp_path):
    tasks = [config(task_key=f"t{i}") for i in range(5)]
    tasks[0]["solution"] = [WRITE, "<done>"]
    tasks[1]["solution"] = [FLEETS, WRITE]  # cut off by max_turns, with everything done
    tasks[2]["solution"] = [FLEETS, "<done>"]
    tasks[3]["solution"] = [WRITE, "<done>"]
    tasks[3]["verifier_code"] = "def verify(state): raise ValueError('broken')"
    tasks[4]["solution"] = [WRITE] * 2  # cut off by the environment's own limit
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, tasks)))
    settings = {"fleet": {"data": str(path), "backend": "local", "url": server, "max_steps": 2}}
    config_of = RolloutConfig(
        env="fleet", engine="scripted", tasks=tuple(t["task_key"] for t in tasks), n_samples_per_prompt=1, max_turns=2
    )
    written = rollout(None, tmp_path / "rollout", config_of, settings=settings)
    assert "url" not in written.settings["fleet"]
    scored = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig())
    rows = [row for table in read_parts(tmp_path / "score", scored) for row in from_table(table)]
    assert [(row.status, row.reward, row.success) for row in rows] == [
        ("completed", 1.0, True), ("max_turns", 1.0, True), ("completed", 0.25, False), ("failed", None, None),
        ("max_turns", 1.0, True),
    ]  # fmt: skip
    assert "broken" in rows[3].error
    assert score(tmp_path / "rollout", tmp_path / "again", ScoreConfig()).digest == scored.digest


def test_an_episode_that_only_the_turn_loop_cuts_off_is_judged_as_it_left_things(server, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(config(solution=[WRITE])))
    settings = {"fleet": {"data": str(path), "backend": "local", "url": server}}
    rollout(None, tmp_path / "rollout", RolloutConfig(
        env="fleet", engine="scripted", train_batch_size=1, n_samples_per_prompt=1, max_turns=1), settings=settings,
    )  # fmt: skip
    scored = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig())
    (row,) = [row for table in read_parts(tmp_path / "score", scored) for row in from_table(table)]
    assert (row.status, row.turns[0].done, row.reward) == ("max_turns", False, 1.0)


def test_many_threads_can_begin_a_session_at_once(server):
    code = f"""
import sys, threading
sys.setswitchinterval(1e-6)
from nanoskyrl.envs.outside.mcp_session import McpSession
found, begin = [], threading.Barrier(16)
def work():
    begin.wait()
    session = McpSession(url={server!r}, timeout_seconds=120)
    found.append(len(session.list_tools()))
    session.close()
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert found == [5] * 16, found
assert [thread.name for thread in threading.enumerate()].count("mcp") == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_of_ones_own_is_started_for_each_episode_and_may_die():
    session = McpSession(command=COMMAND)
    assert session.call_tool("write_note", {"name": "a", "text": "b"}).text == "wrote a"
    with pytest.raises(Exception, match="closed"):
        session.call_tool("die", {})
    session.close()
    session.close()
    with pytest.raises(ConnectionError, match="ended"):
        session.list_tools()


def test_a_server_that_does_not_answer_in_time_raises():
    session = McpSession(command=COMMAND, timeout_seconds=120)
    session._timeout = 0.5  # its start has its own time
    with pytest.raises(TimeoutError, match=r"0\.5 seconds"):
        session.call_tool("wait", {"seconds": 20})
    session.close()


def test_a_server_that_is_not_there_raises():
    with pytest.raises(Exception):  # noqa: B017, PT011 - the client's own kinds
        McpSession(url="http://127.0.0.1:9/mcp", timeout_seconds=120)
    with pytest.raises(FileNotFoundError):
        McpSession(command=["no-such-program"], timeout_seconds=120)


def test_settings_that_cannot_be_meant_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([config()]))
    with pytest.raises(SettingsError, match=r"`fleet.data` is not set"):
        Fleet(FleetConfig()).tasks("train")
    with pytest.raises(SettingsError, match="API key") as caught:
        Fleet(FleetConfig(data=str(path))).tasks("train")
    assert "FLEET_API_KEY" in str(caught.value.hint)
    with pytest.raises(SettingsError, match="one server"):
        Fleet(FleetConfig(data=str(path), backend="local")).tasks("train")
    with pytest.raises(SettingsError, match=r"`fleet.backend`"):
        FleetConfig(backend="cloud")
    with pytest.raises(SettingsError, match=r"`fleet.max_steps`"):
        FleetConfig(max_steps=0)
    with pytest.raises(SettingsError, match="computer_use"):
        make_fleet_task_env(config(task_modality="computer_use"), backend=LocalBackend(command=COMMAND))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"), ("[]", "no tasks"), ('{"tasks": 3}', "no tasks"), ("[1]", "task 0 .* no `task_key`"),
        (json.dumps([config(), config(task_key=1)]), "task 1 .* no `task_key`"),
        (json.dumps([config(prompt=None)]), "no `prompt`"),
        (json.dumps([config(verifier_code="")]), "no verifier"),
        (json.dumps([config(), config()]), "task 1 .* has the key `note-1` again"),
    ],
)  # fmt: skip
def test_task_files_that_cannot_be_used_are_one_clear_error(tmp_path, text, says):
    path = tmp_path / "tasks.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        read_task_configs(str(path))
    with pytest.raises(InputError, match="no file of Fleet tasks"):
        read_task_configs(str(tmp_path / "absent.json"))


def test_the_vendors_client_has_what_the_cloud_backend_asks_of_it():
    """There is no instance to be had here: the published interface is compared, and nothing is sent."""
    fleet = pytest.importorskip("fleet", reason="the vendor's client `fleet-python` is not installed")
    from fleet.tasks import Task

    wanted = {"env_key", "data_key", "env_variables", "ttl_seconds"}
    assert wanted <= set(inspect.signature(fleet.Fleet.make).parameters)
    assert "api_key" in inspect.signature(fleet.Fleet.__init__).parameters
    assert {"key", "prompt", "env_id", "verifier_func"} <= set(Task.model_fields)
    assert "env" in inspect.signature(Task.verify_detailed).parameters
    assert CloudBackend(api_key="k").ttl_seconds == 600
