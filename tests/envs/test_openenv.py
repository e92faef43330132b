"""`openenv` against a real OpenEnv server on loopback."""

import importlib.util
import json

import pytest
from endpoints import served
from hypothesis import given, settings
from nasty import TEXTS, actions, check_answered
from running import skyrl_here

from nanoskyrl.envs.base import check_observation
from nanoskyrl.envs.outside.openenv import OpenEnv, OpenEnvConfig
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.core.trajectory import Turn
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.rollout import rollout
from nanoskyrl.stages.score import ScoreConfig, score

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="the extra `openenv` is not installed"
)


@pytest.fixture(scope="module")
def server():
    """Return a server's address; it runs in a thread, for openenv takes 5 seconds to import."""
    import openenv_server

    with served(openenv_server.APP) as address:
        yield address
        openenv_server.OVER.set()


def begun(server, kind="guess", task=7, **settings):
    environment = OpenEnv(OpenEnvConfig(url=f"{server}/{kind}", **settings))
    episode = environment.start()
    observation = episode.reset(environment.tasks("train")[task], 0)
    check_observation(observation)
    return episode, observation.messages[0]["content"]


def test_an_episode_over_the_wire(server):
    episode, first = begun(server, instruction="Guess the digit.")
    assert first == "Guess the digit.\n\nWrite one action at a time in <action></action> tags.\n\nsay a digit (seed)"
    step = episode.step("<action>3</action>")
    assert (step.observation, step.reward, step.done) == ("not 3", 0.0, False)
    step = episode.step("7")
    assert (step.observation, step.reward, step.done, step.truncated) == ("yes", 1.0, True, False)
    episode.close()
    episode.close()


def test_a_limit_of_the_servers_is_told_from_an_end(server):
    episode, _ = begun(server)
    steps = [episode.step("0") for _ in range(3)]
    assert [(step.done, step.truncated) for step in steps] == [(False, False), (False, False), (True, True)]
    episode.close()


def test_actions_of_several_fields_are_json_and_mistakes_are_answered(server):
    episode, first = begun(server, "move")
    assert '"required": ["x"]' in first
    assert "metadata" not in first
    assert first.endswith('{"at": [0, 0], "note": ""}')
    for text, kind in (
        ('{"x": 1', "malformed"), ("[1]", "malformed"), ('{"y": 1}', "bad_arguments"),
        ('{"x": "north"}', "bad_arguments"), ('{"x": 1, "z": 1}', "bad_arguments"), ("[" * 100_000, "malformed"),
    ):  # fmt: skip
        step = episode.step(text)
        assert step.observation.startswith("error: ")
        assert (step.done, step.reward, step.tool_calls[0].error) == (False, None, kind)
    step = episode.step('I go. <action>{"x": 3, "y": 4}</action>')
    assert (step.done, step.reward) == (True, None)
    assert step.observation == '{"at": [3, 4], "note": ""}'
    episode.close()
    episode, first = begun(server, "move", observation_field="at")
    assert first.endswith("[0, 0]")
    episode.close()


def test_sessions_do_not_mix(server):
    one, two = begun(server, task=1)[0], begun(server, task=2)[0]
    assert two.step("1").reward == 0.0
    assert one.step("1").reward == 1.0
    one.close()
    two.close()


def test_no_text_raises(server):
    for kind in ("guess", "move"):
        episode, _ = begun(server, kind)
        for text in actions():
            step = episode.step(text)
            check_answered(step)
            if kind == "move":  # "guess" takes any text
                assert step.tool_calls[0].error in ("malformed", "bad_arguments"), text[:80]
            if step.done:
                episode.close()
                episode, _ = begun(server, kind)
        episode.close()


@pytest.mark.parametrize("kind", ["guess", "move"])
def test_no_text_that_is_drawn_raises(server, kind):
    episode, _ = begun(server, kind)

    @settings(max_examples=50)
    @given(TEXTS.filter(lambda text: "crash" not in text and "hang" not in text))
    def anything(text):
        nonlocal episode
        step = episode.step(text)
        check_answered(step)
        if step.done:
            episode.close()
            episode, _ = begun(server, kind)

    anything()
    episode.close()


