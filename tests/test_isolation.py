"""check_isolation passes what is right and says of each wrong set-up what to change, with real Transformers models."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, OPTConfig, Qwen3Config

from streampack import Collator
from streampack.isolation import IsolationError, check_isolation

from .test_models import SEQ_LEN, VOCABULARY, batch_of
from .test_models import SIZE as SMALL
from .test_rows import row_of

SIZE = {**SMALL, "max_position_embeddings": 128}

LAYERS = ["sliding_attention", "full_attention"]
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZE, **SPECIAL),
    "qwen3": lambda: Qwen3Config(**SIZE, head_dim=8, **SPECIAL),
    "gemma3": lambda: Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=4, layer_types=LAYERS, **SPECIAL),
    "gpt2": lambda: GPT2Config(**GPT2, **SPECIAL),
    "opt": lambda: OPTConfig(**OPT, num_attention_heads=4, max_position_embeddings=128, **SPECIAL),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(family: str, attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=attention)


def refusal(model: Any, batch: dict[str, Any], **extra: Any) -> tuple[str, str]:
    """What is wrong and what to change, as the error says."""
    with pytest.raises(IsolationError) as error:
        check_isolation(model, batch, extra=extra)
    what, _, advice = str(error.value).partition("; ")
    return what, advice


# ---- right set-ups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("batch_size", "layout"), [(1, "rows"), (3, "rows"), (1, "flat"), (3, "flat")])
def test_a_batch_as_the_loader_gives_it_passes(family: str, attention: str, batch_size: int, layout: Any) -> None:
    check_isolation(model_of(family, attention), batch_of(batch_size, layout)[0])


def test_a_flat_batch_needs_no_lengths_under_sdpa_which_finds_segments_in_position_ids() -> None:
    batch, _ = batch_of(3, "flat")
    lengths = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    check_isolation(model_of("llama"), batch, extra=dict.fromkeys(lengths))
    rows = {name: batch[name].reshape(3, SEQ_LEN) for name in ("input_ids", "position_ids")}
    check_isolation(model_of("llama"), batch, extra=rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_where_it_is_right_and_fails_where_examples_leak(dtype: torch.dtype) -> None:
    model = model_of("llama").to(dtype)
    batch, _ = batch_of(3, "rows")
    check_isolation(model, batch)
    assert "examples see each other" in refusal(model, batch, use_cache=True)[0]


def test_options_of_the_collator_pass() -> None:
    rows = [row_of([1, 2, 3], [4, 5]), row_of([6], [7, 8, 9, 10, 11])]
    for collator in (Collator("flat", fixed_segments=6, loss_weights="sqrt", shift_labels=True), Collator("rows")):
        check_isolation(model_of("llama"), collator.compact(rows, seq_len=8, pad_token_id=0))


# ---- wrong set-ups ----------------------------------------------------------------------------------------------

MASK = torch.ones(3, SEQ_LEN, dtype=torch.int64)
RUNNING_ON = torch.arange(SEQ_LEN).repeat(3, 1)
CACHE_ON = "use_cache=True is passed: pass use_cache=False, as the batch has it, since with a cache position_ids are not looked at"  # noqa: E501
MASKED = "an attention_mask of shape (3, 32) is passed: pass none, since with one position_ids are not looked at"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
@pytest.mark.parametrize(
    ("extra", "advice"),
    [
        ({"use_cache": True}, CACHE_ON),
        ({"use_cache": None}, CACHE_ON.replace("use_cache=True is passed", "use_cache is left to the model")),
        ({"attention_mask": MASK}, MASKED),
        ({"use_cache": True, "attention_mask": MASK}, f"{CACHE_ON}; and {MASKED}"),
        (
            {"position_ids": RUNNING_ON},
            "position_ids run on, or do not begin at 0 in each segment: pass those of the batch",
        ),
        ({"position_ids": None}, "position_ids are not passed: pass those of the batch"),
    ],
    ids=["cache", "cache by default", "mask", "cache and mask", "positions run on", "no positions"],
)
def test_the_advice_names_what_was_wrong_and_only_that(family: str, extra: dict[str, Any], advice: str) -> None:
    what, found = refusal(model_of(family), batch_of(3, "rows")[0], **extra)
    assert what.startswith("examples see each other: new tokens in other segments moved the logits of the segment in")
    assert found == f"this helped when tried: {advice}"


def test_what_is_wrong_is_said_with_the_place() -> None:
    row = [row_of([1, 2, 3, 4], [5, 6, 7, 8])]
    batch = Collator("rows").compact(row, seq_len=8, pad_token_id=0)
    what, _ = refusal(model_of("llama"), batch, use_cache=True)
    assert "the segment in row 0, cells 4 to 7, by 0." in what
    assert "(later ones of their own segment move by up to 0." in what


def test_a_flat_batch_reshaped_to_other_rows_cuts_examples_and_is_told_so() -> None:
    batch, _ = batch_of(3, "flat")
    other = {name: batch[name].reshape(4, 24) for name in ("input_ids", "position_ids")}
    what, advice = refusal(model_of("llama"), batch, **other)
    assert what.startswith("examples do not see themselves: cell 4 of the segment in row 0, cells 20 to 26 does not")
    assert advice == (
        "this helped when tried: the flat batch was reshaped to (4, 24), which cuts or joins segments: pass it as it "
        "is, (1, 96)"
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_whose_attention_ignores_position_ids_is_refused_for_every_layout(attention: str) -> None:
    """OPT makes positions and masks of the attention_mask alone, in Transformers 4.57 and 5.24."""
    for layout, tried in (("rows", "layout='flat', seq_idx"), ("flat", "seq_idx")):
        what, advice = refusal(model_of("opt", attention), batch_of(3, layout)[0])
        assert what.startswith("examples see each other")
        assert advice == (
            f"OPTForCausalLM with attn_implementation='{attention}' does not keep packed examples apart (tried: "
            f"{tried}); use another attention implementation, or a model whose attention follows position_ids, "
            "cu_seq_lens or seq_idx"
        )


# ---- models of one's own ----------------------------------------------------------------------------------------


class Averages(torch.nn.Module):
    """Each cell sees the mean of all cells of its segment, also later ones, as seq_idx tells them apart."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, seq_idx: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
        seq_idx = torch.zeros_like(input_ids) if seq_idx is None else seq_idx
        same = (seq_idx[:, :, None] == seq_idx[:, None, :]).to(self.head.weight.dtype)
        logits: torch.Tensor = self.head(same @ self.embed(input_ids) / same.sum(-1, keepdim=True))
        return logits


