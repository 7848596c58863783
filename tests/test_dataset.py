"""PackedDataset in a plain DataLoader, in torchdata's StatefulDataLoader, and alone."""

import copy
import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from streampack import Collator, PackedDataset, PackedLoader, StateError

from .streams import examples
from .test_loader import packed, rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return rows_of(PackedLoader(packed()))


def test_it_is_an_iterable_dataset_of_dicts_of_tensors(expected: list[list[int]]) -> None:
    dataset = packed()
    assert isinstance(dataset, IterableDataset)
    row = next(iter(dataset))
    assert set(row) == {
        "input_ids", "labels", "position_ids", "seq_idx", "cu_seqlens", "max_seqlen", "num_loss_tokens", "examples",
    }  # fmt: skip
    assert row["input_ids"].tolist() == expected[0]
    assert type(row["max_seqlen"]) is int
    assert row["num_loss_tokens"] == int((row["labels"] != -100).sum())
    assert not hasattr(dataset, "__len__")


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4, 7])
def test_a_plain_dataloader_gives_the_same_rows_each_once(expected: list[list[int]], num_workers: int) -> None:
    loader = DataLoader(packed(), batch_size=None, num_workers=num_workers)
    assert sorted(row["input_ids"].tolist() for row in loader) == sorted(expected)
    batches = DataLoader(packed(), batch_size=4, num_workers=num_workers, collate_fn=Collator("rows"))
    assert sorted(rows_of(batches)) == sorted(expected)


def test_torch_s_own_collation_makes_right_batches_too(expected: list[list[int]]) -> None:
    batch = next(iter(DataLoader(packed(), batch_size=3)))
    assert batch["input_ids"].tolist() == expected[:3]
    assert batch["use_cache"] is False


@pytest.mark.parametrize("persistent", [False, True])
def test_passes_in_a_plain_dataloader_are_successive_epochs_also_in_persistent_workers(persistent: bool) -> None:
    dataset = packed()
    alone = packed()
    in_order = [[row["input_ids"].tolist() for row in alone] for _ in range(4)]
    loader = DataLoader(dataset, batch_size=None, num_workers=3, persistent_workers=persistent)
    for epoch in range(3):
        assert sorted(row["input_ids"].tolist() for row in loader) == sorted(in_order[epoch])
    dataset.set_epoch(1)
    assert sorted(row["input_ids"].tolist() for row in loader) == sorted(in_order[1])
    assert sorted(row["input_ids"].tolist() for row in loader) == sorted(in_order[2])


def test_passes_with_equal_torch_seeds_are_told_apart() -> None:
    dataset = packed()
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    alone = packed()
    for _ in range(3):
        torch.manual_seed(0)  # as set_seed before each epoch does
        rows = [row["input_ids"].tolist() for row in loader]
        assert sorted(rows) == sorted(row["input_ids"].tolist() for row in alone)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_copy_of_a_dataset_counts_its_own_passes_with_its_workers(copy_of: Any) -> None:
    loader = DataLoader(copy_of(packed()), batch_size=None, num_workers=2)
    alone = packed()
    for _ in range(2):
        rows = [row["input_ids"].tolist() for row in loader]
        assert sorted(rows) == sorted(row["input_ids"].tolist() for row in alone)


def test_a_pass_that_is_overtaken_by_a_load_raises() -> None:
    dataset = packed()
    rows = iter(dataset)
    next(rows)
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(StateError, match="a state was loaded"):
        next(rows)


def test_the_state_of_a_dataset_that_workers_iterate_is_refused_in_the_main_process() -> None:
    dataset = packed()
    next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    with pytest.raises(StateError, match=r"iterated in DataLoader workers.*PackedLoader"):
        dataset.state_dict()


def test_a_dataset_alone_resumes_from_its_state_and_from_a_loader_s(expected: list[list[int]]) -> None:
    dataset = packed()
    iterator = iter(dataset)
    head = [next(iterator)["input_ids"].tolist() for _ in range(11)]
    state = json.loads(json.dumps(dataset.state_dict()))
    again = packed()
    again.load_state_dict(state)
    assert head + [row["input_ids"].tolist() for row in again] == expected
    loader = PackedLoader(packed(), 1)
    loader.load_state_dict(state)
    assert head + rows_of(loader) == expected


