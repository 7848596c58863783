"""PackedLoader: real DataLoader workers, threads and passes. Its states cover exactly the batches it handed out."""

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

import streampack
from streampack import PackedDataset, PackedLoader, StateError, merge_states
from streampack.retry import Retry
from streampack.sources import FAULTS

from .streams import examples, split_evenly, write_jsonl
from .tiny_tokenizers import word_tokenizer

# torch warns that this machine has fewer cores than workers; that is the point of some tests.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:source .* processes read all of them"),
]

ROWS = examples(500)


def packed(source: Any = ROWS, **changes: Any) -> PackedDataset:
    settings = {"seq_len": 64, "buffer_size": 8, "shuffle_block": 10, "seed": 3, "source_name": "test", **changes}
    return PackedDataset(source, None, **settings)


def rows_of(batches: Any, count: int | None = None) -> list[list[int]]:
    """The rows of the batches, of all or of the first `count`."""
    rows: list[list[int]] = []
    for number, batch in enumerate(batches, start=1):
        rows += batch["input_ids"].reshape(-1, 64).tolist()
        if number == count:
            break
    return rows


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return rows_of(PackedLoader(packed()))


@pytest.mark.parametrize("num_workers", [1, 3, 4, 17])
@pytest.mark.parametrize("prefetch", [2, 8])
def test_any_number_of_workers_and_any_prefetch_give_the_same_batches(
    expected: list[list[int]], num_workers: int, prefetch: int
) -> None:
    loader = PackedLoader(packed(), 4, num_workers=num_workers, prefetch_factor=prefetch)
    assert rows_of(loader) == expected


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_start_method_gives_the_same_batches(expected: list[list[int]], method: str) -> None:
    assert rows_of(PackedLoader(packed(), 3, num_workers=2, multiprocessing_context=method)) == expected


def test_streamed_files_give_the_same_batches_in_workers_of_every_start_method(tmp_path: Path) -> None:
    files = write_jsonl(tmp_path, split_evenly(ROWS, 3))
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    alone = rows_of(PackedLoader(packed(data)))
    for method in ("fork", "spawn", "forkserver"):
        assert rows_of(PackedLoader(packed(data), 5, num_workers=3, multiprocessing_context=method)) == alone


@pytest.mark.parametrize("num_workers", [0, 3])
def test_resume_after_every_batch_gives_the_rest_whatever_was_prefetched(
    expected: list[list[int]], num_workers: int
) -> None:
    loader = PackedLoader(packed(), 2, num_workers=num_workers)
    states = [loader.state_dict()]
    for _ in loader:
        states.append(json.loads(json.dumps(loader.state_dict())))
    for done, state in list(enumerate(states))[:: 1 if num_workers == 0 else 9]:
        again = PackedLoader(packed(), 3)  # another batch size
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert rows_of(again) == expected[2 * done :]


def test_a_state_of_many_workers_resumes_with_few_and_back(expected: list[list[int]]) -> None:
    rows: list[list[int]] = []
    state = None
    for num_workers in (2, 3, 0, 4, 1, 5):
        loader = PackedLoader(packed(), 2, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        rows += rows_of(loader, 5)
        state = loader.state_dict()
    assert rows == expected[: len(rows)]
    assert len(rows) == 60


def test_states_of_earlier_batches_can_be_asked_for_since_frameworks_fetch_ahead() -> None:
    loader = PackedLoader(packed(), 2)
    states = [loader.state_dict()]
    for _, _ in zip(loader, range(10), strict=False):
        states.append(loader.state_dict())
        if len(states) == 10:
            break
    assert [loader.state_dict(batches=done) for done in range(10)] == states
    with pytest.raises(StateError, match=r"batches=10\).*handed out 9 batches.*0 \.\. 9 are kept"):
        loader.state_dict(batches=10)
    for _ in loader:
        pass
    with pytest.raises(StateError, match="are kept"):
        loader.state_dict(batches=1)


def test_a_batch_fetched_before_the_step_resumes_with_that_batch(expected: list[list[int]]) -> None:
    loader = PackedLoader(packed(), 2)
    iterator = iter(loader)
    rows_of(next(iterator) for _ in range(4))  # three are trained, the fourth is waiting
    again = PackedLoader(packed(), 2)
    again.load_state_dict(loader.state_dict(batches=3))
    assert rows_of(again) == expected[6:]


# ---- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_passes_are_successive_epochs_and_set_epoch_says_which(
    expected: list[list[int]], workers: dict[str, Any]
) -> None:
    loader = PackedLoader(packed(), 4, **workers)
    first, second, third = rows_of(loader), rows_of(loader), rows_of(loader)
    assert first == expected
    assert first != second != third
    tokens = [sorted(token for row in rows for token in row if token) for rows in (first, second, third)]
    assert tokens[0] == tokens[1] == tokens[2]
    loader.set_epoch(1)
    assert rows_of(loader) == second
    assert rows_of(loader) == third
    rows_of(loader, 2)  # break: the next pass is the next epoch
    loader.set_epoch(0)
    assert rows_of(loader) == expected


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_a_loaded_state_is_used_by_the_next_pass_only_also_with_living_workers(
    expected: list[list[int]], workers: dict[str, Any]
) -> None:
    loader = PackedLoader(packed(), 4, **workers)
    rows_of(loader, 5)
    state = loader.state_dict()
    second = rows_of(loader)
    loader.load_state_dict(state)
    assert rows_of(loader) == expected[20:]
    assert rows_of(loader) == second


