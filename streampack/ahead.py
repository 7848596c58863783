"""Working ahead: while the loop is busy with an item, a thread makes the next ones.

Whoever is free makes them. A loop that comes back at once (since there is no step between, or the step is faster than
the making) makes the next item itself: changing threads for each would cost it a third of its speed. As soon as it is
busy for longer than PAUSE_SECONDS, the thread takes over.
"""

import atexit
import threading
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

PAUSE_SECONDS = 0.002
PATIENCE_SECONDS = 5.0
"""How long the end of a pass waits for the item that the thread is making. A source that hangs (on the network) must
not keep a loop that was interrupted from saving."""


class WorkAhead(Generic[T]):
    """An iterator over a generator that a thread runs ahead, at most `depth` items. Its errors are raised here.

    `close()` ends the thread, and the generator with it.
    """

    def __init__(self, source: "Generator[T, None, None]", *, depth: int) -> None:
        self._source = source
        self._depth = depth
        self._made: deque[T] = deque()
        self._making = threading.Lock()  # held by whoever runs the source
        self._error: BaseException | None = None  # what ended the source: StopIteration at its end
        self._waits = False  # the loop wants an item now
        self._stop = threading.Event()
        self._room = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampack", daemon=True)
        self._thread.start()
        # A pass that is never finished must not leave the thread running into the interpreter's end.
        atexit.register(self.close)

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
            self._waits = False
            self._room.set()

    def _make(self) -> None:
        """Make one item, or find the end. Only with the lock."""
        if self._error is None:
            try:
                self._made.append(next(self._source))
            except BaseException as error:
                self._error = error  # kept: the source is over, and must not seem to have ended well

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_SECONDS):
            while not (self._waits or self._stop.is_set() or len(self._made) >= self._depth):
                with self._making:
                    self._make()
                if self._error is not None:
                    return
            self._room.clear()
            if len(self._made) >= self._depth and not self._waits:
                self._room.wait()

    def close(self) -> None:
        """End the thread, once it has finished the item that it is making, and the generator. A thread that hangs in
        its item is left to itself: it ends with the process."""
        atexit.unregister(self.close)
        self._stop.set()
        self._room.set()
        self._thread.join(PATIENCE_SECONDS)
        if not self._thread.is_alive():
            self._source.close()
