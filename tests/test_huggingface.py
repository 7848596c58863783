import itertools
import json
import os
import shutil
import warnings
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from streampack import PackedDataset
from streampack.sources import as_source, where


def write_jsonl(folder, *sizes):
    """Files 0.jsonl, 1.jsonl ... of so many examples each."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        lines = [json.dumps({"text": f"{shard}-{index}", "number": index}) + "\n" for index in range(size)]
        (folder / f"{shard}.jsonl").write_text("".join(lines))
    return [str(folder / f"{shard}.jsonl") for shard in range(len(sizes))]


def write_parquet(folder, *sizes, row_group_size):
    folder.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        rows = [{"text": f"{shard}-{index}", "number": index} for index in range(size)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard}.parquet", row_group_size=row_group_size)
    return [str(folder / f"{shard}.parquet") for shard in range(len(sizes))]


def stream_jsonl(folder, *sizes):
    return datasets.load_dataset("json", data_files=write_jsonl(folder, *sizes), split="train", streaming=True)


def stream_parquet(folder, *sizes, row_group_size):
    files = write_parquet(folder, *sizes, row_group_size=row_group_size)
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def generate(shards, size):
    for shard in shards:
        for index in range(size):
            yield {"text": f"{shard}-{index}", "number": index}


def table(size):
    return datasets.Dataset.from_dict({"text": [f"0-{index}" for index in range(size)], "number": list(range(size))})


def upper(example):
    return {"text": example["text"].upper() + "!"}


def is_even(example):
    return example["number"] % 2 == 0


def twice(batch):
    return {"text": [text for text in batch["text"] for _ in range(2)]}


def read(source, shard, start=0, column="text"):
    """The texts of a shard from `start` on."""
    texts = []
    for item in source.read(shard, start):
        texts += item.column(column).to_pylist() if isinstance(item, pa.Table) else [item[column]]
    return texts


def read_all(source):
    return [read(source, shard) for shard in range(source.num_shards)]


def flat(shards):
    return list(itertools.chain(*shards))


def assert_reads_from_anywhere(source, starts=None):
    """Reading from any start gives the tail of reading from 0, for each shard."""
    for shard, whole in enumerate(read_all(source)):
        for start in starts or range(len(whole) + 3):
            assert read(source, shard, start) == whole[start:]


def texts(*sizes):
    return [[f"{shard}-{index}" for index in range(size)] for shard, size in enumerate(sizes)]


# ---- streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7,), (4, 1, 6)])
def test_each_jsonl_file_is_a_shard(tmp_path, sizes):
    source = as_source(stream_jsonl(tmp_path, *sizes), lanes=2)
    assert source.num_shards == len(sizes)
    assert read_all(source) == texts(*sizes)
    assert_reads_from_anywhere(source)


def test_a_stream_gives_arrow_tables_where_it_holds_them(tmp_path):
    (chunk,) = as_source(stream_jsonl(tmp_path, 5), lanes=1).read(0, 2)
    assert isinstance(chunk, pa.Table)
    assert chunk.to_pylist() == [{"text": f"0-{index}", "number": index} for index in (2, 3, 4)]


def test_a_long_shard_is_read_from_anywhere(tmp_path):
    source = as_source(stream_jsonl(tmp_path, 700), lanes=1)
    assert read_all(source) == texts(700)
    assert_reads_from_anywhere(source, [1, 2, 254, 255, 256, 257, 258, 511, 512, 513, 699, 700, 701])


def test_parquet_files_with_fewer_shards_than_lanes_are_cut_into_row_groups(tmp_path):
    stream = stream_parquet(tmp_path, 30, 25, row_group_size=10)
    source = as_source(stream, lanes=3)
    assert source.num_shards == 6
    assert [len(shard) for shard in read_all(source)] == [10, 10, 10, 10, 10, 5]
    assert flat(read_all(source)) == flat(texts(30, 25))
    assert_reads_from_anywhere(source)


def test_parquet_files_that_are_enough_for_the_lanes_stay_whole(tmp_path):
    source = as_source(stream_parquet(tmp_path, 30, 25, row_group_size=10), lanes=2)
    assert source.num_shards == 2
    assert read_all(source) == texts(30, 25)
    assert_reads_from_anywhere(source)


def test_row_groups_that_do_not_match_the_batches_of_datasets_are_read_from_anywhere(tmp_path):
    source = as_source(stream_parquet(tmp_path, 700, row_group_size=300), lanes=8)
    assert [len(shard) for shard in read_all(source)] == [300, 300, 100]
    assert_reads_from_anywhere(source, [1, 99, 100, 255, 256, 257, 299, 300])


def test_a_mapped_parquet_stream_is_cut_into_row_groups_too(tmp_path):
    source = as_source(stream_parquet(tmp_path, 30, row_group_size=10).map(upper), lanes=4)
    assert read_all(source) == [[f"0-{index}!" for index in range(first, first + 10)] for first in (0, 10, 20)]
    assert_reads_from_anywhere(source)


def test_a_generator_is_sharded_by_its_lists(tmp_path):
    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2], "size": 5})
    source = as_source(stream, lanes=8, name="mine")
    assert source.num_shards == 3
    assert read_all(source) == texts(5, 5, 5)
    assert_reads_from_anywhere(source)


def test_a_generator_without_lists_is_one_shard():
    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": (0,), "size": 5})
    assert read_all(as_source(stream, lanes=8, name="mine")) == texts(5)


CHANGES = {
    "map": (lambda stream: stream.map(upper), [["0-0!", "0-1!", "0-2!", "0-3!", "0-4!"], ["1-0!", "1-1!", "1-2!"]]),
    "batched map": (
        lambda stream: stream.map(twice, batched=True, batch_size=2, remove_columns=["number"]),
        [[f"0-{index // 2}" for index in range(10)], [f"1-{index // 2}" for index in range(6)]],
    ),
    "filter": (lambda stream: stream.filter(is_even), [["0-0", "0-2", "0-4"], ["1-0", "1-2"]]),
    "map and filter": (
        lambda stream: stream.map(upper).filter(is_even),
        [["0-0!", "0-2!", "0-4!"], ["1-0!", "1-2!"]],
    ),
    "select_columns": (lambda stream: stream.select_columns(["text"]), texts(5, 3)),
    "remove_columns": (lambda stream: stream.remove_columns(["number"]), texts(5, 3)),
    "with_format torch": (lambda stream: stream.with_format("torch"), texts(5, 3)),
    "with_format numpy": (lambda stream: stream.with_format("numpy"), texts(5, 3)),
    "with_format arrow": (lambda stream: stream.with_format("arrow"), texts(5, 3)),
    "map with numpy": (
        lambda stream: stream.with_format("numpy").map(upper),
        [["0-0!", "0-1!", "0-2!", "0-3!", "0-4!"], ["1-0!", "1-1!", "1-2!"]],
    ),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "generator"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_stream_is_read_as_it_gives_itself_from_anywhere(tmp_path, kind, change):
    if kind == "jsonl":
        stream = stream_jsonl(tmp_path, 5, 3)
    elif kind == "parquet":
        stream = stream_parquet(tmp_path, 5, 3, row_group_size=2)
    else:
        folder = write_jsonl(tmp_path, 5, 3)
        stream = datasets.IterableDataset.from_generator(from_files, gen_kwargs={"files": folder})
    make, expected = CHANGES[change]
    source = as_source(make(stream), lanes=2, name="mine")
    assert read_all(source) == expected
    assert_reads_from_anywhere(source)


def from_files(files):
    for file in files:
        with open(file) as lines:
            yield from map(json.loads, lines)


@pytest.mark.parametrize("lanes", [1, 16])
@pytest.mark.parametrize(
    "part",
    [
        lambda stream: stream.take(5),
        lambda stream: stream.skip(5),
        lambda stream: stream.skip(2).take(9).map(upper),
        lambda stream: stream.filter(is_even).take(5),
        lambda stream: datasets.concatenate_datasets([stream, stream.map(upper)]),
        lambda stream: stream.repeat(2),
    ],
    ids=["take", "skip", "skip and take", "filter and take", "concatenate", "repeat"],
)
def test_a_part_of_a_stream_holds_the_examples_that_it_gives_by_itself(tmp_path, part, lanes):
    stream = part(stream_parquet(tmp_path, 10, 6, row_group_size=3))
    by_itself = [example["text"] for example in stream]
    assert Counter(flat(read_all(as_source(stream, lanes=lanes, name="mine")))) == Counter(by_itself)


def test_streams_that_are_interleaved_at_random_need_a_seed(tmp_path):
    stream = stream_jsonl(tmp_path, 5, 3)
    seeded = datasets.interleave_datasets([stream, stream.map(upper)], probabilities=[0.3, 0.7], seed=3)
    assert flat(read_all(as_source(seeded, lanes=1, name="mine"))) == [example["text"] for example in seeded]
    unseeded = datasets.interleave_datasets([stream, stream.map(upper)], probabilities=[0.3, 0.7])
    with pytest.raises(ValueError, match=r"at random without a seed.*pass seed=\.\.\. to interleave_datasets"):
        as_source(unseeded, lanes=1, name="mine")


def test_the_number_of_examples_is_known_of_parquet_files_that_nothing_filters(tmp_path):
    stream = stream_parquet(tmp_path, 10, 6, row_group_size=3)
    assert as_source(stream, lanes=16).num_examples == as_source(stream, lanes=1).num_examples == 16
    assert as_source(stream.filter(is_even), lanes=1).num_examples is None
    assert as_source(stream.take(3), lanes=1).num_examples is None


def test_many_files_have_a_short_name_that_still_tells_them_apart(tmp_path):
    names = [as_source(stream_jsonl(tmp_path, *[number] * 9), lanes=1).name for number in (10, 11)]
    assert names[0].startswith("0.jsonl:290 .. 8.jsonl:290, 9 files (")
    assert names[0] != names[1]
    assert len(names[0]) < 80


def test_parts_of_a_stream_have_names_of_their_own(tmp_path):
    stream = stream_jsonl(tmp_path, 5)
    parts = [stream, stream.take(2), stream.take(3), stream.skip(2), stream.skip(1).take(2)]
    assert [as_source(part, lanes=1).name for part in parts] == [
        "0.jsonl:145 (1 shards)",
        "0.jsonl:145 (1 shards, take 2)",
        "0.jsonl:145 (1 shards, take 3)",
        "0.jsonl:145 (1 shards, skip 2)",
        "0.jsonl:145 (1 shards, take 2, skip 1)",
    ]


def test_interleaved_streams_hold_the_examples_that_they_give_by_themselves(tmp_path):
    stream = stream_jsonl(tmp_path, 5, 3)
    mixture = datasets.interleave_datasets([stream, stream.map(upper)])
    by_itself = [example["text"] for example in mixture]
    assert Counter(flat(read_all(as_source(mixture, lanes=1, name="mine")))) == Counter(by_itself)


def test_what_is_taken_for_validation_is_not_in_the_rest(tmp_path):
    stream = stream_jsonl(tmp_path, 10, 10, 10)
    validation = {example["text"] for example in stream.take(8)}
    rest = flat(read_all(as_source(stream.skip(8), lanes=1)))
    assert validation.isdisjoint(rest)


# ---- tables -----------------------------------------------------------------------------------------------------


def test_a_table_is_read_as_runs_of_64_examples():
    source = as_source(table(150), lanes=1)
    assert (source.num_shards, source.num_examples) == (3, 150)
    assert [len(shard) for shard in read_all(source)] == [64, 64, 22]
    assert flat(read_all(source)) == texts(150)[0]
    assert_reads_from_anywhere(source)


@pytest.mark.parametrize("size", [0, 1, 64, 65])
def test_a_table_of_any_size_is_read_whole(size):
    source = as_source(table(size), lanes=1)
    assert source.num_shards == max(1, -(-size // 64))
    assert flat(read_all(source)) == texts(size)[0]


def test_a_table_on_disk_is_read(tmp_path):
    table(70).save_to_disk(tmp_path / "saved")
    source = as_source(datasets.load_from_disk(tmp_path / "saved"), lanes=1)
    assert flat(read_all(source)) == texts(70)[0]
    assert_reads_from_anywhere(source)


@pytest.mark.parametrize("kind", [None, "torch", "numpy", "arrow"])
def test_a_format_that_the_user_chose_does_not_matter(kind):
    data = table(70).with_format(kind)
    source = as_source(data, lanes=1)
    assert all(isinstance(item, pa.Table) for item in source.read(0, 0))
    assert flat(read_all(source)) == texts(70)[0]
    assert data.format["type"] == kind  # the user's own is as it was


def test_columns_that_the_user_left_out_of_the_format_stay_out():
    data = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[-100, -100, 3]]})
    shown = data.with_format("torch", columns=["input_ids"])
    assert list(shown[0]) == ["input_ids"]
    (chunk,) = as_source(shown, lanes=1).read(0, 0)
    assert chunk.column_names == ["input_ids"]


def test_a_users_own_transform_makes_the_examples():
    data = table(70)
    data.set_transform(lambda batch: {"text": [text + "?" for text in batch["text"]]})
    source = as_source(data, lanes=1)
    assert flat(read_all(source)) == [text + "?" for text in texts(70)[0]]
    assert_reads_from_anywhere(source)


def test_a_shuffled_or_selected_table_is_read_in_its_own_order():
    for data in (table(100).shuffle(seed=3), table(100).select(range(90, 10, -1)), table(100).filter(is_even)):
        source = as_source(data, lanes=1)
        assert flat(read_all(source)) == data["text"][:]
        assert_reads_from_anywhere(source, [0, 1, 63])


# ---- in DataLoader workers --------------------------------------------------------------------------------------


class ReadInWorker(torch.utils.data.IterableDataset):
    """What a source gives from several starts, read inside of each worker."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        for shard in range(self.source.num_shards):
            for start in (0, 1, 3):
                yield [worker, shard, start, read(self.source, shard, start)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "map", "generator", "table"])
