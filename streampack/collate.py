"""Batches: B rows as one dict that a Transformers model takes as it is, `model(**batch)`.

layout="flat": [1, B * T] with offset cumulative lengths: flash attention and other variable-length kernels.
layout="rows": [B, T] for SDPA, eager and flex attention, which find the segments in position_ids.
With two rows of 6 cells whose segments are 3 + 3 and 6: cu_seq_lens_q is [0, 3, 6, 12] and max_length_q 6.
attention.py makes of a batch what kernels take that are called without Transformers.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from streampack.loss import LossWeighting, check_weighting, shift, weights_of
from streampack.rows import IGNORE, Row, added_up, lay_out

LayoutName = Literal["flat", "rows"]
Batch = dict[str, Any]


class PackedRow(dict[str, Any]):
    """One row as a dict. T = seq_len, n = segments (a padding tail is the last one).

    input_ids int64 [T]; labels int64 [T], not shifted, -100 where not a target; position_ids int64 [T], from 0 in each
    segment; seq_idx int32 [T], the segment of each cell; cu_seqlens int32 [n + 1], strictly increasing from 0 to T;
    max_seqlen int; num_loss_tokens int; examples: a list of (source, shard, index) for each example in the row.
    Where examples are padded to a multiple also segment_tokens int32 [n], the tokens of each segment without that.
    Where rows have no fixed length (packing="none", "by_length") T is the row's own, and pad_token_id (int) is there.
    """


def packed_row(row: Row, *, seq_len: int | None, pad_token_id: int, examples: list[tuple[Any, ...]]) -> PackedRow:
    """A row as tensors. seq_len=None: it is as long as it is."""
    width = seq_len or max(1, row.num_cells)
    layout = lay_out([row], widths=[width], pad_token_id=pad_token_id)
    lengths = layout.segments[0]
    packed = PackedRow(
        input_ids=torch.from_numpy(layout.input_ids),
        labels=torch.from_numpy(layout.labels),
        position_ids=torch.from_numpy(layout.position_ids),
        seq_idx=torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)),
        cu_seqlens=torch.from_numpy(added_up(lengths)),
        max_seqlen=max(lengths),
        num_loss_tokens=row.num_loss_tokens,
        examples=examples,
    )
    if seq_len is None:
        packed["pad_token_id"] = pad_token_id
    tokens = _segment_tokens(row, lengths)
    if tokens != lengths:
        packed["segment_tokens"] = torch.tensor(tokens, dtype=torch.int32)
    return packed


def _segment_tokens(row: Row, lengths: list[int]) -> list[int]:
    """Tokens of each segment; those of the padding tail are its cells."""
    return [*(tokens for *_, tokens in row.origin), *lengths[len(row.origin) :]]


class Collator:
    """Makes a batch of rows: `collate_fn` for a plain DataLoader over a PackedDataset.

    Args:
        layout: "flat": tensors [1, B * T], with cu_seq_lens_q / cu_seq_lens_k int32 [segments + 1] and max_length_q /
            max_length_k (Python ints); "rows": tensors [B, T] without them.
        shift_labels: add `shift_labels`, the labels moved one to the left, for losses that take them so.
        loss_weights: add `loss_weights`, float32 beside the labels, 0 where there is no target, for
            `packed_cross_entropy`. Of an example of n targets each one weighs 1 ("token"), 1 / n ("example": all
            examples count the same) or 1 / sqrt(n) ("sqrt"). A fragment of a split example counts as an example. With
            shift_labels also `shift_loss_weights`.
        seq_idx: add `seq_idx`, int32 beside the ids: the segment of each cell, for Mamba and linear attention. Of
            "rows" from 0 in each row, of "flat" through all rows.
        fixed_segments: only "flat", for torch.compile and CUDA graphs, which want the same shapes and numbers in each
            step: cu_seq_lens get B * fixed_segments + 1 entries, the last one repeated (segments of no cells, which
            flash attention and torch's varlen_attn skip, and flash-linear-attention refuses), and max_length is
            seq_len. A row has at most max_examples_per_row segments, and one more of padding.
        cu_seqlens_padded: only "flat", for examples padded by `pad_to_multiple_of`: add `cu_seqlens_padded` (the
            cells of each segment, as in cu_seq_lens_q) and `cu_seqlens` (the tokens of each, added up), the pair that
            Transformer Engine and Megatron take.

    The batch holds input_ids, labels and position_ids (int64), and use_cache=False: with a cache, Transformers does
    not look for segments in position_ids, and examples would see each other. It has no attention_mask for the same
    reason.

    Raises:
        ValueError: for arguments that cannot be used; in a call, for more than B * fixed_segments segments.
    """

    def __init__(
        self,
        layout: LayoutName = "flat",
        *,
        shift_labels: bool = False,
        loss_weights: LossWeighting | None = None,
        seq_idx: bool = False,
        fixed_segments: int | None = None,
        cu_seqlens_padded: bool = False,
    ) -> None:
        if layout not in get_args(LayoutName):
            raise ValueError(f"layout={layout!r}: pass 'flat' (variable-length kernels) or 'rows' (SDPA, eager, flex)")
        check_weighting(loss_weights)
        for name, value in (("fixed_segments", fixed_segments), ("cu_seqlens_padded", cu_seqlens_padded)):
            if value and layout == "rows":
                raise ValueError(f"{name}={value!r} is about cu_seqlens, which layout='rows' has not; pass 'flat'")
        _check_segments(fixed_segments)
        self.layout = layout
        self.shift_labels = shift_labels
        self.loss_weights = loss_weights
        self.seq_idx = seq_idx
        self.fixed_segments = fixed_segments
        self.cu_seqlens_padded = cu_seqlens_padded

    def __call__(self, rows: Sequence[PackedRow]) -> Batch:
        """A batch of the rows that a PackedDataset yields."""
        if self.layout == "rows":
            width = max(len(row["input_ids"]) for row in rows)
            rows = [_padded(row, width) for row in rows]
        joined = [torch.cat([row[key] for row in rows]) for key in ("input_ids", "labels", "position_ids")]
        segments = [row["cu_seqlens"].diff().tolist() for row in rows]
        tokens = [
            row["segment_tokens"].tolist() if "segment_tokens" in row else lengths
            for row, lengths in zip(rows, segments, strict=True)
        ]
        return self._batch(joined, segments, tokens)

    def compact(self, rows: Sequence[Row], *, seq_len: int | None, pad_token_id: int) -> Batch:
        """A batch of compact rows, laid out together. seq_len=None: rows have no fixed length."""
        if seq_len is None and self.fixed_segments is not None:
            raise ValueError(
                f"fixed_segments={self.fixed_segments} is for fixed shapes, but rows that are not packed have no fixed "
                "length; leave it out, or pack"
            )
        layout = lay_out(rows, widths=self.widths(rows, seq_len=seq_len), pad_token_id=pad_token_id)
        arrays = [torch.from_numpy(array) for array in (layout.input_ids, layout.labels, layout.position_ids)]
        tokens = []
        if self.cu_seqlens_padded:
            tokens = [_segment_tokens(row, lengths) for row, lengths in zip(rows, layout.segments, strict=True)]
        return self._batch(arrays, layout.segments, tokens)

    def widths(self, rows: Sequence[Row], *, seq_len: int | None) -> list[int]:
        """Cells of each row in a batch: seq_len, or without that its own ("flat") or those of the longest ("rows")."""
        widths = [seq_len or max(1, row.num_cells) for row in rows]
        return [max(widths)] * len(rows) if self.layout == "rows" else widths

    def _batch(self, tensors: list[torch.Tensor], segments: list[list[int]], tokens: list[list[int]]) -> Batch:
        """Of tensors that hold the rows one after the other. For each row: the cells of its segments, and the tokens
        of them."""
        input_ids, labels, position_ids = tensors
        batch: Batch = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        if self.loss_weights is not None:
            batch["loss_weights"] = weights_of(labels, [*chain(*segments)], self.loss_weights)
        if self.seq_idx:
            batch["seq_idx"] = _segment_numbers(segments, through=self.layout == "flat")
        if (
            self.shift_labels
        ):  # the first label of each row is -100 anyway, so none is lost and none gets to its neighbour
            batch["shift_labels"] = shift(labels, IGNORE)
            if self.loss_weights is not None:
                batch["shift_loss_weights"] = shift(batch["loss_weights"], 0)
        shape = (1, -1) if self.layout == "flat" else (len(segments), -1)
        batch = {key: tensor.view(*shape) for key, tensor in batch.items()}
        if self.layout == "flat":
            batch.update(self._lengths(segments, tokens))
        batch["use_cache"] = False
        return batch

    def _lengths(self, segments: list[list[int]], tokens: list[list[int]]) -> Batch:
        """What variable-length kernels take, of rows one after the other."""
        # With fixed shapes a number that changes would make torch.compile begin anew: the longest there can be.
        max_seqlen = max(map(max, segments)) if self.fixed_segments is None else sum(segments[0])
        cells = self._added_up(segments)
        lengths: Batch = {"cu_seq_lens_q": cells, "cu_seq_lens_k": cells}
        lengths.update(max_length_q=max_seqlen, max_length_k=max_seqlen)
        if self.cu_seqlens_padded:
            lengths.update(cu_seqlens=self._added_up(tokens), cu_seqlens_padded=cells)
        return lengths

    def _added_up(self, lengths: list[list[int]]) -> torch.Tensor:
        """0 and the cumulative lengths of all rows, int32 [segments + 1], filled up to fixed_segments."""
        together = [*chain(*lengths)]
        if self.fixed_segments is not None:
            places = len(lengths) * self.fixed_segments
            if len(together) > places:
                raise ValueError(
                    f"a batch of {len(lengths)} rows has {len(together)} segments, more than "
                    f"fixed_segments={self.fixed_segments} for each row; pass "
                    f"max_examples_per_row={max(1, self.fixed_segments - 1)} to PackedDataset (a row may also end with "
                    "a segment of padding), or more fixed_segments"
                )
            together += [0] * (places - len(together))
        return torch.from_numpy(added_up(together))


def _segment_numbers(segments: list[list[int]], *, through: bool) -> torch.Tensor:
    """int32, of rows one after the other: the segment of each cell, from 0 in each row, or counted through all rows."""
    together = [*chain(*segments)]
    numbers = range(len(together)) if through else [*chain(*(range(len(lengths)) for lengths in segments))]
    return torch.from_numpy(np.repeat(np.array(numbers, dtype=np.int32), together))


def _padded(row: PackedRow, width: int) -> PackedRow:
    """The row with a padding tail up to `width` cells, one segment of its own."""
    cells = len(row["input_ids"])
    if cells == width:
        return row
    if "pad_token_id" not in row:
        raise ValueError(
            f"a row has {cells} cells and another {width}: rows of one PackedDataset have the same seq_len"
        )
    tail = width - cells
    filled = {"input_ids": row["pad_token_id"], "labels": IGNORE}
    padded = {key: torch.nn.functional.pad(row[key], (0, tail), value=value) for key, value in filled.items()}
    padded["position_ids"] = torch.cat([row["position_ids"], torch.arange(tail)])
    padded["cu_seqlens"] = torch.nn.functional.pad(row["cu_seqlens"], (0, 1), value=width)
    if "segment_tokens" in row:
        padded["segment_tokens"] = torch.nn.functional.pad(row["segment_tokens"], (0, 1), value=tail)
    return PackedRow({**row, **padded, "max_seqlen": max(row["max_seqlen"], tail)})


def _check_segments(fixed_segments: Any) -> None:
    wrong = not isinstance(fixed_segments, int) or isinstance(fixed_segments, bool) or fixed_segments < 2
    if fixed_segments is not None and wrong:
        raise ValueError(f"fixed_segments={fixed_segments!r}: pass an int of at least 2 (an example, padding), or None")


def pinned(batch: Batch) -> Batch:
    """A batch with its tensors in pinned memory."""
    return {key: value.pin_memory() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _collate_rows(rows: Sequence[PackedRow], *, collate_fn_map: Any = None) -> Batch:
    return Collator("rows")(rows)


# torch's default_collate cannot stack cu_seqlens of different lengths; this is its documented way to teach it a type.
default_collate_fn_map[PackedRow] = _collate_rows
