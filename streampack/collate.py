"""Batches: B rows as one dict that a Transformers model takes as it is, `model(**batch)`.

layout="flat": [1, B * T] with offset cumulative lengths: flash attention and other variable-length kernels.
layout="rows": [B, T] for SDPA, eager and flex attention, which find the segments in position_ids.
With two rows of 6 cells whose segments are 3 + 3 and 6: cu_seq_lens_q is [0, 3, 6, 12] and max_length_q 6.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from streampack.rows import IGNORE, Row, lay_out

LayoutName = Literal["flat", "rows"]
Batch = dict[str, Any]


class PackedRow(dict[str, Any]):
    """One row as a dict. T = seq_len, n = segments (a padding tail is the last one).

    input_ids int64 [T]; labels int64 [T], not shifted, -100 where not a target; position_ids int64 [T], from 0 in each
    segment; seq_idx int32 [T], the segment of each cell; cu_seqlens int32 [n + 1], strictly increasing from 0 to T;
    max_seqlen int; num_loss_tokens int; examples: a list of (source, shard, index) for each example in the row.
    """


def packed_row(row: Row, *, seq_len: int, pad_token_id: int, examples: list[tuple[Any, ...]]) -> PackedRow:
    """A row as tensors."""
    layout = lay_out([row], seq_len=seq_len, pad_token_id=pad_token_id)
    lengths = np.diff(layout.cu_seqlens[0])
    return PackedRow(
        input_ids=torch.from_numpy(layout.input_ids[0]),
        labels=torch.from_numpy(layout.labels[0]),
        position_ids=torch.from_numpy(layout.position_ids[0]),
        seq_idx=torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)),
        cu_seqlens=torch.from_numpy(layout.cu_seqlens[0]),
        max_seqlen=layout.max_seqlen[0],
        num_loss_tokens=row.num_loss_tokens,
        examples=examples,
    )


class Collator:
    """Makes a batch of rows: `collate_fn` for a plain DataLoader over a PackedDataset.

    Args:
        layout: "flat": tensors [1, B * T], with cu_seq_lens_q / cu_seq_lens_k int32 [segments + 1] and max_length_q /
            max_length_k (Python ints); "rows": tensors [B, T] without them.
        shift_labels: add `shift_labels`, the labels moved one to the left, for losses that take them so.

    The batch holds input_ids, labels and position_ids (int64), and use_cache=False: with a cache, Transformers does
    not look for segments in position_ids, and examples would see each other. It has no attention_mask for the same
    reason.
    """

    def __init__(self, layout: LayoutName = "flat", *, shift_labels: bool = False) -> None:
        if layout not in get_args(LayoutName):
            raise ValueError(f"layout={layout!r}: pass 'flat' (variable-length kernels) or 'rows' (SDPA, eager, flex)")
        self.layout = layout
        self.shift_labels = shift_labels

    def __call__(self, rows: Sequence[PackedRow]) -> Batch:
        """A batch of the rows that a PackedDataset yields."""
        stacked = [torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels", "position_ids")]
        return self._batch(stacked, [row["cu_seqlens"].numpy() for row in rows], max(row["max_seqlen"] for row in rows))

    def compact(self, rows: Sequence[Row], *, seq_len: int, pad_token_id: int) -> Batch:
        """A batch of compact rows, laid out together."""
        layout = lay_out(rows, seq_len=seq_len, pad_token_id=pad_token_id)
        arrays = [torch.from_numpy(array) for array in (layout.input_ids, layout.labels, layout.position_ids)]
        return self._batch(arrays, layout.cu_seqlens, max(layout.max_seqlen))

    def _batch(self, tensors: list[torch.Tensor], cu_seqlens: Sequence[Any], max_seqlen: int) -> Batch:
        input_ids, labels, position_ids = tensors
        batch: Batch = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        if self.shift_labels:  # the first label of each row is -100 anyway, so none is lost
            batch["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
        if self.layout == "flat":
            seq_len = input_ids.shape[1]
            batch = {key: tensor.reshape(1, -1) for key, tensor in batch.items()}
            offset = [one[1:] + seq_len * row for row, one in enumerate(cu_seqlens)]
            together = torch.from_numpy(np.concatenate([[0], *offset]).astype(np.int32))
            batch.update(cu_seq_lens_q=together, cu_seq_lens_k=together)
            batch.update(max_length_q=max_seqlen, max_length_k=max_seqlen)
        batch["use_cache"] = False
        return batch


def _collate_rows(rows: Sequence[PackedRow], *, collate_fn_map: Any = None) -> Batch:
    return Collator("rows")(rows)


# torch's default_collate cannot stack cu_seqlens of different lengths; this is its documented way to teach it a type.
default_collate_fn_map[PackedRow] = _collate_rows
