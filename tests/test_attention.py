"""What kernels take that are called without Transformers: lengths, masks, parts of rows; shapes that stay the same."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from streampack import Collator, PackedDataset, PackedLoader
from streampack.attention import block_mask, context_parallel_part, segment_ids, varlen_lengths

from .reference_attention import separate_attention, varlen_attention
from .test_models import batch_of as docs_batch
from .test_models import small_model
from .test_rows import row_of

ROWS = [row_of([1, 2, 3], [4, 5]), row_of([6], [7, 8, 9, 10, 11])]


pytestmark = pytest.mark.usefixtures("one_thread")


def batch_of(layout: Any, rows: Any = ROWS, seq_len: int = 6, **options: Any) -> dict[str, Any]:
    return Collator(layout, **options).compact(rows, seq_len=seq_len, pad_token_id=0)


def long_rows(seq_len: int, lengths: list[list[int]]) -> list[Any]:
    return [row_of(*[list(range(1, 1 + length)) for length in row]) for row in lengths]


# ---- lengths and segments ---------------------------------------------------------------------------------------


def test_a_flat_batch_gives_the_lengths_that_varlen_kernels_take() -> None:
    cu_seqlens, max_seqlen = varlen_lengths(batch_of("flat"))
    assert cu_seqlens.tolist() == [0, 3, 5, 6, 7, 12]
    assert cu_seqlens.dtype is torch.int32
    assert max_seqlen == 5
    assert type(max_seqlen) is int


def test_a_batch_of_rows_has_no_lengths_and_the_error_says_so() -> None:
    with pytest.raises(ValueError, match=r"no cu_seq_lens_q \(it has: input_ids, labels, .*need layout='flat'"):
        varlen_lengths(batch_of("rows"))


def test_attention_by_these_lengths_is_that_of_separate_examples() -> None:
    cu_seqlens, max_seqlen = varlen_lengths(batch_of("flat"))
    query, key, value = (one.squeeze(0).transpose(0, 1) for one in heads(1, 12))
    found = varlen_attention(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)
    start = 0
    for length in (3, 2, 1, 1, 5):
        part = slice(start, start + length)
        torch.testing.assert_close(found[part], separate_attention(query[part], key[part], value[part]))
        start += length


@pytest.mark.parametrize("options", [{}, {"seq_idx": True}])
def test_segment_ids_are_the_same_from_lengths_positions_and_seq_idx(options: dict[str, Any]) -> None:
    rows = segment_ids(batch_of("rows", **options))
    assert rows.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    flat = segment_ids(batch_of("flat", **options))
    assert flat.tolist() == [[0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 4, 4]]
    assert segment_ids(batch_of("flat", fixed_segments=5, **options)).tolist() == flat.tolist()
    assert rows.dtype is flat.dtype is torch.int32


# ---- flex attention ---------------------------------------------------------------------------------------------


def heads(batch: int, cells: int) -> list[torch.Tensor]:
    """query, key and value [batch, 2, cells, 16]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 2, cells, 16, generator=generator) for _ in range(3)]