def test_a_worker_reads_each_shard_whole_and_from_anywhere(tmp_path, kind):
    stream = stream_parquet(tmp_path, 20, 5, row_group_size=6)
    source = {
        "jsonl": lambda: as_source(stream_jsonl(tmp_path / "jsonl", 5, 4, 3), lanes=2),
        "parquet": lambda: as_source(stream, lanes=8),
        "map": lambda: as_source(stream.map(upper).filter(is_even), lanes=1),
        "generator": lambda: as_source(
            datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2], "size": 5}),
            lanes=2,
            name="mine",
        ),
        "table": lambda: as_source(table(70), lanes=2),
    }[kind]()
    expected = [
        [worker, shard, start, whole[start:]]
        for worker in range(2)
        for shard, whole in enumerate(read_all(source))
        for start in (0, 1, 3)
    ]
    found = list(DataLoader(ReadInWorker(source), batch_size=None, num_workers=2, collate_fn=list))
    assert sorted(found) == expected


# ---- names ------------------------------------------------------------------------------------------------------


def test_files_are_named_relative_to_their_folder_with_their_sizes(tmp_path):
    source = as_source(stream_jsonl(tmp_path, 2, 1), lanes=1)
    assert source.name == "0.jsonl:58 1.jsonl:29 (2 shards)"
    assert as_source(stream_jsonl(tmp_path / "one", 2), lanes=1).name == "0.jsonl:58 (1 shards)"


