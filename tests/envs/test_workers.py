"""Calls that travel together: each keeps its place, its own time and its own failure."""

import os
import signal
import sys

import pytest

from nanoskyrl.envs.graders import workers
from nanoskyrl.envs.graders.workers import WorkerDied, Workers, WorkerTimeout
from nanoskyrl.stages.core.children import start_of

FUNCTIONS = """
import os
import time

import numpy.random

made = []
itself = os.urandom(8)


def count(item):
    made.append(item)
    return item, len(made)


def waits(item):
    time.sleep(0.01)
    return item, os.getpid()


def drawn(item):
    time.sleep(0.01)
    return itself, numpy.random.random(), os.environ["SET_BY_MODULE"]


def noted(item):
    with open(item[0], "a") as file:
        file.write(f"{item[1]}\\n")
    if item[1] == 150:
        os._exit(3)
    return item[1]


os.environ["SET_BY_MODULE"] = "yes"


def odd(item):
    if item == "dies":
        os._exit(3)
    if item == "hangs":
        time.sleep(600)
    if item == "raises":
        raise KeyError(item)
    if item == "cannot be sent":
        return lambda: None
    return item
"""


WITH_THREAD = """
import threading
import time

calls = []
threading.Thread(target=lambda: [time.sleep(0.002) or calls.append(1) for _ in range(10**6)], daemon=True).start()


def waits(item):
    before = len(calls)
    time.sleep(0.02)
    return len(calls) > before
"""


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "called.py").write_text(FUNCTIONS)
    (tmp_path / "threaded.py").write_text(WITH_THREAD)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    pool = Workers(4)
    yield pool
    pool.close()


def each(pool, name, items, *, seconds=60.0, most=4):
    return pool.each(f"called:{name}", [(item,) for item in items], [seconds] * len(items), most)


def test_a_function_that_remembers_sees_quick_calls_in_their_order(pool):
    assert each(pool, "count", range(500)) == [(item, item + 1) for item in range(500)]
    assert each(pool, "count", []) == []


@pytest.mark.parametrize(("most", "several"), [(4, True), (1, False)])
def test_calls_that_take_long_are_shared_out_and_keep_their_places(pool, monkeypatch, most, several):
    monkeypatch.setattr(workers, "PROBE_SECONDS", 0.03)
    monkeypatch.setattr(workers, "START_SECONDS", 1e-4)
    found = each(pool, "waits", range(40), most=most)
    assert [item for item, _ in found] == list(range(40))
    processes = {process for _, process in found}
    assert (1 < len(processes) <= 4) if several else len(processes) == 1
    assert os.getpid() not in processes


def test_a_call_that_fails_costs_no_other_its_answer(pool):
    items = ["a", "dies", "b", "raises", "c", "hangs", "d", "cannot be sent", "e"]
    found = each(pool, "odd", items, seconds=1.0)
    assert [found[place] for place in (0, 2, 4, 6, 8)] == list("abcde")
    assert [type(found[place]) for place in (1, 3, 5)] == [WorkerDied, KeyError, WorkerTimeout]
    assert isinstance(found[7], Exception)


@pytest.fixture
def sooner(monkeypatch):
    monkeypatch.setattr(workers, "PROBE_SECONDS", 0.03)
    monkeypatch.setattr(workers, "START_SECONDS", 1e-4)


def test_workers_that_start_together_share_libraries_and_nothing_of_the_user_s_module(pool, sooner):
    found = each(pool, "drawn", range(40))
    itself, numbers, set_by_module = map(set, zip(*found, strict=True))
    assert 1 < len(itself) <= 4
    assert len(numbers) == 40
    assert set_by_module == {"yes"}


def test_a_module_that_starts_a_thread_has_one_in_every_worker(pool, sooner):
    found = pool.each("threaded:waits", [(item,) for item in range(40)], [60.0] * 40, 4)
    assert found == [True] * 40


def test_what_was_seen_to_be_quick_stays_in_one_worker_over_several_rounds(pool):
    seen = workers.Made()
    for round_ in range(3):
        calls = [(item,) for item in range(100)]
        assert pool.each("called:count", calls, [60.0] * 100, 4, seen) == [
            (i, 100 * round_ + i + 1) for i in range(100)
        ]
    assert seen.made == 300


def test_what_was_seen_to_wait_is_shared_out_from_the_first_call(pool, sooner):
    seen = workers.Made()
    pool.each("called:waits", [(item,) for item in range(8)], [60.0] * 8, 4, seen)
    made = seen.made
    found = pool.each("called:waits", [(item,) for item in range(8)], [60.0] * 8, 4, seen)
    assert [item for item, _ in found] == list(range(8))
    assert len({process for _, process in found}) > 1
    assert seen.made == made


def test_quick_calls_before_a_crash_are_made_once_and_keep_their_answers(pool, tmp_path):
    place = str(tmp_path / "noted")
    found = each(pool, "noted", [(place, item) for item in range(300)])
    assert isinstance(found.pop(150), WorkerDied)
    assert found == [item for item in range(300) if item != 150]
    assert (tmp_path / "noted").read_text().split() == [str(item) for item in range(300)]


def test_workers_are_started_again_where_the_process_that_forks_them_was_killed(pool):
    ours, source = pool.call("os:getpid", seconds=60.0), pool.call("os:getppid", seconds=60.0)
    os.kill(source, signal.SIGKILL)
    pool._sources[-1]._process.wait()
    assert pool.call("os:getpid", seconds=60.0) != ours
    assert pool.call("os:getppid", seconds=60.0) not in (source, os.getpid())
    assert start_of(ours) is None
