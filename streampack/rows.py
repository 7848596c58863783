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
    cu_seqlens: list[npt.NDArray[np.int32]]
    """For each row int32 [n + 1], from 0 to its width: segment i is cells cu_seqlens[i] : cu_seqlens[i + 1]."""
    max_seqlen: list[int]
    """For each row the cells of its longest segment."""


def lay_out(rows: Sequence[Row], *, widths: Sequence[int], pad_token_id: int) -> Layout:
    """Lay out rows as the arrays that models take, the cells of each row given by `widths`. `rows` must not be empty; a
    row without segments is all padding."""
    ends = list(itertools.accumulate(widths, initial=0))
    input_ids, labels, position_ids = (np.empty(ends[-1], dtype=np.int64) for _ in range(3))
    cu_seqlens, max_seqlen = [], []
    count_up = np.arange(max(widths))
    for row, start, width in zip(rows, ends, widths, strict=False):
        cells, lengths = len(row.ids), row.lengths.tolist()
        own_ids, own_labels, positions = (array[start : start + width] for array in (input_ids, labels, position_ids))
        own_ids[:cells] = row.ids
        if cells < width:
            own_ids[cells:] = pad_token_id
            lengths.append(width - cells)
        own_labels[:] = own_ids
        own_labels[cells:] = IGNORE
        if row.targets is not None:
            own_labels[:cells][~row.targets] = IGNORE
        places = [0, *itertools.accumulate(lengths)]
        for place, length in zip(places, lengths, strict=False):  # faster than to repeat the starts for all cells
            positions[place : place + length] = count_up[:length]
        own_labels[places[:-1]] = IGNORE  # the first cell of a segment has nothing of its own to be predicted from
        cu_seqlens.append(np.array(places, dtype=np.int32))
        max_seqlen.append(max(lengths))
    return Layout(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )


def filler_row() -> Row:
    """A row of nothing but padding."""
    none: Any = np.zeros(0, dtype=np.int64)
    return Row(ids=none.astype(np.int32), lengths=none, targets=None, origin=none.reshape(0, 5))
