"""HLE, BrowseComp and DeepSearchQA with a judge behind a real HTTP server whose verdicts are scripted."""

import json

import numpy as np
import pytest
from benches import JUDGED, Says, right, run_bench, table_of, wrong
from endpoints import endpoint

from nanoskyrl.envs.graders.judge import first_object
from nanoskyrl.eval.base import Scored
from nanoskyrl.eval.benchmarks.browsecomp import decrypt
from nanoskyrl.eval.benchmarks.calibration import calibration_error, official_calibration_error
from nanoskyrl.eval.benchmarks.deepsearchqa import rated
from nanoskyrl.eval.benchmarks.hle import Hle, HleConfig, answer_line, confidence
from nanoskyrl.eval.judge import JudgedConfig, filled
from nanoskyrl.stages.core.errors import ConflictError, SettingsError
from nanoskyrl.stages.looking.eval_report import compare, comparison


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten the pauses between tries."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.002)


def scripted(body):
    """Judge as a model would: by whether the gold is in the response."""
    prompt = body["messages"][0]["content"]
    if "Correctness Details" in prompt:
        gold = prompt.split("Correct answer: ")[1].split("\n")[0]
        response = prompt.split("Response: ")[1].split("Correct answer: ")[0]
        parts = gold.split(", ") if "Set Answer" in prompt else [gold]
        details = {part: part in response for part in parts}
        excess = [] if any(details.values()) else ["something else"]
        return json.dumps(
            {"Answer Correctness": {"Explanation": "", "Correctness Details": details, "Excessive Answers": excess}}
        )
    gold = prompt.split("[correct_answer]: ")[1].split("\n")[0]
    response = prompt.split("[response]: ")[1].split("[correct_answer]")[0]
    said = "yes" if f"Answer: {gold}\n" in response else "no"
    verdict = {"extracted_final_answer": "x", "reasoning": "r", "correct": said, "confidence": 90, "strict": True}
    return json.dumps(verdict)


def judged(name, server, output, **more):
    tables = {name: {"judge_endpoint": server.url, "judge_model": "j", **more.pop("settings", {})}}
    return run_bench(name, output, tables=tables, **more)


@pytest.mark.parametrize("name", JUDGED)
def test_right_answers_score_one_and_wrong_ones_zero(name, tmp_path):
    with endpoint(scripted) as server:
        good = judged(name, server, tmp_path / "right", engine=right(name))
        bad = judged(name, server, tmp_path / "wrong", engine=wrong(name))
    assert (good["success"], bad["success"]) == (1.0, 0.0)
    assert good["metric"] == ("fully_correct" if name == "deepsearchqa" else "accuracy")
    assert (good["judge_failures"], good["unjudged"], bad["unjudged"]) == (0, 0, 0)
    asked = server.asked[0]
    assert asked["response_format"]["json_schema"]["strict"] is True
    assert asked["model"] == "j"


def test_the_judge_is_asked_for_the_authors_fields(tmp_path):
    with endpoint(scripted) as server:
        judged("hle", server, tmp_path / "out")
    schema = server.asked[0]["response_format"]["json_schema"]["schema"]
    assert list(schema["properties"]) == ["extracted_final_answer", "reasoning", "correct", "confidence", "strict"]


@pytest.mark.parametrize("name", ["hle", "deepsearchqa"])
@pytest.mark.parametrize(
    "answer",
    [
        500, 400, "no json at all", "{}", '{"correct": "maybe"}', "{" * 5000,
        '{"Answer Correctness": {"Correctness Details": []}}',
    ],
    ids=["500", "400", "words", "empty", "maybe", "braces", "list"],
)  # fmt: skip
def test_a_judge_that_fails_leaves_rows_unjudged_and_never_wrong(name, answer, tmp_path):
    with endpoint(lambda body: answer) as server:
        found = judged(name, server, tmp_path / "out", limit=2)
    assert (found["success"], found["judge_failures"], found["unjudged"], found["not_scored"]) == (None, 2, 2, 2)
    if name == "hle":
        assert (found["accuracy_of_all"], found["accuracy_of_all_half_width"]) == (None, None)
    table = table_of(tmp_path / "out")
    assert table.column("reward").null_count == table.num_rows == 2
    assert table.column("score_status").to_pylist() == ["verifier_error"] * 2


