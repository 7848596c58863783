"""What kernels take that are called without Transformers, made of a batch: small functions that only look at it.

- Transformers takes a batch as it is: `model(**batch)`, with layout="flat" for flash attention 2, 3 and kernels of the
  Hub, layout="rows" for SDPA, eager and flex attention.
- flash-attn and torch, of a flat batch, q, k and v being [cells, heads, head_dim]:

      cu_seqlens, max_seqlen = varlen_lengths(batch)
      flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
      torch.nn.attention.varlen.varlen_attn(
          q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0)
      )

- flex attention, of any batch, q, k and v being [batch, heads, cells, head_dim]:

      mask = block_mask(batch)  # once per step, for all layers
      torch.compile(flex_attention)(q, k, v, block_mask=mask)

- Mamba and linear attention take `seq_idx`, from `PackedLoader(..., seq_idx=True)` or `segment_ids(batch)`, or the
  cumulative lengths: `causal_conv1d_fn(..., seq_idx=...)`, `mamba_chunk_scan_combined(..., seq_idx=...)`, fla's
  `chunk_gated_delta_rule(..., cu_seqlens=...)`. Transformers' Mamba2, Bamba and GraniteMoeHybrid take seq_idx of a flat
  batch in `model(**batch)`, and need the packages mamba_ssm and causal_conv1d for it.
- Ring attention (Transformer Engine, Megatron): `context_parallel_part`.
"""

from typing import Any

import torch

from streampack.collate import Batch
from streampack.loss import shift
from streampack.rows import IGNORE

BLOCK = 128
"""Cells of a side of a block of flex attention, its default."""


def varlen_lengths(batch: Batch) -> tuple[torch.Tensor, int]:
    """(cu_seqlens int32 [segments + 1] where the batch is, max_seqlen) of a flat batch, for queries and keys alike.

    Raises:
        ValueError: for a batch of rows.
    """
    cu_seqlens = batch.get("cu_seq_lens_q")
    if cu_seqlens is None:
        raise ValueError(
            f"the batch has no cu_seq_lens_q (it has: {', '.join(batch)}); variable-length kernels need layout='flat'"
        )
    return cu_seqlens, batch["max_length_q"]


def segment_ids(batch: Batch) -> torch.Tensor:
    """int32, of the shape of input_ids: the segment of each cell, from 0 in each row of the tensor, never falling.

    From seq_idx where the batch has it, else from cu_seq_lens_q of a flat batch, else from the zeros of position_ids.
    """
    ids: torch.Tensor | None = batch.get("seq_idx")
    if ids is not None:
        return ids
    positions: torch.Tensor = batch["position_ids"]
    if batch.get("cu_seq_lens_q") is not None:
        cells = torch.arange(positions.numel(), device=positions.device, dtype=torch.int32)
        found = torch.searchsorted(batch["cu_seq_lens_q"][1:], cells, right=True, out_int32=True)
        return found.reshape(positions.shape)
    return (positions == 0).cumsum(-1, dtype=torch.int32) - 1


def block_mask(batch: Batch, *, sliding_window: int | None = None) -> Any:
    """The BlockMask of flex attention: each cell sees itself and the cells before it in its segment.

    [B, 1, T, T] of a batch of rows, [1, 1, B * T, B * T] of a flat one, where the batch is. Made from blocks of 128
    cells, so that it costs (T / 128) ** 2 and not T ** 2, as torch's create_block_mask does.

    Args:
        sliding_window: cells that a cell sees, itself among them; None: all before it.
    """
    from torch.nn.attention.flex_attention import BlockMask

    segments = segment_ids(batch)
    rows, cells = segments.shape
    blocks = -(-cells // BLOCK)
    filled = torch.nn.functional.pad(segments, (0, blocks * BLOCK - cells), mode="replicate")
    by_block = filled.reshape(rows, 1, blocks, BLOCK)  # segments never fall: the first cell has the least
    first, last = by_block[..., 0], by_block[..., -1]
    place = torch.arange(blocks, device=segments.device)
    away = place[:, None] - place  # blocks between queries and keys
    some = (away >= 0) & (last[..., None, :] >= first[..., :, None])
    every = (away > 0) & (first[..., None, :] == last[..., :, None])
    every &= ((place + 1) * BLOCK <= cells)[:, None]  # a block that goes beyond the cells is never whole
    if sliding_window is not None:
        some &= (away - 1) * BLOCK + 1 < sliding_window
        every &= (away + 1) * BLOCK - 1 < sliding_window

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = (query >= key) & (segments[row, query] == segments[row, key])
        return same if sliding_window is None else same & (query - key < sliding_window)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(cells, cells)
    )


