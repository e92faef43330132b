import contextlib
import json
import math
import time

import pytest

from nanoskyrl.stages.core.metrics import MetricsLog, Stopwatch, finite, latest, mean, peak_memory_bytes, read_metrics


def values(line):
    """Return a line without what differs from run to run."""
    return {key: value for key, value in line.items() if key not in ("time", "host")}


def test_the_mean_of_nothing_is_none():
    assert mean([]) is None
    assert mean(iter([])) is None


def test_the_mean_by_hand():
    assert mean([1.0, 0.0, 0.0, 1.0]) == 0.5
    assert mean(x for x in (1e16, 1.0, -1e16)) == 1 / 3  # added one by one the 1 is lost


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    MetricsLog(path, step=3).write("train", {"policy/loss": 0.25, "policy/steps": 4, "algo": "sapo", "reward": None})
    MetricsLog(path).write("sync", {})
    first, second = read_metrics(path)
    assert values(first) == {
        "step": 3, "stage": "train", "policy/loss": 0.25, "policy/steps": 4, "algo": "sapo", "reward": None
    }  # fmt: skip
    assert values(second) == {"step": None, "stage": "sync"}
    assert first["time"] <= second["time"]
    assert first["host"]


def test_a_log_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    MetricsLog().write("train", {"policy/loss": 0.25})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path, value):
    MetricsLog(tmp_path / "metrics.jsonl").write("train", {"policy/loss": value, "policy/entropy": 1.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    line = json.loads(text, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert line["policy/loss"] is None
    assert line["policy/entropy"] == 1.5


def test_finite_leaves_words_and_integers_alone():
    assert finite({"a": "nan", "b": 10**400, "c": None}) == {"a": "nan", "b": 10**400, "c": None}


def test_no_file_is_no_lines(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, step=0).write("train", {"policy/loss": 1.0})
    MetricsLog(path, step=1).write("train", {"policy/loss": 2.0})
    whole = path.read_bytes()
    end = whole.index(b"\n") + 1
    for length in range(end, len(whole) - 1):  # without its newline the last line is still whole
        path.write_bytes(whole[:length])
        assert [line["step"] for line in read_metrics(path)] == [0]


def test_a_character_torn_in_two_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + '{"stage": "ü'.encode()[:-1])
    assert read_metrics(path) == [{"step": 0}]


def test_a_line_after_a_torn_one_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "stage": "train"}\n{"step": 1, "stage": "tra')
    MetricsLog(path, step=1).write("train", {"policy/loss": 2.0})
    assert [line["step"] for line in read_metrics(path)] == [0, 1]


def test_the_tail_begins_at_a_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(50):
        MetricsLog(path, step=step).write("train", {"policy/loss": float(step)})
    size = path.stat().st_size
    for tail in (1, size // 2, size // 2 + 1, size // 2 + 2, size - 1):
        steps = [line["step"] for line in read_metrics(path, tail_bytes=tail)]
        assert steps == list(range(50))[50 - len(steps) :]
        assert len(steps) < 50
    assert len(read_metrics(path, tail_bytes=10 * size)) == 50


def test_the_latest_line_of_a_step_counts():
    lines = [
        {"step": 0, "stage": "train", "loss": 1.0},
        {"step": 0, "stage": "score", "loss": 9.0},
        {"step": 1, "stage": "train", "loss": 2.0},
        {"step": 0, "stage": "train", "loss": 3.0},  # done again after `--force`
        {"step": None, "stage": "train", "loss": 4.0},  # outside a run
        {"loss": 5.0},
    ]
    assert {step: line["loss"] for step, line in latest(lines, "train").items()} == {0: 3.0, 1: 2.0}
    assert latest([], "train") == {}


def test_a_stopwatch_adds_up_by_name_also_when_the_work_fails():
    watch = Stopwatch()
    with watch("generate"):
        pass
    first = watch.seconds["generate"]
    with pytest.raises(RuntimeError, match="boom"), watch("generate"):
        raise RuntimeError("boom")
    assert watch.seconds["generate"] > first
    timings = watch.timings()
    assert set(timings) == {"timing/prepare", "timing/generate", "timing/other", "timing/total"}
    assert timings["timing/total"] >= timings["timing/generate"]


def test_every_second_of_a_stopwatch_has_a_name_and_one_alone():
    watch = Stopwatch()
    with watch("outer"):
        with watch("inner"):
            time.sleep(0.02)
        with watch("outer"):  # a block inside one of its own name is counted once
            time.sleep(0.01)
    with contextlib.suppress(RuntimeError), watch("fails"), watch("inside"):
        raise RuntimeError("boom")
    for _ in range(2):  # asked again, it has continued
        timings = watch.timings()
        total = timings.pop("timing/total")
        assert set(timings) == {f"timing/{name}" for name in ("prepare", "outer", "inner", "fails", "inside", "other")}
        assert sum(timings.values()) == pytest.approx(total, rel=1e-9)
    assert watch.seconds["outer"] < total - watch.seconds["inner"] + 1e-9


def test_peak_memory_is_in_bytes():
    assert 10 * 2**20 < peak_memory_bytes() < 2**40