def test_a_state_in_a_later_epoch_resumes_there_in_a_new_process_s_loader() -> None:
    loader = PackedLoader(packed(), 1)
    rows_of(loader)
    second = rows_of(PackedLoader(packed(), 1), None)
    loader_2 = PackedLoader(packed(), 1)
    rows_of(loader_2)
    iterator = iter(loader_2)
    head = rows_of(next(iterator) for _ in range(7))
    again = PackedLoader(packed(), 1)
    again.load_state_dict(loader_2.state_dict())
    whole = head + rows_of(again)
    assert whole == rows_of(loader)
    assert whole != second


def test_a_state_saved_after_the_end_of_a_pass_begins_the_next_and_one_saved_at_its_last_batch_ends_it() -> None:
    loader = PackedLoader(packed(), 1)
    at_last_batch = None
    for _ in loader:
        at_last_batch = loader.state_dict()
    after_the_end = loader.state_dict()
    second = rows_of(loader)
    again = PackedLoader(packed(), 1)
    again.load_state_dict(after_the_end)
    assert rows_of(again) == second
    again.load_state_dict(at_last_batch)
    assert rows_of(again) == []
    assert rows_of(again) == second


def test_nothing_happens_before_the_first_batch_is_asked_for(expected: list[list[int]]) -> None:
    loader = PackedLoader(packed(), 1)
    iter(loader), iter(loader)
    assert rows_of(loader) == expected


def test_a_pass_that_is_overtaken_by_a_load_or_another_pass_raises() -> None:
    loader = PackedLoader(packed(), 1)
    state = loader.state_dict()
    running = iter(loader)
    next(running)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="a state was loaded, or another pass begun"):
        next(running)
    running = iter(loader)
    next(running)
    next(iter(loader))
    with pytest.raises(StateError, match="another pass begun"):
        next(running)


def test_a_state_loaded_into_one_of_two_loaders_of_a_dataset_is_used_by_that_one(expected: list[list[int]]) -> None:
    dataset = packed()
    first, second = PackedLoader(dataset, 1), PackedLoader(dataset, 1)
    rows_of(first, 9)
    first.load_state_dict(first.state_dict())
    assert rows_of(second, 5) != expected[9:14]
    assert rows_of(first) == expected[9:]


def test_a_copy_of_a_loader_with_persistent_workers_goes_through_its_own_epochs() -> None:
    loader = copy.deepcopy(PackedLoader(packed(), 4, num_workers=2, persistent_workers=True))
    alone = PackedLoader(packed(), 4)
    for _ in range(3):
        assert rows_of(loader) == rows_of(alone)


def test_a_state_loaded_into_the_dataset_while_a_pass_is_running_makes_it_raise() -> None:
    loader = PackedLoader(packed(), 1)
    batches = iter(loader)
    next(batches)
    loader.packed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="a state was loaded"):
        next(batches)


def test_set_epoch_on_a_loaded_state_of_another_epoch_warns() -> None:
    loader = PackedLoader(packed(), 1)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    loader.set_epoch(0)
    with pytest.warns(UserWarning, match=r"set_epoch\(4\) does not apply.*epoch 0"):
        loader.set_epoch(4)


