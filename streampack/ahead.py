"""Working ahead: while the loop is busy with an item, a thread makes the next ones.

Whoever is free makes them. A loop that comes back at once makes the next item itself: changing threads for each would
cost it a third of its speed. The thread looks every PAUSE_SECONDS whether the loop is away, and takes over if it has
been for BUSY_SECONDS.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

PAUSE_SECONDS, BUSY_SECONDS = 0.004, 0.0005
STOP_SECONDS, EXIT_SECONDS = 1.0, 5.0
"""How long the end of a pass and that of the interpreter wait for the thread, which may be inside a network read."""


class WorkAhead(Generic[T]):
    """An iterator over a generator that a thread runs ahead, at most `depth` items. Its errors are raised here.

    Whoever takes items says by `away()` that it is at its own work until it asks for the next one. `close()` ends the
    thread, and the generator with it. `stopped` is set first, so that the generator can end what it waits for.
    """

    def __init__(self, source: "Generator[T, None, None]", *, depth: int, stopped: threading.Event) -> None:
        self._source = source
        self._depth = depth
        self._made: deque[T] = deque()
        self._making = threading.Lock()  # held by whoever runs the source
        self._error: BaseException | None = None  # what ended the source: StopIteration at its end
        self._left: float | None = None  # when the loop went away; None: it is here, and wants the next item soon
        self._stop = stopped
        self._room = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampack", daemon=True)
        self._thread.start()
        # A pass that is never finished must not leave the thread running into the interpreter's end.
        atexit.register(self._end_thread, EXIT_SECONDS)

    def __iter__(self) -> "WorkAhead[T]":
        return self

    def __next__(self) -> T:
        self._left = None
        try:
            if not self._made:
                with self._making:  # waits for what the thread is making now
                    if not self._made:
                        self._make()
            if self._made:
                return self._made.popleft()
            assert self._error is not None
            raise self._error
        finally:
            self._room.set()

    def away(self) -> None:
        """The loop has its item, and is at its own work from now on."""
        self._left = time.monotonic()

    def _make(self) -> None:
        """Make one item, or find the end. Only with the lock."""
        if self._error is None:
            try:
                self._made.append(next(self._source))
            except BaseException as error:
                self._error = error  # kept: the source is over, and must not seem to have ended well

    def _is_busy(self) -> bool:
        left = self._left
        return left is not None and time.monotonic() - left >= BUSY_SECONDS

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS) and self._error is None:
            while self._is_busy() and not (self._stop.is_set() or len(self._made) >= self._depth or self._error):
                with self._making:
                    self._make()
            self._room.clear()  # whoever sets it changes what is asked next before: no call to go on is lost
            if len(self._made) >= self._depth and not self._stop.is_set():
                self._room.wait()
        self._stop.wait()
        self._source.close()

    def close(self) -> None:
        """End the thread, once it has finished the item that it is making, and the generator."""
        self._end_thread(STOP_SECONDS)
        if not self._thread.is_alive():
            atexit.unregister(self._end_thread)

    def _end_thread(self, seconds: float) -> None:
        self._stop.set()
        self._room.set()
        self._thread.join(seconds)
