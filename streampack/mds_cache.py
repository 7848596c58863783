"""MDS shards as files in a local folder, fetched from a remote one. Several processes and runs may share the folder,
and any of them may be killed at any time: nothing is kept in shared memory.

A shard's file is there whole or not at all: it is written under another name, checked, and renamed. One process fetches
a shard while the others wait for its lock, which the system opens when that process dies. A file that is being read may
be evicted by another process: reading goes on from the open file.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

OWN = ".streampack"
"""The folder, in the local one, of locks and of files that are not complete yet."""
LOCK_POLL_SECONDS = 0.01
BUFFER_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Where files are fetched from: a folder, or what mosaicml-streaming can download (s3://, gs://, hf:// ...)."""

    folder: str
    attempts: int
    timeout: float
    """Seconds for each attempt."""

    def download(self, basename: str, to: str) -> None:
        """Fetch one file. Whatever is at `to` is replaced."""
        from streaming.base.storage import CloudDownloader
        from streaming.base.util import retry

        source = f"{self.folder.rstrip('/')}/{basename}"

        def attempt() -> None:
            with suppress(FileNotFoundError):
                os.remove(to)  # of a run that was killed: the downloader takes any file for the whole one
            CloudDownloader.direct_download(source, to, self.timeout)

        retry(num_attempts=self.attempts)(attempt)()


def fetch_index(folder: str, remote: Remote | None) -> str:
    """The path of index.json in the local folder, fetched if it is not there.

    Raises:
        FileNotFoundError: if it is not there, nor a remote to fetch it from.
    """
    path = os.path.join(folder, "index.json")
    if not os.path.exists(path):
        if remote is None:
            raise FileNotFoundError(f"there is no {path}: pass the folder that MDSWriter wrote to, or remote=...")
        with locked(folder, "index.json"):
            if not os.path.exists(path):
                part = _own_path(folder, "index.json", "part")
                remote.download("index.json", part)
                os.replace(part, path)
    return path


class ShardCache:
    """The shard files of one MDS folder.

    Args:
        folder: the local folder.
        remote: where to fetch files from that are not there; None: the folder has all of them (some compressed).
        shards: mosaicml-streaming's readers of the shards, as index.json lists them.
        limit: bytes that the files may take; before a shard is fetched, others make room: those read to their end
            first, then those opened longest ago. None: no limit.
    """

    def __init__(self, folder: str, remote: Remote | None, *, shards: Sequence[Any], limit: int | None) -> None:
        self.folder = folder
        self.remote = remote
        self.shards = shards
        self.limit = limit
        largest = max((_room_for(shard) for shard in shards), default=0)
        if limit is not None and limit < largest:
            raise ValueError(
                f"cache_limit={limit} bytes is less than the largest shard of {folder} needs ({largest}); pass room "
                "for all lanes of a process, best with the shard that comes next for each"
            )

    def open(self, shard: int) -> BinaryIO:
        """The raw file of a shard, open at its start, fetched or decompressed if it is not there.

        Raises:
            FileNotFoundError, ValueError: for a file that is missing or damaged, with the remedy.
        """
        file = self._open_if_whole(shard) or self._fetch(shard, ahead=False)
        assert file is not None
        if self.limit is not None:
            self._set_time(shard, None)
        return file

    def fetch_ahead(self, shard: int) -> None:
        """Fetch a shard that is read later, if there is room or can be made of shards that were read to their end."""
        file = self._open_if_whole(shard) or self._fetch(shard, ahead=True)
        if file is not None:
            file.close()

    def done(self, shard: int) -> None:
        """A shard was read to its end: it is the first to make room for others."""
        if self.limit is not None:
            self._set_time(shard, (0, 0))

    # ---- fetching ------------------------------------------------------------------------------------------------

    def _open_if_whole(self, shard: int) -> BinaryIO | None:
        raw = self.shards[shard].raw_data
        try:
            file = open(self._path(raw), "rb", buffering=BUFFER_BYTES)  # noqa: SIM115
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size == raw.bytes:
            return file
        file.close()
        return None

    def _fetch(self, shard: int, *, ahead: bool) -> BinaryIO | None:
        reader = self.shards[shard]
        raw, path = reader.raw_data, self._path(reader.raw_data)
        if self.remote is None and not reader.compression:
            self._refuse(path, raw.bytes)
        with locked(self.folder, raw.basename):
            file = self._open_if_whole(shard)  # another process may have fetched it meanwhile
            if file is not None or not self._make_room(reader, ahead=ahead):
                return file
            part = _own_path(self.folder, raw.basename, "part")
            if reader.compression:
                data = _decompress(reader.compression, self._zip_data(reader), path)
                verify(data, raw, path)
                with open(part, "wb") as out:
                    out.write(data)
            else:
                assert self.remote is not None
                self.remote.download(raw.basename, part)
                verify(_read(part), raw, f"{raw.basename} of {self.remote.folder}")
            # Opened before it can be evicted; on the disk before it has its name, also if the machine goes down.
            file = open(part, "rb", buffering=BUFFER_BYTES)  # noqa: SIM115
            os.fsync(file.fileno())
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(part, path)
            with suppress(FileNotFoundError):
                os.remove(_own_path(self.folder, raw.basename, "room"))
            return file

    def _zip_data(self, reader: Any) -> bytes:
        """The compressed file: that of the local folder, else fetched and not kept."""
        info = reader.zip_data
        path = self._path(info)
        if _size(path) == info.bytes:
            data = _read(path)
            verify(data, info, path)
            return data
        if self.remote is None:
            self._refuse(path, info.bytes)
        assert self.remote is not None
        part = _own_path(self.folder, info.basename, "part")
        self.remote.download(info.basename, part)
        data = _read(part)
        os.remove(part)
        verify(data, info, f"{info.basename} of {self.remote.folder}")
        return data

    def _refuse(self, path: str, expected: int) -> None:
        found = _size(path)
        if found is None:
            raise FileNotFoundError(f"{path} is missing, and there is no remote to fetch it from: pass remote=...")
        raise ValueError(
            f"{path} has {found} bytes, where index.json says {expected}: it is damaged, and there is no remote to "
            "fetch it from; write it again, or pass remote=..."
        )

    # ---- room ----------------------------------------------------------------------------------------------------

    def _make_room(self, reader: Any, *, ahead: bool) -> bool:
        """Evict until the shard fits below the limit; `ahead`: only what was read to its end, else say False."""
        if self.limit is None:
            return True
        needed = _room_for(reader)
        with locked(self.folder, "room"):
            used = self._reserved()  # before the files: what is done meanwhile is counted twice, not left out
            files = sorted(self._present())
            used += sum(size for _, _, size in files)
            for time, path, size in files:
                if used + needed <= self.limit or (ahead and time > 0):
                    break
                with suppress(FileNotFoundError):
                    os.remove(path)
                used -= size
            if ahead and used + needed > self.limit:
                return False
            with open(_own_path(self.folder, reader.raw_data.basename, "room"), "w") as file:
                file.write(str(needed))
        return True

    def _reserved(self) -> int:
        """Bytes that other processes (and threads) are fetching now: they hold the lock of their shard meanwhile."""
        total = 0
        for name in os.listdir(os.path.join(self.folder, OWN)):
            path = os.path.join(self.folder, OWN, name)
            if name.endswith(".room"):
                with suppress(FileNotFoundError):  # done just now
                    try:
                        with FileLock(f"{path.removesuffix('.room')}.lock").acquire(timeout=0):
                            os.remove(path)  # of a process that was killed
                    except Timeout:
                        total += int(_read(path))
        return total

    def _present(self) -> list[tuple[int, str, int]]:
        """(time of last use, path, size) of each file of a shard that is in the local folder."""
        found = []
        for shard in self.shards:
            for info in (shard.raw_data, shard.zip_data):
                if info is not None:
                    with suppress(FileNotFoundError):
                        status = os.stat(self._path(info))
                        found.append((status.st_mtime_ns, self._path(info), status.st_size))
        return found

    def _set_time(self, shard: int, times: tuple[int, int] | None) -> None:
        with suppress(FileNotFoundError):  # evicted by another process
            os.utime(self._path(self.shards[shard].raw_data), times)

    def _path(self, info: Any) -> str:
        return os.path.join(self.folder, info.basename)