def test_unjudged_rows_count_apart_from_right_and_wrong(tmp_path):
    def answer(body):
        return 400 if "divisible by 1000" in body["messages"][0]["content"] else scripted(body)

    with endpoint(answer) as server:
        found = judged("hle", server, tmp_path / "out")
    assert (found["success"], found["unjudged"], found["samples"]) == (1.0, 1, 5)
    assert found["accuracy_of_all"] == 0.8  # as the authors count


def test_equal_questions_are_judged_once(tmp_path):
    with endpoint(scripted, together=2) as server:
        judged("hle", server, tmp_path / "out", n_samples=4, limit=2)
    assert len(server.asked) == 2
    assert len({body["messages"][0]["content"] for body in server.asked}) == 2


def test_a_verdict_in_a_fence_and_after_words_is_read():
    assert first_object('Sure!\n```json\n{"a": {"b": 1}}\n```') == {"a": {"b": 1}}
    assert first_object('{oops} {"a": 1}') == {"a": 1}
    with pytest.raises(ValueError, match="no JSON object"):
        first_object("[1, 2]")


def test_what_a_model_wrote_is_put_into_the_judges_prompt_as_it_is():
    text = filled(
        JudgedConfig(), '{question}|{response}|{"a": 1}|{other}', question="{response}", response="{question}"
    )
    assert text == '{response}|{question}|{"a": 1}|{other}'


def test_a_judge_needs_a_model():
    with pytest.raises(SettingsError, match="needs its model"):
        Hle(HleConfig(judge_endpoint="http://127.0.0.1:1/v1"))


@pytest.mark.parametrize("name", JUDGED)
def test_a_judge_without_an_endpoint_is_refused_before_anything_is_asked(name, tmp_path):
    with pytest.raises(SettingsError, match="the judge `j` has no endpoint to be asked at"):
        run_bench(name, tmp_path / "out", tables={name: {"judge_model": "j"}})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", JUDGED)
def test_what_no_judge_saw_is_not_up_to_date_once_there_is_one(name, tmp_path):
    run_bench(name, tmp_path / "out")
    with endpoint(scripted) as server, pytest.raises(ConflictError, match=rf"another `settings\.{name}\.judge_model`"):
        judged(name, server, tmp_path / "out")


def test_a_judge_at_another_address_is_the_same_judge(tmp_path):
    with endpoint(scripted) as server:
        found = judged("hle", server, tmp_path / "out")
    with endpoint(scripted) as server:
        assert judged("hle", server, tmp_path / "out") == found
    assert server.asked == []


def test_a_comparison_notes_another_metric_and_another_prompt_of_the_judge(tmp_path):
    plain, ours, theirs, prompt = (tmp_path / name for name in ("plain", "ours", "theirs", "prompt.txt"))
    prompt.write_text("[response]: {response}\n[correct_answer]: {correct_answer}\n")
    run_bench("hle", plain)
    with endpoint(scripted) as server:
        judged("hle", server, ours)
        judged("hle", server, theirs, settings={"judge_prompt": str(prompt)})
    assert comparison(compare(plain, ours)).splitlines()[-2:] == [
        "note: the first is `exact_match_no_judge`, the second `accuracy`",
        "note: the two differ in `hle.judge_model`",
    ]
    assert comparison(compare(ours, theirs)).endswith("note: the two differ in `hle.judge_prompt`")
    assert compare(ours, ours)["graded_otherwise"] == []


# Pictures


def test_questions_with_a_picture_are_asked_only_if_wanted(tmp_path):
    ask = run_bench("hle", tmp_path / "text")["task_ids"]
    with endpoint(lambda body: "Answer: 1") as server:
        found = run_bench(
            "hle", tmp_path / "all", engine_name="openai",
            tables={"hle": {"images": True}, "openai": {"base_url": server.url, "model": "m"}},
        )  # fmt: skip
    pictured = set(found["task_ids"]) - set(ask)
    assert len(pictured) == 1
    with_picture = [body for body in server.asked if isinstance(body["messages"][-1]["content"], list)]
    assert len(with_picture) == 1
    assert with_picture[0]["messages"][-1]["content"][1]["image_url"]["url"].startswith("data:image/png")
    assert server.asked[0]["messages"][0]["role"] == "system"


