"""Hugging Face `datasets` as sources: streams (`IterableDataset`) and random access (`Dataset`).

Shuffling, splitting over ranks and epochs happen in streampack, so a dataset that was shuffled or split before is
refused; `map` and `filter` are fine.
"""

import copy
import hashlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfFileSystem

from streampack.sources import Example, Source, in_short

BATCH = 256
"""Examples asked of `datasets` at a time. Batches are about 10 times faster than single examples, and, unlike single
ones, are not split again inside a DataLoader worker."""


_KEEP_EXAMPLES = ("ArrowExamples", "RebatchedArrowExamples", "SelectColumns", "FormattedExamples")
_WITH_FUNCTIONS = ("Mapped", "Filtered")
_OF_WHOLE_STREAMS = ("Take", "Skip", "Cycling", "RandomlyCycling")


def as_huggingface_source(data: Any, *, lanes: int, name: str | None) -> Source:
    """Wrap a `datasets.IterableDataset` or `datasets.Dataset`.

    Raises:
        ValueError: for a dataset that was shuffled or split by node.
        TypeError: for other classes of `datasets`.
    """
    if isinstance(data, datasets.IterableDataset):
        return StreamSource(data, lanes=lanes, name=name)
    if isinstance(data, datasets.Dataset):
        return TableSource(data, name=name)
    advice = f"; choose one split, e.g. dataset[{next(iter(data))!r}]" if isinstance(data, dict) and data else ""
    raise TypeError(f"cannot stream from datasets.{type(data).__name__}{advice}")


def open_saved(folder: str, *, split: str | None) -> Any:
    """What `save_to_disk` wrote: a Dataset, or the split of a DatasetDict.

    Raises:
        ValueError: for a split that is not there, or none where there are several.
    """
    saved = datasets.load_from_disk(folder)
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            what = "choose a split" if split is None else f"there is no split {split!r}"
            raise ValueError(f"{folder}: {what}; there are: {', '.join(map(str, saved))}")
        return saved[split]
    return saved


def open_hub(name: str, *, config: str | None, split: str | None, revision: str | None) -> Any:
    """A stream of a dataset of the Hub.

    Raises:
        ValueError: if it cannot be opened, with the reason; if there are several splits and none is chosen.
    """
    try:
        stream = datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # of any kind: offline, no such name, config or split, a script, a login
        reason = " ".join(str(error).split())
        raise ValueError(f"no file or folder {name!r} here, and no such dataset of the Hub: {reason}") from error
    if isinstance(stream, dict):
        if len(stream) > 1:
            raise ValueError(f"{name}: choose a split; there are: {', '.join(map(str, stream))}")
        stream = next(iter(stream.values()))
    return stream


class StreamSource:
    """A `datasets.IterableDataset`. A Parquet stream with fewer shards than lanes is cut into row groups.

    `take`, `skip` and `interleave_datasets` mean something for the whole stream: sharded, `take(1000)` would take
    others than it does by itself (and overlap with `skip(1000)`). Such a stream is read as one shard.
    """

    def __init__(self, stream: Any, *, lanes: int, name: str | None) -> None:
        _refuse_shuffled_or_split(stream)
        self.is_whole = any(type(node).__name__.startswith(_OF_WHOLE_STREAMS) for node in _nodes(stream._ex_iterable))
        if not self.is_whole and stream.num_shards < lanes and hasattr(stream, "reshard"):
            # Only Parquet gains by it: each row group can be sought alone. Others return the same shards.
            stream = stream.reshard()
        self.num_shards = 1 if self.is_whole else int(stream.num_shards)
        files = _files(stream)
        labels = _shard_labels(stream, files)
        self.shard_labels = labels if len(labels) == self.num_shards else None
        self.name = name or _stream_name(stream, files, self.num_shards)
        self.num_examples = _count(stream, files)
        arrow = getattr(stream._ex_iterable, "iter_arrow", None) is not None
        self.stream = stream.with_format("arrow" if arrow else None)
        # Functions of the user's (map, filter, a generator) need not stand two threads at a time.
        own = any(type(node).__name__.startswith(_WITH_FUNCTIONS) for node in _nodes(stream._ex_iterable))
        self.concurrent = arrow and not own
        self._hub = _hub_file_systems() if any("hf://" in file for file in files) else []

    def read(self, shard: int, start: int) -> Iterator[Example | pa.Table]:
        for known in self._hub:
            _know_here(known)
        stream = self.stream if self.is_whole else self.stream.shard(num_shards=self.num_shards, index=shard)
        if start:
            stream = stream.skip(start)
        for batch in stream.iter(batch_size=BATCH):
            if isinstance(batch, pa.Table):
                yield batch
            else:
                yield from (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))

    def locate(self, shard: int, index: int) -> tuple[int | str, int]:
        return (self.shard_labels[shard] if self.shard_labels else shard), index


