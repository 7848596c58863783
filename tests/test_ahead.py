"""Working ahead in a thread: what happens when the loop ends while the thread is about to wait."""

import threading
from collections.abc import Generator

from streampack.ahead import WorkAhead


def numbers() -> Generator[int, None, None]:
    yield from range(100)


class ClearedAfterTheStop(threading.Event):
    """Cleared only when the stop is set: the order of events that a busy machine makes once in thousands of runs."""

    def __init__(self, stopped: threading.Event) -> None:
        super().__init__()
        self._stopped = stopped

    def clear(self) -> None:
        self._stopped.wait(5)
        super().clear()


def test_items_come_in_order_and_the_end_is_found_once() -> None:
    ahead = WorkAhead(numbers(), depth=3, stopped=threading.Event())
    assert list(ahead) == list(range(100))
    assert list(ahead) == []
    ahead.close()


def test_a_thread_that_is_about_to_wait_when_the_loop_ends_does_not_wait() -> None:
    stopped = threading.Event()
    ahead = WorkAhead(numbers(), depth=1, stopped=stopped)
    ahead._room = ClearedAfterTheStop(stopped)
    assert next(ahead) == 0
    while len(ahead._made) < 1:  # the thread works ahead, and is on its way to wait for room
        pass
    ahead.close()
    assert not ahead._thread.is_alive()
