"""The judge, against a real server on loopback that answers from a script."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from running import same_bytes

from nanoskyrl.envs.base import VerifierTimeout
from nanoskyrl.envs.graders.judge import Judge, JudgeConfig, JudgeFailed, first_object, prompt_for
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.manifest import read_manifest
from nanoskyrl.stages.core.rows import to_table
from nanoskyrl.stages.core.shards import read_parts
from nanoskyrl.stages.engines.rollout_config import RolloutConfig
from nanoskyrl.stages.rollout import rollout
from nanoskyrl.stages.score import ScoreConfig, judge, score

GOOD = '{"reasoning": "fits", "score": 1}'


class Server:
    """Answers each request with the next of a script: a text, a status, or seconds to wait and then one of the two."""

    def __init__(self):
        self.script, self.asked, self.lock = [], [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.asked.append(body)
                    say = outer.script.pop(0) if outer.script else GOOD
                seconds, say = say if isinstance(say, tuple) else (0.0, say)
                time.sleep(seconds)
                status = say if isinstance(say, int) else 200
                answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": []}
                if status == 200:
                    message = {"role": "assistant", "content": say}
                    answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
                data = json.dumps(answer if status == 200 else {"error": {"message": "no"}}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                """Say nothing."""

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_):
                """A client that gave up is what the script wanted."""

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server():
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def make(server, **changes):
    return Judge(JudgeConfig(**{"endpoint": server.url, "model": "m", "retries": 2, **changes}))


def test_a_verdict_is_a_score_and_the_same_question_is_asked_once(server, make_trajectory):
    judge_one = make(server)
    server.script = ['{"reasoning": "half", "score": 0.5}']
    assert judge_one.score(make_trajectory()).reward == 0.5
    assert judge_one.score(make_trajectory()).success is False
    assert len(server.asked) == 1
    (asked,) = server.asked
    assert asked["response_format"]["json_schema"]["schema"]["required"] == ["reasoning", "score"]
    assert '"What is 1 + 1?"' in asked["messages"][0]["content"]


@pytest.mark.parametrize(
    "first",
    [500, 503, 429, "no JSON", '{"score": 2}', '{"score": "1"}', '{"reasoning": "x"}', "[1]", '{"score": true}'],
)
def test_what_may_pass_is_tried_again(server, make_trajectory, first):
    server.script = [first]
    assert make(server).score(make_trajectory()).reward == 1.0
    assert len(server.asked) == 2


def test_a_judge_that_never_answers_well_gives_no_verdict(server, make_trajectory):
    rows = [make_trajectory(trajectory_id=str(i), metadata={"ground_truth": str(i)}) for i in range(3)]
    server.script = ["nonsense"] * 3
    assert [(v.reward, s) for v, s in judge(to_table(rows[:1]), make(server).score).values()] == [
        (None, "verifier_error")
    ]
    server.script = [401]
    with pytest.raises(JudgeFailed, match="did not answer: AuthenticationError"):
        make(server).score(rows[1])
    server.script = [(5.0, GOOD)] * 2
    with pytest.raises(VerifierTimeout):
        make(server, timeout_seconds=0.3, retries=0).score(rows[2])
    server.http.server_close()


def at_once(count, ask):
    with ThreadPoolExecutor(count) as pool:
        return [future.exception() or future.result() for future in [pool.submit(ask) for _ in range(count)]]


@pytest.mark.parametrize("kept", [True, False])
def test_what_many_ask_at_once_is_asked_once_and_told_to_all(kept, server, make_trajectory, tmp_path):
    table = {"cache": str(tmp_path / "cache")} if kept else {}
    judge_one = make(server, **table)
    server.script = [(0.5, f'{{"reasoning": "", "score": {score}}}') for score in (0.25, 0.5, 0.75, 1)]
    found = at_once(8, lambda: judge_one.score(make_trajectory()))
    assert [score.reward for score in found] == [0.25] * 8
    assert len(server.asked) == 1
    if kept:  # scoring again, in a process that comes later
        assert make(server, **table).score(make_trajectory()).reward == 0.25


def test_who_waits_for_an_answer_that_fails_fails_with_it_and_who_comes_later_asks_again(server, make_trajectory):
    judge_one = make(server, retries=0)
    server.script = [(0.5, 401)]
    found = at_once(8, lambda: judge_one.score(make_trajectory()))
    assert [type(error) for error in found] == [JudgeFailed] * 8
    assert len(server.asked) == 1
    assert judge_one.score(make_trajectory()).reward == 1.0
    assert len(server.asked) == 2


def test_verdicts_outlive_the_process_in_a_folder_and_broken_ones_are_asked_again(server, make_trajectory, tmp_path):
    cache = str(tmp_path / "cache")
    make(server, cache=cache).score(make_trajectory())
    assert make(server, cache=cache).score(make_trajectory()).reward == 1.0
    assert len(server.asked) == 1
    (file,) = (tmp_path / "cache").rglob("*.json")
    file.write_text(file.read_text()[:7])
    assert make(server, cache=cache).score(make_trajectory()).reward == 1.0
    assert len(server.asked) == 2
    make(server, cache=cache, model="other").score(make_trajectory())
    assert len(server.asked) == 3


def test_a_stage_is_judged_by_many_at_once_and_unjudged_rows_are_counted(server, tmp_path):
    config = RolloutConfig(engine="scripted", train_batch_size=24, n_samples_per_prompt=1)
    rollout(None, tmp_path / "r", config)
    table = {"endpoint": server.url, "model": "m", "cache": str(tmp_path / "cache"), "retries": 0, "concurrency": 8}
    scoring = ScoreConfig(rewards={"env": 0.5, "judge": 0.5})
    server.script = [(0.1, GOOD)] * 8 + ["{}"] * 3 + [401]
    manifest = score(tmp_path / "r", tmp_path / "s", scoring, settings={"judge": table})
    rows = [row for found in read_parts(tmp_path / "s", manifest) for row in found.to_pylist()]
    unjudged = [row for row in rows if row["reward"] is None]
    assert manifest.dropped == {"verifier_error": len(unjudged)}
    assert 1 <= len(unjudged) <= 4
    assert {row["reward"] for row in rows if row["reward"] is not None} == {1.0}
    assert read_manifest(tmp_path / "s").settings["judge"]["model"] == "m"
    assert "endpoint" not in read_manifest(tmp_path / "s").settings["judge"]
    # What failed is asked again, what was judged is not; then the bytes repeat without a judge.
    asked = len(server.asked)
    score(tmp_path / "r", tmp_path / "t", scoring, settings={"judge": table})
    assert len(server.asked) == asked + len(unjudged)
    score(tmp_path / "r", tmp_path / "u", scoring, settings={"judge": {**table, "endpoint": "http://127.0.0.1:9/v1"}})
    assert same_bytes(tmp_path / "t", tmp_path / "u") == []


def test_dynamic_sampling_keeps_the_verdicts_of_a_judge(server, tmp_path):
    config = RolloutConfig(
        engine="scripted", train_batch_size=4, n_samples_per_prompt=4, dynamic_sampling=True, max_sample_batches=1
    )
    table = {"endpoint": server.url, "model": "m", "retries": 0, "concurrency": 8}
    tables = {"score": {"rewards": {"judge": 1.0}}, "judge": table}
    server.script = [(0.05, GOOD)] * 16
    rollout(None, tmp_path / "r", config, settings=tables)
    asked = len(server.asked)
    assert 4 <= asked <= 16  # equal attempts are one question
    scoring = ScoreConfig(rewards={"judge": 1.0})
    away = {**tables, "judge": {**table, "endpoint": "http://127.0.0.1:9/v1"}}
    manifest = score(tmp_path / "r", tmp_path / "s", scoring, settings=away)  # nobody is asked
    assert manifest.dropped == {}
    assert len(server.asked) == asked
    assert "_files/verdicts/00000.json" in read_manifest(tmp_path / "r").files
    # Other criteria are other questions.
    score(tmp_path / "r", tmp_path / "t", scoring, settings={**tables, "judge": {**table, "criteria": "Be kind."}})
    assert len(server.asked) > asked


def test_an_attempt_is_shown_as_data(make_trajectory):
    text = prompt_for(make_trajectory(metadata={"ground_truth": 'a "quote"\nand {braces}'}), "Be {fair}.")
    assert r'reference: "a \"quote\"\nand {braces}"' in text
    assert "Be {fair}." in text


@pytest.mark.parametrize(
    ("text", "found"),
    [('x {"a": 1} y', {"a": 1}), ('```json\n{"a": {"b": 2}}\n```', {"a": {"b": 2}}), ('{bad {"a": 1}', {"a": 1})],
)
def test_the_first_object_is_found(text, found):
    assert first_object(text) == found


@pytest.mark.parametrize("text", ["", None, "no", "[1]", "{" * 100_000])
def test_text_without_an_object_is_none(text):
    with pytest.raises(ValueError, match=r"no JSON object|nested too deeply"):
        first_object(text)


def test_a_judge_without_an_address_is_refused():
    with pytest.raises(SettingsError, match=r"needs `judge\.endpoint`"):
        Judge(JudgeConfig(model="m"))
    with pytest.raises(SettingsError, match=r"needs `judge\.model`"):
        Judge(JudgeConfig(endpoint="http://localhost"))
