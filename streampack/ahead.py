"""Working ahead: a generator runs in a thread, a bounded number of items before they are asked for."""

import atexit
import queue
import threading
from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def work_ahead(source: "Generator[T, None, None]", *, depth: int) -> "Generator[T, None, None]":
    """Run a generator in a thread, at most `depth` items ahead; its errors are raised here."""
    made: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

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
            for item in source:
                if not put("item", item):
                    return
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
            yield item
    finally:
        atexit.unregister(stop)
        stop()
