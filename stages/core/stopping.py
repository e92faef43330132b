"""How what stays up, or has started what stays up, is stopped."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def told_to_stop(stop: threading.Event) -> Iterator[None]:
    """Set the event at SIGINT and SIGTERM."""
    with _handled(lambda *_: stop.set(), signal.SIGINT, signal.SIGTERM):
        yield


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as at SIGINT: whoever has started something stops it on the way out."""
    with _handled(signal.default_int_handler, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[..., Any], *names: signal.Signals) -> Iterator[None]:
    """Handle signals inside the block; elsewhere than in the main thread they are others' business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {name: signal.signal(name, handler) for name in names}
    try:
        yield
    finally:
        for name, before in kept.items():
            signal.signal(name, before)