class TableSource:
    """A `datasets.Dataset` (Arrow): random access. Shards are runs of `RUN` consecutive examples."""

    RUN = 64
    random_access = True

    def __init__(self, table: Any, *, name: str | None) -> None:
        self.num_examples = len(table)
        self.num_shards = max(1, -(-self.num_examples // self.RUN))
        self.name = name or _table_name(table)
        # A user's own formatting function (set_transform) decides what an example is; else Arrow is the fast way.
        columns = table.format["columns"]
        self.table = table if table.format["type"] == "custom" else table.with_format("arrow", columns=columns)

    def read(self, shard: int, start: int) -> Iterator[Example | pa.Table]:
        first, last = shard * self.RUN + start, min((shard + 1) * self.RUN, self.num_examples)
        if first >= last:
            return
        if self.table.format["type"] == "arrow":
            yield self.table[first:last]
        else:
            yield from (self.table[index] for index in range(first, last))

    def locate(self, shard: int, index: int) -> tuple[int, int]:
        return 0, shard * self.RUN + index


def _hub_file_systems() -> list[Any]:
    """The file systems of this process that have listed repositories of the Hub.

    Pickled and loaded elsewhere they are known there too (that is how huggingface_hub pickles them). Otherwise each
    process, and each thread, asks the Hub again for the revision and the listing of every folder that it reads from.
    """
    systems = [system for system in getattr(HfFileSystem, "_cache", {}).values() if system.dircache]
    # Each thread has one of its own: the first of those with equal settings stands for them.
    return list({repr((one.storage_args, one.storage_options)): one for one in reversed(systems)}.values())


def _know_here(known: Any) -> None:
    """What a file system of another thread or process has listed, to the one that is used in this thread."""
    here = type(known)(*known.storage_args, **known.storage_options)
    if not known.dircache.keys() <= here.dircache.keys():
        copy.copy(known)  # as if it were pickled and loaded: sets what the file system of this thread knows


def _refuse_shuffled_or_split(stream: Any) -> None:
    if stream._distributed is not None:
        raise ValueError(
            "this dataset was split by node (split_dataset_by_node): streampack deals the stream to ranks and workers "
            "itself, so that the rows do not depend on them; pass the dataset as it was before"
        )
    if any("Shuffle" in type(node).__name__ for node in _nodes(stream._ex_iterable)):
        raise ValueError(
            "this dataset was shuffled: its buffer is lost when a run resumes and its order changes with the workers; "
            "pass the dataset as it was before .shuffle(), and PackedDataset(..., shuffle=True, seed=...)"
        )
    for node in _nodes(stream._ex_iterable):
        generator = getattr(node, "generator", None)
        # NumPy draws 128 bits of entropy for a generator without a seed.
        if generator is not None and (generator.bit_generator.seed_seq.entropy or 0) >= 1 << 64:
            raise ValueError(
                "this dataset interleaves others at random without a seed: it has another order each time it is "
                "built, so a resumed run would not go on with it; pass seed=... to interleave_datasets"
            )


def _nodes(node: Any) -> Iterator[Any]:
    """The chain (or tree) of iterables inside an IterableDataset, outermost first."""
    yield node
    for inner in [getattr(node, "ex_iterable", None), *(getattr(node, "ex_iterables", None) or [])]:
        if inner is not None:
            yield from _nodes(inner)


def _files(stream: Any) -> list[str]:
    """The data files of a stream in the order of its shards, [] if it does not read files."""
    for node in _nodes(stream._ex_iterable):
        arguments = getattr(node, "kwargs", None) or {}
        for key in ("original_files", "base_files", "files", "tar_paths"):
            files = arguments.get(key)
            if isinstance(files, list) and files and all(isinstance(file, str) for file in files):
                return files
    return []


def _shard_labels(stream: Any, files: list[str]) -> list[str]:
    """A name for each shard: its file, and of a Parquet file that was cut, the row group."""
    for node in _nodes(stream._ex_iterable):
        groups = (getattr(node, "kwargs", None) or {}).get("row_groups_list")
        if isinstance(groups, list) and len(groups) == len(files):
            return [
                file if group is None else f"{file} row group {', '.join(map(str, group))}"
                for file, group in zip(files, groups, strict=True)
            ]
    return files


def _stream_name(stream: Any, files: list[str], num_shards: int) -> str:
    if not files:
        warnings.warn(
            f"a stream of {num_shards} shards without files has no name that tells it from another; pass "
            "source_name='...' so that a saved state can be refused for other data",
            stacklevel=7,
        )
        return f"stream of {num_shards} shards"
    parts = [
        f"{type(node).__name__.removesuffix('ExamplesIterable').lower()} {node.n}"
        for node in _nodes(stream._ex_iterable)
        if type(node).__name__.startswith(("Take", "Skip"))
    ]
    return f"{_describe_files(files)} ({', '.join([f'{num_shards} shards', *parts])})"


def _describe_files(files: list[str]) -> str:
    """Relative names and sizes. Names on a hub hold the revision; asking for their sizes would cost a request each."""
    return in_short(_names_and_sizes(list(dict.fromkeys(files))))


def _names_and_sizes(unique: list[str]) -> list[str]:
    folder = os.path.commonpath(unique) if len(unique) > 1 and "://" not in unique[0] else os.path.dirname(unique[0])
    described = []
    for file in unique:
        size = f":{os.path.getsize(file)}" if os.path.exists(file) else ""
        described.append((file if "://" in file else os.path.relpath(file, folder or ".")) + size)
    return described


def _count(stream: Any, files: list[str]) -> int | None:
    """How many examples there are, where local Parquet files say so and nothing in the stream changes it."""
    plain = all(type(node).__name__.startswith(_KEEP_EXAMPLES) for node in _nodes(stream._ex_iterable))
    if not plain or not files or not all(file.endswith(".parquet") and os.path.exists(file) for file in files):
        return None
    return sum(int(pq.read_metadata(file).num_rows) for file in dict.fromkeys(files))


def _table_name(table: Any) -> str:
    """Files, and what tells a selection or another order of the same files apart: its indices and outermost rows."""
    files = [cache["filename"] for cache in table.cache_files]
    names = " ".join(f"{os.path.basename(file)}:{os.path.getsize(file)}" for file in files if os.path.exists(file))
    digest = hashlib.sha256()
    if table._indices is not None:
        digest.update(table._indices.column(0).to_numpy().tobytes())
    if len(table):
        plain = table.with_format("arrow")
        digest.update(repr((plain[:1].to_pylist(), plain[len(table) - 1 :].to_pylist())).encode(errors="replace"))
    columns = ", ".join(table.column_names)
    return f"{names or 'table'} with {len(table)} examples of {columns} ({digest.hexdigest()[:12]})"