# What is read from an answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Explanation: x\nAnswer: 15\nConfidence: 90%", "15"), ("**Answer:** 3/8", "3/8"), ("Exact Answer: Bob", "Bob"),
        ("Answer: 1\nAnswer: 2", "2"), ("the answer: 3", "3"), ("no line", None), ("Answer:", None), ("", None),
    ],
)  # fmt: skip
def test_the_answer_line_is_the_last_that_begins_a_line(text, answer):
    assert answer_line(text) == answer


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("Confidence: 90%", 0.9), ("**Confidence:** 55", 0.55), ("Confidence: 0%", 0.0), ("Confidence: 900%", None),
        ("", None),
    ],
)  # fmt: skip
def test_confidence_is_read_in_percent(text, stated):
    assert confidence(text) == stated


# Calibration


@pytest.mark.parametrize(("count", "official"), [(50, None), (100, None), (199, None), (200, 0.57), (2500, 0.79)])
def test_calibration_of_constant_confidence_is_as_measured(count, official):
    right = [i % 10 == 0 for i in range(count)]  # 10% right, evenly
    stated = [0.9] * count
    assert calibration_error(stated, right) == pytest.approx(0.8, abs=0.01)
    found = official_calibration_error(stated, right)
    assert found is None if official is None else found == pytest.approx(official, abs=0.01)


def test_calibration_of_nothing_is_none():
    assert calibration_error([], []) is None


def test_perfect_calibration_is_near_zero():
    rng = np.random.default_rng(0)
    stated = rng.uniform(size=20_000)
    assert calibration_error(list(stated), list(rng.uniform(size=20_000) < stated)) < 0.02


def test_a_row_without_confidence_counts_as_certain():
    rows = [Scored(task_id=str(i), sample=0, success=False, reward=0.0, parts={"confidence": None}) for i in range(3)]
    assert Hle(HleConfig()).metrics(rows)["calibration_error"] == 1.0


# DeepSearchQA and BrowseComp


@pytest.mark.parametrize(
    ("hit", "missed", "excess", "precision", "recall", "f1", "success"),
    [
        (2, 0, 0, 1, 1, 1, True), (1, 1, 0, 1, 0.5, 2 / 3, False), (2, 0, 1, 2 / 3, 1, 0.8, False),
        (0, 2, 3, 0, 0, 0, False), (0, 2, 0, 0, 0, 0, False),
    ],
)  # fmt: skip
def test_precision_recall_and_f1_by_hand(hit, missed, excess, precision, recall, f1, success):
    score = rated(hit, missed, excess)
    assert score.success is success
    found = [score.parts[name] for name in ("precision", "recall", "f1")]
    assert found == pytest.approx([precision, recall, f1])
    assert score.parts["correct_with_excess"] == float(missed == 0 and excess > 0 and hit > 0)
    assert score.parts["fully_wrong"] == float(hit == 0)


def test_a_set_without_one_item_is_partly_right(tmp_path):
    def most(task):
        items = str(task.ground_truth).split(", ")
        return f"Answer: {', '.join(items[1:] or ['x'])}"

    found = run_bench("deepsearchqa", tmp_path / "out", engine=Says(most))
    assert found["success"] == 0.0
    assert found["recall"] == pytest.approx((3 / 4 + 2 / 3 + 0) / 3)
    assert found["precision"] == pytest.approx((1 + 1 + 0) / 3)


def test_browsecomp_decrypts_with_the_rows_canary():
    from base64 import b64encode
    from hashlib import sha256

    key = sha256(b"canary").digest() * 2
    text = "a question longer than one key of 32 bytes"
    hidden = b64encode(bytes(a ^ b for a, b in zip(text.encode(), key, strict=False))).decode()
    assert decrypt(hidden, "canary") == text
    with pytest.raises(ValueError, match="base64"):
        decrypt("not base64!", "canary")