def test_tasks_can_be_the_servers_own(server):
    environment = OpenEnv(OpenEnvConfig(url=f"{server}/guess", task_api="world", n_train=3))
    assert [task.task_id for task in environment.tasks("train")] == ["train-0", "train-1", "train-2"]
    assert len(environment.tasks("test")) == 2
    episode = environment.start()
    assert "say a digit (test)" in episode.reset(environment.tasks("test")[1], 0).messages[0]["content"]
    assert episode.step("1").done
    episode.close()


def test_the_reward_is_the_sum_and_silence_is_no_verdict(make_trajectory):
    environment = OpenEnv(OpenEnvConfig(success_at=1.5))

    def judged(*rewards, status="completed"):
        turns = [Turn(action="a", observation="", reward=reward, done=False) for reward in rewards]
        found = environment.score(make_trajectory(turns=turns, status=status))
        return found.reward, found.success

    assert judged(0.5, None, 1.0) == (1.5, True)
    assert judged(0.5, 0.5) == (1.0, False)
    assert judged(None, None) == (None, None)
    assert judged(None, status="truncated") == (0.0, False)


def test_through_the_command_failures_of_the_world_are_no_zeros(server, tmp_path):
    actions = tmp_path / "actions.jsonl"
    scripts = {"0": ["0"], "1": ["5", "1"], "2": ["crash"], "3": ["9", "9", "9"]}
    actions.write_text("\n".join(json.dumps({"task_id": k, "actions": v}) for k, v in scripts.items()))
    settings = {"openenv": {"url": f"{server}/guess"}, "scripted": {"actions": str(actions)}}
    config = RolloutConfig(env="openenv", engine="scripted", tasks=tuple(scripts), n_samples_per_prompt=1)
    written = rollout(None, tmp_path / "rollout", config, settings=settings)
    assert written.settings["openenv"] == {
        "instruction": "", "action_field": None, "observation_field": None, "task_api": None, "n_train": 1024,
        "n_test": 256, "success_at": 1.0,
    }  # fmt: skip
    scored = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig())  # without the server's address
    rows = [row for table in read_parts(tmp_path / "score", scored) for row in from_table(table)]
    assert [(row.status, row.reward, row.success) for row in rows] == [
        ("completed", 1.0, True), ("completed", 1.0, True), ("failed", None, None), ("max_turns", 0.0, False),
    ]  # fmt: skip
    assert "the world broke" in rows[2].error
    again = score(tmp_path / "rollout", tmp_path / "again", ScoreConfig())
    assert again.digest == scored.digest


def test_a_server_that_hangs_fails_the_attempt(server):
    episode, _ = begun(server, timeout_seconds=120.0)
    assert episode._client._async._message_timeout == 120.0
    episode._client._async._message_timeout = 0.5  # not before it has begun, which takes its time on a busy machine
    with pytest.raises(TimeoutError):
        episode.step("hang")
    episode.close()


def test_a_server_that_is_not_there_is_one_clear_error(tmp_path):
    environment = OpenEnv(OpenEnvConfig(url="http://127.0.0.1:9", task_api="world"))
    with pytest.raises(InputError, match=r"`http://127.0.0.1:9` did not answer") as caught:
        environment.tasks("train")
    assert "openenv.url" in str(caught.value.hint)
    task = OpenEnv(OpenEnvConfig(url="http://127.0.0.1:9")).tasks("train")[0]
    with pytest.raises(InputError):
        environment.start().reset(task, 0)
    with pytest.raises(SettingsError, match="no expert"):
        environment.expert(task)
    done = skyrl_here("rollout", "--env", "openenv", "--engine", "scripted", "--run", tmp_path / "run")
    assert done.returncode == 2
    assert "error: `openenv.url` is not set" in done.stderr


@pytest.mark.parametrize(
    ("key", "value"), [("url", "localhost:8000"), ("timeout_seconds", 0.0), ("n_train", 0), ("n_test", -1)]
)
def test_settings_that_cannot_be_meant_are_refused_by_name(key, value):
    with pytest.raises(SettingsError, match=f"`openenv.{key}`"):
        OpenEnvConfig(**{key: value})
