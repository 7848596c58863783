"""What runs in the worker processes of a PackedLoader: each sends its share of the rows as messages."""

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from streampack.dataset import PackedDataset
from streampack.hosting import Message
from streampack.progress import Start
from streampack.ranks import limit_tokenizer_threads, worker_of_process
from streampack.stream import Stream


class Messages(IterableDataset[Message]):
    """The messages of a pass. Living (persistent) workers learn of a new pass through shared memory."""

    def __init__(self, packed: PackedDataset) -> None:
        self.packed = packed
        self._start: Start | None = None
        self._rows_per_message = 1
        self.serial = 0
        """Number of the newest pass."""
        # Number of the newest pass, its first epoch, the number of the newest pass that was closed.
        self._shared: torch.Tensor = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has shared memory of its own; in a spawned worker it is the parent's."""
        self.__dict__.update(state)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def renew(self, start: Start, rows_per_message: int, *, running: bool) -> bool:
        """Set the next pass. False: workers that are running cannot take part in it."""
        self.serial += 1
        self._start, self._rows_per_message = start, rows_per_message
        self._shared[0], self._shared[1] = self.serial, start.first_epoch
        return not (running and (start.states or start.row))

    def close(self, serial: int) -> None:
        """Nothing more of a pass, by its number, will be asked for: workers that wait for the network give up."""
        self._shared[2] = max(serial, int(self._shared[2]))

    def __len__(self) -> int:
        raise TypeError(
            "a PackedLoader has no len(): how many batches there are is known once all examples were packed; "
            "streampack.count_batches(loader) does that, and training loops take a number of steps"
        )

    def set_epoch(self, epoch: int) -> None:
        """The next pass of the dataset begins with this epoch."""
        self.packed.set_epoch(epoch)

    def __iter__(self) -> Iterator[Message]:
        limit_tokenizer_threads()
        worker, num_workers = worker_of_process()
        start = self._start
        if start is None or get_worker_info() is None:
            raise RuntimeError(
                "the dataset of a PackedLoader was taken into another DataLoader (as accelerate's prepare does), which "
                "would split or repeat what is dealt to ranks already; use the PackedLoader as it is"
            )
        # What a worker inherits stays to its end. To look through it for garbage again and again takes a tenth of its
        # time, and in a forked worker 80 MB: what is looked at is copied.
        gc.freeze()
        if int(self._shared[0]) != self.serial:
            start = Start(first_epoch=int(self._shared[1]), rank=start.rank, world_size=start.world_size)
        stream = self.packed.stream
        host = start.host(stream, worker=worker, num_workers=num_workers, rows_per_message=self._rows_per_message)
        serial, parent = int(self._shared[0]), os.getppid()

        def closed() -> bool:
            return int(self._shared[2]) >= serial or os.getppid() != parent

        yield from stream.messages(host, first_epoch=start.first_epoch, states=start.states, closed=closed)


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Start workers with the tokenizer's threads off, which also keeps it from warning about the fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ.setdefault(name, "false")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def warn_of_reading(stream: Stream, *, processes: int) -> None:
    """Say where every process has to read the same shards (which costs nothing with random access)."""
    for part in stream.parts:
        factor, source = stream.deal(part).reading_factor(processes), part.source
        if factor >= 2 and not getattr(source, "random_access", False):
            warnings.warn(
                f"source {source.name!r} has {source.num_shards} shards for {stream.lanes} lanes, so {processes} "
                f"processes read all of them, {factor:.3g} times the source in all; more shards (files, or row "
                "groups of Parquet), fewer workers or fewer lanes read less",
                stacklevel=5,
            )


def as_it_is(message: Any) -> Any:
    """What a DataLoader of messages collates: nothing."""
    return message
