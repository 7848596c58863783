"""Blocks: a lane's share of the source as blocks of consecutive examples, the unit of shuffling and of seeking."""

from collections.abc import Iterator

import numpy as np

from streampack.dealing import Deal
from streampack.order import IntArray
from streampack.reading import CHUNK, ShardReader
from streampack.tables import Block, Chunk, Position, concatenate, sizes, take

BLOCK_BYTES = 8 << 20
"""A block ends at this size, whatever its number of examples (part of the stream's identity, like shuffle_block)."""
MIN_DEALT = 64
"""Of a shard that is dealt example by example a block holds shuffle_block / lanes examples, but at least so many."""


class BlockReader:
    """The blocks of one lane: up to `size` examples each, across shards, within one epoch."""

    def __init__(self, reader: ShardReader, deal: Deal, *, lane: int, size: int) -> None:
        self.reader = reader
        self.deal = deal
        self.lane = lane
        self.size = size
        self._sizes = getattr(reader.source, "sizes", sizes)
        self.group_reach = max(1, min(deal.lanes, size // MIN_DEALT))

    def epoch(self, start: Position) -> Iterator[Block]:
        """The blocks from `start`, which must be the start of a block, to the end of its epoch."""
        # Nothing here still refers to what was given away: of many lanes that would be most of the memory.
        held: list[_Piece] = []
        left: _Piece | None
        for left in self._read(start):
            while left is not None:
                left, block_is_full = self._add(held, left)
                if block_is_full:
                    here, start = start, Position(start.epoch, held[-1].turn, held[-1].next_index, start.block + 1)
                    yield self._block(here, held)
        if held:
            yield self._block(start, held)

    def _add(self, held: "list[_Piece]", piece: "_Piece") -> "tuple[_Piece | None, bool]":
        """Add what fits of a piece to the examples held; return what is left of it and whether the block is full.

        A dealt example stands for the others of its group, which other lanes get: so a block reaches about equally far
        in the source, and to resume in it costs the same.
        """
        count, used = sum(one.reach for one in held), sum(int(one.sizes.sum()) for one in held)
        ends = used + np.cumsum(piece.sizes)
        room = max(1, (self.size - count) // piece.reach_of_each)
        fits = min(room, int(np.searchsorted(ends, BLOCK_BYTES)) + 1, len(piece.indices))
        held.append(piece.cut(0, fits))
        full = count + held[-1].reach + piece.reach_of_each > self.size or int(ends[fits - 1]) >= BLOCK_BYTES
        return (piece.cut(fits, len(piece.indices)) if fits < len(piece.indices) else None), full

    def _block(self, start: Position, held: "list[_Piece]") -> Block:
        """The block of what is held, which is empty after it."""
        pieces = [held.pop(0) for _ in range(len(held))]
        return Block(
            source=self.reader.source,
            position=start,
            shards=np.concatenate([np.full(len(piece.indices), piece.shard) for piece in pieces]),
            indices=np.concatenate([piece.indices for piece in pieces]),
            data=concatenate([piece.chunk for piece in pieces]),
        )

    def _read(self, start: Position) -> "Iterator[_Piece]":
        shards, are_dealt = self.deal.turns(epoch=start.epoch, lane=self.lane)
        prefetch = getattr(self.reader.source, "prefetch", None)
        for turn in range(start.turn, len(shards)):
            shard, dealt = int(shards[turn]), bool(are_dealt[turn])
            index = start.index if turn == start.turn else 0
            pieces = (
                self._read_dealt(start.epoch, shard, turn, index) if dealt else self._read_whole(shard, turn, index)
            )
            for number, piece in enumerate(pieces):
                # Now that the shard is there, so that to fetch the next one does not delay it.
                if number == 0 and prefetch is not None and turn + 1 < len(shards):
                    prefetch(int(shards[turn + 1]))
                yield piece

    def _read_whole(self, shard: int, turn: int, index: int) -> "Iterator[_Piece]":
        while len(mine := self.reader.piece(shard, index)):
            indices = np.arange(index, index + len(mine))
            yield _Piece(shard, turn, indices, indices + 1, mine, self._sizes(mine), 1)
            index += len(mine)

    def _read_dealt(self, epoch: int, shard: int, turn: int, group: int) -> "Iterator[_Piece]":
        number = group * self.deal.lanes // CHUNK
        while True:
            chunk = self.reader.chunk(shard, number)
            indices, nexts = self._mine(epoch, shard, number, group, len(chunk))
            if len(indices):
                mine = self.reader.parse(take(chunk, indices - number * CHUNK))
                yield _Piece(shard, turn, indices, nexts, mine, self._sizes(mine), self.group_reach)
            if len(chunk) < CHUNK:
                return
            number += 1

    def _mine(self, epoch: int, shard: int, number: int, group: int, length: int) -> tuple[IntArray, IntArray]:
        """(indices of this lane's examples in a chunk, the position after each), from a group on."""
        low, high, lanes = number * CHUNK, number * CHUNK + length, self.deal.lanes
        groups = range(max(low // lanes, group), max(-(-high // lanes), group))
        if not groups:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        indices = self.deal.dealt_indices(epoch=epoch, shard=shard, lane=self.lane, groups=groups)
        inside = (indices >= low) & (indices < high)
        return indices[inside], np.arange(groups.start + 1, groups.stop + 1)[inside]


class _Piece:
    """A lane's examples of one chunk."""

    __slots__ = ("chunk", "indices", "nexts", "reach_of_each", "shard", "sizes", "turn")

    def __init__(
        self,
        shard: int,
        turn: int,
        indices: IntArray,
        nexts: IntArray,
        chunk: Chunk,
        sizes: IntArray,
        reach_of_each: int,
    ) -> None:
        self.shard = shard
        self.turn = turn
        self.indices = indices
        self.nexts = nexts
        self.chunk = chunk
        self.sizes = sizes
        self.reach_of_each = reach_of_each

    @property
    def reach(self) -> int:
        return len(self.indices) * self.reach_of_each

    @property
    def next_index(self) -> int:
        return int(self.nexts[-1])

    def cut(self, first: int, last: int) -> "_Piece":
        if (first, last) == (0, len(self.indices)):
            return self
        part = slice(first, last)
        return _Piece(
            self.shard,
            self.turn,
            self.indices[part],
            self.nexts[part],
            self.chunk[part],
            self.sizes[part],
            self.reach_of_each,
        )