def test_a_state_loaded_before_a_plain_dataloader_starts_workers_is_used_once(expected: list[list[int]]) -> None:
    dataset = packed()
    iterator = iter(dataset)
    head = [next(iterator)["input_ids"].tolist() for _ in range(21)]
    state = dataset.state_dict()
    again = packed()
    again.load_state_dict(state)
    loader = DataLoader(again, batch_size=None, num_workers=3)
    rest = [row["input_ids"].tolist() for row in loader]
    assert sorted(head + rest) == sorted(expected)
    second = packed()
    list(second)
    assert sorted(row["input_ids"].tolist() for row in loader) == sorted(row["input_ids"].tolist() for row in second)


def test_a_state_loaded_while_persistent_workers_hold_older_copies_is_refused_and_not_ignored() -> None:
    dataset = packed()
    state = dataset.state_dict()
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    list(loader)
    dataset.load_state_dict(state)
    with pytest.raises(StateError, match="after persistent DataLoader workers were started"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_stateful_dataloader_resumes_with_the_same_worker_count(num_workers: int) -> None:
    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(packed(), batch_size=2, num_workers=num_workers, collate_fn=Collator("rows"))

    whole = rows_of(loader())
    for done in (0, 1, 7, 30, len(whole) // 2 - 2, len(whole) // 2 - 1):
        first = loader()
        iterator = iter(first)
        head = rows_of(next(iterator) for _ in range(done))
        again = loader()
        again.load_state_dict(first.state_dict())
        assert head + rows_of(again) == whole


def test_a_stateful_dataloader_resumes_in_its_second_epoch() -> None:
    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(packed(), batch_size=None, num_workers=2)

    first = loader()
    list(first)
    iterator = iter(first)
    head = [next(iterator)["input_ids"].tolist() for _ in range(9)]
    again = loader()
    again.load_state_dict(first.state_dict())
    rest = [row["input_ids"].tolist() for row in again]
    second = packed()
    list(second)
    assert sorted(head + rest) == sorted(row["input_ids"].tolist() for row in second)


@pytest.mark.parametrize("asked_for_more", [False, True])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (3, False), (3, True)])
def test_a_stateful_dataloader_saved_at_the_end_of_a_pass_goes_on_with_the_next(
    num_workers: int, persistent: bool, asked_for_more: bool
) -> None:
    """After the last batch nothing is left of the pass; once the loop has ended, the next pass begins."""

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(packed(), batch_size=None, num_workers=num_workers, persistent_workers=persistent)

    alone = packed()
    passes = [sorted(row["input_ids"].tolist() for row in alone) for _ in range(3)]
    first = loader()
    list(first)
    iterator = iter(first)
    for _ in passes[1]:
        next(iterator)
    if asked_for_more:
        assert list(iterator) == []
    again = loader()
    again.load_state_dict(first.state_dict())
    if not asked_for_more:
        assert list(again) == []
    assert sorted(row["input_ids"].tolist() for row in again) == passes[2]


def test_global_random_state_is_neither_read_nor_changed(expected: list[list[int]]) -> None:
    np.random.seed(1)
    random.seed(1)
    torch.manual_seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    assert [row["input_ids"].tolist() for row in packed()] == expected
    assert (np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()) == before


def test_the_launcher_s_environment_is_read_when_iteration_starts(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = [packed() for _ in range(4)]  # built before the environment is there
    rows = []
    for rank, dataset in enumerate(datasets):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        rows.append(rows_of(PackedLoader(dataset, 1), 3))
        explicit = PackedDataset(examples(500), None, seq_len=64, buffer_size=8, shuffle_block=10, seed=3,
                                 rank=0, world_size=1)  # fmt: skip
        assert rows_of(PackedLoader(explicit, 1), 3) == expected[:3]
    assert [rows[rank][place] for place in range(3) for rank in range(4)] == expected[:12]


def test_half_an_environment_is_refused_and_tasks_without_ranks_are_warned_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="RANK=None, WORLD_SIZE=4"):
        next(iter(packed()))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(UserWarning, match="SLURM_NTASKS=4, but there is no process group"):
        next(iter(packed()))