def test_shards_that_every_process_has_to_read_are_said_once_with_the_factor(tmp_path: Path) -> None:
    files = write_jsonl(tmp_path, split_evenly(ROWS, 3))
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    loader = PackedLoader(packed(data, rank=0, world_size=2), 1, num_workers=2)
    with pytest.warns(UserWarning, match=r"'test' has 3 shards for 16 lanes, so 4 processes read all .*4 times"):
        next(iter(loader))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(loader))
        next(iter(PackedLoader(packed(data), 1)))  # one process
        next(iter(PackedLoader(packed(rank=0, world_size=4), 1)))  # random access
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize(
    ("key", "saved", "here"),
    [
        ("seq_len", {}, {"seq_len": 128}),
        ("tokenizer", {}, {"tokenizer": word_tokenizer("a b c")}),
        ("overlong", {}, {"overlong": "drop"}),
        ("text_column", {}, {"text_column": "body"}),
        ("append_eos", {}, {"append_eos": False}),
        ("source", {}, {"source_name": "other"}),
    ],
)
def test_a_state_of_a_stream_that_encodes_otherwise_is_refused_with_both_values(
    key: str, saved: dict[str, Any], here: dict[str, Any]
) -> None:
    def build(tokenizer: Any = None, **changes: Any) -> PackedDataset:
        settings = {"seq_len": 64, "source_name": "texts", **changes}
        return PackedDataset([{"text": "a b"}] * 9, tokenizer or word_tokenizer("a b"), **settings)

    state = PackedLoader(build(**saved), 1).state_dict()
    other = build(**here)
    values = state["stream"][key], other.stream.identity()[key]
    assert values[0] != values[1]
    pattern = f"cannot resume.*{key}={values[0]!r}.*{key}={values[1]!r}"
    with pytest.raises(StateError, match=pattern):
        PackedLoader(other, 1).load_state_dict(state)
    with pytest.raises(StateError, match=pattern):
        other.load_state_dict(state)


def test_an_endless_stream_works_ahead_by_a_bounded_number_of_rows() -> None:
    read = []

    class Endless:
        name, num_shards = "endless", 1

        def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
            for number in range(start, 10**9):
                read.append(number)
                yield {"input_ids": [number] * 30}

    loader = PackedLoader(packed(Endless(), epochs=None, lanes=1, source_name=None), 1)
    next(iter(loader))
    assert len(read) < 2000


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("packing", ["auto", "none"])
def test_ranks_go_on_exactly_after_every_step_also_where_their_lanes_have_ended_at_different_times(
    world_size: int, packing: Any
) -> None:
    lengths = [1, 60, 2, 9, 40, 3, 64, 5, 30, 8, 2, 2, 55, 7, 1, 20] * 6

    def loader(rank: int) -> PackedLoader:
        rows = [{"input_ids": [number + 1] * length} for number, length in enumerate(lengths)]
        dataset = packed(rows, packing=packing, lanes=8, rank=rank, world_size=world_size)
        return PackedLoader(dataset, 2)

    def steps_of(one: PackedLoader) -> tuple[list[Any], list[Any]]:
        """(what is in each batch, the state after each, and at the end)"""
        steps = [(one.provenance, one.state_dict()) for _ in one]
        return [found for found, _ in steps], [*(state for _, state in steps), one.state_dict()]

    whole = [steps_of(loader(rank)) for rank in range(world_size)]
    most = max(len(batches) for batches, _ in whole)
    assert min(len(batches) for batches, _ in whole) < most
    for done in range(1, most):
        merged = merge_states([states[min(done, len(states)) - 1] for _, states in whole])
        for rank, (batches, _) in enumerate(whole):
            resumed = loader(rank)
            resumed.load_state_dict(merged)
            assert steps_of(resumed)[0] == batches[done:], f"rank {rank} after step {done}"


