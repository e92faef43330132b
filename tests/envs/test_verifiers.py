"""Environments of verifiers, on the real package: their own rollout, and their own scores."""

import asyncio
import json

import pytest

pytest.importorskip("verifiers")

from running import SMALL

from nanoskyrl.envs.outside.verifiers_env import Verifiers, VerifiersConfig, _client_class, _response
from nanoskyrl.stages.core.config import merge
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.runs import Run
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.running.session import Session

ENV = "vf_cities"


def call(city):
    return f"<tool_call>{json.dumps({'name': 'size', 'arguments': {'city': city}})}</tool_call>"


SCRIPTS = {
    "0": [call("Arden") + call("Borel"), "It is Borel."],
    "1": ["I look.\n" + call("Nowhere"), call("Cadiz"), "It is Cadiz."],
}


def rows_of(directory):
    return [row for table in read_parts(directory, read_manifest(directory)) for row in table.to_pylist()]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Rollout and score by the commands' own session, with scripted actions."""
    folder = tmp_path_factory.mktemp("verifiers")
    (folder / "actions.jsonl").write_text(
        "".join(json.dumps({"task_id": name, "actions": actions}) + "\n" for name, actions in SCRIPTS.items())
    )
    settings = {
        "rollout": {"env": "verifiers", "engine": "scripted", "train_batch_size": 2, "n_samples_per_prompt": 1},
        "verifiers": {"env": ENV},
        "scripted": {"actions": str(folder / "actions.jsonl")},
    }
    run = Run(folder / "run")
    session = Session(run, settings)
    session.rollout()
    session.score()
    return {row["task_id"]: row for row in rows_of(run.stage(0, "score"))}


def own(task_id):
    """Return the package's own reward and metrics of the same answers, by its own rollout."""
    environment = Verifiers(VerifiersConfig(env=ENV)).environment
    row = next(row for row in environment.get_dataset() if str(row["example_id"]) == task_id)

    async def play():
        client = _client_class()(object())
        client.asked, client.answers = type("Nobody", (), {"put": lambda *_: None})(), asyncio.Queue()
        for turn, action in enumerate(SCRIPTS[task_id]):
            client.answers.put_nowait(_response(action, turn)[0])
        state = await environment.rollout(dict(row), client, "m", {})
        await environment.rubric.score_rollout(state)
        return state["reward"], state["metrics"]

    return asyncio.run(play())


@pytest.mark.parametrize("task_id", SCRIPTS)
def test_a_package_s_own_scores_are_ours(scored, task_id):
    reward, metrics = own(task_id)
    row = scored[task_id]
    assert row["reward"] == reward
    assert {key: value for key, value in json.loads(row["reward_parts"]).items() if key in metrics} == metrics
    assert (row["status"], row["success"]) == ("completed", reward >= 1)


def test_tools_are_offered_and_answered_by_the_environment(scored):
    turns = scored["0"]["turns"]
    assert [turn["observation"] for turn in turns] == ["31\n87", ""]
    records = json.loads(turns[0]["tool_calls"])
    assert [(record["tool"], record["result"]) for record in records] == [("size", "31"), ("size", "87")]
    assert "Nowhere" in scored["1"]["turns"][0]["observation"]
    messages = json.loads(scored["0"]["messages"])
    assert [message["role"] for message in messages[:2]] == ["system", "user"]


def test_limits_and_broken_calls_are_the_environment_s_to_answer():
    environment = Verifiers(VerifiersConfig(env=ENV, args={"turns": 2}))
    task = environment.tasks("train")[0]
    episode = environment.start()
    schemas = episode.reset(task, 0).tools
    assert [schema["function"]["name"] for schema in schemas] == ["size"]
    assert not episode.step(call("Arden")).done
    assert episode.step(call("Borel")).done  # its limit of turns
    assert episode.close()["verifiers"]["metrics"]["num_turns"] == 2.0
    broken = environment.start()
    broken.reset(task, 0)
    step = broken.step("<tool_call>{oops")
    assert step.done  # a text without a call ends
    assert [record.error for record in step.tool_calls] == ["malformed"]
    broken.close()


def test_an_attempt_that_is_cut_off_is_judged_too():
    environment = Verifiers(VerifiersConfig(env=ENV))
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], 0)
    episode.step(call("Arden"))
    found = episode.close()["verifiers"]
    assert found["metrics"]["right"] == 0.0
    assert environment.start().close() == {}


def test_what_is_missing_is_named():
    with pytest.raises(SettingsError, match=r"`verifiers\.env` is not set"):
        Verifiers(VerifiersConfig()).tasks("train")
    with pytest.raises(SettingsError, match="the environment `no-such` of verifiers cannot be made"):
        Verifiers(VerifiersConfig(env="no-such")).tasks("train")


@pytest.mark.slow
def test_a_multi_turn_environment_with_tools_is_trained_on(tmp_path):
    run = Run(tmp_path / "run")
    settings = merge(SMALL, {"rollout": {"env": "verifiers", "train_batch_size": 2}, "verifiers": {"env": ENV}})
    session = Session(run, settings)
    for stage in ("rollout", "score", "advantage", "train"):
        getattr(session, stage)()
    rows = rows_of(run.stage(0, "score"))
    assert {row["score_status"] for row in rows} == {"scored"}
    assert read_manifest(run.stage(0, "train")).stage == "train"
