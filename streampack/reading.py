"""Reading: shards in chunks and pieces, for all lanes of a process; a thread reads the next one meanwhile.

A shard that all lanes share is read in chunks of CHUNK examples at fixed places. A chunk is kept until all lanes of the
process have taken it, so that it is read once for them, also where the first one goes far ahead to fill its buffer
before the others begin; a lane that falls behind the cache gets a reader of its own.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from streampack.retry import ReadStats, Retry, read_with_retries
from streampack.sources import Source, parser_of
from streampack.tables import Chunk, concatenate, size_of

CHUNK = 256
PIECE_BYTES = 1 << 20
CACHE_BYTES, CACHE_BYTES_OF_LANE = 64 << 20, 1 << 20
"""What is kept of chunks at most, or for each lane: about what it reads at once to fill its buffer."""
OPEN_READERS = 64
CLOSE_SECONDS = 5.0


class ShardReader:
    """Chunks of shards by number, and pieces by index. Holds chunks up to a limit of bytes, and OPEN_READERS readers
    with one piece (of about PIECE_BYTES) or chunk each that was read ahead.

    lanes: how many share the chunks: each asks for each one once.
    select: keeps of a table what is looked at; None: all.
    retry, closed: see `read_with_retries`.
    """

    def __init__(
        self,
        source: Source,
        *,
        lanes: int,
        select: Callable[[pa.Table], Chunk] | None,
        retry: Retry | None = None,
        closed: Callable[[], bool] | None = None,
    ) -> None:
        self.source = source
        self.lanes = lanes
        self.select = select
        self.retry = Retry.of(retry)
        self.reading = ReadStats()
        self._parse = parser_of(source)
        self._is_closed = closed
        self._ends = False
        self._chunks: OrderedDict[tuple[int, int], _Kept] = OrderedDict()
        self._bytes = 0
        self._most_bytes = max(CACHE_BYTES, lanes * CACHE_BYTES_OF_LANE)
        # What comes next, and is being read: of shared chunks by the number, of pieces by the index.
        self._readers: OrderedDict[tuple[int, int], _Next] = OrderedDict()
        self._open: OrderedDict[tuple[int, int], _Next] = OrderedDict()
        self._thread: _ReadingThread | None = None

    def chunk(self, shard: int, number: int) -> Chunk:
        """Examples number * CHUNK ... of a shard that lanes share; fewer than CHUNK at its end, none after it. They may
        have to be parsed."""
        key = shard, number
        kept = self._chunks.get(key)
        if kept is None:
            reader = self._readers.pop(key, None) or _Next(self._read(shard, number))
            chunk = reader.result()
            if len(chunk) == CHUNK:
                self._go_on(self._readers, (shard, number + 1), reader)
            kept = self._keep(key, chunk)
        self._chunks.move_to_end(key)
        kept.asked += 1
        if kept.asked == self.lanes:
            self._bytes -= self._chunks.pop(key).size
        return kept.chunk

    def piece(self, shard: int, index: int) -> Chunk:
        """Some examples of a shard from `index` on: at most CHUNK, or about PIECE_BYTES; none at its end."""
        reader = self._open.pop((shard, index), None) or _Next(map(self.parse, self._pieces(shard, index)))
        piece = reader.result()
        if len(piece):
            self._go_on(self._open, (shard, index + len(piece)), reader)
        return piece

    def parse(self, chunk: Chunk) -> Chunk:
        """Examples that are not parsed yet as dicts."""
        if self._parse is None or isinstance(chunk, pa.Table):
            return chunk
        return [self._parse(one) if type(one) is bytes else one for one in chunk]

    def close(self) -> None:
        """End the thread. (A read that does not come back is left to itself after CLOSE_SECONDS.)"""
        self._ends = True
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _go_on(self, readers: "OrderedDict[tuple[int, int], _Next]", at: tuple[int, int], reader: "_Next") -> None:
        """Remember a reader by the place it is at, and read on in the thread, if not so many are open that it may be
        closed before it is asked for, and if the source can be read by two threads at a time."""
        readers[at] = following = _Next(reader.iterator)
        if len(readers) > OPEN_READERS:
            readers.popitem(last=False)
        elif getattr(self.source, "concurrent", False):
            self._thread = self._thread or _ReadingThread()
            self._thread.submit(following)

    def _keep(self, key: tuple[int, int], chunk: Chunk) -> "_Kept":
        size = int(chunk.nbytes) if isinstance(chunk, pa.Table) else sum(map(self._size_of, chunk))
        kept = self._chunks[key] = _Kept(chunk, size)
        self._bytes += kept.size
        while self._bytes > self._most_bytes and len(self._chunks) > 1:
            self._bytes -= self._chunks.popitem(last=False)[1].size
        return kept

    def _size_of(self, one: Any) -> int:
        return len(one) if self._parse is not None and type(one) is bytes else size_of(one)

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
        examples: list[Any] = []
        size = 0
        for item in read_with_retries(
            self.source, shard, start, retry=self.retry, stats=self.reading, closed=self._closed
        ):
            if isinstance(item, pa.Table):
                if examples:
                    yield examples
                    examples, size = [], 0
                chunk = self.select(item) if self.select else item
                yield from (chunk[first : first + CHUNK] for first in range(0, len(chunk), CHUNK))
                continue
            for one in item if self._parse is not None and isinstance(item, list) else [item]:
                examples.append(one)
                size += self._size_of(one)
                if len(examples) == CHUNK or size >= PIECE_BYTES:
                    yield examples
                    examples, size = [], 0
        if examples:
            yield examples

    def _closed(self) -> bool:
        return self._ends or (self._is_closed is not None and self._is_closed())


@dataclass(slots=True)
class _Kept:
    """A chunk, about its bytes, and how many lanes have asked for it."""

    chunk: Chunk
    size: int
    asked: int = 0


class _Next:
    """The next item of an iterator: read when it is asked for, or before that by a thread."""

    __slots__ = ("_error", "_item", "_lock", "_read", "iterator")

    def __init__(self, iterator: Iterator[Chunk]) -> None:
        self.iterator = iterator
        self._lock = threading.Lock()
        self._read = False
        self._item: Chunk = []
        self._error: BaseException | None = None

    def read(self) -> None:
        with self._lock:
            if not self._read:
                self._read = True
                try:
                    self._item = next(self.iterator, [])
                except BaseException as error:
                    self._error = error

    def result(self) -> Chunk:
        """The item; none at the end."""
        self.read()
        if self._error is not None:
            raise self._error
        return self._item


class _ReadingThread:
    """Reads what was submitted, in order."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[_Next | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="streampack reading", daemon=True)
        self._thread.start()

    def submit(self, following: _Next) -> None:
        self._asked.put(following)

    def _run(self) -> None:
        while (following := self._asked.get()) is not None and not self._closed.is_set():
            following.read()
            del following  # what was read belongs to whoever asks for it

    def close(self) -> None:
        self._closed.set()
        self._asked.put(None)
        self._thread.join(CLOSE_SECONDS)