def test_files_of_several_folders_are_named_relative_to_the_folder_they_share(tmp_path):
    files = [*write_jsonl(tmp_path / "a", 1), *write_jsonl(tmp_path / "b", 1)]
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    assert as_source(stream, lanes=1).name == "a/0.jsonl:29 b/0.jsonl:29 (2 shards)"


def test_a_moved_folder_has_the_same_name(tmp_path):
    before = as_source(stream_jsonl(tmp_path / "here", 3, 4), lanes=1).name
    shutil.move(tmp_path / "here", tmp_path / "there")
    files = [str(tmp_path / "there" / f"{shard}.jsonl") for shard in range(2)]
    moved = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    assert as_source(moved, lanes=1).name == before


def test_a_file_of_another_size_has_another_name(tmp_path):
    before = as_source(stream_jsonl(tmp_path, 3, 4), lanes=1).name
    assert as_source(stream_jsonl(tmp_path, 3, 5), lanes=1).name != before


def test_files_cut_into_row_groups_have_another_name_than_whole_ones(tmp_path):
    stream = stream_parquet(tmp_path, 30, row_group_size=10)
    size = os.path.getsize(tmp_path / "0.parquet")
    assert as_source(stream, lanes=1).name == f"0.parquet:{size} (1 shards)"
    assert as_source(stream, lanes=2).name == f"0.parquet:{size} (3 shards)"


