import functools
import gc
import itertools
import re
import textwrap
import threading
import time
from collections import UserDict, deque
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import streampack.sources
from streampack import FunctionSource, PackedDataset, PackedLoader, SequenceSource, Source
from streampack.retry import Retry
from streampack.sources import as_source, locate, where

from .tiny_tokenizers import word_tokenizer

TEXTS = [{"text": f"text {number}"} for number in range(200)]


class Lists:
    """A source of one's own, with no more than is asked for."""

    def __init__(self, *shards):
        self.shards = shards
        self.name = "lists"
        self.num_shards = len(shards)

    def read(self, shard, start):
        yield from self.shards[shard][start:]


class Squares:
    """A map-style dataset."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"text": str(index * index)}


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from TEXTS


def numbers(shard):
    for index in range(4):
        yield {"text": f"{shard} {index}"}


def read_all(source):
    return [list(source.read(shard, 0)) for shard in range(source.num_shards)]


def texts_of_rows(source, retry=None):
    """The word of each example that comes out of a PackedDataset (whose vocabulary is "a b c d")."""
    settings = {"seq_len": 4, "lanes": 1, "shuffle": False, "append_eos": False, "no_target": "keep", "pad_token_id": 0}
    dataset = PackedDataset(source, word_tokenizer(), retry=retry, **settings)
    return [token for row in dataset for token in row["input_ids"].tolist() if token]


# ---- the sources ------------------------------------------------------------------------------------------------


def test_a_list_is_read_as_shards_of_64_examples():
    source = SequenceSource(TEXTS)
    assert (source.num_shards, source.num_examples) == (4, 200)
    assert read_all(source) == [TEXTS[:64], TEXTS[64:128], TEXTS[128:192], TEXTS[192:]]


@pytest.mark.parametrize(("size", "shards"), [(0, 1), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_an_empty_list_is_one_shard_and_no_shard_is_empty_otherwise(size, shards):
    source = SequenceSource(TEXTS[:size])
    assert source.num_shards == shards
    assert list(itertools.chain(*read_all(source))) == TEXTS[:size]
    assert size == 0 or all(read_all(source))


@given(st.integers(0, 3), st.integers(0, 70))
def test_reading_a_list_from_any_index_gives_what_follows_it(shard, start):
    source = SequenceSource(TEXTS)
    assert list(source.read(shard, start)) == read_all(source)[shard][start:]


def test_a_list_is_not_read_before_what_is_asked_for():
    class Guarded(Squares):
        def __getitem__(self, index):
            assert index >= 3
            return super().__getitem__(index)

    assert next(SequenceSource(Guarded()).read(0, 3)) == {"text": "9"}


def test_a_map_style_dataset_is_read_by_its_length_and_not_until_it_raises():
    source = as_source(Squares(), lanes=1)
    assert read_all(source) == [[{"text": "0"}, {"text": "1"}, {"text": "4"}, {"text": "9"}, {"text": "16"}]]
    assert source.name == "Squares of 5 examples"


def test_a_torch_dataset_is_a_map_style_dataset():
    halves = torch.utils.data.Subset(TEXTS, range(0, 200, 2))
    assert list(itertools.chain(*read_all(as_source(halves, lanes=1)))) == TEXTS[::2]


def test_a_function_is_called_with_each_shard_and_seeking_passes_over_what_came_before():
    source = FunctionSource(numbers, num_shards=2)
    assert read_all(source) == [[{"text": f"{shard} {index}"} for index in range(4)] for shard in range(2)]
    assert list(source.read(1, 3)) == [{"text": "1 3"}]
    assert list(source.read(1, 4)) == []
    assert list(source.read(1, 9)) == []


def test_a_function_may_return_any_iterable():
    source = FunctionSource(lambda shard: [{"text": "a"}, {"text": "b"}], num_shards=1)
    assert list(source.read(0, 1)) == [{"text": "b"}]


def test_a_function_is_named_by_itself_or_by_the_user():
    assert FunctionSource(numbers, num_shards=2).name == "numbers of 2 shards"
    assert FunctionSource(functools.partial(numbers), num_shards=2).name == "partial of 2 shards"
    assert FunctionSource(numbers, num_shards=2, name="mine").name == "mine"


def test_a_function_source_needs_a_shard():
    with pytest.raises(ValueError, match="num_shards=0: a FunctionSource needs at least 1 shard"):
        FunctionSource(numbers, num_shards=0)


def test_the_source_class_in_the_documentation_works(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(5)))
    documentation = streampack.sources.__doc__
    code = re.search(r"( {4}class Lines:\n.*?)\n\n`read`", documentation, re.DOTALL)[1]
    scope = {"itertools": itertools}
    exec(textwrap.dedent(code), scope)
    lines = scope["Lines"]([str(tmp_path / f"{number}.txt") for number in (2, 0, 1)])

    assert isinstance(lines, Source)
    assert as_source(lines, lanes=4) is lines
    assert list(lines.read(1, 3)) == [{"text": "1-3\n"}, {"text": "1-4\n"}]
    assert len(list(PackedDataset(lines, word_tokenizer(), seq_len=8, lanes=1))) > 0


# ---- as_source --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [[{"text": "a"}], ({"text": "a"},), deque([{"text": "a"}]), np.array([[1, 2], [3, 4]])]
)
def test_anything_with_a_length_and_indices_is_a_sequence(data):
    source = as_source(data, lanes=1)
    assert isinstance(source, SequenceSource)
    assert source.num_examples == len(data)


@pytest.mark.parametrize(
    "source", [Lists([{"text": "a"}]), SequenceSource(TEXTS), FunctionSource(numbers, num_shards=1)]
)
def test_a_source_stays_as_it_is(source):
    assert as_source(source, lanes=1) is source
    assert as_source(source, lanes=1, name=source.name) is source


def test_a_source_that_can_also_be_indexed_is_read_as_a_source():
    class Indexed(Lists):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise AssertionError("a source is read by read(shard, start)")

    source = Indexed([{"text": "a"}])
    assert as_source(source, lanes=1) is source


@pytest.mark.parametrize(
    "data",
    [
        (example for example in TEXTS),
        iter(TEXTS),
        "data.jsonl",
        b"data.jsonl",
        {"train": TEXTS},
        UserDict(train=TEXTS),
        {1, 2},
        None,
        5,
        numbers,
        TorchStream(),
        Lists,
    ],
    ids=lambda data: type(data).__name__,
)
def test_what_cannot_be_read_again_from_any_index_is_refused(data):
    with pytest.raises(TypeError) as refusal:
        as_source(data, lanes=1)
    assert str(refusal.value) == (
        f"cannot stream from {type(data).__name__}: pass a datasets.IterableDataset or Dataset, a list or map-style "
        "dataset, streampack.FunctionSource(shard -> iterator, num_shards=...), or an object with `name`, "
        "`num_shards` and `read(shard, start)`"
    )


def test_a_torch_stream_that_knows_its_length_is_refused_too():
    class Sized(TorchStream):
        def __len__(self):
            return len(TEXTS)

    with pytest.raises(TypeError, match="cannot stream from Sized: pass a"):
        as_source(Sized(), lanes=1)


def test_a_source_without_shards_is_refused():
    with pytest.raises(ValueError, match="num_shards=0"):  # a pattern that matched no file, most likely
        as_source(Lists(), lanes=1)


def test_source_name_names_a_list():
    assert as_source(TEXTS, lanes=1).name == "list of 200 examples"
    assert as_source(TEXTS, lanes=1, name="mine").name == "mine"


def test_source_name_is_refused_for_a_source_that_names_itself():
    with pytest.raises(
        ValueError, match=r"source_name='mine': this source names itself 'lists'; set its \.name instead"
    ):
        as_source(Lists([]), lanes=1, name="mine")


# ---- places -----------------------------------------------------------------------------------------------------


def test_places_are_shard_and_index_unless_a_source_knows_better():
    class Files(Lists):
        def locate(self, shard, index):
            return f"{shard}.txt", index + 1

    assert locate(Lists([]), 2, 5) == (2, 5)
    assert locate(Files([]), 2, 5) == ("2.txt", 6)
    assert where(Lists([]), 2, 5) == "source 'lists', shard 2, index 5"
    assert where(Files([]), 2, 5) == "source 'lists', shard 2.txt, index 6"


def test_an_example_of_a_list_is_known_by_its_index_in_the_list():
    source = SequenceSource(TEXTS)
    for shard, index in ((0, 0), (1, 3), (3, 7)):
        assert next(source.read(shard, index)) == TEXTS[source.locate(shard, index)[1]]
    assert source.locate(1, 3) == (0, 67)


def test_rows_name_the_examples_of_a_list_by_their_index():
    texts = [{"text": "a b"}, {"text": ""}, {"text": "c"}]
    (row,) = PackedDataset(texts, word_tokenizer(), seq_len=8, lanes=1, shuffle=False)
    assert row["examples"] == [("list of 3 examples", 0, 0), ("list of 3 examples", 0, 2)]


# ---- what sources may do ----------------------------------------------------------------------------------------


def test_a_source_may_yield_tables_examples_or_both_and_empty_tables():
    rows = [{"text": word} for word in "abcdabcd"]
    mixed = Lists(
        [
            pa.Table.from_pylist(rows[:2]),
            pa.Table.from_pylist(rows[:0], schema=pa.schema({"text": pa.string()})),
            rows[2],
            rows[3],
            pa.Table.from_pylist(rows[4:]),
        ]
    )
    assert texts_of_rows(mixed) == texts_of_rows(Lists(rows)) == [3, 4, 5, 6, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1000])
def test_the_size_of_the_tables_of_a_source_does_not_matter(size):
    table = pa.table({"text": [word for word in "abcd" for _ in range(200)]})
    pieces = [table[first : first + size] for first in range(0, len(table), size)]
    assert texts_of_rows(Lists(pieces)) == [3] * 200 + [4] * 200 + [5] * 200 + [6] * 200


def test_an_empty_source_has_no_rows():
    assert texts_of_rows([]) == []
    assert texts_of_rows(Lists([])) == []
    assert texts_of_rows(Lists([], [])) == []


def test_an_error_of_a_source_keeps_its_type_and_says_where_it_was():
    class Broken(Lists):
        def read(self, shard, start):
            for index in range(start, 9):
                if index == 5:
                    raise OSError("the disk is gone")
                yield {"text": "a"}

    with pytest.raises(OSError, match="the disk is gone") as error:
        texts_of_rows(Broken([]), Retry(attempts=1))
    told = str(error.value) + "".join(getattr(error.value, "__notes__", []))
    assert "while reading source 'lists', shard 0, index 5" in told


def test_an_example_that_is_not_a_dict_is_refused_with_its_place():
    with pytest.raises(ValueError, match="source 'lists', shard 0, index 1: the example is str, not a dict of columns"):
        texts_of_rows(Lists([{"text": "a"}, "b"]))


def test_columns_that_are_not_needed_may_change_their_type_from_table_to_table():
    tables = [pa.table({"text": ["a"] * 3, "meta": meta}) for meta in (pa.nulls(3), ["x"] * 3, [1] * 3)]
    assert texts_of_rows(Lists(tables)) == [3] * 9


def test_columns_beside_token_ids_may_change_their_type_from_table_to_table():
    tables = [pa.table({"input_ids": [[1, 2]], "meta": meta}) for meta in (pa.nulls(1), ["x"], [1])]
    (row,) = PackedDataset(Lists(tables), seq_len=6, lanes=1, shuffle=False)
    assert row["input_ids"].tolist() == [1, 2, 1, 2, 1, 2]


def test_columns_that_a_transform_sees_may_change_their_type_from_table_to_table():
    tables = [pa.table({"input_ids": [[1, 2]], "meta": meta}) for meta in (pa.nulls(1), ["x"], [1])]
    seen = []

    def look(row):
        seen.append(row["meta"])
        return {"input_ids": row["input_ids"]}

    (row,) = PackedDataset(Lists(tables), seq_len=6, lanes=1, shuffle=False, transform=look)
    assert row["input_ids"].tolist() == [1, 2, 1, 2, 1, 2]
    assert seen == [None, "x", 1]


def test_columns_that_are_not_needed_may_change_their_type_from_example_to_example():
    rows = [{"text": "a", "meta": meta} for meta in (None, "x", 1, [2], {"y": 3})]
    assert texts_of_rows(Lists(rows)) == [3] * 5


# ---- reading ahead -------------------------------------------------------------------------------------------------


class Watched:
    """Says which threads read, and how many at a time."""

    name, num_shards = "watched", 8

    def __init__(self, *, concurrent: bool) -> None:
        self.concurrent = concurrent
        self.threads: set[str] = set()
        self.reading = 0
        self.most_at_a_time = 0

    def read(self, shard: int, start: int) -> Any:
        for index in range(start, 2000):
            if index % 256 == 0:
                self.reading += 1
                self.most_at_a_time = max(self.most_at_a_time, self.reading)
                self.threads.add(threading.current_thread().name)
                time.sleep(0)  # let the other thread have its turn
                self.reading -= 1
            yield {"input_ids": [shard, index]}


def test_a_source_that_stands_it_is_read_ahead_by_a_thread_which_ends_with_the_pass() -> None:
    source = Watched(concurrent=True)
    rows = list(PackedDataset(source, seq_len=64, lanes=4))
    assert len(rows) == 8 * 2000 * 2 // 64
    assert "streampack reading" in source.threads
    assert not [one for one in threading.enumerate() if one.name == "streampack reading"]
    for _ in zip(range(3), PackedDataset(source, seq_len=64, lanes=4), strict=False):
        pass
    gc.collect()
    assert not [one for one in threading.enumerate() if one.name == "streampack reading"]


def test_a_source_that_does_not_say_so_is_never_read_by_two_threads_at_a_time() -> None:
    source = Watched(concurrent=False)
    rows = sum(batch["input_ids"].shape[0] for batch in PackedLoader(PackedDataset(source, seq_len=64, lanes=4), 1))
    assert rows == 8 * 2000 * 2 // 64
    assert "streampack reading" not in source.threads
    assert source.most_at_a_time == 1


def test_a_stream_with_functions_of_the_users_is_not_read_by_two_threads(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    plain = datasets.load_dataset("json", data_files=str(file), split="train", streaming=True, cache_dir=str(tmp_path))
    assert as_source(plain, lanes=1).concurrent
    assert not as_source(plain.map(lambda one: one), lanes=1).concurrent
    assert not as_source(plain.filter(lambda one: True), lanes=1).concurrent
    made = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}]))
    assert not as_source(made, lanes=1, name="made").concurrent


def test_an_error_while_reading_ahead_comes_when_its_place_is_reached() -> None:
    class Failing:
        name, num_shards, concurrent = "failing", 1, True

        def read(self, shard: int, start: int) -> Any:
            for index in range(start, 1000):
                if index == 600:
                    raise KeyError("lost")
                yield {"input_ids": [index] * 64}

    found = []
    rows = PackedDataset(Failing(), seq_len=64, lanes=1, shuffle=False, shuffle_block=1, buffer_size=1)
    with pytest.raises(KeyError, match="lost"):
        found.extend(int(row["input_ids"][0]) for row in rows)
    assert found == list(range(len(found)))
    assert len(found) > 400
