"""Attention in a few lines of torch, for tests: of separate examples, and by cumulative lengths, as kernels do."""

from typing import Any

import torch


def separate_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: Any = None) -> torch.Tensor:
    """Causal attention of one example: [cells, heads, head_dim]; key and value may have fewer heads."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    place = torch.arange(len(query), device=query.device)
    scores = scores.masked_fill(place[:, None] < place, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """What flash-attn's `flash_attn_varlen_func` computes, as far as a causal language model without windows needs."""
    assert causal
    assert window_size == (-1, -1)
    assert dropout_p == softcap == 0
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    out = torch.full_like(q, float("nan"))  # cells outside of all segments stay what they were
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        assert end - start <= max_seqlen_q == max_seqlen_k
        out[start:end] = separate_attention(q[start:end], k[start:end], v[start:end], softmax_scale)
    return out


def batched_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """What flash-attn's `flash_attn_func` computes: each row is one example."""
    assert causal
    assert window_size == (-1, -1)
    return torch.stack([separate_attention(*one, softmax_scale) for one in zip(q, k, v, strict=True)])
