"""MDS shards as a source, written by the real MDSWriter, read by MDSSource and through the datasets of that library."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from torch.utils.data import DataLoader

from streampack import Collator, PackedDataset, PackedLoader
from streampack.mds import MDSDatasetSource, MDSSource
from streampack.sources import Fault, as_source, where

from .streams import (
    Ranks,
    all_examples,
    examples,
    fingerprints,
    make_stream,
    split_evenly,
    tokens_by_example,
)
from .tiny_tokenizers import word_tokenizer

streaming = pytest.importorskip(
    "streaming", reason="mosaicml-streaming is not installed: pip install 'streampack[mds]'"
)

pytestmark = [
    # LocalDataset does not close its index.json.
    pytest.mark.filterwarnings("ignore:unclosed file"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:source .* processes read all of them"),
]

IDS = {"input_ids": "ndarray:uint16"}
LOCKS = tempfile.TemporaryDirectory()


def write(folder: Path, rows: list[dict[str, Any]], columns: dict[str, str] | None = None, **settings: Any) -> Path:
    """The rows as MDS, as many shards as `size_limit` makes."""
    columns = columns or IDS
    with streaming.MDSWriter(columns=columns, out=str(folder), **settings) as writer:
        for row in rows:
            writer.write({name: as_array(row[name], columns[name]) for name in columns})
    return folder


def as_array(value: Any, encoding: str) -> Any:
    if not encoding.startswith("ndarray"):
        return value
    return np.array(value, dtype=([*encoding.split(":"), "int64"])[1])


def streaming_dataset(**arguments: Any) -> Any:
    """A StreamingDataset. Two processes that make one at the same moment choose the same names in shared memory, and
    its lock files stay for ever where Python keeps temporary files."""
    with FileLock(Path(tempfile.gettempdir()) / "streampack-tests.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", LOCKS.name)
        return streaming.StreamingDataset(batch_size=1, **arguments)


def opened(way: str, folder: Path, cache: Path) -> Any:
    if way == "MDSSource":
        return MDSSource(folder)
    if way == "MDSSource of a remote":
        return MDSSource(cache / "own", folder)
    if way == "LocalDataset":
        return streaming.LocalDataset(str(folder))
    return streaming_dataset(local=str(cache / "streaming"), remote=str(folder))


WAYS = ["MDSSource", "MDSSource of a remote", "LocalDataset", "StreamingDataset"]


def read(source: Any, shard: int, start: int = 0, column: str = "input_ids") -> list[Any]:
    return [as_list(example[column]) for example in source.read(shard, start)]


def as_list(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def read_all(source: Any, column: str = "input_ids") -> list[Any]:
    return [value for shard in range(source.num_shards) for value in read(source, shard, 0, column)]


def files(folder: Path) -> list[str]:
    """The shard files in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("shard"))


def bytes_in(folder: Path) -> int:
    """What the shard files in a folder take, while others may vanish."""
    total = 0
    for name in files(folder):
        with contextlib.suppress(FileNotFoundError):
            total += (folder / name).stat().st_size
    return total


def in_process(code: str, *arguments: Any, **settings: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **settings)


ROWS = examples(600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """The 600 examples in 20 shards, in 3, and in 20 that are compressed."""
    folder = tmp_path_factory.mktemp("mds")
    return {
        "20": write(folder / "20", ROWS, size_limit=1300),
        "3": write(folder / "3", ROWS, size_limit=9000),
        "zstd": write(folder / "zstd", ROWS, size_limit=1300, compression="zstd", hashes=["sha1", "xxh64"]),
    }


# ---- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "encoding", ["ndarray:uint16", "ndarray:uint32", "ndarray:int32", "ndarray:int64", "ndarray", "ndarray:uint8:2"]
)
def test_ids_of_every_type_become_rows(tmp_path: Path, way: str, encoding: str) -> None:
    write(tmp_path / "mds", [{"input_ids": [7, 200]}, {"input_ids": [5, 6]}], {"input_ids": encoding})
    data = opened(way, tmp_path / "mds", tmp_path / "cache")
    (row,) = PackedDataset(data, seq_len=6, lanes=1, shuffle=False, pad_token_id=9)
    assert row["input_ids"].tolist() == [7, 200, 5, 6, 9, 9]
    assert row["labels"].tolist() == [-100, 200, -100, 6, -100, -100]
    assert [example[1:] for example in row["examples"]] == [("shard.00000.mds", 0), ("shard.00000.mds", 1)]


