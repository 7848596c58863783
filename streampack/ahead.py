"""Working ahead: while the loop is busy with an item, a thread makes the next ones.

Whoever is free makes them. A loop that comes back at once (since there is no step between, or the step is faster than
the making) makes the next item itself: changing threads for each would cost it a third of its speed. As soon as it is
busy for longer than PAUSE_SECONDS, the thread takes over. To look whether it is costs a fast loop time, too, so the
thread looks less often as long as it is not.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.002, 0.032
STOP_SECONDS, EXIT_SECONDS = 1.0, 5.0
"""How long the end of a pass and that of the interpreter wait for the thread, which may be inside a network read."""


class WorkAhead(Generic[T]):
    """An iterator over a generator that a thread runs ahead, at most `depth` items. Its errors are raised here.

    `close()` ends the thread, and the generator with it. `stopped` is set first, so that the generator can end what it
    waits for.
    """

    def __init__(self, source: "Generator[T, None, None]", *, depth: int, stopped: threading.Event) -> None:
        self._source = source
        self._depth = depth
        self._made: deque[T] = deque()
        self._making = threading.Lock()  # held by whoever runs the source
        self._error: BaseException | None = None  # what ended the source: StopIteration at its end
        self._waits = False  # the loop wants an item now
        self._left = time.monotonic()  # when it got its last one
        self._stop = stopped
        self._room = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampack", daemon=True)
        self._thread.start()
        # A pass that is never finished must not leave the thread running into the interpreter's end.
        atexit.register(self._end_thread, EXIT_SECONDS)

    def __iter__(self) -> "WorkAhead[T]":
        return self

    def __next__(self) -> T:
        self._waits = True
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
            self._left = time.monotonic()
            self._waits = False
            self._room.set()

    def _make(self) -> None:
        """Make one item, or find the end. Only with the lock."""
        if self._error is None:
            try:
                self._made.append(next(self._source))
            except BaseException as error:
                self._error = error  # kept: the source is over, and must not seem to have ended well

    def _is_busy(self) -> bool:
        """Whether the loop has been at work on its last item for a while."""
        return not self._waits and time.monotonic() - self._left >= PAUSE_SECONDS

    def _run(self) -> None:
        pause = PAUSE_SECONDS
        while not self._stop.wait(pause) and self._error is None:
            pause = PAUSE_SECONDS if self._is_busy() else min(2 * pause, LONGEST_PAUSE_SECONDS)
            while self._is_busy() and not (self._stop.is_set() or len(self._made) >= self._depth or self._error):
                with self._making:
                    self._make()
            self._room.clear()  # whoever sets it changes what is asked next before: no call to go on is lost
            if len(self._made) >= self._depth and not (self._waits or self._stop.is_set()):
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
