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

    pieces: list[npt.NDArray[np.int32]]
    """int32, c in all: token ids of the segments, one after the other, in arrays of any length."""
    lengths: list[int]
    """Cells of each segment; they sum to c."""
    targets: npt.NDArray[np.bool_] | None
    """bool [c]: cells that are targets; None: all (the first cell of a segment never is, see `lay_out`)."""
    origin: list[tuple[int, int, int, int, int]]
    """Epoch, shard, index, first token, tokens of each segment. Tokens are fewer than cells where each example is
    padded to a multiple."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """int32 [c]: token ids of the segments."""
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, dtype=np.int32)

    @property
    def num_cells(self) -> int:
        """Cells of the segments, c."""
        return sum(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens: fewer than cells where examples are padded to a multiple."""
        return sum([origin[4] for origin in self.origin])

    @property
    def num_loss_tokens(self) -> int:
        """Labels that count: targets apart from the first cell of each segment."""
        if self.targets is None:
            return sum(self.lengths) - len(self.lengths)
        firsts = [end - length for end, length in zip(itertools.accumulate(self.lengths), self.lengths, strict=True)]
        return int(np.count_nonzero(self.targets) - np.count_nonzero(self.targets[firsts]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes the ids travel as one array, which takes a fraction of the time of many."""
        return _received, (self.ids, self.lengths, self.targets, self.origin)


def _received(
    ids: npt.NDArray[np.int32],
    lengths: list[int],
    targets: npt.NDArray[np.bool_] | None,
    origin: list[tuple[int, int, int, int, int]],
) -> Row:
    return Row(pieces=[ids], lengths=lengths, targets=targets, origin=origin)


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
    count_up, pad = np.arange(max(widths)), np.full(max(widths), pad_token_id)
    pieces: list[npt.NDArray[Any]] = []
    segments, unlabelled = [], []
    end = 0
    for row, width in zip(rows, widths, strict=True):
        lengths, filled = row.lengths, row.num_cells
        pieces += row.pieces
        if row.targets is not None:
            unlabelled.append(end + np.flatnonzero(~row.targets))
        if filled < width:
            pieces.append(pad[filled:width])
            lengths = [*lengths, width - filled]
            unlabelled.append(np.arange(end + filled, end + width))
        segments.append(lengths)
        end += width
    together = [*itertools.chain(*segments)]
    input_ids = np.concatenate(pieces, dtype=np.int64)
    labels = input_ids.copy()
    labels[[0, *itertools.accumulate(together[:-1])]] = IGNORE  # nothing of its own to be predicted from
    for places in unlabelled:
        labels[places] = IGNORE
    position_ids = np.concatenate([count_up[:length] for length in together])
    return Layout(input_ids=input_ids, labels=labels, position_ids=position_ids, segments=segments)


def added_up(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """cu_seqlens of n segments, int32 [n + 1]: segment i is cells cu_seqlens[i] : cu_seqlens[i + 1]."""
    return np.array([0, *itertools.accumulate(lengths)], dtype=np.int32)


def filler_row() -> Row:
    """A row of nothing but padding."""
    return Row(pieces=[], lengths=[], targets=None, origin=[])
