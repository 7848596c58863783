"""The flash-attention path of Transformers: with a stand-in for the kernel on the CPU, and real kernels where CUDA is.

The stand-in is the one function `flash_attn_varlen_func`, computed from cu_seqlens in plain torch. All that leads to it
is Transformers' own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

from streampack import PackedDataset, PackedLoader
from streampack.attention import varlen_lengths
from streampack.isolation import IsolationError, check_isolation

from .reference_attention import batched_attention, separate_attention, varlen_attention
from .test_models import SEQ_LEN, TOLERANCE, VOCABULARY, batch_of, docs, gradients, separate, small_model

GLOBALS = ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that reach the kernel, by name."""
    found: list[dict[str, Any]] = []

    @functools.wraps(varlen_attention)  # Transformers looks at the names of its arguments
    def varlen(*arguments: Any, **named: Any) -> torch.Tensor:
        found.append(inspect.signature(varlen_attention).bind(*arguments, **named).arguments)
        return varlen_attention(*arguments, **named)

    functions = [batched_attention, varlen, flash_utils._pad_input, flash_utils._unpad_input]
    if hasattr(flash_utils, "_flash_with_kvcache_fn"):  # Transformers 5
        functions.insert(2, None)
    for name in (*GLOBALS, "_process_flash_kwargs_fn"):  # what it has loaded before
        if hasattr(flash_utils, name):
            monkeypatch.setattr(flash_utils, name, None)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *arguments, **named: tuple(functions))
    return found


def flash_model(family: str) -> Any:
    """Built with eager attention, since Transformers refuses flash attention where there is no CUDA device."""
    model = small_model(family, "eager")
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_flat_batch_through_flash_attention_equals_separate_examples(
    calls: list[dict[str, Any]], family: str, batch_size: int, training: bool
) -> None:
    model = flash_model(family).train(training)
    batch, rows = batch_of(batch_size, "flat")
    packed = model(**batch)

    lengths = [[len(docs()[index]["input_ids"]) for index in row] for row in rows]
    segments = [length for row in lengths for length in (*row, SEQ_LEN - sum(row))]  # each row has a tail of padding
    assert len(calls) == 2  # layers
    for call in calls:
        assert [call[name].shape for name in "qkv"] == [(batch_size * SEQ_LEN, heads, 8) for heads in (4, 2, 2)]
        assert call["causal"] is True
        for side in "qk":
            assert call[f"cu_seqlens_{side}"] is batch[f"cu_seq_lens_{side}"]
            assert call[f"max_seqlen_{side}"] == max(segments)
            assert type(call[f"max_seqlen_{side}"]) is int
        assert call["cu_seqlens_q"].diff().tolist() == segments

    alone = small_model(family, "eager").train(training)
    alone.load_state_dict(model.state_dict())
    wanted, loss = separate(alone, rows)
    logits = packed.logits.reshape(batch_size, SEQ_LEN, VOCABULARY)
    for row, examples in enumerate(wanted):
        together = torch.cat(examples)
        torch.testing.assert_close(logits[row, : len(together)], together, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(packed.loss, loss, rtol=0, atol=TOLERANCE)
    found, expected = gradients(model, packed.loss), gradients(alone, loss)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=TOLERANCE)


def test_fixed_segments_give_the_kernel_the_same_shapes_and_the_model_the_same_logits(
    calls: list[dict[str, Any]],
) -> None:
    model = flash_model("llama").eval()
    dataset = PackedDataset(docs(), None, seq_len=SEQ_LEN, lanes=1, packing="next_fit", source_name="docs")
    plain = [model(**batch).logits for batch in PackedLoader(dataset, 1)]
    dataset.set_epoch(0)
    calls.clear()
    fixed = [model(**batch).logits for batch in PackedLoader(dataset, 1, fixed_segments=8)]
    assert len(plain) == len(fixed) > 2
    assert all(torch.equal(one, other) for one, other in zip(plain, fixed, strict=True))
    assert {len(call["cu_seqlens_q"]) for call in calls} == {9}
    assert {call["max_seqlen_q"] for call in calls} == {SEQ_LEN}
    assert not any(bool(logits.isnan().any()) for logits in fixed)


def advice(model: Any, batch: dict[str, Any], **extra: Any) -> str:
    with pytest.raises(IsolationError, match="examples see each other") as error:
        check_isolation(model, batch, extra=extra)
    return str(error.value).partition("; this helped when tried: ")[2]


def test_flash_attention_isolates_flat_batches_and_the_check_advises_them_for_rows(calls: list[dict[str, Any]]) -> None:
    model = flash_model("llama")
    check_isolation(model, batch_of(1, "flat")[0])
    check_isolation(model, batch_of(3, "flat")[0])
    check_isolation(model, batch_of(1, "rows")[0])  # of one row Transformers finds the zeros in position_ids
    assert calls
    assert advice(model, batch_of(3, "rows")[0]) == (
        "this attention finds no segments in a batch of rows: pass layout='flat' to PackedLoader"
    )


def test_the_check_names_what_a_trainer_took_out_of_a_flat_batch(calls: list[dict[str, Any]]) -> None:
    batch, _ = batch_of(3, "flat")
    model = flash_model("llama")
    check_isolation(model, batch, extra={"position_ids": None})  # lengths are enough to isolate
    without = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    check_isolation(model, batch, extra=without)  # so are positions, while it is one row
    assert advice(model, batch, position_ids=None, **without) == (
        "position_ids are not passed: pass those of the batch"
    )
    rows = {name: batch[name].reshape(3, SEQ_LEN) for name in ("input_ids", "position_ids")}
    check_isolation(model, batch, extra=rows)
    assert advice(model, batch, **rows, **without) == (
        "the flat batch was reshaped to (3, 32), which cuts or joins segments: pass it as it is, (1, 96)"
    )
    positions = torch.arange(3 * SEQ_LEN)[None]
    assert advice(model, batch, position_ids=positions, **without) == (
        "position_ids run on, or do not begin at 0 in each segment: pass those of the batch"
    )


# ---- real kernels -----------------------------------------------------------------------------------------------


def torch_varlen(q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0))


def flash_attn(q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("kernel", "module"), [(torch_varlen, "torch.nn.attention.varlen"), (flash_attn, "flash_attn")]
)
@pytest.mark.parametrize("fixed_segments", [None, 12])
def test_a_real_kernel_gives_packed_examples_the_attention_of_separate_ones(
    kernel: Callable[..., torch.Tensor], module: str, fixed_segments: int | None
) -> None:
    pytest.importorskip(module)
    dataset = PackedDataset(docs(), None, seq_len=SEQ_LEN, lanes=1, packing="next_fit", source_name="docs")
    batch = next(iter(PackedLoader(dataset, 3, fixed_segments=fixed_segments)))
    batch = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    cu_seqlens, max_seqlen = varlen_lengths(batch)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(3 * SEQ_LEN, 4, 64, generator=generator, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    packed = kernel(*inputs, cu_seqlens, max_seqlen)
    weights = torch.randn(packed.shape, generator=generator, device="cuda")
    found = torch.autograd.grad((packed * weights).sum(), inputs)

    exact = [one.detach().float().requires_grad_() for one in inputs]
    lengths = [int(length) for length in cu_seqlens.diff() if length]
    alone = torch.cat([separate_attention(*one) for one in zip(*(part.split(lengths) for part in exact), strict=True)])
    torch.testing.assert_close(packed.float(), alone, rtol=0.02, atol=0.02)
    for one, other in zip(found, torch.autograd.grad((alone * weights).sum(), exact), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0.05, atol=0.05)
