"""The end of a finite pass on several ranks: they end together, nothing is lost ("fill") or what was cut is counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from streampack import PackedDataset, PackedLoader, merge_states

from .streams import SEQ_LEN, Shards, examples, split_evenly
from .test_ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create"), pytest.mark.timeout(120)]

COUNT = 230


def uneven() -> PackedDataset:
    """Files of 200, 20, 8 and 2 examples, whole ones to each of 4 lanes."""
    parts, rows = [], examples(COUNT)
    for size in (200, 20, 8, 2):
        parts.append(rows[:size])
        rows = rows[size:]
    return PackedDataset(Shards(parts), seq_len=SEQ_LEN, lanes=4, buffer_size=8, shuffle=False)


def evaluate(dataset: PackedDataset, num_workers: int, at_end: Any, epochs: int) -> Any:
    """All batches of some passes, with a collective in each step, as training has."""
    loader = PackedLoader(dataset, 3, num_workers=num_workers, at_end=at_end, layout="rows")
    passes = []
    for _ in range(epochs):
        found, steps, fillers = [], 0, 0
        for batch in loader:
            assert batch["input_ids"].shape == (3, SEQ_LEN)
            dist.all_reduce(torch.ones(1))
            steps += 1
            found += [list(place[1:]) for row in loader.provenance for place in row]
            fillers += sum(not row for row in loader.provenance)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, loader.state_dict())
        merged = merge_states(states)
        passes.append([found, steps, fillers, loader.stats, merged["ended"]])
    return passes


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_filled_up_with_padding_every_example_is_seen_once_and_all_ranks_make_the_same_steps(
    tmp_path: Path, world_size: int, num_workers: int
) -> None:
    reports = run_ranks(evaluate, world_size, tmp_path / "run", num_workers, None, 2, make=uneven)
    for epoch in range(2):
        seen = Counter(tuple(place) for report in reports for place in report[epoch][0])
        assert set(seen.values()) == {1}
        assert len(seen) == COUNT
        steps = {report[epoch][1] for report in reports}
        assert len(steps) == 1
        for _, _, fillers, stats, ended in (report[epoch] for report in reports):
            assert fillers == stats["filler_rows"]
            assert ended
        assert sum(report[epoch][2] for report in reports) > 30
    rows = sum(report[1][3]["rows"] for report in reports)
    assert rows + sum(report[epoch][2] for report in reports for epoch in (0, 1)) == 2 * 3 * steps.pop() * world_size


@pytest.mark.parametrize("num_workers", [0, 2])
def test_cut_all_ranks_end_together_and_what_is_left_is_counted(tmp_path: Path, num_workers: int) -> None:
    reports = run_ranks(evaluate, 4, tmp_path / "run", num_workers, "cut", 2, make=uneven)
    for epoch in range(2):
        assert {report[epoch][1] for report in reports} == {0}  # the lane of 2 examples has less than a batch
        found = sum(report[epoch][3]["cut_rows"] for report in reports)
        alone = PackedLoader(uneven(), 1)
        assert found == sum(1 for _ in alone)
        assert sum(report[epoch][3]["cut_tokens"] for report in reports) == alone.stats["tokens"]


def test_cut_gives_the_full_batches_that_every_rank_has(tmp_path: Path) -> None:
    reports = run_ranks(evaluate, 2, tmp_path / "run", 0, "cut", 1, make=even)
    steps = {report[0][1] for report in reports}
    assert len(steps) == 1
    alone = PackedLoader(even(), 1)
    rows = sum(1 for _ in alone)
    cut = sum(report[0][3]["cut_rows"] for report in reports)
    assert 3 * 2 * steps.pop() + cut == rows
    assert 0 < cut < 12


def even() -> PackedDataset:
    return PackedDataset(Shards(split_evenly(examples(300), 8)), seq_len=SEQ_LEN, lanes=4, buffer_size=8)


def stop_and_go_on(dataset: PackedDataset, state: Any, batches: int) -> Any:
    loader = PackedLoader(dataset, 3, layout="rows")
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for number, _ in enumerate(loader, 1):
        found += [list(place[1:]) for row in loader.provenance for place in row]
        if number == batches:
            break
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    return found, merge_states(states)


def test_a_pass_stopped_while_some_ranks_are_out_goes_on_on_other_ranks(tmp_path: Path) -> None:
    first = run_ranks(stop_and_go_on, 4, tmp_path / "first", None, 6, make=uneven)
    second = run_ranks(stop_and_go_on, 2, tmp_path / "second", first[0][1], 3, make=uneven)
    third = run_ranks(stop_and_go_on, 1, tmp_path / "third", second[0][1], 10**6, make=uneven)
    seen = Counter(tuple(place) for found, _ in first + second + third for place in found)
    assert set(seen.values()) == {1}
    assert len(seen) == COUNT
    assert third[0][1]["ended"]


def own(dataset: PackedDataset) -> Any:
    loader = PackedLoader(dataset, 3, at_end="own")
    return sum(1 for _ in loader), [batch["input_ids"].numel() // SEQ_LEN for batch in loader]


def test_each_rank_may_end_by_itself(tmp_path: Path) -> None:
    reports = run_ranks(own, 4, tmp_path / "run", make=uneven)
    assert len({report[0] for report in reports}) > 1
    assert any(report[1][-1] < 3 for report in reports)


def test_an_endless_stream_exchanges_nothing(tmp_path: Path) -> None:
    def count(dataset: PackedDataset) -> Any:
        loader = PackedLoader(dataset, 2)
        for _, _ in zip(range(3 + dist.get_rank()), loader, strict=False):  # ranks need not even make the same steps
            pass
        return loader._group._group is None

    assert run_ranks(count, 2, tmp_path / "run") == [True, True]


def test_a_batch_of_padding_alone_gives_a_loss_of_zero_and_no_gradient(tmp_path: Path) -> None:
    def losses(dataset: PackedDataset) -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
        found = []
        for batch in PackedLoader(dataset, 3, layout="rows"):
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            gradient = max(float(one.grad.abs().max()) for one in model.parameters())
            found.append([float(loss.detach()), gradient, int((batch["labels"] != -100).sum())])
        return found

    first, second = run_ranks(losses, 2, tmp_path / "run", make=uneven)
    assert len(first) == len(second)
    fillers = [one for one in first + second if one[2] == 0]
    assert len(fillers) > 3
    assert all(loss == gradient == 0 for loss, gradient, _ in fillers)
    assert all(loss > 1 and gradient > 0 for loss, gradient, targets in first + second if targets)


def test_an_end_that_needs_a_process_group_is_refused_without_one() -> None:
    dataset = PackedDataset(examples(50), seq_len=SEQ_LEN, lanes=4, rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"at_end='fill' needs torch\.distributed\.init_process_group"):
        next(iter(PackedLoader(dataset, at_end="fill")))
    assert next(iter(PackedLoader(dataset)))
    with pytest.raises(ValueError, match="at_end='stop': pass 'own', 'fill' or 'cut', or None"):
        PackedLoader(dataset, at_end="stop")  # type: ignore[arg-type]


def test_ranks_of_a_mesh_read_by_their_data_parallel_rank(tmp_path: Path) -> None:
    """2 x 2: ranks that share a row of the model (tensor or context parallel) get the same rows, and end together."""

    def read(dataset: PackedDataset) -> Any:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        mine = PackedDataset(
            dataset.stream.parts[0].source,
            seq_len=SEQ_LEN,
            lanes=4,
            buffer_size=8,
            rank=mesh.get_local_rank("dp"),
            world_size=mesh["dp"].size(),
        )
        loader = PackedLoader(mine, 3, layout="rows")
        return [batch["input_ids"].tolist() for batch in loader]

    reports = run_ranks(read, 4, tmp_path / "run", make=uneven)
    assert reports[0] == reports[1]
    assert reports[2] == reports[3]
    assert len(reports[0]) == len(reports[2])
    assert reports[0] != reports[2]
