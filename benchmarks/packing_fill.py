"""How full the rows are: one packing stream, and 16 lanes, against the information bound and best-fit-decreasing.

    python benchmarks/packing_fill.py

For each length set and row length (over-long examples cut), with the order of the data kept:

- rows: of the stream; bound: ceil(tokens / seq_len), which no packing can beat; BFD 1000: best-fit-decreasing over
  isolated chunks of 1000 pieces, as they come; BFD 1000 whole: of 1000 examples with all their pieces, so of more (not
  judged); BFD all: over the whole set at once.
- Mtoken/s: of the packing functions alone, over a simulated buffer: no reading, no encoding, no rows laid out.
- wait: most examples between the oldest of a row and the newest that the lane had read then; span: how far apart in the
  stream the waiting examples lie at most, which is what a resume reads again.

A line is "ok" if the rows are not more than those of BFD 1000 and, where the mean piece is at most a quarter of a row,
at most 1.0005 times the bound (rounded up). Of 16 lanes each has a part-filled last row: these 16 are left out of the
comparison with BFD 1000 of the whole set, and the bound is that of each lane's share. `over BFD` is stricter and not
judged: lanes with more rows than BFD 1000 of their own share, which is one chunk where a lane has few examples. At the
end: 1,000 examples in an endless stream. Exit status 1 on a MISS.
"""

import itertools
import math
import sys
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from data import SETS, LengthSource, cut, exit_status, lengths_of, show, show_versions

from streampack import PackedDataset
from streampack.lanes import MAX_ROWS, MIN_ROWS
from streampack.packing import best_fit, first_row, resolve
from streampack.stream import LaneOpener

SEQ_LENS = (2048, 4096, 8192, 32768, 131072)
BUFFER = 256
LANES = 16


@dataclass
class LaneRows:
    """What one lane made of its share."""

    rows: int = 0
    wait: int = 0
    span: int = 0
    segments: list[np.ndarray] = field(default_factory=list)

    def pieces(self) -> tuple[list[int], list[int]]:
        """(lengths, example of each) in the order of the data."""
        shard, index, start, tokens = np.concatenate(self.segments).T[1:]
        order = np.lexsort((start, index, shard))
        return tokens[order].tolist(), (shard * 1000 + index)[order].tolist()


def run_lane(dataset: PackedDataset, number: int) -> LaneRows:
    """One lane to its end. Of one lane, the number of an example is its place in the set."""
    lane = LaneOpener(dataset.stream, 0, {})(number)
    made = LaneRows()
    while (row := lane.next_row()) is not None:
        made.rows += 1
        made.segments.append(np.array(row.origin))
        if dataset.stream.lanes == 1:
            state = lane.state().feeds[0]
            newest = state.head[0] - (state.head[1] == 0)
            made.wait = max(made.wait, newest - min(shard * 1000 + index for _, shard, index, *_ in row.origin))
            oldest = state.waiting.find(1)
            made.span = max(made.span, newest - state.first - oldest + 1 if oldest >= 0 else 0)
    return made


def best_fit_decreasing(pieces: Sequence[int], seq_len: int) -> int:
    """Rows of best-fit-decreasing."""
    rooms: list[int] = []  # ascending, of the rows that can take more
    rows = 0
    for piece in sorted(pieces, reverse=True):
        place = bisect_left(rooms, piece)
        if place < len(rooms):
            room = rooms.pop(place)
        else:
            room, rows = seq_len, rows + 1
        insort(rooms, room - piece)
    return rows