def test_a_mapped_stream_is_named_by_its_files(tmp_path):
    stream = stream_jsonl(tmp_path, 2)
    assert as_source(stream.map(upper).filter(is_even), lanes=1).name == "0.jsonl:58 (1 shards)"


def test_source_name_names_streams_and_tables(tmp_path):
    assert as_source(stream_jsonl(tmp_path, 2), lanes=1, name="mine").name == "mine"
    assert as_source(table(3), lanes=1, name="mine").name == "mine"


def test_a_stream_that_cannot_be_named_warns_and_does_not_with_source_name():
    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1], "size": 2})
    with pytest.warns(UserWarning, match="has no name") as told:
        dataset = PackedDataset(stream, seq_len=8, lanes=1)
    assert [str(one.message) for one in told] == [
        "a stream of 2 shards without files has no name that tells it from another; pass source_name='...' so that a "
        "saved state can be refused for other data"
    ]
    assert told[0].filename == __file__  # it points at the user's own line
    assert dataset.stream.parts[0].source.name == "stream of 2 shards"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PackedDataset(stream, seq_len=8, lanes=1, source_name="mine")


def test_a_table_in_memory_is_named_by_its_size_and_columns():
    name = as_source(table(3), lanes=1).name
    assert name.startswith("table with 3 examples of text, number")
    assert as_source(table(3), lanes=1).name == name
    assert as_source(table(4), lanes=1).name != name


