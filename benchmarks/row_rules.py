"""The papers' rules of packing, as pure functions of lengths, for comparison with what streampack does itself.

Nothing here streams: each rule sees all examples of an epoch. A row is a list of pieces (example, start, stop). With
rows of 10 tokens and examples of 4, 8, 5 and 11, concatenate-and-cut makes [0: 0-4, 1: 0-6], [1: 6-8, 2: 0-5, 3: 0-3]
and [3: 3-11].

paper 1: "Enhancing Training Efficiency Using Packing with Flash Attention", arXiv 2407.09105.
paper 2: "Packing Analysis", arXiv 2410.08081, and its code.
"""

from collections.abc import Sequence

Piece = tuple[int, int, int]
Row = list[Piece]

CHUNK = 1000
"""Examples among which paper 2's greedy packing looks: its code packs inside `datasets.map(batched=True)`, whose
default batch that is."""


def concatenate_and_cut(lengths: Sequence[int], *, seq_len: int) -> list[Row]:
    """All examples one after the other, cut at every `seq_len` tokens: paper 1's FixedLengthPacking, paper 2's random
    packing. Examples are cut at row ends. Paper 2's code drops what is left at the end of each chunk; here it is the
    last row, shorter than the others, so that each token is there once."""
    rows: list[Row] = [[]]
    room = seq_len
    for example, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                rows.append([])
                room = seq_len
            stop = min(length, start + room)
            rows[-1].append((example, start, stop))
            room -= stop - start
            start = stop
    return rows if rows[0] else []


def greedy(lengths: Sequence[int], *, seq_len: int, chunk: int = CHUNK) -> list[Row]:
    """First-fit-decreasing in chunks: the longest example that waits opens a row, and all others that still fit are
    added, longest first. Paper 2's greedy packing (its code: preprocess_packed_without_cut_supervised_dataset): whole
    examples; those over `seq_len` are truncated and get a row alone."""
    rows: list[Row] = []
    for first in range(0, len(lengths), chunk):
        part = [min(length, seq_len) for length in lengths[first : first + chunk]]
        found = first_fit_decreasing(part, capacity=seq_len)
        rows += [[(first + place, 0, part[place]) for place in row] for row in found]
    return rows


def by_sorted_length(lengths: Sequence[int], *, seq_len: int) -> list[Row]:
    """Sorted packing: whole examples, longest first, each into the last row if it fits there, else into a new one. (It
    is told that paper 1 compares such a way; its rule was not found, so this is the simplest one of that name.)"""
    order = sorted(range(len(lengths)), key=lambda example: (-lengths[example], example))
    rows = next_fit([lengths[example] for example in order], capacity=seq_len)
    return [[(order[place], start, stop) for place, start, stop in row] for row in rows]


def next_fit(lengths: Sequence[int], *, capacity: int) -> list[Row]:
    """Whole examples in order, each row up to the first one that does not fit. With `capacity` batch_size * seq_len
    these stand for paper 1's offline flat rows: its 585 of 16,384 tokens for FLAN_20k are 98.0 % full, and rows that
    are cut would be full."""
    _check_fit(lengths, capacity=capacity)
    rows: list[Row] = []
    room = 0
    for example, length in enumerate(lengths):
        if length > room or not rows:
            rows.append([])
            room = capacity
        rows[-1].append((example, 0, length))
        room -= length
    return rows


def multipack(lengths: Sequence[int], *, seq_len: int, batch_size: int) -> list[list[Row]]:
    """Steps of at most `batch_size` rows. Each step takes the examples that come next in order, as many as
    first-fit-decreasing puts into its rows, which a binary search finds: the idea of multipack_sampler (imoneoi) and
    axolotl. The last step may have fewer rows."""
    _check_fit(lengths, capacity=seq_len)
    steps: list[list[Row]] = []
    first = 0
    while first < len(lengths):
        fits, too_many = 1, _bound(lengths, first, tokens=batch_size * seq_len) + 1
        found = first_fit_decreasing(lengths[first : first + 1], capacity=seq_len)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            tried = first_fit_decreasing(lengths[first : first + middle], capacity=seq_len)
            if len(tried) <= batch_size:
                fits, found = middle, tried
            else:
                too_many = middle
        steps.append([[(first + place, 0, lengths[first + place]) for place in row] for row in found])
        first += fits
    return steps


def first_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Rows of places, each row filled with the longest that still fit."""
    _check_fit(lengths, capacity=capacity)
    waiting = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    rows = []
    while waiting:
        row, others, room = [], [], capacity
        for place in waiting:
            if lengths[place] <= room:
                row.append(place)
                room -= lengths[place]
            else:
                others.append(place)
        rows.append(row)
        waiting = others
    return rows


def _bound(lengths: Sequence[int], first: int, *, tokens: int) -> int:
    """How many examples from `first` on have at most so many tokens together."""
    count = 0
    for length in lengths[first:]:
        tokens -= length
        if tokens < 0:
            break
        count += 1
    return count


def _check_fit(lengths: Sequence[int], *, capacity: int) -> None:
    if max(lengths, default=0) > capacity:
        raise ValueError(f"an example of {max(lengths)} tokens does not fit into a row of {capacity}; leave it out")
