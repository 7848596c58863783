"""Items: what enters a lane's buffer. Blocks are shuffled, encoded and cut into fragments of at most a row.

The examples of a lane are numbered in the order in which it takes them. Numbers do not depend on what encoding makes of
an example, so an example that waits can be found again by its number without encoding those before it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.blocks import BlockReader
from streampack.encode import Encoder
from streampack.order import permutation
from streampack.sources import Example, Fault, FaultReason, where
from streampack.tables import Block, Position
from streampack.token_ids import Encoded, Tokens

Transform = Callable[[Example], Example | None]
_NO_LIMIT = 1 << 62
_SHUFFLE = 16  # keeps the random streams of blocks apart from those of dealing


@dataclass(slots=True)
class Item:
    """A waiting example, or what waits of it: a fragment, or with `wrapped` packing its rest."""

    number: int
    """Of its example among those that the lane takes from this source."""
    start: int
    """Its first token in the example."""
    ids: npt.NDArray[np.int32]
    targets: npt.NDArray[np.bool_] | None
    cells: int
    """Cells that it takes in a row: its tokens, rounded up to pad_to_multiple_of."""
    epoch: int
    shard: int
    """Of the example, numbered among the shards of all sources."""
    index: int
    """Of the example in its shard."""
    is_last: bool
    """No fragment of the example comes after it."""
    truncated: int = 0
    """Tokens of the example that were cut off."""
    feed: int = 0
    """Which of the sources of a mixture it is from."""
    age: int = 0
    """How many examples the lane had taken before its own, from all sources: less is older."""

    @property
    def origin(self) -> tuple[int, int, int, int, int]:
        """(epoch, shard, index, first token, tokens), as in `Row.origin`."""
        return self.epoch, self.shard, self.index, self.start, len(self.ids)

    def padded_ids(self, pad_token_id: int) -> npt.NDArray[np.int32]:
        """int32 [cells]: padding to a multiple lies inside the example's segment."""
        ids = np.full(self.cells, pad_token_id, dtype=np.int32)
        ids[: len(self.ids)] = self.ids
        return ids

    def padded_targets(self) -> npt.NDArray[np.bool_]:
        """bool [cells]; padding is not a target."""
        targets = np.zeros(self.cells, dtype=bool)
        targets[: len(self.ids)] = True if self.targets is None else self.targets
        return targets

    def cut(self, tokens: int) -> "tuple[Item, Item]":
        """The first `tokens` tokens, and the rest."""
        first, rest = slice(0, tokens), slice(tokens, None)
        targets = [None if self.targets is None else self.targets[part] for part in (first, rest)]
        return (
            replace(self, ids=self.ids[first], targets=targets[0], cells=tokens, is_last=False),
            replace(
                self,
                start=self.start + tokens,
                ids=self.ids[rest],
                targets=targets[1],
                cells=self.cells - tokens,
                truncated=0,
            ),
        )


@dataclass(slots=True)
class Dropped:
    """An example that is left out, and why."""

    number: int
    reason: str
    epoch: int
    fault: "Bad | None" = None


@dataclass(frozen=True, slots=True)
class Bad:
    """An example that could not be used: for the list of those that were left out."""

    epoch: int
    shard: int
    index: int
    reason: FaultReason
    what: str


