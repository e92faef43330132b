"""Calls that travel together: each keeps its place, its own time and its own failure."""

import os
import sys

import pytest

from nanoskyrl.envs.graders import workers
from nanoskyrl.envs.graders.workers import WorkerDied, Workers, WorkerTimeout

FUNCTIONS = """
import os
import time

made = []


def count(item):
    made.append(item)
    return item, len(made)


def waits(item):
    time.sleep(0.01)
    return item, os.getpid()


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


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "called.py").write_text(FUNCTIONS)
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
