"""The loss of packed batches: as of separate examples, and the same on any number of ranks with any accumulation."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from streampack import Collator, PackedDataset, PackedLoader
from streampack.attention import context_parallel_part
from streampack.loss import global_sum, loss_normalizer, packed_cross_entropy

from .test_models import batch_of, docs, small_model
from .test_ranks import run_ranks
from .test_rows import row_of

STEPS, ROWS_PER_STEP = 50, 8
WEIGHTINGS = ["token", "example", "sqrt"]


pytestmark = pytest.mark.usefixtures("one_thread")


def logits_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    names = ("input_ids", "position_ids", "use_cache")
    found: torch.Tensor = model(**{name: batch[name] for name in names}).logits
    return found


# ---- one process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_the_sum_of_packed_losses_is_the_sum_over_separate_examples(layout: Any) -> None:
    model = small_model("llama", "sdpa").eval()
    batch, rows = batch_of(3, layout)
    packed = packed_cross_entropy(logits_of(model, batch), batch["labels"], normalizer=1)
    alone = 0.0
    for doc in (docs()[index] for row in rows for index in row):
        ids, labels = torch.tensor([doc["input_ids"]]), torch.tensor([doc["labels"]])
        alone += float(packed_cross_entropy(model(input_ids=ids).logits, labels, normalizer=1).detach())
    assert alone > 100
    torch.testing.assert_close(float(packed.detach()), alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("layout", ["rows", "flat"])
def test_without_weights_and_normalizer_it_is_the_loss_of_transformers(layout: Any) -> None:
    model = small_model("llama", "sdpa").eval()
    batch, _ = batch_of(3, layout)
    logits = logits_of(model, batch)
    torch.testing.assert_close(packed_cross_entropy(logits, batch["labels"]), model(**batch).loss)


def test_weighted_losses_are_the_mean_over_examples_of_their_means() -> None:
    rows = [row_of([1, 2, 3], [4, 5, 6, 7, 8]), row_of([9, 10])]
    batch = Collator("rows", loss_weights="example", shift_labels=True).compact(rows, seq_len=8, pad_token_id=0)
    logits = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    means = []
    for row, start, end in ((0, 0, 3), (0, 3, 8), (1, 0, 2)):
        targets = batch["input_ids"][row, start + 1 : end]
        means.append(torch.nn.functional.cross_entropy(logits[row, start : end - 1], targets))
    found = packed_cross_entropy(logits, batch["labels"], batch["loss_weights"])
    torch.testing.assert_close(found, sum(means) / 3)
    shifted = packed_cross_entropy(logits, batch["shift_labels"], batch["shift_loss_weights"], shifted=True)
    assert torch.equal(found, shifted)


def test_half_precision_logits_are_taken_to_float32() -> None:
    logits = torch.randn(1, 64, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(64)[None] % 20
    found = packed_cross_entropy(logits, labels)
    assert found.dtype is torch.float32
    assert torch.equal(found, packed_cross_entropy(logits.float(), labels))


def test_a_batch_without_targets_gives_a_loss_of_zero_and_no_gradient() -> None:
    logits = torch.randn(1, 4, 20, requires_grad=True)
    labels = torch.full((1, 4), -100)
    for weights in (None, torch.zeros(1, 4)):
        for normalizer in (None, loss_normalizer({"labels": labels})):
            loss = packed_cross_entropy(logits, labels, weights, normalizer=normalizer)
            assert float(loss.detach()) == 0
            assert float(torch.autograd.grad(loss, logits)[0].abs().max()) == 0


def test_the_parts_of_a_context_parallel_group_sum_to_the_whole() -> None:
    rows = [row_of(list(range(1, 9)), list(range(20, 24)))]
    batch = Collator("flat", loss_weights="sqrt").compact(rows, seq_len=16, pad_token_id=0)
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))  # logits by the token alone
    whole = packed_cross_entropy(table[batch["input_ids"]], batch["labels"], batch["loss_weights"])
    parts = [context_parallel_part(batch, rank=rank, size=2) for rank in range(2)]
    normalizer = loss_normalizer(parts)
    assert normalizer == pytest.approx(7**0.5 + 3**0.5, rel=1e-6)
    found = sum(
        packed_cross_entropy(
            table[part["input_ids"]],
            part["shift_labels"],
            part["shift_loss_weights"],
            normalizer=normalizer,
            shifted=True,
        )
        for part in parts
    )
    torch.testing.assert_close(found, whole)


def test_shapes_that_do_not_agree_are_refused_naming_them() -> None:
    logits, labels = torch.zeros(1, 12, 20), torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match="labels") as error:
        packed_cross_entropy(logits, labels)
    assert str(error.value) == (
        "logits of shape (1, 12, 20) need labels of shape (1, 12), not (2, 6); take both from the same batch"
    )
    with pytest.raises(ValueError, match=r"need weights of shape \(2, 6\), not \(12,\)"):
        packed_cross_entropy(logits.reshape(2, 6, 20), labels, torch.zeros(12))


def test_sums_of_one_process() -> None:
    assert global_sum(3) == 3.0
    assert global_sum([1, 2.5, torch.tensor([1, 2, 3])]) == 9.5
    assert global_sum(torch.tensor([True, True, False])) == 2.0
    assert global_sum([2**53 - 1]) == 2**53 - 1
    assert global_sum([]) == 0.0
    labels = torch.tensor([[-100, 5, -100, 6]])
    assert loss_normalizer({"labels": labels}) == 2.0
    assert loss_normalizer([{"labels": labels}, {"labels": labels, "loss_weights": torch.tensor([0.25])}]) == 2.25
    assert loss_normalizer([]) == loss_normalizer({"labels": labels[:, :1]}) == 1.0
    with pytest.raises(ValueError, match=r"the batch has no labels \(it has: input_ids\)"):
        loss_normalizer({"input_ids": labels})


# ---- ranks ------------------------------------------------------------------------------------------------------


def examples() -> list[dict[str, Any]]:
    """Of very different lengths, some with few targets."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 30, (200,), generator=generator).tolist()
    found = []
    for number, length in enumerate(lengths):
        ids = [1 + (7 * number + place) % 49 for place in range(length)]
        prompt = number % 3 * length // 3
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


