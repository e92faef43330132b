"""How what stays up is told to stop."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def told_to_stop(stop: threading.Event) -> Iterator[None]:
    """Set the event at SIGINT and SIGTERM; elsewhere than in the main thread signals are others' business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {name: signal.signal(name, lambda *_: stop.set()) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in kept.items():
            signal.signal(name, handler)