def test_a_table_on_disk_is_named_by_its_files_wherever_they_are(tmp_path):
    table(3).save_to_disk(tmp_path / "here")
    name = as_source(datasets.load_from_disk(tmp_path / "here"), lanes=1).name
    size = os.path.getsize(tmp_path / "here" / "data-00000-of-00001.arrow")
    assert name.startswith(f"data-00000-of-00001.arrow:{size} with 3 examples of text, number")
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert as_source(datasets.load_from_disk(tmp_path / "there"), lanes=1).name == name


def test_other_rows_or_another_order_of_one_table_have_other_names(tmp_path):
    table(100).save_to_disk(tmp_path)
    data = datasets.load_from_disk(tmp_path)
    parts = [data.shuffle(seed=1), data.shuffle(seed=2), data.select(range(50)), data.select(range(50, 100))]
    parts += [data, data.select(range(0, 100, 2)), data.select(range(1, 100, 2))]
    assert len({as_source(part, lanes=1).name for part in parts}) == len(parts)
    assert as_source(data.shuffle(seed=1), lanes=1).name == as_source(data.shuffle(seed=1), lanes=1).name


# ---- places -----------------------------------------------------------------------------------------------------


def test_an_example_of_a_file_is_known_by_the_file(tmp_path):
    files = write_jsonl(tmp_path, 3, 4)
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    source = as_source(stream, lanes=1)
    assert source.locate(1, 2) == (files[1], 2)
    assert where(source, 1, 2) == f"source '0.jsonl:87 1.jsonl:116 (2 shards)', shard {files[1]}, index 2"