class ItemReader:
    """The items that one lane takes from one source.

    Args:
        lane: its number.
        feed: which of the sources of a mixture this is, and `first_shard`: the number of its shard 0 among all.
        blocks: reads its blocks.
        encoder: makes tokens of examples.
        transform: a user's function on single examples, applied after seeking, so never to examples that are used;
            None from it leaves the example out.
        shuffle: shuffle within blocks, by (seed, epoch, lane, block).
        limit: longest fragment in tokens; None: never cut.
        multiple: each example takes a multiple of this many cells.
    """

    def __init__(
        self,
        lane: int,
        *,
        blocks: BlockReader,
        encoder: Encoder,
        transform: Transform | None,
        shuffle: bool,
        seed: int,
        limit: int | None,
        multiple: int,
        feed: int = 0,
        first_shard: int = 0,
    ) -> None:
        self.lane = lane
        self.feed = feed
        self.first_shard = first_shard
        self.blocks = blocks
        self.encoder = encoder
        self.transform = transform
        self.shuffle = shuffle
        self.seed = seed
        self.limit = limit
        self.multiple = multiple
        self.opened: list[tuple[int, Position]] = []
        """(number of the first example, position) of each block read; a lane removes those it is done with."""

    def where(self, shard: int, index: int) -> str:
        """The place of an example, for messages; shards are numbered among all."""
        return where(self.blocks.reader.source, shard - self.first_shard, index)

    def read(
        self, position: Position, *, number: int, stop_epoch: int | None, unused: Callable[[int, int], Sequence[int]]
    ) -> Iterator[Item | Dropped]:
        """Items in the order of their numbers. Examples are encoded many at a time, but their items made one by one:
        objects that come and go by turns give Python no reason to look for garbage.

        Args:
            position: of the block to start with.
            number: of that block's first example.
            stop_epoch: read up to this epoch; None: without end.
            unused: of so many examples from a number on those that are wanted, counted from there; others are passed
                over, not encoded.

        Raises:
            ValueError: where an endless stream has an epoch that brings this lane nothing.
        """
        fresh = number == 0
        while stop_epoch is None or position.epoch < stop_epoch:
            found_any = not fresh
            for block in self.blocks.epoch(position):
                self.opened.append((number, block.position))
                wanted = unused(number, len(block))
                found_any = found_any or len(wanted) < len(block)
                items = self._items(block, number, wanted)
                number += len(block)
                del block  # goes with its last batch
                for item in items:
                    found_any = found_any or isinstance(item, Item)
                    yield item
            if stop_epoch is None and not found_any:
                source = self.blocks.reader.source
                count = getattr(source, "num_examples", None)
                size = f" (of {count} examples)" if count is not None else ""
                raise ValueError(
                    f"lane {self.lane} of {self.blocks.deal.lanes} got no usable example from source {source.name!r}"
                    f"{size} in epoch {position.epoch}, so a stream that repeats it could not go on; use fewer lanes "
                    "(lanes=...), or more data"
                )
            position = Position(position.epoch + 1, 0, 0, 0)
            fresh = True

    def _items(self, block: Block, number: int, wanted: Sequence[int]) -> Iterator[Item | Dropped]:
        order, size = self._order(block), self.encoder.batch
        for first in range(0, len(wanted), size):
            places = wanted[first : first + size]
            items = self._encode(block, [number + place for place in places], order[places].tolist())
            if first + size >= len(wanted):
                del block
            yield from items

    def _order(self, block: Block) -> npt.NDArray[Any]:
        if not self.shuffle:
            return np.arange(len(block))
        return permutation(len(block), self.seed, _SHUFFLE, block.position.epoch, self.lane, block.position.block)

    def _encode(self, block: Block, numbers: list[int], picks: list[int]) -> Iterator[Item | Dropped]:
        kept = block
        rows: list[int | None] = list(picks)
        if self.transform is not None:
            kept, rows = transformed(block, picks, self.transform)
        encoded: list[Any] = self.encoder.encode(kept, [row for row in rows if row is not None])
        if len(encoded) < len(rows):
            of_rows = iter(encoded)
            encoded = ["transform" if row is None else next(of_rows) for row in rows]
        shards, indices = (block.shards[picks] + self.first_shard).tolist(), block.indices[picks].tolist()
        return self._items_of(encoded, numbers, block.position.epoch, shards, indices)

    def _items_of(
        self, encoded: list[Any], numbers: list[int], epoch: int, shards: list[int], indices: list[int]
    ) -> Iterator[Item | Dropped]:
        limit, feed, cells_of = self.limit or _NO_LIMIT, self.feed, len if self.multiple == 1 else self._cells
        for number, example, shard, index in zip(numbers, encoded, shards, indices, strict=True):
            if isinstance(example, np.ndarray) and len(example) <= limit:
                yield Item(number, 0, example, None, cells_of(example), epoch, shard, index, True, 0, feed)
            elif isinstance(example, np.ndarray):
                yield from self._fragments(number, Encoded(example, None), (epoch, shard, index), limit)
            elif isinstance(example, Encoded):
                ids, targets = example.ids, example.targets
                if len(ids) <= limit:
                    cells, truncated = cells_of(ids), example.truncated
                    yield Item(number, 0, ids, targets, cells, epoch, shard, index, True, truncated, feed)
                else:
                    yield from self._fragments(number, example, (epoch, shard, index), limit)
            elif isinstance(example, Fault):
                bad = Bad(epoch, shard, index, example.reason, example.what)
                yield Dropped(number, f"bad_{example.reason}", epoch, bad)
            else:
                yield Dropped(number, example, epoch)

    def _fragments(self, number: int, example: Encoded, place: tuple[int, int, int], limit: int) -> Iterator[Item]:
        tokens = len(example.ids)
        for start, stop in _cuts(tokens, limit):
            ids, targets = example.ids[start:stop], None if example.targets is None else example.targets[start:stop]
            yield Item(number, start, ids, targets, self._cells(ids), *place, stop == tokens, 0, self.feed)

    def _cells(self, ids: Tokens) -> int:
        return -(-len(ids) // self.multiple) * self.multiple


def transformed(block: Block, picks: Sequence[int], transform: Transform) -> tuple[Block, list[int | None]]:
    """The transformed examples as a block of their own, and the row of each pick there, None if left out."""
    results: list[Example | Fault | None] = []
    for pick, example in zip(picks, block.examples(picks), strict=True):
        try:
            results.append(example if isinstance(example, Fault) else transform(example))
        except Exception as error:
            raise ValueError(f"{block.where(pick)}: transform raised {type(error).__name__}: {error}") from error
    count = iter(range(len(results)))
    rows = [None if result is None else next(count) for result in results]
    kept = [pick for pick, result in zip(picks, results, strict=True) if result is not None]
    return block.select(kept, [result for result in results if result is not None]), rows


def _cuts(tokens: int, limit: int) -> list[tuple[int, int]]:
    """Where an example is cut. No fragment is a single token, which would have nothing to learn: 9 by 4 is 4, 3, 2."""
    ends = [*range(limit, tokens, limit), tokens]
    if tokens - ends[-2] == 1 and limit > 2:
        ends[-2] -= 1
    return list(zip([0, *ends[:-1]], ends, strict=True))
