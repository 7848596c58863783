"""How the next pass begins, agreed between a dataset's copies in the main process and in workers.

A plain DataLoader starts its workers with copies of the dataset, and persistent ones keep them, so the counter lives in
shared memory. Worker 0 decides for a pass, the others read it; a pass is known by the seed that torch gives
all its workers, and by how many passes this copy has seen (persistent workers keep their seed).
"""

import multiprocessing
import os
import time
from typing import Any

import torch
from torch.utils.data import get_worker_info

from streampack.state import StateError

_NEXT, _USED_BY_WORKERS, _LOADED, _RESUMED, _SLOT, _FIRST = range(6)
_SLOTS = 8
_PATIENCE_SECONDS = 120


class PassCounter:
    """Decides how passes begin: all workers of a pass get the same answer."""

    def __init__(self) -> None:
        # The cells named above, then slots of (seed, pass, 1 + first epoch or 0: resume, is the slot filled).
        shared = torch.zeros(_FIRST + 4 * _SLOTS, dtype=torch.int64)
        self._shared: torch.Tensor = shared.share_memory_()  # type: ignore[no-untyped-call]
        self._passes = 0
        self._loaded = 0  # number of the newest state that this copy holds
        self._resumes_here = False  # a state was loaded in this worker

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy (deepcopy, pickle) has shared memory of its own; in a spawned worker it is the parent's."""
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def upcoming(self) -> int:
        """The epoch with which the next pass would begin."""
        return int(self._shared[_NEXT])

    @property
    def loads(self) -> int:
        """How many states were loaded into the dataset."""
        return self._loaded

    @property
    def in_workers(self) -> bool:
        """Whether DataLoader workers have begun a pass."""
        return bool(self._shared[_USED_BY_WORKERS])

    def set(self, epoch: int) -> None:
        """The next pass begins with `epoch`."""
        self._shared[_NEXT] = epoch

    def load(self, *, next_epoch: int) -> None:
        """A state was loaded: the next pass resumes it, the one after that begins with `next_epoch`."""
        self._shared[_NEXT] = next_epoch
        if get_worker_info() is not None:  # as StatefulDataLoader does: each worker its own
            self._resumes_here = True
            return
        self._shared[_LOADED] += 1
        self._loaded = int(self._shared[_LOADED])

    def next_pass(self, *, step: int) -> int | None:
        """The first epoch of a pass that begins now, None: resume the loaded state. Later passes begin `step` later.

        Raises:
            StateError: in a persistent worker that was started before a state was loaded, and cannot know it.
        """
        info = get_worker_info()
        if self._resumes_here:
            self._resumes_here = False
            return None
        if int(self._shared[_LOADED]) != self._loaded:
            raise StateError(
                "a state was loaded into the dataset after persistent DataLoader workers were started with copies of "
                "it; load it before the first pass, or make a new DataLoader (PackedLoader does this by itself)"
            )
        if info is None:
            return self._decide(step)
        self._passes += 1
        key = (_first_process(info.id), self._passes)
        self._shared[_USED_BY_WORKERS] = 1
        if info.id > 0:
            return self._wait_for(key)
        answer = self._decide(step)
        place = _FIRST + 4 * (int(self._shared[_SLOT]) % _SLOTS)
        self._shared[_SLOT] += 1
        self._shared[place + 3] = 0
        self._shared[place], self._shared[place + 1] = key
        self._shared[place + 2] = 0 if answer is None else answer + 1
        self._shared[place + 3] = 1  # last: the slot counts only now
        return answer

    def _decide(self, step: int) -> int | None:
        if int(self._shared[_RESUMED]) != self._loaded:
            self._shared[_RESUMED] = self._loaded
            return None
        epoch = int(self._shared[_NEXT])
        self._shared[_NEXT] = epoch + step
        return epoch

    def _wait_for(self, key: tuple[int, int]) -> int | None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for seed, number, answer, filled in self._shared[_FIRST:].reshape(_SLOTS, 4).tolist():
                if filled and (seed, number) == key:
                    return int(answer) - 1 if answer else None
            time.sleep(0.001)
        raise RuntimeError(f"worker 0 of this DataLoader did not begin its pass within {_PATIENCE_SECONDS} s")


def _first_process(worker: int) -> int:
    """Tells the workers of one DataLoader iterator from all others: their seeds may be equal (torch.manual_seed before
    each pass). A process numbers those that it starts, and worker 0 is started first."""
    return os.getppid() << 32 | (multiprocessing.current_process()._identity[-1] - worker)
