"""The state of a lane: which examples wait, by number, and where to read them again. A short JSON text.

[[feed, ...], arrivals, rows of the plan that are out, counts, tokens in rows of each feed, is the lane done], where a
feed is [[epoch, turn, index, block], first, bitmap, [used, size], [head], fragments, [epoch], [entered]].
"""

import binascii
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from streampack.sources import FAULTS
from streampack.tables import Position

BAD = tuple(f"bad_{reason}" for reason in FAULTS)
COUNTS = (
    "rows",
    "segments",
    "tokens",
    "loss_tokens",
    "examples",
    "split",
    "truncated_tokens",
    "no_target_tokens",
    "empty",
    "no_target",
    "overlong",
    "transform",
    *BAD,
)
"""A lane's counters: rows made, segments and real tokens and targets in them; examples taken, those split, tokens cut
off by truncation, tokens of rows left out since they held no target; examples left out, by reason."""
COMMON = 6
"""The counters from here on are 0 in most lanes, and then not written."""
SAME = -1
"""In place of the number of an example: the one before it."""


@dataclass(slots=True)  # not frozen, which would take twice as long to make
class FeedState:
    """What a lane has taken from one source."""

    position: Position
    """Of a block at or before the oldest waiting example ..."""
    first: int
    """... and the number of that block's first example."""
    waiting: bytes
    """For the numbers from `first` on: 1 where (some of) the example waits, else 0."""
    head: tuple[int, int]
    """(number, first token) of the next example, or fragment, to enter the buffer."""
    fragments: tuple[tuple[int, tuple[int, ...]], ...]
    """(number, first tokens) of the examples of which only these fragments wait."""
    epoch: tuple[int, int, int]
    """(epoch that enters, number of its first example, examples of the epoch before or 0 where unknown)"""
    entered: tuple[int, ...] = ()
    """Of a mixture: (tokens or examples that entered since the weights were set, examples entered, tokens entered)."""

    def to_json(self) -> str:
        """Compact: numbers relative to `first`, the waiting ones as a bitmap from the oldest on."""
        used = max(self.waiting.find(1), 0)
        bits = np.packbits(np.frombuffer(self.waiting[used:], dtype=np.uint8)).tobytes()
        position, (number, start) = self.position, self.head
        # Written by hand: of many lanes, after each step, a JSON encoder takes three times as long.
        return (
            f"[[{position.epoch},{position.turn},{position.index},{position.block}],{self.first},"
            f'"{_base64(bits)}",[{used},{len(self.waiting)}],[{number - self.first},{start}],'
            f"{_runs(self.fragments, self.first)},{_integers(self.epoch)},{_integers(self.entered)}]"
        )

    @staticmethod
    def from_list(values: Any) -> "FeedState":
        position, first, bitmap, span, head, fragments, epoch, entered = values
        used, size = span
        bits = np.unpackbits(np.frombuffer(binascii.a2b_base64(bitmap), dtype=np.uint8), count=size - used)
        return FeedState(
            position=Position(*position),
            first=first,
            waiting=bytes(used) + bits.tobytes(),
            head=(first + head[0], head[1]),
            fragments=_from_runs(fragments, first),
            epoch=tuple(epoch),
            entered=tuple(entered),
        )

    @staticmethod
    def start(epoch: int, *, mixed: bool = False) -> "FeedState":
        return FeedState(Position(epoch, 0, 0, 0), 0, b"", (0, 0), (), (epoch, 0, 0), (0, 0, 0) if mixed else ())