def best_fit_decreasing_in_chunks(pieces: Sequence[int], examples: Sequence[int], seq_len: int) -> int:
    """Rows of best-fit-decreasing over isolated chunks of 1000 examples."""
    place = {example: number for number, example in enumerate(dict.fromkeys(examples))}
    chunks = itertools.groupby(zip(pieces, examples, strict=True), key=lambda pair: place[pair[1]] // 1000)
    return sum(best_fit_decreasing([piece for piece, _ in chunk], seq_len) for _, chunk in chunks)


def best_fit_decreasing_of_pieces(pieces: list[int], seq_len: int) -> int:
    """Rows of best-fit-decreasing over isolated chunks of 1000 pieces."""
    return sum(best_fit_decreasing(pieces[first : first + 1000], seq_len) for first in range(0, len(pieces), 1000))


def packing_speed(pieces: list[int], examples: list[int], seq_len: int) -> tuple[int, float]:
    """(rows, Mtoken/s) of the packing rule over a buffer filled as a lane fills it."""
    begin = time.perf_counter()
    waiting: list[int] = []
    numbers: list[int] = []
    rows = head = tokens = 0
    while True:
        while (
            head < len(pieces)
            and tokens < MAX_ROWS * seq_len
            and (len(waiting) < BUFFER or tokens < MIN_ROWS * seq_len)
        ):
            waiting.append(pieces[head])
            numbers.append(examples[head])
            tokens += pieces[head]
            head += 1
        if not waiting:
            return rows, sum(pieces) / (time.perf_counter() - begin) / 1e6
        packing = resolve("auto", tokens=tokens, count=len(waiting), seq_len=seq_len)
        if packing == "best_fit":
            taken = examples[head - 1] + 1
            plan = best_fit(waiting, [taken - number for number in numbers], seq_len=seq_len)
        else:
            plan = [first_row(packing, waiting, seq_len=seq_len, must=1, max_examples=None)]
        rows += len(plan)
        for place in sorted(itertools.chain(*plan), reverse=True):
            tokens -= waiting[place]
            del waiting[place], numbers[place]


def near(rows: int, bound: int) -> bool:
    return rows <= math.ceil(1.0005 * bound)


def verdict(fine: bool) -> str:
    return "ok" if fine else "MISS"


def compare(name: str, seq_len: int) -> tuple[list[object], list[object]]:
    """A line of the table of one stream, and one of that of 16 lanes."""
    lengths = lengths_of(name)
    source = LengthSource(lengths)
    settings = {"seq_len": seq_len, "shuffle": False, "buffer_size": BUFFER}
    pieces, examples = cut(lengths, seq_len)
    tokens, mean = sum(pieces), sum(pieces) / len(pieces)
    short = 4 * mean <= seq_len
    label = [name, seq_len, round(mean)]

    one = run_lane(PackedDataset(source, lanes=1, **settings), 0)
    bound = -(-tokens // seq_len)
    chunks, whole = (
        best_fit_decreasing_of_pieces(pieces, seq_len),
        best_fit_decreasing_in_chunks(pieces, examples, seq_len),
    )
    simulated, speed = packing_speed(pieces, examples, seq_len)
    assert simulated == one.rows, f"the simulated buffer gives {simulated} rows, the lane {one.rows}"
    line = [*label, one.rows, bound, chunks, whole, best_fit_decreasing(pieces, seq_len), f"{one.rows / bound:.5f}"]
    line += [f"{tokens / one.rows / seq_len:.5f}", round(speed), one.wait, one.span]
    line += [verdict(one.rows <= chunks and (not short or near(one.rows, bound)))]

    dataset = PackedDataset(source, lanes=LANES, **settings)
    lanes = [run_lane(dataset, number) for number in range(LANES)]
    parts = [lane.pieces() for lane in lanes]
    assert sum(sum(lengths) for lengths, _ in parts) == tokens
    bounds = [-(-sum(lengths) // seq_len) for lengths, _ in parts]
    own = [best_fit_decreasing_in_chunks(*part, seq_len) for part in parts]
    rows = [lane.rows for lane in lanes]
    over = max(got - least for got, least in zip(rows, bounds, strict=True))
    many = [
        *label,
        sum(rows),
        sum(bounds),
        sum(own),
        sum(got > most for got, most in zip(rows, own, strict=True)),
        over,
        f"{sum(rows) / sum(bounds):.5f}",
    ]
    many += [f"{tokens / sum(rows) / seq_len:.5f}", sum(rows) - LANES, chunks]
    fine = not short or all(map(near, rows, bounds))
    many += [verdict(sum(rows) - LANES <= chunks and fine)]
    return line, many


def endless(name: str, lanes: int) -> list[object]:
    """Five epochs of 1,000 examples: is each there once in every epoch, and none twice in a row?"""
    dataset = PackedDataset(LengthSource(lengths_of(name)[:1000]), seq_len=4096, lanes=lanes, epochs=None)
    opener = LaneOpener(dataset.stream, 0, {})
    seen: Counter[tuple[int, ...]] = Counter()
    twice = rows = 0
    for lane in map(opener, range(lanes)):
        while (row := lane.next_row()) is not None and min(epoch for epoch, *_ in row.origin) < 5:
            rows += 1
            segments = [segment[:4] for segment in row.origin]
            twice += len({segment[1:] for segment in segments}) < len(segments)
            seen.update(segment[:3] for segment in segments if segment[0] < 5 and segment[3] == 0)
    once = len(seen) == 5000 and set(seen.values()) == {1}
    return [name, lanes, rows, "yes" if once else "NO", twice, "ok" if once and not twice else "MISS"]


def main() -> int:
    show_versions()
    both = [compare(name, seq_len) for name in SETS for seq_len in SEQ_LENS]
    head = [
        "set",
        "seq_len",
        "mean piece",
        "rows",
        "bound",
        "BFD 1000",
        "BFD 1000 whole",
        "BFD all",
        "rows / bound",
        "fill",
    ]
    print("One stream:\n")
    show([*head, "Mtoken/s", "wait", "span", "verdict"], [line for line, _ in both])
    print("16 lanes, each against the bound and best-fit-decreasing of its own share (sums; most rows over):\n")
    of_lanes = [
        "BFD 1000 of shares",
        "over BFD",
        "most over bound",
        "rows / bound",
        "fill",
        "rows - 16",
        "BFD 1000 of the set",
        "verdict",
    ]
    show([*head[:5], *of_lanes], [line for _, line in both])
    print("Endless, five epochs of the first 1,000 examples, seq_len 4096, shuffled:\n")
    small = [endless(name, lanes) for name in SETS for lanes in (1, 16)]
    show(["set", "lanes", "rows", "each once per epoch", "rows with one twice", "verdict"], small)
    return exit_status([*itertools.chain(*both), *small])


if __name__ == "__main__":
    sys.exit(main())