def dense(segments: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [B, T, T], cell by cell."""
    place = torch.arange(segments.shape[1])
    away = place[:, None] - place
    seen = (away >= 0) & (segments[:, :, None] == segments[:, None, :])
    return seen if window is None else seen & (away < window)


SHORT = [[100, 50, 28, 200], [384], [1, 127, 128, 120]]


@pytest.mark.parametrize(("layout", "seq_len", "window"), [("rows", 384, None), ("flat", 400, 130)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_lets_cells_see_those_before_them_in_their_segment(
    layout: Any, seq_len: int, window: int | None
) -> None:
    batch = batch_of(layout, long_rows(seq_len, SHORT), seq_len)
    seen = dense(segment_ids(batch), window)
    query, key, value = heads(*batch["input_ids"].shape)
    found = flex_attention(query, key, value, block_mask=block_mask(batch, sliding_window=window))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 1, 100, 130, 257])
@pytest.mark.parametrize("seq_len", [384, 400])
def test_a_block_mask_has_the_blocks_that_torch_finds_cell_by_cell(window: int | None, seq_len: int) -> None:
    batch = batch_of("rows", long_rows(seq_len, [*SHORT, []]), seq_len)
    seen = dense(segment_ids(batch), window)
    own = block_mask(batch, sliding_window=window)
    theirs = create_block_mask(
        lambda row, head, query, key: seen[row, query, key], 4, 1, seq_len, seq_len, device="cpu"
    )
    assert own.shape == theirs.shape
    assert torch.equal(own.to_dense(), theirs.to_dense())
    assert torch.equal(own.full_kv_num_blocks, theirs.full_kv_num_blocks)
    for name in ("kv_indices", "full_kv_indices"):
        assert torch.equal(getattr(own, name), getattr(theirs, name))
    if window is None:
        assert own.full_kv_num_blocks.sum() > 0


def test_a_block_mask_of_a_long_row_does_not_hold_all_pairs_of_cells() -> None:
    batch = batch_of("rows", long_rows(1 << 17, [[50_000, 50_000]]), 1 << 17)
    assert block_mask(batch).kv_indices.shape == (1, 1, 1024, 1024)  # all pairs would be 16 GiB


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as Transformers compiles the mask
def test_flex_attention_of_transformers_finds_segments_itself_and_takes_a_block_mask() -> None:
    exact, flex = (small_model("llama", attention).eval() for attention in ("sdpa", "flex_attention"))
    for layout in ("rows", "flat"):
        batch, _ = docs_batch(3, layout)
        del batch["labels"]
        with torch.no_grad():
            expected = exact(**batch).logits
            torch.testing.assert_close(flex(**batch).logits, expected, rtol=0, atol=1e-6)
            found = flex(**batch, attention_mask=block_mask(batch)).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# ---- context parallelism ----------------------------------------------------------------------------------------


def padded_batch(size: int, **options: Any) -> tuple[dict[str, Any], int]:
    """A flat batch of 2 rows, each example padded to 2 * size cells."""
    lengths = (5, 9, 3, 17, 12, 4, 7, 20, 6, 11)
    examples = [{"input_ids": [100 * number + place for place in range(n)]} for number, n in enumerate(lengths, 1)]
    dataset = PackedDataset(
        examples, seq_len=48, lanes=1, pad_to_multiple_of=2 * size, packing="next_fit", shuffle=False
    )
    loader = PackedLoader(dataset, 2, cu_seqlens_padded=True, loss_weights="example", seq_idx=True, **options)
    return next(iter(loader)), 96


def test_a_part_has_chunk_c_and_the_one_as_far_from_the_end_of_each_segment() -> None:
    batch = batch_of("flat", long_rows(16, [[8, 4]]), 16)
    first, second = (context_parallel_part(batch, rank=rank, size=2) for rank in (0, 1))
    plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in first.items()}
    assert plain == {
        "input_ids": [[1, 2, 7, 8, 1, 4, 0, 0]],
        "position_ids": [[0, 1, 6, 7, 0, 3, 0, 3]],
        "shift_labels": [[2, 3, 8, -100, 2, -100, -100, -100]],
        "cu_seqlens": [0, 8, 12, 16],
        "cu_seqlens_padded": [0, 8, 12, 16],
        "max_seqlen": 8,
    }
    assert second["input_ids"].tolist() == [[3, 4, 5, 6, 2, 3, 0, 0]]
    assert second["shift_labels"].tolist() == [[4, 5, 6, 7, 3, 4, -100, -100]]  # 7: the label of a cell of rank 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_parts_of_all_ranks_have_each_cell_once_and_all_its_targets(size: int) -> None:
    batch, cells = padded_batch(size)
    parts = [context_parallel_part(batch, rank=rank, size=size) for rank in range(size)]
    where = [reference_cells(batch["cu_seqlens_padded"].tolist(), rank, size) for rank in range(size)]
    assert sorted(cell for some in where for cell in some) == list(range(cells))
    for part, some in zip(parts, where, strict=True):
        assert part["input_ids"].shape == (1, cells // size)
        for name in ("input_ids", "position_ids", "seq_idx"):
            assert torch.equal(part[name], batch[name][:, some])
            assert part[name].dtype is batch[name].dtype
        following = torch.cat([batch["labels"][0, 1:], torch.tensor([-100])])
        assert torch.equal(part["shift_labels"][0], following[some])
        assert ((part["shift_loss_weights"] > 0) == (part["shift_labels"] != -100)).all()
        assert "labels" not in part
        assert torch.equal(part["cu_seqlens"], batch["cu_seqlens"])
        assert torch.equal(part["cu_seqlens_padded"], batch["cu_seqlens_padded"])
    assert sum(int((part["shift_labels"] != -100).sum()) for part in parts) == int((batch["labels"] != -100).sum()) > 20


def reference_cells(cu_seqlens: list[int], rank: int, size: int) -> list[int]:
    found = []
    for start, end in itertools.pairwise(cu_seqlens):
        chunk = (end - start) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            found += range(start + number * chunk, start + (number + 1) * chunk)
    return found


def test_segments_that_cannot_be_cut_evenly_are_refused_with_the_remedy() -> None:
    batch = batch_of("flat", long_rows(16, [[8, 6]]), 16)
    with pytest.raises(ValueError, match="segment 1") as error:
        context_parallel_part(batch, rank=0, size=2)
    assert str(error.value) == (
        "segment 1 of the batch has 6 cells, not a multiple of 2 * size = 4; pass pad_to_multiple_of=4 (and a seq_len "
        "that is a multiple of it) to PackedDataset"
    )
    with pytest.raises(ValueError, match="rank=2, size=2: pass a rank from 0 to size - 1"):
        context_parallel_part(batch, rank=2, size=2)
    with pytest.raises(ValueError, match="need layout='flat'"):
        context_parallel_part(batch_of("rows"), rank=0, size=2)


# ---- Transformers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_transformers_takes_a_batch_with_every_option_and_gives_the_same_loss(family: str, layout: Any) -> None:
    model = small_model(family, "sdpa")
    lengths = {"fixed_segments": 4, "cu_seqlens_padded": True} if layout == "flat" else {}
    options = {"shift_labels": True, "loss_weights": "example", "seq_idx": True, **lengths}
    plain, full = batch_of(layout), batch_of(layout, **options)
    assert len(full) == len(plain) + 4 + len(lengths)
    found, expected = model(**full), model(**plain)
    assert torch.equal(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


# ---- fixed shapes -----------------------------------------------------------------------------------------------


def compiled_graphs(**options: Any) -> tuple[int, set[int]]:
    """How many times attention is compiled over 100 rows, and how many segments these have."""
    lengths = torch.randint(1, 15, (1000,), generator=torch.Generator().manual_seed(1)).tolist()
    examples = [{"input_ids": list(range(1, 1 + length))} for length in lengths]
    dataset = PackedDataset(examples, seq_len=64, lanes=1, packing="next_fit", max_examples_per_row=14)
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def attention(x: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        segments = torch.searchsorted(cu_seqlens[1:], torch.arange(len(x), dtype=torch.int32), right=True)
        place = torch.arange(len(x))
        seen = (place[:, None] >= place) & (segments[:, None] == segments) & (place[:, None] - place < max_seqlen)
        return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=seen)[0]

    torch._dynamo.reset()
    compiled = torch.compile(attention, backend=count, dynamic=False)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    rows, segments = 0, set()
    with torch._dynamo.config.patch(recompile_limit=200):
        for batch, _ in zip(PackedLoader(dataset, **options), range(100), strict=False):
            cu_seqlens, max_seqlen = varlen_lengths(batch)
            torch.testing.assert_close(compiled(x, cu_seqlens, max_seqlen), attention(x, cu_seqlens, max_seqlen))
            rows += 1
            segments.add(int(segment_ids(batch).max()) + 1)
    assert rows == 100
    return graphs, segments


def test_with_fixed_segments_rows_of_any_number_of_examples_are_compiled_once() -> None:
    graphs, segments = compiled_graphs(fixed_segments=15)
    assert graphs == 1
    assert len(segments) > 5


def test_without_fixed_segments_each_shape_is_compiled_anew() -> None:
    graphs, segments = compiled_graphs()
    assert graphs > len(segments) > 5