def test_an_example_of_a_stream_without_files_is_known_by_its_shard():
    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1], "size": 2})
    assert as_source(stream, lanes=1, name="mine").locate(1, 2) == (1, 2)


def test_an_example_of_a_table_is_known_by_its_row():
    assert as_source(table(150), lanes=1).locate(2, 5) == (0, 133)


def test_examples_of_different_row_groups_are_known_apart_and_name_their_file(tmp_path):
    files = write_parquet(tmp_path, 30, 25, row_group_size=10)
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    source = as_source(stream, lanes=16)
    places = [
        source.locate(shard, index) for shard, whole in enumerate(read_all(source)) for index in range(len(whole))
    ]
    assert len(set(places)) == 55
    assert [files[0] in str(shard) for shard, _ in places] == [True] * 30 + [False] * 25
    assert [files[1] in str(shard) for shard, _ in places] == [False] * 30 + [True] * 25


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shuffled",
    [
        lambda stream: stream.shuffle(seed=1),
        lambda stream: stream.shuffle(seed=1, buffer_size=2).map(upper),
        lambda stream: stream.shuffle(seed=1).filter(is_even).take(3),
        lambda stream: stream.map(upper).shuffle(seed=1).select_columns(["text"]),
        lambda stream: datasets.concatenate_datasets([stream, stream.shuffle(seed=1)]),
        lambda stream: datasets.interleave_datasets([stream.shuffle(seed=1), stream]),
    ],
)
def test_a_shuffled_stream_is_refused(tmp_path, shuffled):
    with pytest.raises(ValueError, match="this dataset was shuffled") as refusal:
        as_source(shuffled(stream_jsonl(tmp_path, 5, 3)), lanes=1)
    assert "pass the dataset as it was before .shuffle(), and PackedDataset(..., shuffle=True, seed=...)" in str(
        refusal.value
    )


def test_a_stream_of_one_shard_that_was_shuffled_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this dataset was shuffled"):
        as_source(stream_jsonl(tmp_path, 5).shuffle(seed=1), lanes=1)


@pytest.mark.parametrize("after", [lambda stream: stream, lambda stream: stream.map(upper)])
def test_a_stream_split_by_node_is_refused(tmp_path, after):
    split = after(split_dataset_by_node(stream_jsonl(tmp_path, 5, 3), rank=0, world_size=2))
    with pytest.raises(ValueError, match=r"this dataset was split by node \(split_dataset_by_node\)") as refusal:
        as_source(split, lanes=1)
    assert "pass the dataset as it was before" in str(refusal.value)


def test_all_splits_at_once_are_refused_and_one_is_suggested(tmp_path):
    both = datasets.DatasetDict(train=table(3), test=table(3))
    with pytest.raises(TypeError) as refusal:
        as_source(both, lanes=1)
    assert str(refusal.value) == ("cannot stream from datasets.DatasetDict; choose one split, e.g. dataset['train']")
    streams = datasets.load_dataset("json", data_files=write_jsonl(tmp_path, 3), streaming=True)
    with pytest.raises(
        TypeError, match=r"from datasets.IterableDatasetDict; choose one split, e.g. dataset\['train'\]"
    ):
        as_source(streams, lanes=1)
    with pytest.raises(TypeError, match=r"cannot stream from datasets\.DatasetDict$"):
        as_source(datasets.DatasetDict(), lanes=1)


def test_a_subclass_of_a_users_own_is_read_as_what_it_is(tmp_path):
    class Mine(datasets.Dataset):
        pass

    class MyStream(datasets.IterableDataset):
        pass

    data = Mine(table(70).data, split=None)
    assert all(isinstance(item, pa.Table) for item in as_source(data, lanes=1).read(0, 0))
    stream = stream_jsonl(tmp_path, 5, 3)
    assert read_all(as_source(MyStream(stream._ex_iterable), lanes=1)) == texts(5, 3)
