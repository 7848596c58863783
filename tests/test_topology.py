"""One row sequence, whoever hosts the lanes; every example once per epoch. The torch-free core, in one process."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from streampack.files import Files

from .streams import (
    Ranks,
    all_examples,
    examples,
    files_in_ranges,
    fingerprints,
    make_stream,
    split_evenly,
    tokens_by_example,
    write_jsonl,
    write_parquet,
)

TOPOLOGIES = [(1, 0), (1, 1), (1, 3), (1, 4), (2, 2), (4, 1), (4, 4), (16, 1)]
COUNT = 600


def jsonl(parts: int) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        files = write_jsonl(folder, split_evenly(examples(COUNT), parts))
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))

    return make


def parquet(folder: Path) -> Any:
    files = write_parquet(folder, split_evenly(examples(COUNT), 2), row_group_size=9)
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(folder))


def arrow(folder: Path) -> Any:
    datasets.Dataset.from_list(examples(COUNT)).save_to_disk(folder / "arrow")
    return datasets.load_from_disk(folder / "arrow")


def sequence(folder: Path) -> Any:
    return examples(COUNT)


def generate(parts: list[int]) -> Any:
    for part in parts:
        yield from split_evenly(examples(COUNT), 7)[part]


def generator(folder: Path) -> Any:
    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"parts": list(range(7))})


def ranges(parts: int) -> Callable[[Path], Files]:
    def make(folder: Path) -> Files:
        write_jsonl(folder, split_evenly(examples(COUNT), parts))
        return files_in_ranges(folder / "*.jsonl", range_bytes=1500)

    return make


def mixed_files(folder: Path) -> Files:
    """Row groups, record batches, a compressed file and an empty one."""
    parts = split_evenly(examples(COUNT), 4)
    write_parquet(folder, [*parts[:1], []], row_group_size=9)
    for number, name in enumerate(write_jsonl(folder, [parts[1]])):
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
        Path(name).write_bytes(b"")
    for number, part in enumerate(parts[2:]):
        datasets.Dataset.from_list(part).save_to_disk(folder / f"arrow-{number}", num_shards=2)
    return Files([folder / "*.parquet", folder / "*.jsonl*", folder / "**" / "*.arrow"])


SOURCES = {
    "jsonl-1": jsonl(1),
    "jsonl-3": jsonl(3),
    "jsonl-17": jsonl(17),
    "jsonl-40": jsonl(40),
    "parquet": parquet,
    "arrow": arrow,
    "list": sequence,
    "generator": generator,
    "files-ranges-of-1": ranges(1),
    "files-ranges-of-5": ranges(5),
    "files-mixed": mixed_files,
}


@pytest.fixture(params=list(SOURCES))
def source(request: Any, tmp_path: Path) -> Any:
    return SOURCES[request.param](tmp_path)


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in-order"])
def test_two_epochs_are_the_same_rows_on_every_topology_and_hold_each_example_once(source: Any, shuffle: bool) -> None:
    stream = make_stream(source, epochs=2, shuffle=shuffle)
    alone = Ranks(stream, 1, 0).take(10**6)
    expected = fingerprints(alone)
    assert tokens_by_example(alone) == all_examples(stream.parts[0].source, epochs=2)
    assert len(alone) > 100

    for world_size, num_workers in TOPOLOGIES:
        ranks = Ranks(stream, world_size, num_workers)
        rows = ranks.take(10**6)
        until_a_lane_ends = _rows_until_a_lane_ends(alone)
        assert fingerprints(rows)[:until_a_lane_ends] == expected[:until_a_lane_ends]
        assert sorted(fingerprints(rows)) == sorted(expected)
        assert all(progress.ended for progress in ranks.progress)


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in-order"])
def test_an_endless_stream_is_the_same_rows_on_every_topology(source: Any, shuffle: bool) -> None:
    stream = make_stream(source, epochs=None, shuffle=shuffle)
    count = 480
    alone = Ranks(stream, 1, 0).take(count)
    for world_size, num_workers in TOPOLOGIES:
        rows = Ranks(stream, world_size, num_workers).take(count // world_size)
        assert fingerprints(rows) == fingerprints(alone)
    # Each lane finishes an epoch before it begins the next.
    for lane in range(stream.lanes):
        epochs = [
            max(epoch for epoch, *_ in row.origin) for row in (given.row for given in alone if given.lane == lane)
        ]
        assert epochs == sorted(epochs)


def test_an_endless_stream_of_a_thousand_examples_gives_each_once_per_epoch_and_none_twice_in_a_row() -> None:
    stream = make_stream(examples(1000), epochs=None)
    rows = Ranks(stream, 1, 0).take(1600)
    found = tokens_by_example(rows)
    complete = min(min(epoch for epoch, *_ in given.row.origin) for given in rows[-stream.lanes :])
    assert complete >= 2
    wanted = all_examples(stream.parts[0].source, epochs=complete)
    assert {key: found[key] for key in wanted} == dict(wanted)
    for given in rows:
        places = [(shard, index) for _, shard, index, *_ in given.row.origin]
        assert len(set(places)) == len(places)


@pytest.mark.parametrize("packing", ["oldest_first", "best_fit", "next_fit", "wrapped", "none", "by_length"])
def test_every_packing_gives_the_same_rows_on_every_topology(packing: Any) -> None:
    stream = make_stream(examples(500, longest=200), epochs=2, packing=packing)
    alone = Ranks(stream, 1, 0).take(10**6)
    assert tokens_by_example(alone) == all_examples(stream.parts[0].source, epochs=2)
    for world_size, num_workers in [(1, 3), (2, 2), (8, 1)]:
        rows = Ranks(stream, world_size, num_workers).take(10**6)
        assert sorted(fingerprints(rows)) == sorted(fingerprints(alone))


def test_orders_differ_between_epochs_and_seeds_when_shuffled_and_repeat_when_not() -> None:
    def firsts(**changes: Any) -> list[list[int]]:
        rows = Ranks(make_stream(examples(400), epochs=2, **changes), 1, 0).take(10**6)
        return [[index for given in rows for e, _, index, *_ in given.row.origin if e == epoch] for epoch in (0, 1)]

    first, second = firsts()
    assert first != second
    assert sorted(first) == sorted(second)
    assert firsts() == [first, second]
    assert firsts(seed=4)[0] != first
    one_lane = firsts(shuffle=False, lanes=1, packing="next_fit")
    assert one_lane[0] == one_lane[1] == [index % 64 for index in range(400)]


def _rows_until_a_lane_ends(rows: list[Any]) -> int:
    """How many rows come before the first lane is missed: until there the order is the same for all topologies."""
    lanes = max(given.lane for given in rows) + 1
    for number, given in enumerate(rows):
        if given.lane != number % lanes:
            return number
    return len(rows)
