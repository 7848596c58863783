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


def work_ahead(
    source: "Generator[T, None, None]", *, depth: int, stopped: threading.Event
) -> "Generator[T, None, None]":
    """Run a generator in a thread, at most about 2 * `depth` items ahead; its errors are raised here.

    `stopped` is set when nothing more will be asked for, so that the generator can end what it waits for.

    Items that are made within HAND_OVER_SECONDS go over together: changing threads costs more than making a few.
    """
    made: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=2)
    most = max(1, depth // 2)

    def put(kind: str, item: Any) -> bool:
        while not stopped.is_set():
            try:
                made.put((kind, item), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            held: list[T] = []
            given = time.monotonic()
            for item in source:
                held.append(item)
                if len(held) >= most or time.monotonic() - given > HAND_OVER_SECONDS:
                    if not put("items", held):
                        return
                    held, given = [], time.monotonic()
            put("items", held)
            put("end", None)
        except BaseException as error:
            put("error", error)
        finally:
            source.close()

    thread = threading.Thread(target=work, name="streampack", daemon=True)

    def stop() -> None:
        stopped.set()
        thread.join()

    thread.start()
    atexit.register(stop)  # a pass that is never finished must not leave the thread running into the interpreter's end
    try:
        while True:
            kind, item = made.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield from item
    finally:
        atexit.unregister(stop)
        stop()