def test_ranks_go_on_where_a_lane_had_nothing_to_give_before_others_have_begun() -> None:
    def loader(rank: int) -> PackedLoader:
        rows = [{"input_ids": [number + 1] * length} for number, length in enumerate([1, 2, 2, 2, 2, 2])]
        return PackedLoader(packed(rows, lanes=6, shuffle=False, packing="none", rank=rank, world_size=2), 2)

    first = [loader(rank) for rank in range(2)]
    iterators = [iter(one) for one in first]
    for iterator in iterators:
        next(iterator)
    merged = merge_states([one.state_dict() for one in first])
    for rank, iterator in enumerate(iterators):
        resumed = loader(rank)
        resumed.load_state_dict(merged)
        assert [batch["input_ids"].tolist() for batch in resumed] == [one["input_ids"].tolist() for one in iterator]


# ---- threads, processes and errors -----------------------------------------------------------------------------------


def test_the_thread_that_works_ahead_ends_with_a_break_and_with_an_error() -> None:
    def threads() -> int:
        alive = [thread for thread in threading.enumerate() if thread.name == "streampack"]
        for thread in alive:
            thread.join(10)  # on a busy machine the end of a pass does not wait for it
        return sum(thread.is_alive() for thread in alive)

    rows_of(PackedLoader(packed(), 1), 3)
    assert threads() == 0
    bad = [{"input_ids": [1, 2]}] * 30 + [{"input_ids": None}]
    with pytest.raises(ValueError, match=r"source 'test', shard 0, index 30: 'input_ids' is null.*bad='drop'"):
        rows_of(PackedLoader(packed(bad), 1))
    assert threads() == 0


def test_a_pass_gives_python_no_reason_to_look_for_garbage() -> None:
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2, 3]}] * 20_000)
    before = gc.get_stats()[0]["collections"]
    assert len(rows_of(PackedLoader(packed(rows, lanes=4, buffer_size=256, shuffle_block=1024), 8))) > 900
    # With an object for each example of a block there are 40, and then one of all that the process holds.
    assert gc.get_stats()[0]["collections"] - before < 10


def test_a_worker_does_not_look_for_garbage_in_what_it_inherits() -> None:
    def frozen(example: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": [int(gc.get_freeze_count() > 10_000)] * 4}

    assert sum(sum(row) for row in rows_of(PackedLoader(packed([{}] * 30, transform=frozen), 1, num_workers=1))) == 120
    assert gc.get_freeze_count() == 0


def test_an_error_in_a_worker_reaches_the_main_process_with_its_type_and_place() -> None:
    bad = [{"input_ids": [1, 2]}] * 30 + [{"input_ids": [[1, 2]]}]
    with pytest.raises(ValueError, match=r"shard 0, index 30: 'input_ids' is ndarray \[\[1, 2\]\]"):
        rows_of(PackedLoader(packed(bad), 1, num_workers=2))


class Failing:
    name, num_shards = "failing", 1

    def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
        yield from [{"input_ids": [1, 2, 3]}][start:]
        raise ConnectionError("the line is down")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_source_keeps_its_type_and_gets_its_place(num_workers: int) -> None:
    dataset = packed(Failing(), source_name=None, retry=Retry(attempts=1))
    with pytest.raises(ConnectionError) as raised:
        rows_of(PackedLoader(dataset, 1, num_workers=num_workers))
    text = "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "the line is down" in text
    assert "source 'failing', shard 0, index 1" in text


class KillsItself:
    name, num_shards = "killed", 1

    def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
        for number in range(start, 10_000):
            if number == 3000 and get_worker_info() is not None and get_worker_info().id == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield {"input_ids": [number] * 20}


def test_a_killed_worker_is_a_clear_error_and_the_state_saved_before_resumes() -> None:
    alone = rows_of(PackedLoader(packed(KillsItself(), source_name=None), 1))
    loader = PackedLoader(packed(KillsItself(), source_name=None), 1, num_workers=2)
    rows: list[list[int]] = []
    batches = (rows.extend(batch["input_ids"].tolist()) for batch in loader)
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed by signal|exited unexpectedly)"):
        list(batches)
    assert 0 < len(rows) < len(alone)
    again = PackedLoader(packed(KillsItself(), source_name=None), 1)
    again.load_state_dict(loader.state_dict())
    assert rows + rows_of(again) == alone


def test_workers_end_with_the_pass_and_with_a_break() -> None:
    before = set(psutil.Process().children())
    rows_of(PackedLoader(packed(), 1, num_workers=2), 2)
    rows_of(PackedLoader(packed(), 1, num_workers=2))
    assert set(psutil.Process().children()) <= before


