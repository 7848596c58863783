"""Packing: which of the waiting examples make the next rows. Pure functions of lengths: no tokens, no torch.

Lengths are listed oldest first. With seq_len 10 and lengths [4, 5, 3, 3, 6], oldest-first exact fill takes the oldest
(4), and with it the oldest others that make the row full: [0, 2, 3]. Rows are lists of positions in age order.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Packing = Literal["auto", "oldest_first", "best_fit", "next_fit", "wrapped", "none", "by_length"]
UNPACKED = ("none", "by_length")
"""Each row is one example, as long as it is: rows have no fixed length."""

OVER_AGE = 4
"""best_fit: a row whose oldest example is older than this many buffers is emitted with the next plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """What shapes the rows of a lane; part of the stream's identity (but for max_bad_share)."""

    seq_len: int
    buffer_size: int = 256
    packing: Packing = "auto"
    max_examples: int | None = None
    pad_to_multiple_of: int = 1
    pad_token_id: int = 0
    keep_no_target: bool = False
    """Emit rows without any target too."""
    max_bad_share: float = 1.0
    """Of the examples taken, at most so many may be bad, else it is an error."""

    def __post_init__(self) -> None:
        assert self.packing not in UNPACKED or self.max_examples == 1

    @property
    def row_len(self) -> int | None:
        """Cells of every row; None: each row is as long as its example."""
        return None if self.packing in UNPACKED else self.seq_len


def resolve(packing: Packing, *, tokens: int, count: int, seq_len: int) -> Packing:
    """The rule for a buffer of `count` examples with `tokens` tokens: `auto` is `oldest_first` where their mean length
    is at most a quarter of seq_len, else `best_fit`."""
    if packing == "auto":
        return "oldest_first" if 4 * tokens <= seq_len * count else "best_fit"
    return packing


def first_row(
    packing: Packing, lengths: Sequence[int], *, seq_len: int, must: int, max_examples: int | None
) -> list[int]:
    """One row that holds the `must` oldest examples (which fit), filled up by the rule of `packing`."""
    if packing in UNPACKED:
        return [0]
    if packing == "next_fit":
        return next_fit(lengths, seq_len=seq_len, max_examples=max_examples)
    if packing == "wrapped":
        return wrapped(lengths, seq_len=seq_len, max_examples=max_examples)
    if max_examples is None:
        return oldest_first(lengths, seq_len=seq_len, must=must)
    return oldest_first_limited(lengths, seq_len=seq_len, must=must, max_examples=max_examples)


def oldest_first(lengths: Sequence[int], *, seq_len: int, must: int = 1) -> list[int]:
    """The `must` oldest, and the oldest others whose lengths fill the row exactly, or else as far as it goes.

    Subset sum on one big integer: bit r of `rooms` is set if some of the examples looked at leave r cells free. What
    would overflow falls off at the right.
    """
    room = seq_len - sum(lengths[:must])
    rooms, before = 1 << room, []
    for length in lengths[must:]:
        if rooms & 1:
            break
        before.append(rooms)
        rooms |= rooms >> length
    left = (rooms & -rooms).bit_length() - 1
    row = []
    place = len(before)
    while left < room:
        place -= 1
        if not before[place] >> left & 1:  # not to be had without this one, so older ones come first
            row.append(must + place)
            left += lengths[must + place]
    return [*range(must), *reversed(row)]


def oldest_first_limited(lengths: Sequence[int], *, seq_len: int, must: int, max_examples: int) -> list[int]:
    """`oldest_first` with at most `max_examples` in the row: one band of bits for each number of examples.

    Bands are twice a row wide, so that a sum that overflows lands in the gap between bands and is masked off.
    """
    band = 2 * (seq_len + 1)
    mask = sum(((1 << (seq_len + 1)) - 1) << band * count for count in range(max_examples + 1))
    full = sum(1 << (band * count + seq_len) for count in range(max_examples + 1))
    base = band * must + sum(lengths[:must])
    reach, before = 1 << base, []
    for length in lengths[must:]:
        if reach & full:
            break
        before.append(reach)
        reach |= (reach << (band + length)) & mask
    tops = (((reach >> band * count) & ((1 << band) - 1)).bit_length() - 1 for count in range(max_examples + 1))
    best, count = max((top, -count) for count, top in enumerate(tops))
    left, row = band * -count + best, []
    for place in range(must + len(before) - 1, must - 1, -1):
        if not before[place - must] >> left & 1:
            row.append(place)
            left -= band + lengths[place]
    assert left == base
    return [*range(must), *reversed(row)]


def best_fit(
    lengths: Sequence[int], ages: Sequence[int], *, seq_len: int, max_examples: int | None = None
) -> list[list[int]]:
    """Best-fit-decreasing over all that waits, of which the fullest half of the rows is emitted, oldest first.

    The other half goes back and meets what comes next, so nothing is ever flushed half full before the end of data.
    """
    rows = _best_fit_decreasing(lengths, seq_len=seq_len, max_examples=max_examples)
    room = [seq_len - sum(lengths[place] for place in row) for row in rows]
    by_fill = sorted(range(len(rows)), key=lambda row: (room[row], rows[row][0]))
    limit = OVER_AGE * len(lengths)
    chosen = set(by_fill[: (len(rows) + 1) // 2]) | {row for row in by_fill if ages[rows[row][0]] > limit}
    return sorted(rows[row] for row in chosen)


def _best_fit_decreasing(lengths: Sequence[int], *, seq_len: int, max_examples: int | None) -> list[list[int]]:
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, row) of the rows that can take more, ascending
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        fit = bisect_left(rooms, (lengths[place], -1))
        if fit < len(rooms):
            room, row = rooms.pop(fit)
            rows[row].append(place)
        else:
            room, row = seq_len, len(rows)
            rows.append([place])
        if room > lengths[place] and (max_examples is None or len(rows[row]) < max_examples):
            insort(rooms, (room - lengths[place], row))
    return [sorted(row) for row in rows]


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """All that waits, each example in a row of its own, the longest first. Lanes do so in step, so the rows of a batch,
    which come from different lanes, are of about the same length."""
    return [[place] for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))]


def next_fit(lengths: Sequence[int], *, seq_len: int, max_examples: int | None = None) -> list[int]:
    """The oldest examples in order, up to the first that does not fit: the order of the stream is kept."""
    total = 0
    for place, length in enumerate(lengths[:max_examples]):
        total += length
        if total > seq_len:
            return list(range(place))
    return list(range(len(lengths[:max_examples])))


def wrapped(lengths: Sequence[int], *, seq_len: int, max_examples: int | None = None) -> list[int]:
    """The oldest examples in order until the row is full or more than full: concatenate and cut."""
    total = 0
    for place, length in enumerate(lengths[:max_examples]):
        total += length
        if total >= seq_len:
            return list(range(place + 1))
    return list(range(len(lengths[:max_examples])))
