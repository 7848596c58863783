"""Writing MDS: tokenized examples and packed rows, read back by mosaicml-streaming itself."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streampack import Collator, PackedDataset, PackedLoader
from streampack.mds import MDSSource
from streampack.mds_writer import read_packed_row, write_mds, write_packed_mds

from .streams import Shards, examples, split_evenly

streaming = pytest.importorskip(
    "streaming", reason="mosaicml-streaming is not installed: pip install 'streampack[mds]'"
)

pytestmark = [
    # LocalDataset does not close its index.json.
    pytest.mark.filterwarnings("ignore:unclosed file"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def samples(folder: Path) -> list[dict[str, Any]]:
    dataset = streaming.LocalDataset(str(folder))
    return [dataset[index] for index in range(len(dataset))]


def columns(folder: Path) -> dict[str, str]:
    (first, *_) = json.loads((folder / "index.json").read_text())["shards"]
    return dict(zip(first["column_names"], first["column_encodings"], strict=True))


# ---- tokenized examples ----------------------------------------------------------------------------------------------


def test_token_ids_are_written_and_read_back(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 65535]}, {"input_ids": np.array([7])}, {"input_ids": torch.tensor([3, 4, 5])}]
    assert write_mds(iter(rows), str(tmp_path), vocab_size=1 << 16) == 3
    assert columns(tmp_path) == {"input_ids": "ndarray:uint16"}
    assert [sample["input_ids"].tolist() for sample in samples(tmp_path)] == [[1, 65535], [7], [3, 4, 5]]


@pytest.mark.parametrize(
    ("settings", "encoding"),
    [
        ({}, "ndarray:uint32"),
        ({"vocab_size": 50257}, "ndarray:uint16"),
        ({"vocab_size": 65536}, "ndarray:uint16"),
        ({"vocab_size": 65537}, "ndarray:uint32"),
        ({"dtype": "uint16"}, "ndarray:uint16"),
        ({"vocab_size": 100, "dtype": "uint32"}, "ndarray:uint32"),
    ],
)
def test_the_type_follows_from_the_vocabulary_unless_it_is_given(
    tmp_path: Path, settings: dict[str, Any], encoding: str
) -> None:
    write_mds([{"input_ids": [1, 2]}], str(tmp_path), **settings)
    assert columns(tmp_path) == {"input_ids": encoding}


@pytest.mark.parametrize(
    "example",
    [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "assistant_masks": [False, True, True], "attention_mask": [1, 1, 1]},
    ],
)
def test_what_is_a_target_is_written_as_a_mask_that_is_read_again(tmp_path: Path, example: dict[str, Any]) -> None:
    write_mds([example], str(tmp_path), vocab_size=10)
    assert columns(tmp_path) == {"input_ids": "ndarray:uint16", "loss_mask": "ndarray:uint8"}
    (row,) = PackedDataset(MDSSource(tmp_path), seq_len=3, lanes=1)
    (wanted,) = PackedDataset([example], seq_len=3, lanes=1)
    assert row["labels"].tolist() == wanted["labels"].tolist() == [-100, 6, 7]


def test_other_columns_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "url": "a", "score": 3}, {"input_ids": [3, 4], "url": "b", "score": 4}]
    write_mds(rows, str(tmp_path), columns={"url": "str"})
    assert [sample["url"] for sample in samples(tmp_path)] == ["a", "b"]
    assert columns(tmp_path) == {"input_ids": "ndarray:uint32", "url": "str"}


def test_shards_compression_and_hashes_are_those_asked_for(tmp_path: Path) -> None:
    rows = examples(300)
    write_mds(rows, str(tmp_path / "mds"), vocab_size=1000, size_limit="2kb", compression="zstd:5", hashes=["sha1"])
    shards = json.loads((tmp_path / "mds" / "index.json").read_text())["shards"]
    assert len(shards) > 4
    assert {shard["compression"] for shard in shards} == {"zstd:5"}
    assert {tuple(shard["zip_data"]["hashes"]) for shard in shards} == {("sha1",)}
    source = MDSSource(tmp_path / "cache", tmp_path / "mds")
    read = [example["input_ids"].tolist() for shard in range(len(shards)) for example in source.read(shard, 0)]
    assert read == [row["input_ids"] for row in rows]

    write_mds(rows, str(tmp_path / "default"))
    (shard,) = json.loads((tmp_path / "default" / "index.json").read_text())["shards"]
    assert (list(shard["raw_data"]["hashes"]), shard["zip_data"]) == (["xxh64"], None)


def test_a_folder_and_one_to_upload_to(tmp_path: Path) -> None:
    write_mds([{"input_ids": [1, 2]}], (str(tmp_path / "local"), str(tmp_path / "remote")), keep_local=True)
    for folder in ("local", "remote"):
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["index.json", "shard.00000.mds"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [1, 100]}, r"index 300: the id 100 at token 1 does not fit: ids are 0 \.\. 99 \(uint16\)"),
        ({"input_ids": []}, r"index 300: the example has no tokens, and MDS cannot hold empty arrays; leave it out"),
        ({"input_ids": [1, -2]}, r"index 300: 'input_ids' holds -2 \.\. 1, outside 0 "),
        ({"input_ids": "text"}, r"index 300: 'input_ids' is str 'text', not one list of integers"),
        ({"text": "text"}, r"index 300: no column 'input_ids' \(there are: text\)"),
        ({"input_ids": [1, 2], "labels": [1, 2]}, r"index 300: targets are given by labels, those of earlier .* by no"),
        ({"input_ids": [1, 2], "entropy": [0.1, 0.2]}, r"index 300: the column 'entropy' holds a list for each"),
    ],
)
def test_an_example_that_cannot_be_written_is_an_error_and_a_part_is_not_taken_for_the_whole(
    tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    rows = [*([{"input_ids": [1, 2, 3]}] * 300), bad]
    with pytest.raises(ValueError, match=f"source 'examples', shard 0, {message}"):
        write_mds(rows, str(tmp_path), vocab_size=100, size_limit="1kb")
    assert (tmp_path / "shard.00000.mds").exists()
    assert not (tmp_path / "index.json").exists()
    with pytest.raises(FileNotFoundError, match=r"there is no .*index.json"):
        MDSSource(tmp_path)


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    row = {"input_ids": [1, 2], "url": "a"}
    with pytest.raises(ValueError, match="vocab_size=70000 does not fit into dtype='uint16'; pass 'uint32'"):
        write_mds([row], str(tmp_path), vocab_size=70000, dtype="uint16")
    with pytest.raises(ValueError, match="dtype='int64': pass 'uint16' or 'uint32'"):
        write_mds([row], str(tmp_path), dtype="int64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocab_size=0: must be at least 1"):
        write_mds([row], str(tmp_path), vocab_size=0)
    with pytest.raises(ValueError, match="'input_ids' is written anyway; leave it out"):
        write_mds([row], str(tmp_path), columns={"input_ids": "bytes"})
    with pytest.raises(ValueError, match=r"index 0: no column 'number' \(there are: input_ids, url\)"):
        write_mds([row], str(tmp_path), columns={"number": "int"})
    with pytest.raises(ValueError, match="there are no examples to write"):
        write_mds([], str(tmp_path))
    with pytest.raises(ValueError, match="there are no rows to write"):
        write_packed_mds([], str(tmp_path))
    with pytest.raises(ValueError, match="packing='none' makes no packed rows; write single examples with write_mds"):
        write_packed_mds(PackedDataset([row], seq_len=4, lanes=1, packing="none"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    write_mds([row], str(tmp_path))
    with pytest.raises(FileExistsError, match="not empty"):
        write_mds([row], str(tmp_path))


# ---- packed rows -----------------------------------------------------------------------------------------------------


class Named(Shards):
    """Shards with names, as files have."""

    def locate(self, shard: int, index: int) -> tuple[str, int]:
        return f"part-{shard} é", index


def with_targets() -> Iterator[dict[str, Any]]:
    for row in examples(200, seed=5):
        yield {**row, "completion_mask": [number % 3 > 0 for number in range(len(row["input_ids"]))]}


DATA: dict[str, tuple[Any, dict[str, Any]]] = {
    "examples": (examples(300), {}),
    "targets": (list(with_targets()), {}),
    "named shards": (Named(split_evenly(examples(300), 7)), {"lanes": 2}),
    "over-long": (examples(100, longest=150), {"overlong": "split"}),
    "wrapped": (examples(100, longest=150), {"packing": "wrapped"}),
    "padded to 8": (examples(200), {"pad_to_multiple_of": 8, "pad_token_id": 999}),
    "two epochs": (examples(50), {"epochs": 2, "lanes": 4}),
}


def assert_equal_rows(one: Any, other: Any) -> None:
    assert list(one) == list(other)
    assert type(one) is type(other)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert value.tolist() == other[name].tolist(), name
        else:
            assert value == other[name], name


@pytest.mark.parametrize("kind", list(DATA))
def test_packed_rows_come_back_as_they_were(tmp_path: Path, kind: str) -> None:
    data, settings = DATA[kind]
    dataset = PackedDataset(data, seq_len=64, buffer_size=8, **settings)
    rows = list(dataset)
    dataset.set_epoch(0)
    assert write_packed_mds(dataset, str(tmp_path), vocab_size=1000, size_limit="5kb", compression="zstd") == len(rows)
    source = MDSSource(tmp_path)
    assert source.num_shards > 1
    again = [read_packed_row(sample) for shard in range(source.num_shards) for sample in source.read(shard, 0)]
    assert len(again) == len(rows) > 20
    for row, read in zip(rows, again, strict=True):
        assert_equal_rows(row, read)
    assert columns(tmp_path) == {
        "examples": "json",
        "input_ids": "ndarray:uint16:64",
        "lengths": "ndarray:uint32",
        "tokens": "ndarray:uint32",
        "loss_mask": "ndarray:uint8:64",
    }


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_batches_of_written_rows_are_those_of_the_loader(tmp_path: Path, layout: Any) -> None:
    dataset = PackedDataset(examples(300), seq_len=64, buffer_size=8)
    write_packed_mds(dataset, str(tmp_path))
    dataset.set_epoch(0)
    collator = Collator(layout)
    dataset_of_rows = streaming.LocalDataset(str(tmp_path))
    loader = torch.utils.data.DataLoader(
        dataset_of_rows,
        batch_size=4,
        collate_fn=lambda batch: collator([read_packed_row(sample) for sample in batch]),
    )
    for batch, wanted in zip(loader, PackedLoader(dataset, 4, layout=layout), strict=True):
        assert_equal_rows(batch, wanted)


def test_an_endless_stream_is_written_as_far_as_it_is_asked_for(tmp_path: Path) -> None:
    dataset = PackedDataset(examples(100), seq_len=64, epochs=None)
    with pytest.raises(ValueError, match=r"epochs=None, which never ends; pass epochs=1, or itertools.islice"):
        write_packed_mds(dataset, str(tmp_path))
    assert write_packed_mds(itertools.islice(dataset, 50), str(tmp_path)) == 50


def test_a_row_that_would_not_come_back_is_refused(tmp_path: Path) -> None:
    first, second, *_ = PackedDataset(examples(100), seq_len=64)
    second["loss_weights"] = torch.ones(64)
    with pytest.raises(ValueError, match="row 1: 'loss_weights' would not come back as it is"):
        write_packed_mds([first, second], str(tmp_path / "keys"))
    assert not (tmp_path / "keys" / "index.json").exists()
    third, *_ = PackedDataset(examples(100), seq_len=64)
    third["labels"] = third["labels"] * 0
    with pytest.raises(ValueError, match="row 0: 'labels' would not come back as it is"):
        write_packed_mds([third], str(tmp_path / "values"))
    with pytest.raises(ValueError, match=r"row 0: the id \d+ at token \d+ does not fit: ids are 0 \.\. 9 "):
        write_packed_mds([first], str(tmp_path / "ids"), vocab_size=10)
    with pytest.raises(ValueError, match=r"the sample has no 'loss_mask' \(there are: input_ids\): not a packed row"):
        read_packed_row({"input_ids": np.array([1])})