def test_a_tokenizer_used_before_the_fork_neither_hangs_nor_warns_and_the_environment_is_unchanged() -> None:
    program = """
import os, sys
from tests.tiny_tokenizers import word_tokenizer
import streampack
tokenizer = word_tokenizer()
tokenizer(["a b"] * 100)
texts = [{"text": "a b c d"}] * 200
ds = streampack.PackedDataset(texts, tokenizer, seq_len=16)
before = dict(os.environ)
print(len(list(streampack.PackedLoader(ds, 2, num_workers=2))))
assert dict(os.environ) == before
"""
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True, cwd=root
    )
    assert "just got forked" not in run.stderr
    assert int(run.stdout) > 20


def test_no_warning_comes_from_an_epoch_with_two_workers() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows_of(PackedLoader(packed(), 2, num_workers=2))
    assert [str(warning.message) for warning in caught] == []


# ---- what a batch is -------------------------------------------------------------------------------------------------


def test_the_loader_tells_about_its_last_batch_and_the_pass() -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6, 7, 8, 9]}]
    loader = PackedLoader(packed(rows, seq_len=6, lanes=1, shuffle=False, packing="next_fit"), 1)
    batches = iter(loader)
    first = next(batches)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0]]
    assert loader.provenance == [[("test", 0, 0), ("test", 0, 1)]]
    assert loader.num_loss_tokens == 3
    assert loader.stats == {
        "rows": 1,
        "segments": 2,
        "tokens": 5,
        "loss_tokens": 3,
        "examples": 3,
        "split": 0,
        "truncated_tokens": 0,
        "no_target_tokens": 0,
        "empty": 0,
        "no_target": 0,
        "overlong": 0,
        "transform": 0,
        **{f"bad_{reason}": 0 for reason in FAULTS},
        "bad": 0,
        "filler_rows": 0,
        "cut_rows": 0,
        "cut_tokens": 0,
        "retries": 0,
        "retry_seconds": 0.0,
        "longest_read_seconds": loader.stats["longest_read_seconds"],
        "longest_read_shard": 0,
        "cells": 6,
        "padding_tokens": 1,
        "fill": 5 / 6,
        "epoch": 2 / 3,
        "lane_rows_min": 1,
        "lane_rows_max": 1,
    }
    next(batches)
    assert loader.provenance == [[("test", 0, 2)]]
    assert next(batches, None) is None
    assert (loader.stats["rows"], loader.stats["tokens"], loader.stats["fill"]) == (2, 9, 0.75)


def test_a_collate_fn_gets_packed_rows() -> None:
    loader = PackedLoader(packed(), 3, collate_fn=lambda rows: [row["cu_seqlens"] for row in rows])
    first = next(iter(loader))
    assert len(first) == 3
    assert all(cu[0] == 0 and cu[-1] == 64 and cu.dtype == torch.int32 for cu in first)


def test_the_last_batch_of_a_pass_may_be_short_and_the_batch_size_is_what_was_asked_for(
    expected: list[list[int]],
) -> None:
    loader = PackedLoader(packed(), 7, layout="rows")
    sizes = [len(batch["input_ids"]) for batch in loader]
    assert sizes[:-1] == [7] * (len(expected) // 7)
    assert sizes[-1] == len(expected) % 7
    assert loader.batch_size == 7
    assert isinstance(loader, DataLoader)
    with pytest.raises(TypeError, match=r"a PackedLoader has no len\(\).*streampack.count_batches\(loader\)"):
        len(loader)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="PackedLoader takes a PackedDataset, not list"):
        PackedLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size=0"):
        PackedLoader(packed(), 0)
    with pytest.raises(ValueError, match="prefetch_factor=-1: must be at least 1"):
        PackedLoader(packed(), 1, prefetch_factor=-1)
    with pytest.raises(ValueError, match="layout='flow'"):
        PackedLoader(packed(), 1, layout="flow")  # type: ignore[arg-type]


def test_the_loader_s_dataset_pickles_before_and_after_iterating(expected: list[list[int]]) -> None:
    dataset = packed()
    assert rows_of(PackedLoader(pickle.loads(pickle.dumps(dataset)), 1)) == expected
    dataset.set_epoch(0)
    next(iter(dataset))
    assert len(pickle.dumps(dataset)) < 200_000
    copy = pickle.loads(pickle.dumps(dataset))
    copy.set_epoch(0)
    assert rows_of(PackedLoader(copy, 1)) == expected


