"""Storage: files on local disks or behind any fsspec URL, found by name and opened at any byte.

A file of 10 bytes gives `read(4, 8)`: its bytes 4 .. 7, and no others are fetched. Nothing that is opened outlives the
`with` that opened it, so a `File` goes to other processes, forked or spawned, as the plain values that it is.
"""

import glob
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import pyarrow as pa

LOCAL_PIECE = 256 << 10
REMOTE_PIECE = 4 << 20
"""Bytes to ask for at a time: of a disk few, since each lane may hold a piece; of a server as many as pay its delay."""

_URL = re.compile(r"[A-Za-z][\w+.-]+(://|::)")


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was when it was found."""

    path: str
    """Absolute local path, or URL."""
    size: int
    """Bytes."""
    shown: str
    """Its name in messages."""
    options: Mapping[str, Any]
    """Settings of its fsspec filesystem."""

    @property
    def is_remote(self) -> bool:
        return is_url(self.path)


PartKind = Literal["range", "compressed", "row group", "record batch", "batch at", "batches", "cut short"]
PART_KINDS: tuple[PartKind, ...] = get_args(PartKind)


class Part(NamedTuple):
    """What can be read alone of a file."""

    kind: PartKind
    """Of JSONL a range of bytes, or a compressed file; of Parquet a row group; of Arrow a record batch of the file
    format or of the stream format, or all batches of a stream; what is lost of a file that ends early."""
    place: int
    """The number of a row group or record batch; the byte where a range, or a batch of a stream, begins; else 0."""
    rows: int | None
    """None: not known before reading."""

    @property
    def name(self) -> str:
        """As people call it; "" where it is the whole file."""
        if self.kind in ("row group", "record batch"):
            return f"{self.kind} {self.place}"
        begins = {"range": f"from byte {self.place}", "batch at": f"record batch at byte {self.place}"}
        return begins.get(self.kind, "")


@dataclass(frozen=True, slots=True)
class Opened:
    """A file that can be read at any place."""

    read: Callable[[int, int], bytes]
    """The bytes from the first place up to, not with, the second. Fewer than that is an OSError."""
    size: int
    piece: int
    """Bytes to ask for at a time."""


def is_url(path: str) -> bool:
    return _URL.match(path) is not None


def find(pattern: str, options: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(path or URL, size in bytes) of the files that a path, glob or URL stands for, in no order.

    Raises:
        ValueError: if there are none, or a file has no known size.
    """
    if pattern.startswith(("file://", "local://")):
        pattern = pattern.partition("://")[2]
    found = _find_remote(pattern, options) if is_url(pattern) else _find_local(os.path.expanduser(pattern))
    if not found:
        here = "" if is_url(pattern) or os.path.isabs(pattern) else f" (in {os.getcwd()})"
        raise ValueError(f"no file matches {pattern!r}{here}")
    return found


@contextmanager
def opened(file: File) -> Iterator[Opened]:
    """A file to be read by places.

    Raises:
        ValueError: if its size is not what it was when it was found.
        OSError and the filesystem's own errors: as they come.
    """
    if not file.is_remote:
        with open(file.path, "rb") as local:
            _check_size(file, os.fstat(local.fileno()).st_size)
            yield Opened(_reading(local, file.shown), file.size, LOCAL_PIECE)
        return
    # Asked for here, in the process that reads: fsspec keeps filesystems by process, and none of them crosses a fork.
    filesystem, path = _filesystem(file.path, file.options)
    # Caches of fsspec read ahead, or anew what was read; here each byte that is needed is asked for once.
    with filesystem.open(path, "rb", cache_type="none") as remote:
        size = getattr(remote, "size", None)
        _check_size(file, filesystem.size(path) if size is None else size)
        yield Opened(_reading(remote, file.shown), file.size, REMOTE_PIECE)


@contextmanager
def opened_for_arrow(file: File, *, memory_map: bool) -> Iterator[Any]:
    """A file as pyarrow reads it: natively where it is local.

    Raises:
        As `opened`.
    """
    if file.is_remote:
        with opened(file) as remote, pa.PythonFile(_Seekable(remote), mode="r") as native:
            yield native
        return
    path = os.fsencode(file.path)
    with pa.memory_map(path) if memory_map else pa.OSFile(path) as local:
        _check_size(file, local.size())
        yield local


def _filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """(the filesystem of a URL, its path there)."""
    import fsspec  # type: ignore[import-untyped]  # it takes a while, and local files do without

    found: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    return found


class _Seekable(io.RawIOBase):
    """What was opened, as a file object with a position of its own (fsspec's `memory://` has one for all readers)."""

    def __init__(self, source: Opened) -> None:
        self.source = source
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.source.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.source.size - self.at)
        stop = self.at + (left if size is None or size < 0 else min(size, left))
        data = self.source.read(self.at, stop) if stop > self.at else b""
        self.at = stop
        return data


def _reading(file: Any, shown: str) -> Callable[[int, int], bytes]:
    def read(start: int, stop: int) -> bytes:
        file.seek(start)
        data: bytes = file.read(stop - start)
        if len(data) != stop - start:
            raise OSError(f"{shown}: {len(data)} bytes came where bytes {start} to {stop} were asked for")
        return data

    return read


def _check_size(file: File, size: int) -> None:
    if size != file.size:
        raise ValueError(
            f"{file.shown} has {size} bytes, and had {file.size} when it was listed: it was changed since; a stream "
            "needs files that stay as they are"
        )


def _find_local(pattern: str) -> list[tuple[str, int]]:
    paths = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    found = [(path, os.path.getsize(path)) for path in paths if os.path.isfile(path)]
    if not found and os.path.isdir(pattern):
        raise ValueError(f"{pattern!r} is a folder: say which of its files, e.g. {os.path.join(pattern, '*.jsonl')!r}")
    return found


def _find_remote(pattern: str, options: Mapping[str, Any]) -> list[tuple[str, int]]:
    filesystem, path = _filesystem(pattern, options)
    head, chain, rest = pattern.partition("::")
    if any(letter in pattern for letter in "*?["):  # (fsspec knows that the "?" of a web address is none)
        hidden_too = os.path.basename(path).startswith(".")  # as for local globs
        infos = [
            info
            for name, info in filesystem.glob(path, detail=True).items()
            if hidden_too or not os.path.basename(name).startswith(".")
        ]
    else:
        try:
            infos = [filesystem.info(path)]
        except FileNotFoundError:
            return []
    found = []
    for info in infos:
        if info["type"] == "directory":
            continue
        url = str(filesystem.unstrip_protocol(info["name"]))
        if chain:  # "zip://a.jsonl::s3://...": a file in another; "simplecache::s3://...": a cache before another
            url = f"{url}::{rest}" if "://" in head else f"{head}::{url}"
        if info.get("size") is None:
            raise ValueError(f"{url}: its server does not say its size, which a shard needs; download the file")
        found.append((url, int(info["size"])))
    return found
