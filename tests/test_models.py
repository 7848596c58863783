"""Packed rows give the logits, the loss and the gradients of separate examples, in real Transformers models."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from streampack import PackedDataset, PackedLoader

SEQ_LEN, VOCABULARY = 32, 97
TOLERANCE = 1e-5


SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def small_model(family: str, attention: str) -> Any:
    config = LlamaConfig(**SIZE) if family == "llama" else Qwen3Config(**SIZE, head_dim=8)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def docs() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 9, 3, 17, 12, 4, 7, 20, 6, 11, 2, 9, 5]
    ids = [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    masked = [{"input_ids": doc, "labels": [-100] * (len(doc) // 2) + doc[len(doc) // 2 :]} for doc in ids]
    return masked


def batch_of(batch_size: int, layout: Any) -> tuple[dict[str, Any], list[list[int]]]:
    """The first batch, and the indices of the examples in its rows."""
    dataset = PackedDataset(docs(), None, seq_len=SEQ_LEN, lanes=1, packing="next_fit", source_name="docs")
    loader = PackedLoader(dataset, batch_size, layout=layout)
    batch = next(iter(loader))
    return batch, [[index for _, _, index in row] for row in loader.provenance]


def separate(model: Any, rows: list[list[int]]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Logits of each example alone, and the mean loss over all their targets."""
    logits, losses = [], []
    for row in rows:
        logits.append([])
        for index in row:
            doc = docs()[index]
            ids, labels = torch.tensor([doc["input_ids"]]), torch.tensor([doc["labels"]])
            out = model(input_ids=ids).logits
            logits[-1].append(out[0])
            losses.append(
                torch.nn.functional.cross_entropy(out[0, :-1], labels[0, 1:], ignore_index=-100, reduction="none")
            )
    count = sum(int((torch.tensor(docs()[index]["labels"][1:]) != -100).sum()) for row in rows for index in row)
    return logits, torch.cat(losses).sum() / count


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("batch_size", "layout"), [(1, "rows"), (3, "rows"), (1, "flat"), (3, "flat")])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_packed_rows_equal_separate_examples(
    family: str, attention: str, batch_size: int, layout: Any, training: bool
) -> None:
    model = small_model(family, attention).train(training)
    batch, rows = batch_of(batch_size, layout)
    padding = batch_size * SEQ_LEN - sum(len(docs()[index]["input_ids"]) for row in rows for index in row)
    assert padding > 0  # there is a tail
    assert all(len(row) > 1 for row in rows)

    packed = model(**batch)  # as the collator gives it, the model's defaults untouched
    logits = packed.logits.reshape(batch_size, SEQ_LEN, VOCABULARY)
    wanted, loss = separate(model, rows)
    for row, alone in enumerate(wanted):
        start = 0
        for one in alone:
            torch.testing.assert_close(logits[row, start : start + len(one)], one, rtol=0, atol=TOLERANCE)
            start += len(one)
    torch.testing.assert_close(packed.loss, loss, rtol=0, atol=TOLERANCE)

    found, expected = gradients(model, packed.loss), gradients(model, loss)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=TOLERANCE)


def test_changing_one_example_moves_no_other_example_s_logits() -> None:
    model = small_model("llama", "sdpa").eval()
    batch, rows = batch_of(3, "rows")
    before = model(**batch).logits
    first = len(docs()[rows[0][0]]["input_ids"])
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, :first] = 50
    after = model(**changed).logits
    assert not torch.equal(before[0, :first], after[0, :first])
    assert torch.equal(before[0, first:], after[0, first:])
    assert torch.equal(before[1:], after[1:])


def test_with_the_cache_on_examples_would_leak_so_the_batch_turns_it_off() -> None:
    """The reason for use_cache=False. If a Transformers release mends this, the key could go."""
    model = small_model("llama", "sdpa").eval()
    batch, _ = batch_of(1, "rows")
    assert batch["use_cache"] is False
    leaking = model(**{**batch, "use_cache": True}).logits
    assert (leaking - model(**batch).logits).abs().max() > 0.01