def test_five_examples_on_sixteen_lanes_come_once_and_an_endless_stream_of_them_is_refused() -> None:
    rows = [row["input_ids"].tolist() for row in packed(examples(5))]
    assert len(rows) == 5
    with pytest.raises(ValueError, match=r"lane \d+ of 16 got no usable example .*\(of 5 examples\) in epoch 0.*fewer"):
        for _ in packed(examples(5), epochs=None):
            pass
    few = packed(examples(5), epochs=None, lanes=1)
    assert len([row for row, _ in zip(few, range(20), strict=False)]) == 20


@pytest.mark.parametrize("source", [[], [{"input_ids": []}, {"input_ids": []}]])
def test_a_source_without_examples_gives_no_rows(source: Any) -> None:
    dataset = packed(source)
    assert list(dataset) == []
    assert dataset.state_dict()["ended"] is True


def test_a_transform_runs_after_the_seek_and_may_leave_examples_out() -> None:
    seen: list[int] = []

    def transform(row: Any) -> Any:
        seen.append(row["input_ids"][0])
        return {"input_ids": [*row["input_ids"][:3], 9999]} if row["input_ids"][0] % 2 else None

    def build() -> PackedDataset:
        return packed(examples(1000), transform=transform, lanes=2)

    loader = PackedLoader(build(), 1)
    whole = rows_of(loader)
    assert loader.stats["transform"] == 500
    assert loader.stats["examples"] == 500
    assert sum(row.count(9999) for row in whole) == 500
    rows_of(loader, 1)
    run = PackedLoader(build(), 1)
    head = rows_of(run, 20)
    again = PackedLoader(build(), 1)
    again.load_state_dict(run.state_dict())
    seen.clear()
    first = rows_of(again, 1)
    assert head + first == whole[:21]
    assert len(seen) < 300  # what waits and what comes next, not the 400 examples before


def test_an_error_in_a_transform_names_the_example() -> None:
    def transform(row: Any) -> Any:
        raise KeyError("nothing")

    with pytest.raises(ValueError, match=r"source 'test', shard 0, index \d+: transform raised KeyError: 'nothing'"):
        list(packed(transform=transform))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "seq_len=1: must be at least 2"),
        ({"seq_len": 64.0}, "seq_len=64.0 is float, not an int"),
        ({"lanes": 0}, "lanes=0: must be at least 1"),
        ({"seed": -1}, "seed=-1: must be at least 0"),
        ({"epochs": 0}, "epochs=0: must be at least 1"),
        ({"overlong": "cut"}, "overlong='cut': pass one of 'auto', 'split', 'truncate', 'drop', 'error'"),
        ({"packing": "bfd"}, "packing='bfd': pass one of 'auto'"),
        ({"bad": "skip"}, "bad='skip': pass one of 'drop', 'error'"),
        ({"pad_to_multiple_of": 5}, "seq_len=64 is not a multiple of pad_to_multiple_of=5"),
        ({"pad_to_multiple_of": 2, "packing": "wrapped"}, "packing='wrapped' cuts examples anywhere"),
        ({"max_example_len": 65}, "max_example_len=65 does not fit into seq_len=64"),
        ({"rank": 0}, "rank=0, world_size=None: pass both or neither"),
        ({"rank": np.int64(0), "world_size": 2}, r"rank=np.int64\(0\) is int64, not an int"),
        ({"pad_token_id": -1}, "pad_token_id=-1: must be at least 0"),
        ({"pad_token_id": 2**40}, r"pad_token_id=1099511627776: must be at least 0, below 2\*\*31"),
        ({"text_column": 3}, "text_column=3 is int, not a str"),
        ({"transform": "x"}, "transform='x' is str, not a function"),
        ({"rank": 2, "world_size": 2}, r"rank=2 is not in 0 \.\. 1"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        packed(**changes)