class TwoTokens(torch.nn.Module):
    """Logits by a token and the one before it in its segment."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.before = torch.nn.Embedding(50, 16), torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        before = self.before(input_ids.roll(1, dims=1)) * (position_ids > 0)[..., None]
        logits: torch.Tensor = self.head(torch.tanh(self.token(input_ids) + before))
        return logits


def train(_: Any, batch_size: int, accumulate: int, weighting: Any) -> list[tuple[float, float]]:
    """The loss and the size of the gradient of each step."""
    dataset = PackedDataset(examples(), None, seq_len=32, lanes=4, epochs=None, buffer_size=16)
    batches = iter(PackedLoader(dataset, batch_size, layout="rows", loss_weights=weighting))
    torch.manual_seed(0)
    model: Any = TwoTokens()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ddp: Any = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for _step in range(STEPS):
        micro_batches = list(itertools.islice(batches, accumulate))
        normalizer = loss_normalizer(micro_batches)
        total = 0.0
        for number, batch in enumerate(micro_batches, 1):
            with ddp.no_sync() if ranks > 1 and number < accumulate else nullcontext():
                logits = ddp(batch["input_ids"], batch["position_ids"])
                loss = packed_cross_entropy(logits, batch["labels"], batch.get("loss_weights"), normalizer=normalizer)
                loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        steps.append((global_sum(total) / ranks, float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return steps


def nothing() -> None:
    return None


def train_all(_: Any, batch_size: int, accumulate: int) -> list[list[tuple[float, float]]]:
    return [train(None, batch_size, accumulate, weighting) for weighting in WEIGHTINGS]


@pytest.fixture(scope="module")
def one_process() -> list[list[tuple[float, float]]]:
    return train_all(None, ROWS_PER_STEP, 1)


def assert_same_training(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert len(one) == STEPS
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-5, atol=2e-6)


def test_the_training_of_one_process_learns_and_its_weightings_differ(one_process: Any) -> None:
    for losses in one_process:
        assert sum(loss for loss, _ in losses[-10:]) < 0.8 * sum(loss for loss, _ in losses[:10])
    token, example, sqrt = (torch.tensor(steps)[:, 0] for steps in one_process)
    assert torch.equal(token, torch.tensor(train(None, ROWS_PER_STEP, 1, None))[:, 0])
    assert (token - example).abs().min() > 1e-6
    assert (token - sqrt).abs().min() > 1e-6
    assert (sqrt - example).abs().min() > 1e-6


def test_accumulation_gives_the_losses_and_gradients_of_the_whole_batch(one_process: Any) -> None:
    assert_same_training(train_all(None, 2, 4), one_process)


@pytest.mark.parametrize(("world_size", "batch_size", "accumulate"), [(2, 4, 1), (2, 2, 2), (4, 2, 1), (4, 1, 2)])
def test_ranks_give_the_losses_and_gradients_of_one_process_at_every_step(
    tmp_path: Path, one_process: Any, world_size: int, batch_size: int, accumulate: int
) -> None:
    reports = run_ranks(train_all, world_size, tmp_path / "run", batch_size, accumulate, make=nothing)
    assert all(report == reports[0] for report in reports)
    assert_same_training(reports[0], one_process)


def sums(_: Any) -> list[Any]:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    batch = {"labels": torch.tensor([[-100, 1, 2, 3][: rank + 1]])}  # 0, 1, 2 and 3 targets
    mine = pairs[rank // 2]
    return [
        global_sum(rank + 0.5),
        global_sum([torch.tensor(rank), 1], group=mine),
        loss_normalizer(batch),
        loss_normalizer([batch] * (rank + 1), group=mine),
    ]


def test_sums_over_all_ranks_and_over_a_group(tmp_path: Path) -> None:
    first, second = [8.0, 3.0, 6 / 4, 2 / 2], [8.0, 7.0, 6 / 4, 18 / 2]
    assert run_ranks(sums, 4, tmp_path / "run", make=nothing) == [first, first, second, second]