class Background:
    """Calls a function for one shard at a time, in a thread that lives while there is something to do.

    Errors are swallowed: reading the shard will meet them again, where they can be told to somebody.
    """

    MOST = 64
    """Shards that wait; of more, the oldest are dropped."""

    def __init__(self, fetch: Callable[[int], None], *, daemon: bool) -> None:
        self._fetch = fetch
        self._daemon = daemon
        self._waiting: deque[int] = deque(maxlen=self.MOST)
        self._thread: Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: a copy in another process begins with nothing to do."""
        return {**self.__dict__, "_waiting": deque(maxlen=self.MOST), "_thread": None}

    def __call__(self, shard: int) -> None:
        if shard not in self._waiting:
            self._waiting.append(shard)
        # After a fork the thread of the parent is not alive here.
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._work, name="streampack-prefetch", daemon=self._daemon)
            self._thread.start()

    def _work(self) -> None:
        while self._waiting:
            with suppress(Exception):
                self._fetch(self._waiting.popleft())


def locked(folder: str, name: str) -> AbstractContextManager[Any]:
    """One process (and one of its threads) at a time."""
    return FileLock(_own_path(folder, name, "lock")).acquire(poll_interval=LOCK_POLL_SECONDS)


def verify(data: bytes, info: Any, what: str) -> None:
    """Compare a file with its size and hashes in index.json.

    Raises:
        ValueError: if it differs.
    """
    from streaming.base.hashing import get_hash, is_hash

    if len(data) != info.bytes:
        raise ValueError(
            f"{what} has {len(data)} bytes, where index.json says {info.bytes}: it is damaged, or was written anew; "
            "then empty the local folder"
        )
    for algorithm, expected in info.hashes.items():
        if is_hash(algorithm) and get_hash(algorithm, data) != expected:
            raise ValueError(
                f"{what}: its {algorithm} is {get_hash(algorithm, data)}, where index.json says {expected}: it is "
                "damaged, or was written anew; delete it, or empty the local folder"
            )


def _decompress(compression: str, data: bytes, what: str) -> bytes:
    from streaming.base.compression import decompress

    try:
        raw: bytes = decompress(compression, data)
    except Exception as error:
        raise ValueError(f"{what} cannot be decompressed ({compression}): {error}; write it again") from error
    return raw


def _own_path(folder: str, basename: str, kind: str) -> str:
    """A merged index names files in subfolders; locks and parts of all of them lie in one folder."""
    own = os.path.join(folder, OWN)
    try:
        os.makedirs(own, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make the folder {own}, to fetch or decompress shards: {error.strerror}; pass a folder that can be "
            f"written to, MDSSource(local, remote={folder!r})"
        ) from error
    return os.path.join(own, f"{basename.replace('/', '--')}.{kind}")


def _room_for(reader: Any) -> int:
    return int(reader.raw_data.bytes) + (int(reader.zip_data.bytes) if reader.zip_data is not None else 0)


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
