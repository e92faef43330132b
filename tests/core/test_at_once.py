"""Calls that wait are made at the same time, and nobody can tell from what they return."""

import threading
import time

import pytest

from nanoskyrl.stages.core.at_once import AtOnce


class Waits:
    """Counts how many calls are under way, and ends none before so many are."""

    def __init__(self, together):
        self.barrier = threading.Barrier(together)
        self.threads = set()

    def __call__(self, item):
        self.threads.add(threading.current_thread())
        if item > 1:  # the first two show that calls wait
            self.barrier.wait(timeout=30)
        else:
            time.sleep(0.01)
        return item * 10


def test_calls_that_wait_are_made_together_and_answer_in_order():
    call = Waits(4)
    assert AtOnce(4).map(call, range(10)) == [item * 10 for item in range(10)]
    assert len(call.threads) == 5


def test_what_was_seen_to_wait_is_remembered():
    at_once = AtOnce(3)
    at_once.map(lambda item: time.sleep(0.01), [0, 0])
    call = Waits(3)
    assert at_once.map(call, [2, 3, 4]) == [20, 30, 40]  # would not end one after another
    assert threading.current_thread() not in call.threads


@pytest.mark.parametrize("at_once", [AtOnce(8), AtOnce(1), AtOnce(1, waits=True)])
def test_calls_that_compute_and_calls_that_must_be_alone_stay_here(at_once):
    seen = []
    at_once.map(lambda item: seen.append(threading.current_thread()), range(50))
    if at_once._most == 1:
        at_once.map(lambda item: seen.append(threading.current_thread()) or time.sleep(0.003), range(5))
    assert set(seen) == {threading.current_thread()}
    assert AtOnce(8).map(str, []) == []


def test_one_call_that_waited_says_nothing_of_the_others():
    seen = []

    def call(item):
        seen.append(threading.current_thread())
        if item in (0, 40):
            time.sleep(0.03)  # as where another thread holds Python's lock

    AtOnce(8).map(call, range(100))
    assert set(seen) == {threading.current_thread()}


def test_the_first_failure_is_raised_and_what_waits_behind_it_is_not_begun():
    begun = []

    def call(item):
        begun.append(item)
        time.sleep(0.005)
        if item == 2:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        AtOnce(2).map(call, range(1000))
    assert len(begun) < 900
