"""Working ahead in a thread: what happens when the loop ends while the thread is about to wait."""

import threading
from collections.abc import Generator

import pytest

from streampack.ahead import BUSY_SECONDS, WorkAhead


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


class Clock:
    """Stands still until it is told to go on, and counts who looked at it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.now


def test_the_thread_leaves_a_fast_loop_alone_and_works_ahead_of_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("streampack.ahead.time", clock)
    ahead = WorkAhead(numbers(), depth=3, stopped=threading.Event())
    assert next(ahead) == 0
    ahead.away()
    seen = clock.looks
    while clock.looks < seen + 3:  # the thread has looked for itself
        pass
    assert not ahead._made
    clock.now = BUSY_SECONDS
    while len(ahead._made) < 3:
        pass
    assert [next(ahead) for _ in range(99)] == list(range(1, 100))
    ahead.close()


def test_the_thread_makes_nothing_while_the_loop_has_not_gone_away() -> None:
    made_by = []

    def made() -> Generator[int, None, None]:
        for number in range(100):
            made_by.append(threading.get_ident())
            yield number

    ahead = WorkAhead(made(), depth=3, stopped=threading.Event())
    for _ in range(50):
        next(ahead)
        ahead._thread.join(BUSY_SECONDS)  # it does not end: this gives it time
    assert {*made_by} == {threading.get_ident()}
    ahead.close()


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
    ahead.away()
    while len(ahead._made) < 1:  # the thread works ahead, and is on its way to wait for room
        pass
    ahead.close()
    assert not ahead._thread.is_alive()
