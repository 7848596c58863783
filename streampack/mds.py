"""MDS, the format of mosaicml-streaming, as a source. One shard here is one MDS shard.

`MDSSource(local, remote)` opens a folder by itself, without shared memory: nothing of a run that was killed can stop
the next one. Objects that are there already, `streaming.LocalDataset` and `streaming.StreamingDataset`, are read
through their random access. Shuffling, sampling and sharding happen in streampack, and theirs are not used.
"""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

from streampack.mds_cache import Background, Remote, ShardCache, fetch_index
from streampack.sources import Example, Fault, Source

POLL_SECONDS = 0.01


class MDSSource:
    """A folder of MDS shards, with an index.json: a local one, or a remote one with a local cache.

    Any number of processes and runs may use one local folder at the same time, and nothing that a killed run leaves
    there is taken for a whole file: sizes, and hashes where index.json has them, are compared. Columns come as
    mosaicml-streaming decodes them; arrays are read-only. Token ids are found in a column `input_ids` (with another
    name, or as bytes, by a `transform=` of PackedDataset), text in `text_column`.

    Args:
        local: the folder that MDSWriter wrote to, or, with `remote`, where shards are kept. Compressed shards are
            decompressed there.
        remote: where to fetch shards from that are not there: a folder, s3://, gs://, hf:// ... (what
            mosaicml-streaming can download).
        split: the subfolder of both.
        cache_limit: bytes that shards may take locally (an int, or "10gb"). Shards read to their end make room first.
            Give room for twice as many shards as lanes that a machine hosts (16), or shards are fetched again; a
            shard that is evicted while it is read keeps its disk space until then.
        download_retry: attempts to fetch a file.
        download_timeout: seconds for each.
        allow_unsafe_types: read columns of pickled objects, which can run any code.
        name: identifies the data in states instead of what index.json says.

    Raises:
        ImportError: without mosaicml-streaming.
        FileNotFoundError, ValueError: for a folder without index.json, and arguments that cannot be used.
    """

    def __init__(
        self,
        local: str | os.PathLike[str],
        remote: str | os.PathLike[str] | None = None,
        *,
        split: str | None = None,
        cache_limit: int | str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60.0,
        allow_unsafe_types: bool = False,
        name: str | None = None,
    ) -> None:
        import_streaming()
        if download_retry < 1:
            raise ValueError(f"download_retry={download_retry}: pass at least 1, the number of attempts")
        folder, remote_folder = _folders(local, remote, split or "")
        if cache_limit is not None and remote_folder is None:
            raise ValueError(f"cache_limit={cache_limit!r} needs a remote: without one, {folder} is the only copy")
        fetch_from = (
            Remote(folder=remote_folder, attempts=download_retry, timeout=download_timeout) if remote_folder else None
        )
        self._shards = _read_index(fetch_index(folder, fetch_from), allow_unsafe_types=allow_unsafe_types)
        self._cache = ShardCache(folder, fetch_from, shards=self._shards, limit=_as_bytes(cache_limit))
        self._background = Background(self._cache.fetch_ahead, daemon=True)
        self.num_shards = len(self._shards)
        self.num_examples = sum(shard.samples for shard in self._shards)
        self.name = name or _name(self._shards)

    def read(self, shard: int, start: int) -> Iterator[Example | Fault]:
        """The examples of a shard from `start` on; a Fault for one that cannot be decoded."""
        reader = self._shards[shard]
        if start >= reader.samples:
            return  # do not fetch it for nothing
        with self._cache.open(shard) as file:
            offsets = _offsets(file, reader)
            file.seek(offsets[start])
            for first, last in zip(offsets[start:], offsets[start + 1 :], strict=False):
                data = file.read(last - first)
                try:
                    example: Example | Fault = reader.decode_sample(data)
                except Exception as error:  # of any type, from whatever decodes the column
                    example = Fault("malformed", f"it cannot be decoded: {type(error).__name__}: {error}")
                yield example
        self._cache.done(shard)

    def prefetch(self, shard: int) -> None:
        """Fetch a shard in the background."""
        self._background(shard)

    def locate(self, shard: int, index: int) -> tuple[str, int]:
        """(the shard's file, index there)"""
        return self._shards[shard].raw_data.basename, index