def test_ids_are_read_as_they_are_and_nothing_writes_into_them(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    source = MDSSource(write(tmp_path / "mds", rows, {"input_ids": "ndarray:int32"}))
    first, second = source.read(0, 0)
    assert (first["input_ids"].dtype, first["input_ids"].flags.writeable) == (np.int32, False)
    # Its memory is that of the one value, not that of a shard.
    assert len(first["input_ids"].base.base) == len(first["input_ids"].base.tobytes()) == 8
    assert second["input_ids"].tolist() == [3]


@pytest.mark.parametrize("way", WAYS)
def test_text_becomes_rows_and_other_columns_are_left_alone(tmp_path: Path, way: str) -> None:
    columns = {"text": "str", "url": "str", "number": "int", "more": "json", "score": "float32"}
    rows = [
        {"text": text, "url": "é", "number": 3, "more": {"a": [1]}, "score": np.float32(0.5)}
        for text in ("alpha beta", "gamma")
    ]
    write(tmp_path / "mds", rows, columns)
    tokenizer = word_tokenizer()
    data = opened(way, tmp_path / "mds", tmp_path / "cache")
    (row,) = PackedDataset(data, tokenizer, seq_len=8, lanes=1, shuffle=False)
    (wanted,) = PackedDataset([{"text": row["text"]} for row in rows], tokenizer, seq_len=8, lanes=1, shuffle=False)
    assert row["input_ids"].tolist() == wanted["input_ids"].tolist()


def decode(example: Any) -> Any:
    return {"input_ids": np.frombuffer(example["tokens"], dtype=np.int64)}


def test_raw_bytes_of_ids_in_a_column_of_another_name_take_a_transform(tmp_path: Path) -> None:
    rows = [{"tokens": np.array([4, 5, 6]).tobytes()}, {"tokens": np.array([7, 8]).tobytes()}]
    source = MDSSource(write(tmp_path / "mds", rows, {"tokens": "bytes"}))
    (row,) = PackedDataset(source, seq_len=5, lanes=1, shuffle=False, transform=decode)
    assert row["input_ids"].tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("way", WAYS)
def test_shards_are_read_from_anywhere(folders: dict[str, Path], tmp_path: Path, way: str) -> None:
    source = as_source(opened(way, folders["20"], tmp_path), lanes=16)
    assert (source.num_shards, source.num_examples) == (20, 600)
    assert read_all(source) == [row["input_ids"] for row in ROWS]
    whole = read(source, 4)
    for start in range(len(whole) + 2):
        assert read(source, 4, start) == whole[start:]
    assert where(source, 4, 2).endswith("shard shard.00004.mds, index 2")


def test_a_name_tells_data_apart_by_its_files_and_not_by_their_folder_or_how_it_was_opened(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    moved = shutil.copytree(folders["20"], tmp_path / "elsewhere" / "mds")
    names = {as_source(opened(way, moved, tmp_path), lanes=16).name for way in WAYS} | {MDSSource(folders["20"]).name}
    assert len(names) == 1
    assert "MDS with 600 examples in 20 shards (" in names.pop()
    assert MDSSource(folders["3"]).name != MDSSource(folders["20"]).name
    # Of equal sizes: only hashes tell them apart.
    one, other = ([{"input_ids": [number, 2]}] for number in (1, 3))
    hashed = [
        MDSSource(write(tmp_path / str(number), rows, hashes=["sha1"])) for number, rows in enumerate((one, other))
    ]
    assert hashed[0].name != hashed[1].name
    assert MDSSource(moved, name="mine").name == "mine"
    assert as_source(streaming.LocalDataset(str(moved)), lanes=1, name="mine").name == "mine"


def test_several_streams_are_one_source_and_a_place_names_the_stream(tmp_path: Path) -> None:
    parts = [[{"input_ids": [number, 1]} for number in numbers] for numbers in (range(3), range(3, 8))]
    streams = [
        streaming.Stream(
            remote=str(write(tmp_path / f"remote-{number}", part)), local=str(tmp_path / f"local-{number}")
        )
        for number, part in enumerate(parts)
    ]
    source = as_source(streaming_dataset(streams=streams), lanes=1)
    assert read_all(source) == [[number, 1] for number in range(8)]
    assert [source.locate(shard, 0)[0] for shard in (0, 1)] == ["stream 0 shard.00000.mds", "stream 1 shard.00000.mds"]


def test_a_subclass_that_makes_its_own_examples_is_read_through_it(tmp_path: Path) -> None:
    class Reversed(streaming.LocalDataset):  # type: ignore[name-defined,misc]
        def get_item(self, index: int) -> Any:
            return {"input_ids": super().get_item(index)["input_ids"][::-1]}

    source = as_source(Reversed(str(write(tmp_path / "mds", [{"input_ids": [1, 2, 3]}]))), lanes=1)
    assert read_all(source) == [[3, 2, 1]]


def test_a_split_is_a_subfolder_of_both(tmp_path: Path) -> None:
    write(tmp_path / "remote" / "train", [{"input_ids": [1, 2]}])
    source = MDSSource(tmp_path / "local", f"file://{tmp_path / 'remote'}", split="train")
    assert read_all(source) == [[1, 2]]
    assert files(tmp_path / "local" / "train") == ["shard.00000.mds"]


def test_a_merged_index_names_shards_in_subfolders(tmp_path: Path) -> None:
    for part in range(2):
        write(tmp_path / "mds" / str(part), [{"input_ids": [part, 1]}])
    streaming.base.util.merge_index(str(tmp_path / "mds"))
    assert sorted(read_all(MDSSource(tmp_path / "local", tmp_path / "mds"))) == [[0, 1], [1, 1]]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[(way, shards) for way in WAYS for shards in ("20", "3")], ids="-".join)
def stream_of(request: Any, folders: dict[str, Path], tmp_path: Path) -> Callable[..., Any]:
    way, shards = request.param
    data = opened(way, folders[shards], tmp_path)
    return lambda **settings: make_stream(data, **settings)


def test_every_topology_gives_the_same_rows_with_each_example_once_and_resumes_on_others(
    stream_of: Callable[..., Any],
) -> None:
    stream = stream_of(epochs=2)
    alone = Ranks(stream, 1, 0).take(10**6)
    expected = fingerprints(alone)
    assert tokens_by_example(alone) == all_examples(stream.parts[0].source, epochs=2)
    for world_size, num_workers in [(1, 3), (2, 2), (16, 1)]:
        assert sorted(fingerprints(Ranks(stream, world_size, num_workers).take(10**6))) == sorted(expected)

    endless = stream_of(epochs=None)
    expected = fingerprints(Ranks(endless, 1, 0).take(300))
    chooser = random.Random(4)
    rows: list[str] = []
    state = None
    while len(rows) < 300:
        world_size, num_workers = chooser.choice([(1, 0), (1, 3), (2, 2), (4, 1), (16, 1)])
        ranks = Ranks(endless, world_size, num_workers, state)
        rows += fingerprints(ranks.take(chooser.randint(1, 60 // world_size)))
        state = ranks.state()
    assert rows[:300] == expected


def packed(data: Any, **changes: Any) -> PackedDataset:
    settings = {"seq_len": 64, "buffer_size": 8, "shuffle_block": 10, "seed": 3, **changes}
    return PackedDataset(data, None, **settings)


def rows_of(batches: Any) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].reshape(-1, 64).tolist()]


SPAWNED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize("way", ["MDSSource of a remote", "StreamingDataset"])
def test_workers_of_every_start_method_give_the_same_batches(
    folders: dict[str, Path], tmp_path: Path, way: str
) -> None:
    expected = rows_of(PackedLoader(packed(MDSSource(folders["20"])), 4))
    data = opened(way, folders["20"], tmp_path)
    # Between the two in this process, which must leave nothing in the source that cannot go to another.
    for workers in ({"num_workers": 2, "multiprocessing_context": "fork"}, {}, SPAWNED):
        assert rows_of(PackedLoader(packed(data), 4, **workers)) == expected


def test_three_samples_on_two_ranks_come_once_each_and_none_is_repeated(tmp_path: Path) -> None:
    write(tmp_path / "mds", [{"input_ids": [number, 1]} for number in range(3)])
    found = []
    for rank in range(2):
        data = opened("StreamingDataset", tmp_path / "mds", tmp_path / f"cache-{rank}")
        for row in packed(data, seq_len=4, lanes=2, rank=rank, world_size=2):
            found += [index for _, _, index in row["examples"]]
    assert sorted(found) == [0, 1, 2]


def test_a_plain_dataloader_resumes_exactly_and_two_epochs_in_workers_end(tmp_path: Path) -> None:
    write(tmp_path / "mds", [{"input_ids": [number, 1, 2]} for number in range(20)], size_limit=400)
    data = opened("StreamingDataset", tmp_path / "mds", tmp_path)

    def dataset() -> PackedDataset:
        return packed(data, seq_len=8, lanes=2)

    whole = [row["examples"] for row in dataset()]
    for done in range(len(whole)):
        first, second = dataset(), dataset()
        rows = iter(first)
        assert [next(rows)["examples"] for _ in range(done)] == whole[:done]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [row["examples"] for row in second] == whole[done:]
    loader = DataLoader(dataset(), batch_size=2, num_workers=2, collate_fn=Collator("rows"))
    epochs = [sorted(row[0] for batch in loader for row in batch["input_ids"].tolist()) for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(whole)] * 2


# ---- local files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["zstd", "gz:3"])
def test_compressed_shards_are_decompressed_beside_them_or_into_the_cache(tmp_path: Path, compression: str) -> None:
    write(tmp_path / "mds", ROWS[:100], size_limit=1300, compression=compression, hashes=["sha1"])
    zipped = files(tmp_path / "mds")
    expected = [row["input_ids"] for row in ROWS[:100]]
    assert read_all(MDSSource(tmp_path / "local", tmp_path / "mds")) == expected
    assert files(tmp_path / "local") == [name.rpartition(".")[0] for name in zipped]  # the compressed are not kept
    assert read_all(MDSSource(tmp_path / "mds")) == expected
    assert set(files(tmp_path / "mds")) == {*zipped, *files(tmp_path / "local")}


def test_a_local_dataset_of_compressed_shards_says_what_reads_them(folders: dict[str, Path], tmp_path: Path) -> None:
    source = as_source(streaming.LocalDataset(str(folders["zstd"])), lanes=1)
    with pytest.raises(FileNotFoundError, match=r"neither fetches nor decompresses; pass streampack.MDSSource\('/"):
        read(source, 0)


def test_only_the_shards_that_are_read_are_fetched_and_a_resume_fetches_those_it_needs(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    assert read(MDSSource(tmp_path / "one", folders["zstd"]), 7) != []
    assert files(tmp_path / "one") == ["shard.00007.mds"]
    assert read(MDSSource(tmp_path / "none", folders["20"]), 7, start=1000) == []
    assert files(tmp_path / "none") == []

    run = Ranks(make_stream(MDSSource(folders["20"]), lanes=4), 1, 0)
    run.take(60)
    state, following = run.state(), run.take(1)
    source = MDSSource(tmp_path / "cold", folders["20"])
    resumed = Ranks(make_stream(source, lanes=4), 1, 0, state).take(1)
    assert fingerprints(resumed) == fingerprints(following)
    wait_for(source)
    assert len(files(tmp_path / "cold")) <= 3  # one lane's window, and the shard after it


def wait_for(source: Any) -> None:
    thread = source._background._thread
    if thread is not None:
        thread.join()


def test_the_next_shard_is_fetched_while_one_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    for way in ("MDSSource of a remote", "StreamingDataset"):
        local = tmp_path / ("own" if way.startswith("MDS") else "streaming")
        stream = make_stream(opened(way, folders["20"], tmp_path), lanes=1, shuffle=False)
        assert len(Ranks(stream, 1, 0).take(1)) == 1
        wait_for(stream.parts[0].source)
        assert files(local) == ["shard.00000.mds", "shard.00001.mds"]


def test_a_source_is_told_of_the_shard_that_a_lane_reads_next() -> None:
    calls: list[tuple[str, int]] = []

    class Recording:
        name, num_shards = "recording", 5

        def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
            calls.append(("read", shard))
            yield {"input_ids": [shard, 1]}

        def prefetch(self, shard: int) -> None:
            calls.append(("prefetch", shard))

    Ranks(make_stream(Recording(), lanes=2, shuffle=False), 1, 0).take(10)
    # Lane 0 reads 0, 2 and its part of 4, lane 1 reads 1, 3 and its part of 4.
    assert [call for call in calls if call[1] in (0, 2)] == [("read", 0), ("prefetch", 2), ("read", 2)]
    assert [call for call in calls if call[1] in (1, 3)] == [("read", 1), ("prefetch", 3), ("read", 3)]
    assert calls.count(("prefetch", 4)) == 2


def test_a_cache_smaller_than_the_data_is_never_full_and_nothing_is_lost(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    limit = 8000  # of 26,000
    source = MDSSource(tmp_path / "cache", folders["20"], cache_limit=limit)
    sizes = []
    run = Ranks(make_stream(source, epochs=2), 1, 0)
    rows = []
    while step := run.step():
        rows += step
        wait_for(source)
        sizes.append(bytes_in(tmp_path / "cache"))
    assert tokens_by_example(rows) == all_examples(MDSSource(folders["20"]), epochs=2)
    assert 0 < max(sizes) <= limit
    assert fingerprints(rows) == fingerprints(Ranks(make_stream(MDSSource(folders["20"]), epochs=2), 1, 0).take(10**6))


def test_shards_that_were_read_make_room_before_those_that_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    source = MDSSource(tmp_path, folders["20"], cache_limit=1400 * 4)
    reading = source.read(0, 0)
    next(reading)
    for shard in (1, 2, 3):
        read(source, shard)
    assert files(tmp_path) == [f"shard.0000{shard}.mds" for shard in (0, 1, 2, 3)]
    source.prefetch(4)
    wait_for(source)
    held = files(tmp_path)
    assert "shard.00000.mds" in held
    assert "shard.00004.mds" in held
    others = [source.read(shard, 0) for shard in (4, 5, 6, 7)]
    for other in others:
        next(other)
    source.prefetch(9)  # all are being read: there is no room for one that is not needed yet
    wait_for(source)
    assert files(tmp_path) == [f"shard.0000{shard}.mds" for shard in (4, 5, 6, 7)]
    assert [example["input_ids"].tolist() for example in reading] == read(MDSSource(folders["20"]), 0, 1)


def test_a_streaming_dataset_with_a_cache_limit_is_read_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    data = streaming_dataset(local=str(tmp_path / "local"), remote=str(folders["20"]), cache_limit=12_000)
    stream = make_stream(data, lanes=4)
    rows = Ranks(stream, 1, 0).take(10**6)
    assert tokens_by_example(rows) == all_examples(MDSSource(folders["20"]), epochs=1)
    assert len(files(tmp_path / "local")) < 20


@pytest.mark.parametrize("way", ["MDSSource of a remote", "StreamingDataset"])
def test_a_shard_evicted_by_another_process_while_it_is_read_is_read_to_its_end(
    folders: dict[str, Path], tmp_path: Path, way: str
) -> None:
    data = opened(way, folders["20"], tmp_path)
    source = as_source(data, lanes=1)
    for evict in (lambda path: path.unlink(), lambda path: data.evict_shard(0)):
        if way.startswith("MDSSource") and evict.__code__.co_names == ("evict_shard",):
            continue
        reading = source.read(0, 0)
        rows = [next(reading)["input_ids"].tolist()]
        (path,) = tmp_path.rglob("shard.00000.mds")
        evict(path)
        rows += [example["input_ids"].tolist() for example in reading]
        assert rows == read(MDSSource(folders["20"]), 0)


READ_ALL = """
import hashlib, sys
from streampack.mds import MDSSource

for cache, limit in (("all", None), ("some", 4000)):
    source = MDSSource(f"{sys.argv[1]}/{cache}", sys.argv[2], cache_limit=limit)
    digest = hashlib.sha256()
    for shard in range(source.num_shards):
        for example in source.read(shard, 0):
            digest.update(example["input_ids"].tobytes())
    print(digest.hexdigest())
"""


def test_several_processes_read_everything_through_one_cold_cache_also_a_small_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    processes = [in_process(READ_ALL, tmp_path, folders["zstd"]) for _ in range(3)]
    found = [process.communicate(timeout=400)[0].split() for process in processes]
    digest = hashlib.sha256(b"".join(np.array(row["input_ids"], np.uint16).tobytes() for row in ROWS))
    assert found == [[digest.hexdigest()] * 2] * 3
    assert len(files(tmp_path / "all")) == 20
    assert 0 < bytes_in(tmp_path / "some") <= 4000
    assert {path.suffix for path in tmp_path.glob("*/.streampack/*")} <= {".lock"}


def test_what_others_are_fetching_counts_for_the_limit_until_they_die(folders: dict[str, Path], tmp_path: Path) -> None:
    source = MDSSource(tmp_path, folders["20"], cache_limit=4000)
    read(source, 0)
    own = tmp_path / ".streampack"
    (own / "shard.00005.mds.room").write_text("3000")  # as another process does that fetches this shard ...
    with FileLock(own / "shard.00005.mds.lock"):  # ... and holds its lock
        source.prefetch(1)  # instead of shard 0, which was read
        wait_for(source)
        next(source.read(1, 0))
        assert files(tmp_path) == ["shard.00001.mds"]
        source.prefetch(2)
        wait_for(source)
        assert files(tmp_path) == ["shard.00001.mds"]
    source.prefetch(2)
    wait_for(source)
    assert files(tmp_path) == ["shard.00001.mds", "shard.00002.mds"]
    assert not (own / "shard.00005.mds.room").exists()


# ---- what a killed run leaves ----------------------------------------------------------------------------------------

TRAIN = """
import json, sys, time
from streampack import PackedDataset, PackedLoader
from streampack.mds import MDSSource

source = MDSSource(sys.argv[1], sys.argv[2])
dataset = PackedDataset(source, seq_len=64, buffer_size=8, shuffle_block=10, seed=3)
loader = PackedLoader(dataset, 2, num_workers=2, prefetch_factor=1)
for batch in loader:
    print(json.dumps([batch["input_ids"].tolist(), loader.state_dict()]), flush=True)
"""


def test_a_run_killed_with_its_workers_leaves_nothing_that_stops_the_next_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    expected = rows_of(PackedLoader(packed(MDSSource(folders["zstd"])), 2))
    process = in_process(TRAIN, tmp_path, folders["zstd"], start_new_session=True)
    assert process.stdout is not None
    rows: list[list[int]] = []
    for _ in range(5):
        ids, state = json.loads(process.stdout.readline())
        rows += np.reshape(ids, (-1, 64)).tolist()
    os.killpg(process.pid, signal.SIGKILL)  # the whole job, as a scheduler or a container does
    process.communicate()
    loader = PackedLoader(packed(MDSSource(tmp_path, folders["zstd"])), 2)
    loader.load_state_dict(state)
    assert rows + rows_of(loader) == expected


def test_half_a_file_in_the_cache_is_fetched_again(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("20", "zstd"):
        source = MDSSource(tmp_path / name, folders[name])
        expected = read(source, 0)
        path = tmp_path / name / "shard.00000.mds"
        path.write_bytes(path.read_bytes()[:700])
        part = tmp_path / name / ".streampack" / f"{files(folders[name])[0]}.part"
        part.write_bytes(b"the beginning of")  # of a download that was killed
        assert read(MDSSource(tmp_path / name, folders[name]), 0) == expected
        assert path.stat().st_size > 1000
        assert not part.exists()
    zipped = tmp_path / "zstd" / "shard.00001.mds.zstd"
    zipped.write_bytes(b"x" * 100)  # StreamingDataset downloads compressed shards to here
    assert read(MDSSource(tmp_path / "zstd", folders["zstd"]), 1) == read(MDSSource(folders["zstd"]), 1)


def test_a_damaged_file_is_refused_where_there_is_nothing_to_fetch(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(folders["20"], tmp_path / "mds")
    path = copy / "shard.00003.mds"
    whole = path.read_bytes()
    path.write_bytes(whole[:700])
    with pytest.raises(ValueError, match=rf"{path} has 700 bytes, where index.json says {len(whole)}: it is damaged"):
        read(MDSSource(copy), 3)
    for way in ("LocalDataset", "StreamingDataset"):
        data = streaming.LocalDataset(str(copy)) if way == "LocalDataset" else streaming_dataset(local=str(copy))
        with pytest.raises(
            ValueError, match=rf"{path} has 700 bytes, where index.json says {len(whole)}: it is damaged"
        ):
            read(as_source(data, lanes=1), 3)
    zeros = bytes(4)
    for damaged in (bytes(len(whole)), zeros + whole[4:], whole[:12] + zeros + whole[16:]):  # as after a power cut
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{path} is damaged: its head does not fit index.json"):
            read(MDSSource(copy), 3)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{path} is missing, and there is no remote to fetch it from"):
        read(MDSSource(copy), 3)


def test_a_remote_file_that_does_not_fit_the_index_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    remote = shutil.copytree(folders["zstd"], tmp_path / "remote")
    path = remote / "shard.00003.mds.zstd"
    whole = path.read_bytes()
    for damaged, what in [
        (whole[:90], rf"shard.00003.mds.zstd of {remote} has 90 bytes, where index.json says {len(whole)}"),
        (
            whole[:-1] + b"?",
            rf"shard.00003.mds.zstd of {remote}: its sha1 is [0-9a-f]+, where index.json says [0-9a-f]+",
        ),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=what):
            read(MDSSource(tmp_path / "local", remote), 3)
        assert files(tmp_path / "local") == []


def test_a_shard_that_cannot_be_fetched_is_an_error_at_the_read_and_not_a_hang(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    remote = shutil.copytree(folders["20"], tmp_path / "remote")
    (remote / "shard.00001.mds").unlink()
    for data in (
        MDSSource(tmp_path / "own", remote, download_retry=1),
        streaming_dataset(local=str(tmp_path / "streaming"), remote=str(remote), download_retry=1),
    ):
        stream = make_stream(data, lanes=1, shuffle=False)
        stream.parts[0].source.prefetch(1)  # its error tells nobody
        wait_for(stream.parts[0].source)
        with pytest.raises(FileNotFoundError, match=r"remote/shard.00001.mds") as error:
            Ranks(stream, 1, 0).take(10**6)
        text = str(error.value) + " ".join(getattr(error.value, "__notes__", []))
        assert "shard shard.00001.mds, index 0" in text


def test_a_shard_that_a_dead_process_left_in_preparation_is_fetched_after_a_while(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    data = streaming_dataset(
        local=str(tmp_path / "local"), remote=str(folders["20"]), download_timeout=0.05, download_retry=1
    )
    data._shard_states[0] = 2  # PREPARING: what a worker leaves that is killed while it downloads
    source = as_source(data, lanes=1)
    with pytest.warns(UserWarning, match=r"shard.00000.mds of .* has been in preparation .* fetching it here"):
        assert read(source, 0) == read(MDSSource(folders["20"]), 0)


def test_a_shard_left_in_preparation_where_it_is_the_only_copy_is_an_error(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(folders["zstd"], tmp_path / "mds", ignore=shutil.ignore_patterns("*.mds"))
    data = streaming_dataset(local=str(copy), download_timeout=0.05, download_retry=1)
    data._shard_states[0] = 2  # PREPARING
    with pytest.raises(TimeoutError, match=r"for 0.1 seconds, .* start again, or pass streampack.MDSSource\('/"):
        read(as_source(data, lanes=1), 0)
    assert len(files(copy)) == 20


def test_a_folder_that_cannot_be_written_to_says_what_to_do(folders: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(folders["zstd"], tmp_path / "mds", ignore=shutil.ignore_patterns("*.mds", ".streampack"))
    (copy / ".streampack").write_text("in the way")
    with pytest.raises(
        OSError, match=rf"cannot make the folder {copy}/.streampack.*MDSSource\(local, remote='{copy}'\)"
    ):
        read(MDSSource(copy), 0)


def test_a_copy_in_another_process_fetches_by_itself_whatever_the_first_one_waits_for(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    source = MDSSource(tmp_path, folders["20"])
    with FileLock(tmp_path / ".streampack" / "shard.00000.mds.lock"):
        source.prefetch(0)  # waits for the lock
        copy = pickle.loads(pickle.dumps(source))
        copy.prefetch(1)
        wait_for(copy)
        process = multiprocessing.get_context("fork").Process(target=prefetch, args=(source, 2))
        process.start()
        process.join()
        assert files(tmp_path) == ["shard.00001.mds", "shard.00002.mds"]
    wait_for(source)
    assert files(tmp_path) == ["shard.00000.mds", "shard.00001.mds", "shard.00002.mds"]


def prefetch(source: Any, shard: int) -> None:
    source.prefetch(shard)
    wait_for(source)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": True}, r"shuffle=True: .*shuffling happens here; pass it with shuffle=False"),
        ({"batching_method": "per_stream"}, r"batching_method='per_stream'.*leave it out"),
        ({"epoch_size": 1000}, r"takes 1000 samples an epoch of the 600 of stream 0 \(proportion, repeat, choose or"),
    ],
)
def test_orders_and_samples_of_its_own_are_refused(
    folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    data = streaming_dataset(local=str(tmp_path), remote=str(folders["20"]), **settings)
    with pytest.raises(ValueError, match=message):
        as_source(data, lanes=16)


@pytest.mark.parametrize(("weight", "drawn"), [({"repeat": 2.0}, 1200), ({"choose": 7}, 7), ({"proportion": 1.0}, 600)])
def test_weights_are_refused_where_they_change_what_an_epoch_holds(
    folders: dict[str, Path], tmp_path: Path, weight: dict[str, Any], drawn: int
) -> None:
    data = streaming_dataset(streams=[streaming.Stream(remote=str(folders["20"]), local=str(tmp_path), **weight)])
    if drawn == 600:
        assert as_source(data, lanes=16).num_shards == 20
        return
    with pytest.raises(ValueError, match=f"takes {drawn} samples an epoch of the 600 of stream 0"):
        as_source(data, lanes=16)


def test_replication_is_refused_since_ranks_are_dealt_here(folders: dict[str, Path], tmp_path: Path) -> None:
    data = streaming_dataset(local=str(tmp_path), remote=str(folders["20"]))
    data.replication = 2  # as with replication=2 on two GPUs
    with pytest.raises(ValueError, match=r"replication=2.*rank=, world_size="):
        as_source(data, lanes=16)


def test_a_stream_alone_is_refused_with_what_to_pass(folders: dict[str, Path], tmp_path: Path) -> None:
    stream = streaming.Stream(remote=str(folders["20"]), local=str(tmp_path))
    with pytest.raises(TypeError, match=r"streaming.Stream: pass streampack.MDSSource\(local, remote\)"):
        PackedDataset(stream, seq_len=64)


def test_folders_and_settings_that_cannot_be_used_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"there is no {tmp_path}/index.json"):
        MDSSource(tmp_path)
    with pytest.raises(ValueError, match=r"not a folder of this machine; pass MDSSource\(local, remote='s3://bucket/"):
        MDSSource("s3://bucket/data")
    with pytest.raises(ValueError, match="cache_limit='10gb' needs a remote"):
        MDSSource(folders["20"], folders["20"], cache_limit="10gb")
    with pytest.raises(ValueError, match=r"cache_limit=1024 bytes is less than the largest shard .* needs \(1\d\d\d\)"):
        MDSSource(tmp_path / "local", folders["20"], cache_limit="1kb")
    with pytest.raises(ValueError, match="download_retry=0: pass at least 1"):
        MDSSource(folders["20"], download_retry=0)
    (tmp_path / "index.json").write_text('{"version": 2, "sha')
    with pytest.raises(ValueError, match=rf"{tmp_path}/index.json is not an index of MDS shards"):
        MDSSource(tmp_path)
    (tmp_path / "index.json").write_text('{"version": 1, "shards": []}')
    with pytest.raises(ValueError, match="has version 1, this reads version 2"):
        MDSSource(tmp_path)
    (tmp_path / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(ValueError, match="lists no shards"):
        MDSSource(tmp_path)


def test_pickled_columns_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    write(tmp_path / "mds", [{"input_ids": [1, 2]}], {"input_ids": "pkl"})
    with pytest.raises(ValueError, match="unsafe type: pkl"):
        MDSSource(tmp_path / "mds")
    assert read_all(MDSSource(tmp_path / "mds", allow_unsafe_types=True)) == [[1, 2]]


def test_other_formats_of_the_library_are_read_as_its_local_dataset(tmp_path: Path) -> None:
    with streaming.JSONWriter(columns={"text": "str"}, out=str(tmp_path)) as writer:
        for text in ("a", "b"):
            writer.write({"text": text})
    with pytest.raises(ValueError, match="format 'json', not 'mds'; pass a LocalDataset"):
        MDSSource(tmp_path)
    source = as_source(streaming.LocalDataset(str(tmp_path)), lanes=1)
    assert isinstance(source, MDSDatasetSource)
    assert read_all(source, "text") == ["a", "b"]


def test_bad_columns_are_errors_that_name_the_shard_and_the_index(tmp_path: Path) -> None:
    def error(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
        folder = write(tmp_path / columns["input_ids"].replace(":", "-").replace(",", "-"), rows, columns)
        with pytest.raises(ValueError, match="shard") as raised:
            list(packed(MDSSource(folder), lanes=1, shuffle=False))
        return str(raised.value)

    text = error([{"input_ids": [1, 2]}, {"input_ids": [3, -4]}], {"input_ids": "ndarray:int16"})
    assert "shard shard.00000.mds, index 1: 'input_ids' holds -4 .. 3, outside 0 .." in text
    text = error([{"input_ids": [[1, 2], [3, 4]]}], {"input_ids": "ndarray:int32:2,2"})
    assert "shard shard.00000.mds, index 0: 'input_ids' is ndarray [[1, 2], [3, 4]], not one list of integers" in text
    text = error([{"input_ids": [0.5, 1.5]}], {"input_ids": "ndarray:float32"})
    assert "shard shard.00000.mds, index 0: 'input_ids' is ndarray [0.5, 1.5], not one list of integers" in text
    text = error([{"input_ids": "text"}], {"input_ids": "str"})
    assert "shard shard.00000.mds, index 0: 'input_ids' is str 'text', not one list of integers" in text


def test_an_example_that_cannot_be_decoded_is_a_fault_and_those_after_it_keep_their_indices(tmp_path: Path) -> None:
    # MDSWriter takes any bytes for any column.
    source = MDSSource(write(tmp_path / "mds", [{"text": "a"}, {"text": b"\xff"}, {"text": "c"}], {"text": "str"}))
    first, fault, last = source.read(0, 0)
    assert (first, last) == ({"text": "a"}, {"text": "c"})
    assert isinstance(fault, Fault)
    assert fault.reason == "malformed"
    assert "it cannot be decoded: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff" in fault.what


def test_few_shards_are_read_whole_by_each_process_and_it_is_said(folders: dict[str, Path]) -> None:
    assert [len(part) for part in split_evenly(ROWS, 3)] == [200] * 3
    loader = PackedLoader(packed(MDSSource(folders["3"])), 4, num_workers=2)
    with pytest.warns(UserWarning, match="has 3 shards for 16 lanes, so 2 processes read all of them, 2 times"):
        next(iter(loader))
