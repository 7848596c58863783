"""Reading: a lane's share of the source as blocks of consecutive examples, the unit of shuffling and of seeking.

A shard that all lanes share is read in chunks of CHUNK examples at fixed places, so that a chunk is read once for the
lanes of a process while they stay near each other; a lane that falls behind the cache gets a reader of its own.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from streampack.dealing import Deal
from streampack.order import IntArray
from streampack.sources import Source, where
from streampack.tables import Block, Chunk, Position, concatenate, size_of, sizes, take

CHUNK = 256
BLOCK_BYTES = 8 << 20
"""A block ends at this size, whatever its number of examples (part of the stream's identity, like shuffle_block)."""
PIECE_BYTES = 1 << 20
CACHE_BYTES = 64 << 20
OPEN_READERS = 64
MIN_DEALT = 64
"""Of a shard that is dealt example by example a block holds shuffle_block / lanes examples, but at least so many."""


class ShardReader:
    """Chunks of shards by number, for all lanes of a process. Holds at most CACHE_BYTES and OPEN_READERS readers.

    needed: the columns of a table that are looked at; None: all.
    """

    def __init__(self, source: Source, *, needed: Callable[[pa.Table], list[str]] | None) -> None:
        self.source = source
        self.needed = needed
        self._chunks: OrderedDict[tuple[int, int], tuple[Chunk, int]] = OrderedDict()
        self._bytes = 0
        # Readers that wait to go on: of shared chunks by the number of the next one, of pieces by the next index.
        self._readers: OrderedDict[tuple[int, int], Iterator[Chunk]] = OrderedDict()
        self._open: OrderedDict[tuple[int, int], Iterator[Chunk]] = OrderedDict()

    def chunk(self, shard: int, number: int) -> Chunk:
        """Examples number * CHUNK ... of a shard that lanes share; fewer than CHUNK at its end, none after it."""
        key = shard, number
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key][0]
        reader = self._readers.pop(key, None) or self._read(shard, number)
        chunk = next(reader, [])
        if len(chunk) == CHUNK:
            self._remember(self._readers, (shard, number + 1), reader)
        self._keep(key, chunk)
        return chunk

    def piece(self, shard: int, index: int) -> Chunk:
        """Some examples of a shard from `index` on: at most CHUNK, or about PIECE_BYTES; none at its end."""
        reader = self._open.pop((shard, index), None) or self._pieces(shard, index)
        piece = next(reader, [])
        if len(piece):
            self._remember(self._open, (shard, index + len(piece)), reader)
        return piece

    def _remember(
        self, readers: "OrderedDict[tuple[int, int], Iterator[Chunk]]", at: tuple[int, int], reader: Iterator[Chunk]
    ) -> None:
        readers[at] = reader
        if len(readers) > OPEN_READERS:
            readers.popitem(last=False)

    def _keep(self, key: tuple[int, int], chunk: Chunk) -> None:
        size = int(sizes(chunk).sum())
        self._chunks[key] = chunk, size
        self._bytes += size
        while self._bytes > CACHE_BYTES and len(self._chunks) > 1:
            self._bytes -= self._chunks.popitem(last=False)[1][1]

    def _read(self, shard: int, number: int) -> Iterator[Chunk]:
        """Full chunks from `number` on, then the rest of the shard."""
        held: list[Chunk] = []
        count = 0
        for piece in self._pieces(shard, number * CHUNK):
            held.append(piece)
            count += len(piece)
            while count >= CHUNK:
                joined = concatenate(held)
                yield joined[:CHUNK]
                rest = joined[CHUNK:]
                held, count = ([rest] if len(rest) else []), len(rest)
        if held:
            yield concatenate(held)

    def _pieces(self, shard: int, start: int) -> Iterator[Chunk]:
        index = start
        examples: list[Any] = []
        size = 0
        try:
            for item in self.source.read(shard, start):
                if isinstance(item, pa.Table):
                    if examples:
                        yield examples
                        examples, size = [], 0
                    index += len(item)
                    table = item.select(self.needed(item)) if self.needed else item
                    yield from (table[first : first + CHUNK] for first in range(0, len(table), CHUNK))
                else:
                    index += 1
                    examples.append(item)
                    size += size_of(item)
                    if len(examples) == CHUNK or size >= PIECE_BYTES:
                        yield examples
                        examples, size = [], 0
        except Exception as error:
            _add_place(error, f"while reading {where(self.source, shard, index)}")
            raise
        if examples:
            yield examples


class BlockReader:
    """The blocks of one lane: up to `size` examples each, across shards, within one epoch."""

    def __init__(self, reader: ShardReader, deal: Deal, *, lane: int, size: int) -> None:
        self.reader = reader
        self.deal = deal
        self.lane = lane
        self.size = size
        self.group_reach = max(1, min(deal.lanes, size // MIN_DEALT))

    def epoch(self, start: Position) -> Iterator[Block]:
        """The blocks from `start`, which must be the start of a block, to the end of its epoch."""
        held: list[_Piece] = []
        for piece in self._read(start):
            left: _Piece | None = piece
            while left is not None:
                left, block_is_full = self._add(held, left)
                if block_is_full:
                    yield self._block(start, held)
                    last = held[-1]
                    start = Position(start.epoch, last.turn, last.next_index, start.block + 1)
                    held = []
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
        return Block(
            source=self.reader.source,
            position=start,
            shards=np.concatenate([np.full(len(piece.indices), piece.shard) for piece in held]),
            indices=np.concatenate([piece.indices for piece in held]),
            data=concatenate([piece.chunk for piece in held]),
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
            yield _Piece(shard, turn, indices, indices + 1, mine, sizes(mine), 1)
            index += len(mine)

    def _read_dealt(self, epoch: int, shard: int, turn: int, group: int) -> "Iterator[_Piece]":
        number = group * self.deal.lanes // CHUNK
        while True:
            chunk = self.reader.chunk(shard, number)
            indices, nexts = self._mine(epoch, shard, number, group, len(chunk))
            if len(indices):
                mine = take(chunk, indices - number * CHUNK)
                yield _Piece(shard, turn, indices, nexts, mine, sizes(mine), self.group_reach)
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


def _add_place(error: Exception, place: str) -> None:
    """Say where an error of a source happened, keeping its type: as a note, or before Python 3.11 in its message."""
    if hasattr(error, "add_note"):
        error.add_note(place)
    else:
        error.args = (f"{error} ({place})",)