class MDSDatasetSource:
    """A `streaming.StreamingDataset` or `streaming.LocalDataset` (or a subclass), through `prepare_shard` and `[i]`."""

    def __init__(self, dataset: Any, *, name: str | None) -> None:
        self.dataset = dataset
        self._counts = [int(shard.samples) for shard in dataset.shards]
        self._firsts = np.cumsum([0, *self._counts]).tolist()
        self.num_shards = len(self._counts)
        self.num_examples = sum(self._counts)
        self.name = name or _name(dataset.shards)
        # A thread that dies with its process would leave the shard "in preparation" for all others: wait for it.
        self._background = Background(self._fetch_ahead, daemon=False) if hasattr(dataset, "prepare_shard") else None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the dataset makes its lock, which cannot be pickled, anew."""
        self.dataset.__dict__.pop("_cache_filelock", None)
        return self.__dict__

    def read(self, shard: int, start: int) -> Iterator[Example]:
        """The examples of a shard from `start` on."""
        if start >= self._counts[shard]:
            return
        self._prepare(shard)
        first = self._firsts[shard]
        for index in range(first + start, first + self._counts[shard]):
            yield self.dataset[index]  # fetches the shard again where another process has evicted it

    def prefetch(self, shard: int) -> None:
        """Fetch a shard in the background."""
        if self._background is not None:
            self._background(shard)

    def locate(self, shard: int, index: int) -> tuple[str, int]:
        """(the shard's file, index there)"""
        file: str = self.dataset.shards[shard].file_pairs[0][0].basename
        streams = getattr(self.dataset, "streams", [])
        return (f"stream {self.dataset.stream_per_shard[shard]} {file}" if len(streams) > 1 else file), index

    def _prepare(self, shard: int) -> None:
        """Wait for the shard's files. prepare_shard would wait for ever where the process that fetches has died."""
        reader = self.dataset.shards[shard]
        if hasattr(self.dataset, "prepare_shard"):
            stream = self._stream(shard)
            patience = 2 * stream.download_timeout * max(1, stream.download_retry)
            started = time.monotonic()
            self._fetch(shard)
            while not all(os.path.exists(path) for path, _ in _files(reader)):
                if time.monotonic() - started > patience:
                    what = (
                        f"{reader.file_pairs[0][0].basename} of {stream.local} has been in preparation for "
                        f"{patience:.3g} seconds, by a process that has probably died"
                    )
                    if not self._give_up(shard):
                        raise TimeoutError(f"{what}; start again, or pass streampack.MDSSource({stream.local!r})")
                    warnings.warn(f"{what}; fetching it here", stacklevel=2)
                    started = time.monotonic()
                time.sleep(POLL_SECONDS)
                self._fetch(shard)
        _check_files(self.dataset, reader)

    def _fetch(self, shard: int) -> None:
        """Fetch the shard, unless another process is about it."""
        try:
            self.dataset.prepare_shard(shard, blocking=False)
        except BaseException:
            self._give_up(shard)
            raise

    def _fetch_ahead(self, shard: int) -> None:
        """Fetch the shard if that evicts none: the least recently used one may well be in use."""
        limit, reader = self.dataset.cache_limit, self.dataset.shards[shard]
        if not limit or self.dataset.cache_usage + reader.get_max_size() <= limit:
            self._fetch(shard)

    def _give_up(self, shard: int) -> bool:
        """Mark the shard as one to be fetched, or all processes would wait for it. This deletes its local files, so
        where they are the only ones, nothing is done."""
        stream = self._stream(shard)
        if stream.remote is None or _is_same(stream.remote, stream.local):
            return False
        with suppress(Exception):
            self.dataset.evict_shard(shard)
        return True

    def _stream(self, shard: int) -> Any:
        return self.dataset.streams[self.dataset.stream_per_shard[shard]]


def as_mds_source(data: Any, *, name: str | None) -> Source:
    """Wrap a `streaming.StreamingDataset` or `streaming.LocalDataset`.

    Raises:
        ValueError: for one that was told to shuffle, sample or replicate.
        TypeError: for other classes of `streaming`.
    """
    streaming = import_streaming()
    if not isinstance(data, streaming.StreamingDataset | streaming.LocalDataset):
        raise TypeError(
            f"cannot stream from streaming.{type(data).__name__}: pass streampack.MDSSource(local, remote), or a "
            "StreamingDataset or LocalDataset"
        )
    if isinstance(data, streaming.StreamingDataset):
        _refuse_own_order(data)
    return MDSDatasetSource(data, name=name)


def import_streaming() -> Any:
    """mosaicml-streaming, or an ImportError that says how to get it."""
    try:
        import streaming
    except ImportError as error:
        raise ImportError("MDS needs mosaicml-streaming: pip install 'streampack[mds]'") from error
    return streaming


def _refuse_own_order(dataset: Any) -> None:
    if dataset.shuffle:
        raise ValueError(
            "this StreamingDataset has shuffle=True: its order depends on ranks and workers, and shuffling happens "
            "here; pass it with shuffle=False, and PackedDataset(..., shuffle=True, seed=...)"
        )
    for number, stream in enumerate(dataset.streams):
        chosen, there = int(stream.choose), int(dataset.samples_per_stream[number])
        if chosen != there:
            raise ValueError(
                f"this StreamingDataset takes {chosen} samples an epoch of the {there} of stream {number} (proportion, "
                "repeat, choose or epoch_size), which it draws itself; here each example comes once per epoch: leave "
                "these out"
            )
    if dataset.batching_method != "random":
        raise ValueError(
            f"this StreamingDataset has batching_method={dataset.batching_method!r}, but batches are made of packed "
            "rows here; leave it out"
        )
    if (dataset.replication or 1) > 1:
        raise ValueError(
            f"this StreamingDataset has replication={dataset.replication}, but ranks are dealt here; leave it out, and "
            "pass PackedDataset(..., rank=, world_size=) of data parallelism: ranks with equal ones get equal rows"
        )


def _folders(
    local: str | os.PathLike[str], remote: str | os.PathLike[str] | None, split: str
) -> tuple[str, str | None]:
    """The local and the remote folder; no remote where both are one."""
    folder = os.path.expanduser(os.fspath(local))
    if "://" in folder:
        raise ValueError(f"local={folder!r} is not a folder of this machine; pass MDSSource(local, remote={folder!r})")
    folder = os.path.join(folder, split) if split else folder
    if remote is None:
        return folder, None
    there = os.path.expanduser(os.fspath(remote).removeprefix("file://"))
    there = f"{there.rstrip('/')}/{split}" if split else there
    return folder, None if _is_same(there, folder) else there


def _is_same(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _read_index(path: str, *, allow_unsafe_types: bool) -> list[Any]:
    from streaming.base.format import reader_from_json

    with open(path, "rb") as file:
        text = file.read()
    try:
        index = json.loads(text)
        version, infos = index["version"], index["shards"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an index of MDS shards ({error!r}); delete it, or write it again") from error
    if version != 2:
        raise ValueError(f"{path} has version {version}, this reads version 2; write the data again")
    shards = []
    for info in infos:
        if info["format"] != "mds":
            raise ValueError(f"{path} lists shards of format {info['format']!r}, not 'mds'; pass a LocalDataset of it")
        shard = reader_from_json(os.path.dirname(path), None, info)
        shard.validate(allow_unsafe_types)
        shards.append(shard)
    if not shards:
        raise ValueError(f"{path} lists no shards")
    return shards


def _offsets(file: BinaryIO, reader: Any) -> list[int]:
    """Where each sample of a shard begins, and the last one ends, from the head of its file."""
    head = np.frombuffer(file.read(4 * (reader.samples + 2)), np.uint32)
    offsets = head[1:].astype(np.int64)
    if head[0] != reader.samples or offsets[-1] != reader.raw_data.bytes or (np.diff(offsets) < 0).any():
        raise ValueError(f"{file.name} is damaged: its head does not fit index.json; delete it, or write it again")
    positions: list[int] = offsets.tolist()
    return positions


def _name(shards: Sequence[Any]) -> str:
    """What index.json says of the data, whatever folder it is in: the same for each way of opening it."""
    files = [
        [(info.basename, info.bytes, sorted(info.hashes.items())) for info in pair if info is not None]
        for shard in shards
        for pair in shard.file_pairs
    ]
    counts = [int(shard.samples) for shard in shards]
    digest = hashlib.sha256(repr((files, counts)).encode()).hexdigest()[:12]
    return f"MDS with {sum(counts)} examples in {len(shards)} shards ({digest})"


def _as_bytes(limit: int | str | None) -> int | None:
    from streaming.base.util import bytes_to_int

    return None if limit is None else int(bytes_to_int(limit))


def _files(reader: Any) -> list[tuple[str, int]]:
    """(path, bytes) of each raw file of a shard."""
    folder = os.path.join(reader.dirname, reader.split)
    return [(os.path.join(folder, raw.basename), int(raw.bytes)) for raw, _ in reader.file_pairs]


def _check_files(dataset: Any, reader: Any) -> None:
    for path, expected in _files(reader):
        try:
            found = os.path.getsize(path)
        except FileNotFoundError:
            if hasattr(dataset, "prepare_shard"):
                continue  # evicted just now: [i] fetches it again
            raise FileNotFoundError(
                f"{path} is missing, and a LocalDataset neither fetches nor decompresses; pass "
                f"streampack.MDSSource({reader.dirname!r}, remote=...)"
            ) from None
        if found != expected:
            raise ValueError(
                f"{path} has {found} bytes, where index.json says {expected}: it is damaged; delete it, to have it "
                "fetched again"
            )