class Bag(Averages):
    """Each cell sees itself alone."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(input_ids))
        return logits


class Deaf(Averages):
    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(torch.zeros_like(input_ids)))
        return logits


def test_seeing_later_tokens_of_the_same_example_is_no_leak() -> None:
    rows = [row_of([1, 2, 3], [4, 5]), row_of([6], [7, 8, 9, 10, 11])]
    check_isolation(Averages(), Collator("rows", seq_idx=True).compact(rows, seq_len=8, pad_token_id=0))


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_a_model_that_needs_seq_idx_is_told_so(layout: Any) -> None:
    what, advice = refusal(Averages(), batch_of(3, layout)[0])
    assert what.startswith("examples see each other")
    assert advice == (
        "this helped when tried: seq_idx is not passed, by which this model tells segments apart: pass seq_idx=True to "
        "PackedLoader"
    )


def test_a_model_that_does_not_look_at_its_tokens_proves_nothing() -> None:
    assert refusal(Deaf(), batch_of(3, "rows")[0]) == (
        "new tokens moved no logits at all: the model does not look at input_ids",
        "pass a model and a batch that belong together",
    )


def test_a_model_in_which_cells_see_only_themselves_proves_nothing() -> None:
    what, advice = refusal(Bag(), batch_of(3, "rows")[0])
    assert what.startswith("examples do not see themselves: cell 1 of the segment in row 0, cells 0 to")
    assert advice.startswith("Bag does not keep packed examples apart (tried: layout='flat', seq_idx)")


def test_a_batch_that_shows_nothing_is_refused() -> None:
    batch = Collator("rows").compact([row_of([1, 2, 3, 4])] * 2, seq_len=4, pad_token_id=0)
    with pytest.raises(ValueError, match=r"each row of the batch of \(2, 4\) is one segment, so that nothing can leak"):
        check_isolation(model_of("llama"), batch)
    with pytest.raises(ValueError, match=r"extra has input_ids of shape \(1, 5\), the batch of \(3, 32\)"):
        check_isolation(model_of("llama"), batch_of(3, "rows")[0], extra={"input_ids": torch.ones(1, 5).long()})


def test_a_model_that_gives_no_logits_of_cells_is_refused() -> None:
    class Pooled(Averages):
        def forward(self, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
            return super().forward(input_ids, **more).mean()

    with pytest.raises(ValueError, match="the model gives Tensor for 96 cells; check_isolation needs logits"):
        check_isolation(Pooled(), batch_of(3, "rows")[0])


# ---- it leaves all as it was ------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaks", [False, True])
def test_the_model_its_modes_gradients_and_random_numbers_are_as_before(leaks: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZE, **SPECIAL, attention_dropout=0.5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.model.layers[0].mlp.eval()  # part of it frozen
    batch, _ = batch_of(3, "rows")
    model(**batch).loss.backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    cells = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    random = torch.random.get_rng_state()

    if leaks:
        refusal(model, batch, use_cache=True)
    else:
        check_isolation(model, batch)

    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.is_grad_enabled()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
        assert torch.equal(value.grad, gradients[name])
        assert value.requires_grad
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert list(batch) == list(cells)
    for key, value in batch.items():
        assert torch.equal(value, cells[key]) if isinstance(value, torch.Tensor) else value == cells[key]
