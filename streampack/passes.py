"""Passes, for engines that train on a loader: how many batches they have, and totals of all ranks."""

import math
from collections.abc import Iterator
from typing import Any

from streampack.checkpoint import gather_objects
from streampack.ending import resolve
from streampack.loader import PackedLoader
from streampack.progress import Start


class TrainPasses:
    """A pass of the loader each time, for engines that number passes from 0 also where they resume.

    They cannot set the epoch: the stream knows it itself.
    """

    def __init__(self, loader: PackedLoader) -> None:
        self.loader = loader
        self.batches = 0
        """Fetched in this pass."""
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        self.batches = 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        is_first, self._is_first = self._is_first, False
        for batch in self.loader:
            self.batches += 1
            yield batch
        if is_first and not self.batches:  # resumed from the very end of a pass: an empty one would end the training
            yield from self._batches()


def count_batches(loader: PackedLoader, *, passes: int = 1) -> list[int]:
    """How many batches each rank gets in each of the first passes over a finite stream, for schedules.

    Nobody knows it before packing, so this reads, tokenizes and packs them all, each rank its share. It takes as long
    as the loader alone takes for these passes, and changes nothing about the loader. With a process group all ranks
    must call it.

    Raises:
        ValueError: for an endless stream.
    """
    stream = loader.packed.stream
    if stream.epochs is None:
        raise ValueError("an endless stream (epochs=None) has no number of batches; choose a number of steps")
    rank, world_size = loader.packed.resolve_rank()
    at_end = resolve(loader.at_end, endless=False, world_size=world_size)
    counts = []
    for number in range(passes):
        start = Start(first_epoch=number * stream.epochs, rank=rank, world_size=world_size)
        given = stream.rows(start.host(stream, rows_per_message=64), first_epoch=start.first_epoch)
        batches = sum(one.row is not None for one in given) / loader.batch_size
        mine = math.floor(batches) if at_end == "cut" else math.ceil(batches)
        everyone = [mine] if at_end == "own" else gather_objects(mine)
        counts.append(min(everyone) if at_end == "cut" else max(everyone))
    return counts


def totals(loader: PackedLoader) -> dict[str, float]:
    """Of all ranks together since the stream began, also before a resume: num_tokens (without padding),
    num_loss_tokens (targets), fill (tokens / cells). All ranks must call it; of those that read the same rows, one
    counts."""
    stats = loader.stats
    mine = [stats[key] for key in ("tokens", "loss_tokens", "cells", "padding_tokens")]
    by_rank = dict(gather_objects((loader.packed.resolve_rank()[0], mine)))
    tokens, loss_tokens, cells, padding = map(sum, zip(*by_rank.values(), strict=True))
    return {"num_tokens": tokens, "num_loss_tokens": loss_tokens, "fill": 1 - padding / cells if cells else 0.0}
