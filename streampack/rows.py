"""Rows: `seq_len` cells that hold whole segments, each an example (or a fragment of one), and a padding tail. Where
examples are not packed, a row is one example, as long as it is.

In memory and between processes a row is compact: ids in int32, segment lengths, targets only where they are not simply
all tokens. `lay_out` makes the full arrays of a whole batch at once. With seq_len 6 and the examples [7, 8, 9] and
[5, 6]: input_ids [7, 8, 9, 5, 6, pad], position_ids [0, 1, 2, 0, 1, 0], cu_seqlens [0, 3, 5, 6].
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORE = -100
"""The label that losses ignore (the default of torch's cross_entropy)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row, compact. n = its segments, c = the cells they cover, 0 <= c <= T."""

    ids: npt.NDArray[np.int32]
    """int32 [c]: token ids of the segments, one after the other."""
    lengths: npt.NDArray[np.int64]
    """int64 [n]: cells of each segment; they sum to c."""
    targets: npt.NDArray[np.bool_] | None
    """bool [c]: cells that are targets; None: all (the first cell of a segment never is, see `lay_out`)."""
    origin: npt.NDArray[np.int64]
    """int64 [n, 5]: epoch, shard, index, first token, tokens of each segment. Tokens are fewer than cells where each
    example is padded to a multiple."""

    @property
    def num_tokens(self) -> int:
        """Tokens: fewer than cells where examples are padded to a multiple."""
        return int(self.origin[:, 4].sum())

    @property
    def num_loss_tokens(self) -> int:
        """Labels that count: targets apart from the first cell of each segment."""
        if self.targets is None:
            return len(self.ids) - len(self.lengths)
        firsts = np.cumsum(self.lengths) - self.lengths
        return int(np.count_nonzero(self.targets) - np.count_nonzero(self.targets[firsts]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The arrays of B rows, one after the other: C cells in all. Padding is one last segment of its row. See DESIGN in
    the README, 'A row'."""

    input_ids: npt.NDArray[np.int64]
    """int64 [C]; padding cells hold pad_token_id."""
    labels: npt.NDArray[np.int64]
    """int64 [C]: input_ids, or -100 where not a target, at the first cell of each segment and in padding. Not
    shifted: labels[i] is the id at i, which the model predicts from i - 1 (as in Transformers)."""
    position_ids: npt.NDArray[np.int64]
    """int64 [C]: 0, 1, 2 ... in each segment."""
    segments: list[list[int]]
    """For each row the cells of its segments; they sum to its width."""


def lay_out(rows: Sequence[Row], *, widths: Sequence[int], pad_token_id: int) -> Layout:
    """Lay out rows as the arrays that models take, the cells of each row given by `widths`. `rows` must not be empty; a
    row without segments is all padding."""
    cells = sum(widths)
    input_ids, labels, position_ids = (np.empty(cells, dtype=np.int64) for _ in range(3))
    segments, firsts = [], []
    count_up = np.arange(max(widths))
    place = 0
    for row, width in zip(rows, widths, strict=True):
        lengths, end, filled = row.lengths.tolist(), place + width, place + len(row.ids)
        own = slice(place, filled)
        input_ids[own] = row.ids
        labels[own] = input_ids[own]
        if row.targets is not None:
            labels[own][~row.targets] = IGNORE
        if filled < end:
            input_ids[filled:end] = pad_token_id
            labels[filled:end] = IGNORE
            lengths.append(end - filled)
        for length in lengths:  # faster than to repeat the starts for all cells
            position_ids[place : place + length] = count_up[:length]
            firsts.append(place)
            place += length
        segments.append(lengths)
    labels[firsts] = IGNORE  # the first cell of a segment has nothing of its own to be predicted from
    return Layout(input_ids=input_ids, labels=labels, position_ids=position_ids, segments=segments)


def added_up(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """cu_seqlens of n segments, int32 [n + 1]: segment i is cells cu_seqlens[i] : cu_seqlens[i + 1]."""
    return np.array([0, *itertools.accumulate(lengths)], dtype=np.int32)


def filler_row() -> Row:
    """A row of nothing but padding."""
    none: Any = np.zeros(0, dtype=np.int64)
    return Row(ids=none.astype(np.int32), lengths=none, targets=None, origin=none.reshape(0, 5))
