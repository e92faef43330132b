"""`skyrl_gym`: skyrl-gym's own environments, as they install, over rows in SkyRL's layout."""

import http.server
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from nasty import TEXTS, actions, check_answered
from worlds import play

pytest.importorskip("skyrl_gym", reason="the extra `skyrl_gym` is not installed")

from nanoskyrl.envs.base import check_observation
from nanoskyrl.envs.outside.skyrl_gym import SkyrlGym, SkyrlGymConfig
from nanoskyrl.stages.core.errors import InputError, SettingsError
from nanoskyrl.stages.core.rows import from_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.rollout import rollout
from nanoskyrl.stages.score import ScoreConfig, score


@pytest.fixture
def rows(tmp_path):
    def write(env="gsm8k", **changes):
        path = tmp_path / f"{env}.jsonl"
        made = [
            {
                "data_source": "made", "prompt": [{"role": "user", "content": f"What is {i} + {i}?"}], "env_class": env,
                "reward_spec": {"method": "rule", "ground_truth": str(2 * i)}, **changes,
            }
            for i in range(1, 9)
        ]  # fmt: skip
        path.write_text("\n".join(map(json.dumps, made)))
        return str(path)

    return write


@pytest.fixture(scope="module")
def retriever():
    """A real search server, as skyrl-gym's `search` asks one."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            if self.path != "/retrieve":
                self.send_error(404)
                return
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"result": [[{"document": {"contents": "Sums\n1 + 1 is 2."}, "score": 1.0}]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/retrieve"
    server.shutdown()


def ends(environment, *actions):
    steps = play(environment, environment.tasks("train")[0], actions)
    return [(step.reward, step.done, step.truncated) for step in steps]


def searching(rows, url, max_turns=3):
    config = SkyrlGymConfig(
        data=rows("search", reward_spec={"ground_truth": {"target": ["2"]}}), max_turns=max_turns,
        env_config={"search_url": url, "topk": 1, "timeout": 120, "log_requests": False},
    )  # fmt: skip
    return SkyrlGym(config)


def test_one_turn_ends_by_itself(rows):
    environment = SkyrlGym(SkyrlGymConfig(data=rows()))
    assert ends(environment, "It is\n#### 2") == [(1.0, True, False)]
    assert ends(environment, "It is 2") == [(0.0, True, False)]


def test_a_limit_of_turns_is_told_from_an_end(rows):
    environment = SkyrlGym(SkyrlGymConfig(data=rows("gsm8k_multi_turn"), max_turns=2))
    assert ends(environment, "#### 3", "#### 2") == [(0.1, False, False), (1.0, True, False)]
    assert ends(environment, "#### 3", "#### 3") == [(0.1, False, False), (0.1, True, True)]
    assert ends(environment, "#### 2") == [(1.0, True, False)]
    by_itself = SkyrlGym(SkyrlGymConfig(data=rows("gsm8k_multi_turn")))  # five, as it has it
    assert [end[2] for end in ends(by_itself, *["?"] * 5)] == [False] * 4 + [True]


def test_search_asks_a_server_and_an_answer_at_the_limit_is_an_end(rows, retriever):
    environment = searching(rows, retriever, max_turns=2)
    first, last = play(environment, environment.tasks("train")[0], ["<search>1 + 1</search>", "<answer>2</answer>"])
    assert "1 + 1 is 2." in first.observation
    assert (first.tool_calls[0].tool, first.tool_calls[0].ok) == ("search", True)
    assert (last.reward, last.done, last.truncated) == (1.0, True, False)
    first, last = play(environment, environment.tasks("train")[0], ["well", "hmm"])
    assert first.tool_calls[0].error == "malformed"
    assert (last.reward, last.done, last.truncated) == (0.0, True, True)


def test_a_search_server_that_fails_is_a_failure_and_no_zero(rows, retriever):
    environment = searching(rows, f"{retriever}/gone")
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], 0)
    with pytest.raises(ConnectionError, match="search server failed"):
        episode.step("<search>1 + 1</search>")


def test_the_loop_writes_the_rows_and_scoring_needs_no_gym(rows, tmp_path):
    settings = {"skyrl_gym": {"data": rows("gsm8k_multi_turn")}}
    config = RolloutConfig(env="skyrl_gym", engine="scripted", train_batch_size=8, n_samples_per_prompt=8)
    written = rollout(None, tmp_path / "rollout", config, settings=settings)
    assert "data" in written.inputs
    scored = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig())
    found = [row for table in read_parts(tmp_path / "score", scored) for row in from_table(table)]
    assert len(found) == 64
    assert {(row.status, row.reward, row.success) for row in found} == {("completed", 1.0, True)}
    assert found[0].metadata["metrics"] == {"steps": 1}
    assert found[0].metadata["env_class"] == "gsm8k_multi_turn"
    assert score(tmp_path / "rollout", tmp_path / "again", ScoreConfig()).digest == scored.digest


def test_an_environment_that_cannot_begin_fails_its_row_alone(rows, tmp_path):
    path = rows()
    lines = Path(path).read_text().splitlines()
    broken = json.loads(lines[0]) | {"reward_spec": {}, "ground_truth": "2"}
    Path(path).write_text("\n".join([json.dumps(broken), *lines[1:]]))
    config = RolloutConfig(env="skyrl_gym", engine="scripted", train_batch_size=8, n_samples_per_prompt=1)
    rollout(None, tmp_path / "rollout", config, settings={"skyrl_gym": {"data": path}})
    scored = score(tmp_path / "rollout", tmp_path / "score", ScoreConfig())
    found = [row for table in read_parts(tmp_path / "score", scored) for row in from_table(table)]
    assert sorted((row.status, row.reward) for row in found if row.status == "failed") == [("failed", None)]
    assert sum(row.reward == 1.0 for row in found) == 7


def test_no_text_raises(rows):
    for env in ("gsm8k", "gsm8k_multi_turn"):
        environment = SkyrlGym(SkyrlGymConfig(data=rows(env)))
        task = environment.tasks("train")[0]
        for text in actions():
            episode = environment.start()
            check_observation(episode.reset(task, 0))
            check_answered(episode.step(text))
            episode.close()


def test_where_the_environment_tells_of_mistakes_each_is_counted(rows, retriever):
    environment = searching(rows, retriever)
    task = environment.tasks("train")[0]
    for text in actions():
        episode = environment.start()
        episode.reset(task, 0)
        step = episode.step(text)
        check_answered(step)
        assert step.done or step.tool_calls[0].error == "malformed", text[:80]
        episode.close()


def test_no_text_that_is_drawn_raises(rows, retriever):
    environments = [
        searching(rows, retriever), *(SkyrlGym(SkyrlGymConfig(data=rows(env))) for env in ("gsm8k", "gsm8k_multi_turn"))
    ]  # fmt: skip
    tasks = [environment.tasks("train")[0] for environment in environments]

    @settings(max_examples=50)
    @given(TEXTS)
    def anything(text):
        for environment, task in zip(environments, tasks, strict=True):
            episode = environment.start()
            episode.reset(task, 0)
            check_answered(episode.step(text))
            episode.close()

    anything()


def test_environments_that_run_code_unguarded_are_refused_unless_allowed(rows):
    with pytest.raises(SettingsError, match="without a sandbox") as caught:
        SkyrlGym(SkyrlGymConfig(data=rows("searchcode"))).tasks("train")
    assert "allow_unsafe" in str(caught.value.hint)
    assert SkyrlGym(SkyrlGymConfig(data=rows("searchcode"), allow_unsafe=True)).tasks("train")


def test_what_is_not_there_is_one_clear_error(rows):
    with pytest.raises(SettingsError, match=r"`skyrl_gym.data` is not set"):
        SkyrlGym(SkyrlGymConfig()).tasks("train")
    with pytest.raises(InputError, match=r"line 1 of .* wants the environment 'chess'") as caught:
        SkyrlGym(SkyrlGymConfig(data=rows("chess"))).tasks("train")
    assert "gsm8k_multi_turn" in str(caught.value.hint)
    environment = SkyrlGym(SkyrlGymConfig(data=rows("text2sql")))
    task = environment.tasks("train")[0]
    with pytest.raises(SettingsError, match="no expert"):
        environment.expert(task)
    with pytest.raises(SettingsError, match=r"`skyrl_gym.max_turns`"):
        SkyrlGymConfig(max_turns=0)
