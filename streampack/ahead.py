"""Working ahead: a generator runs in a thread, a bounded number of items before they are asked for."""

import atexit
import queue
import threading
import time
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")

HAND_OVER_SECONDS = 0.005
"""As long as Python lets a thread run before another may have its turn (sys.getswitchinterval)."""
STARVING_SECONDS = 0.05
"""After so long without items, those that were made but still wait for company are taken as they are."""
STOP_SECONDS, EXIT_SECONDS = 1.0, 5.0
"""How long the end of a pass and that of the interpreter wait for the thread, which may be inside a network read."""


def work_ahead(
    source: "Generator[T, None, None]", *, depth: int, stopped: threading.Event
) -> "Generator[T, None, None]":
    """Run a generator in a thread, at most about 2 * `depth` items ahead; its errors are raised here.

    Items that are made within HAND_OVER_SECONDS go over together: changing threads costs more than making a few.
    `stopped` is set when nothing more will be asked for, so that the generator can end what it waits for.
    """
    made: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=2)
    most = max(1, depth // 2)
    held: list[T] = []  # made, not handed over yet; the thread adds, and whoever hands over takes all, under the lock
    lock = threading.Lock()

    def put(kind: str, item: Any) -> bool:
        while not stopped.is_set():
            try:
                made.put((kind, item), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def take() -> list[T]:
        with lock:
            taken, held[:] = held[:], []
        return taken

    def work() -> None:
        try:
            given = time.monotonic()
            for item in source:
                with lock:
                    held.append(item)
                if len(held) >= most or time.monotonic() - given > HAND_OVER_SECONDS:
                    if not put("items", take()):
                        return
                    given = time.monotonic()
            put("items", take())
            put("end", None)
        except BaseException as error:
            put("items", take())
            put("error", error)
        finally:
            source.close()

    thread = threading.Thread(target=work, name="streampack", daemon=True)

    def stop(seconds: float) -> None:
        stopped.set()
        thread.join(seconds)

    thread.start()
    # A pass that is never finished must not leave the thread running into the interpreter's end.
    atexit.register(stop, EXIT_SECONDS)
    try:
        while True:
            try:
                kind, item = made.get(timeout=STARVING_SECONDS)
            except queue.Empty:  # the source is slow, or waits for the network
                kind, item = "items", take()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield from item
    finally:
        stop(STOP_SECONDS)
        if not thread.is_alive():
            atexit.unregister(stop)