@dataclass(slots=True)  # not frozen, which would take twice as long to make
class LaneState:
    """A lane after a row."""

    feeds: tuple[FeedState, ...]
    arrivals: bytes
    """Of a mixture: which feed each example came from, from the oldest that waits on. Of one source: empty."""
    planned: int
    """How many rows of the plan made with this buffer are out."""
    counts: tuple[int, ...]
    """In the order of COUNTS, since the pass began."""
    given: tuple[int, ...]
    """Of a mixture: tokens in rows, of each feed. Of one source: empty."""
    done: bool
    """The lane has given all its rows of the pass."""

    @property
    def about_begun(self) -> int:
        """About how many examples of one source have begun in the rows of the plan that are out: as many pieces as are
        in other rows, and as many examples to a piece as among those that wait."""
        feed, rows, segments = self.feeds[0], self.counts[0], self.counts[1]
        waiting = feed.waiting.count(1)
        pieces = waiting + sum(len(starts) - 1 for _, starts in feed.fragments)
        return round(self.planned * segments / max(1, rows) * waiting / max(1, pieces))

    def to_json(self) -> str:
        feeds = ",".join([feed.to_json() for feed in self.feeds])
        counts = self.counts if any(self.counts[COMMON:]) else self.counts[:COMMON]
        return (
            f'[[{feeds}],"{_pack(self.arrivals)}",{self.planned},{_integers(counts)},{_integers(self.given)},'
            f"{int(self.done)}]"
        )

    @staticmethod
    def from_json(text: str) -> "LaneState":
        feeds, arrivals, planned, counts, given, done = json.loads(text)
        counts = (*counts, *[0] * (len(COUNTS) - len(counts)))
        return LaneState(
            tuple(map(FeedState.from_list, feeds)), _unpack(arrivals), planned, counts, tuple(given), bool(done)
        )

    @staticmethod
    def start(epoch: int, *, feeds: int = 1, mixed: bool = False) -> "LaneState":
        """A lane that has not begun an epoch."""
        start = FeedState.start(epoch, mixed=mixed)
        return LaneState((start,) * feeds, b"", 0, (0,) * len(COUNTS), (0,) * feeds if mixed else (), False)


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _pack(numbers: bytes) -> str:
    """Small numbers, in as many bits each as the largest needs: "bits,how many,base64"."""
    if not numbers:
        return ""
    width = max(1, max(numbers).bit_length())
    bits = np.unpackbits(np.frombuffer(numbers, dtype=np.uint8)[:, None], axis=1)[:, 8 - width :]
    return f"{width},{len(numbers)},{_base64(np.packbits(bits).tobytes())}"


def _unpack(text: str) -> bytes:
    if not text:
        return b""
    width, count, data = text.split(",")
    bits = np.unpackbits(np.frombuffer(binascii.a2b_base64(data), dtype=np.uint8), count=int(width) * int(count))
    wide = np.zeros((int(count), 8), dtype=np.uint8)
    wide[:, 8 - int(width) :] = bits.reshape(int(count), int(width))
    return np.packbits(wide, axis=1).tobytes()


def _integers(numbers: Iterable[int]) -> str:
    return str([*numbers]).replace(" ", "")  # the fastest way to write many small integers


def _runs(fragments: Iterable[tuple[int, tuple[int, ...]]], base: int) -> str:
    """Fragments as number - base, first token, step, how many, one after the other: most rise in equal steps. Of those
    that do not each is a run of its own, with SAME instead of the number from the second on."""
    return f"[{','.join([f'{number - base}{_runs_of(starts)}' for number, starts in fragments])}]"


@lru_cache(maxsize=4096)  # the same ones come again and again, from row to row and from example to example
def _runs_of(starts: tuple[int, ...]) -> str:
    first, many = starts[0], len(starts)
    step = starts[1] - first if many > 1 else 0
    if many <= 2 or starts == tuple(range(first, starts[-1] + 1, step)):
        return f",{first},{step},{many}"
    return f",{SAME}".join(f",{start},0,1" for start in starts)


def _from_runs(runs: Sequence[int], base: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    fragments: dict[int, tuple[int, ...]] = {}
    number = 0
    for named, first, step, many in zip(runs[::4], runs[1::4], runs[2::4], runs[3::4], strict=True):
        number = number if named == SAME else base + named
        fragments[number] = fragments.get(number, ()) + tuple(first + step * place for place in range(many))
    return tuple(fragments.items())