def _listed(which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, and which: theirs first, int32."""
    order = torch.argsort(which.to(torch.int8), dim=-1, descending=True, stable=True)
    return which.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def context_parallel_part(batch: Batch, *, rank: int, size: int) -> Batch:
    """What rank `rank` of a context-parallel group of `size` ranks gets of a flat batch.

    Each segment is cut into 2 * size chunks of equal length, of which the rank gets chunk `rank` and the one that far
    from the end: with causal attention all ranks have the same work. So Transformer Engine and Megatron cut.

    Labels are shifted before they are cut, since the label after a chunk's last cell is on another rank: the part has
    `shift_labels` (and `shift_loss_weights`), but no `labels`. Use `packed_cross_entropy(..., shifted=True)`.

    The part holds input_ids, position_ids, shift_labels int64 [1, cells / size], with seq_idx, shift_loss_weights where
    the batch has them, and of the whole batch, since Transformer Engine divides itself: cu_seqlens_padded and
    cu_seqlens (the same, unless the loader has cu_seqlens_padded=True) int32 [segments + 1], max_seqlen int. For
    Megatron these are PackedSeqParams(cu_seqlens_q=, cu_seqlens_kv=, cu_seqlens_q_padded=, cu_seqlens_kv_padded=,
    max_seqlen_q=, max_seqlen_kv=, qkv_format="thd").

    Raises:
        ValueError: for a batch of rows, a rank outside of the group, or a segment that cannot be cut so.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: pass a rank from 0 to size - 1")
    cu_seqlens, max_seqlen = varlen_lengths(batch)
    kept = _cells_of(cu_seqlens, rank=rank, size=size)
    whole: Batch = {name: batch[name] for name in ("input_ids", "position_ids", "seq_idx") if name in batch}
    whole["shift_labels"] = shift(batch["labels"], IGNORE)
    if "loss_weights" in batch:
        whole["shift_loss_weights"] = shift(batch["loss_weights"], 0)
    part: Batch = {name: tensor[:, kept] for name, tensor in whole.items()}
    part.update(cu_seqlens=batch.get("cu_seqlens", cu_seqlens), cu_seqlens_padded=cu_seqlens, max_seqlen=max_seqlen)
    return part


def _cells_of(cu_seqlens: torch.Tensor, *, rank: int, size: int) -> torch.Tensor:
    """Which cells a rank keeps, int64 [cells / size] in order."""
    lengths = cu_seqlens.diff()
    uneven = (lengths % (2 * size)).nonzero()
    if len(uneven):
        first = int(uneven[0])
        raise ValueError(
            f"segment {first} of the batch has {int(lengths[first])} cells, not a multiple of 2 * size = "
            f"{2 * size}; pass pad_to_multiple_of={2 * size} (and a seq_len that is a multiple of it) to PackedDataset"
        )
    cells = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    segment = torch.searchsorted(cu_seqlens[1:].long(), cells, right=True)
    chunk = (cells - cu_seqlens[segment]) // (lengths[segment] // (2 * size))
    return cells[(chunk == rank) | (chunk == 2 * size - 1 - rank)]