def test_set_epoch_and_a_state_loaded_into_the_dataset_hold_for_its_loader(expected: list[list[int]]) -> None:
    dataset = packed()
    loader = PackedLoader(dataset, 1, num_workers=2, persistent_workers=True)
    rows_of(loader)
    dataset.set_epoch(0)
    assert rows_of(loader, 10) == expected[:10]
    state = loader.state_dict()
    dataset.load_state_dict(state)
    assert rows_of(loader) == expected[10:]


def test_a_dataset_of_a_loader_that_another_loader_takes_apart_is_refused() -> None:
    loader = PackedLoader(packed(), 1)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="use the PackedLoader as it is"):
        next(iter(DataLoader(loader.dataset, batch_size=None)))


def test_a_pass_that_is_never_finished_does_not_disturb_the_end_of_the_program() -> None:
    program = """
import streampack
dataset = streampack.PackedDataset([{"input_ids": [1, 2, 3]}] * 5000, None, seq_len=16, epochs=None)
batches = iter(streampack.PackedLoader(dataset, 2))
next(batches)
print("end")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert (run.stdout, run.stderr) == ("end\n", "")


# ---- ranks by hand ---------------------------------------------------------------------------------------------------


def test_ranks_given_by_hand_make_up_the_stream_and_merge_into_one_state(expected: list[list[int]]) -> None:
    loaders = [PackedLoader(packed(rank=rank, world_size=4), 2, num_workers=rank % 2) for rank in range(4)]
    batches = [rows_of(loader, 3) for loader in loaders]
    interleaved = [batches[rank][place] for place in range(6) for rank in range(4)]
    assert interleaved == expected[:24]
    merged = merge_states([loader.state_dict() for loader in loaders])
    for world_size in (1, 2, 8):
        again = [PackedLoader(packed(rank=rank, world_size=world_size), 1) for rank in range(world_size)]
        for loader in again:
            loader.load_state_dict(merged)
        assert merge_states([loader.state_dict() for loader in again])["lanes"] == merged["lanes"]
        assert [rows_of(loader, 1)[0] for loader in again] == expected[24 : 24 + world_size]
        totals = merge_states([loader.state_dict() for loader in again])
        assert totals["rows"] == 24 + world_size


def test_states_of_the_last_steps_merge_where_some_ranks_have_no_more_rows(expected: list[list[int]]) -> None:
    for batch_size in (1, 3, 7):
        loaders = [PackedLoader(packed(rank=rank, world_size=4), batch_size) for rank in range(4)]
        batches = [iter(loader) for loader in loaders]
        rows: list[list[int]] = []
        merges = 0
        while any(step := [next(one, None) for one in batches]):
            rows += [row for batch in step if batch for row in batch["input_ids"].reshape(-1, 64).tolist()]
            merged = merge_states([loader.state_dict() for loader in loaders])
            if len(rows) > len(expected) - 60:  # from here on, resume on one rank
                again = PackedLoader(packed(), 1)
                again.load_state_dict(merged)
                rest = rows_of(again) if not merged["ended"] else []
                assert sorted(rows + rest) == sorted(expected)
                merges += 1
        assert merges > 2


def test_one_rank_s_state_alone_and_a_state_of_other_steps_are_refused() -> None:
    loaders = [PackedLoader(packed(rank=rank, world_size=2), 1) for rank in range(2)]
    rows_of(loaders[0], 2)
    rows_of(loaders[1], 3)
    with pytest.raises(StateError, match="rank 0 of 2 alone; use"):
        loaders[0].load_state_dict(loaders[0].state_dict())
    with pytest.raises(StateError, match="different steps: rank 0 was after row 4, rank 1 after row 6"):
        merge_states([loader.state_dict() for loader in loaders])
    with pytest.raises(StateError, match=r"ranks \[1\] of world_size=2"):
        merge_states([loaders[1].state_dict()])


def test_lanes_that_ranks_do_not_divide_are_refused_with_lanes_that_they_do() -> None:
    with pytest.raises(ValueError, match=r"lanes=16 .*world_size=3 ranks; use lanes=15 or 18"):
        packed(rank=0, world_size=3)
    assert streampack.__version__ == "0.1.0"
