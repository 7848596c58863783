"""Files: JSONL, Parquet and Arrow files as a source, on a local disk or behind any fsspec URL.

A shard is what can be read alone: of a JSONL file a range of 4 MiB (the lines that begin in it), of a Parquet file a
row group, of an Arrow file a record batch; a compressed JSONL file is one. So JSONL files of 10 MiB and 1 MiB are 3 + 1
shards, many lanes share a big file, and a position in the middle of it costs a seek.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from streampack import columnar, lines
from streampack.order import IntArray
from streampack.sources import Example, Fault, in_short
from streampack.storage import PART_KINDS, File, Part, find, is_url, opened

FormatName = Literal["jsonl", "parquet", "arrow"]
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

RANGE_BYTES = 4 << 20
MOST_RANGES = 1 << 16
"""A range of a JSONL file has RANGE_BYTES, or twice, four times, ... that many where there would be more ranges."""

_ENDINGS: dict[str, FormatName] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_UNKNOWN = -1
_THREADS = 16
_MOST_COUNTED = 4 << 30
"""Bytes before a line that are read to tell its number; of a line further on its byte is told."""


class Files:
    """JSONL, Parquet and Arrow files, local or remote, as a source. Their names and sizes are looked up once, here.

    A line of a JSONL file is one example, an object; blank lines are none. What cannot be read (a line that is not
    JSON, the rest of a file that ends early) is a `Fault` in its place, and `bad=` says what happens to it.

    Args:
        files: paths, globs ("data/**/*.jsonl") and fsspec URLs ("s3://bucket/*.parquet", "hf://datasets/..."): one, or
            a list. A file found twice counts once; files are in the order of their names.
        columns: the top-level columns (keys) to read; default: all. One that a file lacks is not in its examples.
        storage_options: settings of the fsspec filesystem (keys, endpoints).
        format: "jsonl", "parquet" or "arrow"; default: by the ending, .jsonl, .json or .ndjson (also with .gz, .zst,
            .bz2 or .xz behind it), .parquet or .arrow (both IPC formats, so what `save_to_disk` writes too).
        name: identifies the data in states; default: names, without the folders that all files share, and sizes.

    Raises:
        ValueError: if nothing is found or an ending is not understood; when reading, if a file was changed since.
        ImportError: for a .zst file without zstandard.
    """

    concurrent = True

    def __init__(
        self,
        files: Paths,
        *,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        format: FormatName | None = None,
        name: str | None = None,
    ) -> None:
        _check(columns, format)
        self.columns = None if columns is None else list(dict.fromkeys(columns))
        self._options = dict(storage_options or {})
        self._folder = os.getcwd()
        found = _find_all(files, self._options)
        kinds = [_kind_of(file, format) for file in found]
        cut = [file.size for file, kind in zip(found, kinds, strict=True) if kind == ("jsonl", "")]
        self._range_bytes = _choose_range_bytes(cut)
        self._keep_names(found)
        self._keep_parts(_parts(found, kinds, self._range_bytes))
        if not self.num_shards:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise ValueError(f"{found[0].shown}{more}: there is nothing in it")
        is_cut = max(cut, default=0) > self._range_bytes
        self.name = name or _identity(found, self._range_bytes if is_cut else None)

    def _keep_names(self, found: list[File]) -> None:
        """In buffers of Arrow and NumPy: a list of 100,000 would be copied into every forked worker, bit by bit."""
        names = [file.path if file.is_remote else file.shown for file in found]
        self._prefix = names[0][: _num_shared(names)]
        self._names = pa.array([os.fsencode(name[len(self._prefix) :]) for name in names], pa.large_binary())
        self._sizes: IntArray = np.array([file.size for file in found], dtype=np.int64)

    def _keep_parts(self, parts: list[list[Part]]) -> None:
        table = [
            (file, PART_KINDS.index(part.kind), part.place, _UNKNOWN if part.rows is None else part.rows)
            for file, of_file in enumerate(parts)
            for part in of_file
        ]
        columns = np.array(table, dtype=np.int64).reshape(-1, 4).T
        self._file_of, self._kinds, self._places, self._rows = (np.ascontiguousarray(column) for column in columns)
        self.num_shards = len(table)
        self.num_examples = None if (self._rows == _UNKNOWN).any() else int(self._rows.sum())
        # Arrow files that are mapped into memory: the local ones, of which alone rows are known.
        at_hand = {PART_KINDS.index("record batch"), PART_KINDS.index("batch at")}
        self.random_access = self.num_examples is not None and at_hand.issuperset(self._kinds.tolist())

    def read(self, shard: int, start: int) -> Iterator[Example | Fault | pa.Table]:
        """The examples `start`, `start + 1`, ... of a shard. Opens its file anew, and nothing else.

        Raises:
            ValueError: if the file was changed or is damaged, with its name.
            OSError and the errors of its filesystem: as they come.
        """
        for some in self.read_unparsed(shard, start):
            if isinstance(some, list):
                yield from map(self.parse_one, some)
            else:
                yield some

    def read_unparsed(self, shard: int, start: int) -> Iterator[list[bytes] | Fault | pa.Table]:
        """The same with lists of lines, not parsed yet, in the place of the examples of JSONL files."""
        file, part = self._shard(shard)
        if part.rows is not None and start >= part.rows:
            return
        if part.kind not in ("range", "compressed"):
            yield from columnar.read_part(file, part, start=start, columns=self.columns)
            return
        with opened(file) as source:
            if part.kind == "range":
                begin, end = self._range(file, part)
                yield from lines.read_range(source, begin=begin, end=end, start=start)
            else:
                compression = _compression(file.shown)
                yield from lines.read_compressed(source, compression=compression, name=file.shown, start=start)

    def parse_one(self, raw: bytes) -> Example | Fault:
        """The example of a line, or what is wrong with it."""
        return lines.parse(raw, self.columns)

    def shard_sizes(self) -> IntArray | None:
        """Bytes of each shard where all are ranges of JSONL files, or all compressed ones; else None."""
        kinds = {PART_KINDS[kind] for kind in self._kinds.tolist()}
        files: IntArray = self._sizes[self._file_of]
        ranges: IntArray = np.minimum(files - self._places, self._range_bytes)
        return ranges if kinds == {"range"} else files if kinds == {"compressed"} else None

    def locate(self, shard: int, index: int) -> tuple[str, int]:
        """("data/a.jsonl from byte 4194304", index), ("a.parquet row group 3", index). Reads nothing."""
        file, part = self._shard(shard)
        return f"{file.shown} {self._part_name(file, part, shard)}".rstrip(), index

    def describe(self, shard: int, index: int) -> str:
        """The place of an example: "data/a.jsonl, line 70123", of remote files "s3://bucket/a.jsonl, byte 4194999";
        "a.parquet, row group 3, row 17". Reads the file up to there to count lines; where that fails, it does without.
        """
        file, part = self._shard(shard)
        try:
            if part.kind == "range":
                return f"{file.shown}, {self._line(file, part, index)}"
            if part.kind == "compressed" and not file.is_remote:
                with opened(file) as source:
                    number = lines.compressed_line_number(source, _compression(file.shown), file.shown, index)
                return f"{file.shown}, line {number}"
            if part.kind == "cut short":
                return file.shown
        except Exception:  # it is called to tell of another error, which must not be lost
            pass
        what = "example" if part.kind in ("range", "compressed") else "row"
        return ", ".join(filter(None, [file.shown, self._part_name(file, part, shard), f"{what} {index}"]))

    def _line(self, file: File, part: Part, index: int) -> str:
        with opened(file) as source:
            begin, end = self._range(file, part)
            place = lines.place_of(source, begin=begin, end=end, index=index)
            if file.is_remote or place > _MOST_COUNTED:
                return f"byte {place}"
            return f"line {lines.line_number(source, place)}"

    def _range(self, file: File, part: Part) -> tuple[int, int]:
        return part.place, min(part.place + self._range_bytes, file.size)

    def _part_name(self, file: File, part: Part, shard: int) -> str:
        if part.kind == "batch at":
            return f"record batch {shard - int(np.searchsorted(self._file_of, self._file_of[shard]))}"
        return "" if part.kind == "range" and file.size <= self._range_bytes else part.name

    def _name_of(self, number: int) -> str:
        return self._prefix + os.fsdecode(self._names[number].as_py())

    def _shard(self, shard: int) -> tuple[File, Part]:
        number, rows = int(self._file_of[shard]), int(self._rows[shard])
        file = _file(self._name_of(number), int(self._sizes[number]), self._folder, self._options)
        kind = PART_KINDS[self._kinds[shard]]
        return file, Part(kind, int(self._places[shard]), None if rows == _UNKNOWN else rows)


def _file(name: str, size: int, folder: str, options: Mapping[str, Any]) -> File:
    """A file by its name as the user knows it; `folder`: where relative paths start."""
    if is_url(name):
        return File(name, size, _without_query(name), options)
    return File(os.path.abspath(os.path.join(folder, name)), size, name, options)


def _without_query(url: str) -> str:
    """Queries of web addresses hold keys, which belong neither into messages nor into states."""
    return url.partition("?")[0] if url.startswith(("http://", "https://")) else url


def _find_all(files: Paths, options: Mapping[str, Any]) -> list[File]:
    patterns = [files] if isinstance(files, str | os.PathLike) else list(files)
    if not patterns:
        raise ValueError(f"files={files!r}: pass at least one path, glob or URL")
    found: dict[str, File] = {}
    for pattern in patterns:
        path = os.fspath(pattern) if isinstance(pattern, str | os.PathLike) else pattern
        if not isinstance(path, str):
            raise TypeError(f"files: {pattern!r} is {type(pattern).__name__}, not a path or URL")
        for name, size in find(path, options):
            file = _file(name, size, os.getcwd(), options)
            found.setdefault(file.path, file)
    return [found[path] for path in sorted(found)]


def _kind_of(file: File, given: FormatName | None) -> tuple[FormatName, str]:
    """(format, compression or "") of a file."""
    compression = _compression(file.shown)
    ending = os.path.splitext(_inner(file.shown).lower().removesuffix(compression))[1]
    kind = given or _ENDINGS.get(ending)
    if kind is None or (compression and kind != "jsonl"):
        raise ValueError(
            f"{file.shown}: its ending is not one of {', '.join(_ENDINGS)} (the first three also with "
            f"{', '.join(lines.COMPRESSIONS)} behind); pass files that are, or Files(..., format='jsonl')"
        )
    lines.require(compression, file.shown)
    return kind, compression


def _inner(shown: str) -> str:
    """The name that says what a file is: of chained URLs ("zip://a.jsonl::s3://...") the innermost."""
    return next((link for link in shown.split("::") if "://" in link), shown)


def _compression(shown: str) -> str:
    ending = os.path.splitext(_inner(shown).lower())[1]
    return ending if ending in lines.COMPRESSIONS else ""


def _choose_range_bytes(sizes: list[int]) -> int:
    """Of sizes alone, so that it is the same everywhere and for ever."""
    size, array = RANGE_BYTES, np.array(sizes, dtype=np.int64)
    while len(array) and size < array.max() and (-(-array // size)).sum() > MOST_RANGES:
        size *= 2
    return size


def _parts(found: list[File], kinds: list[tuple[FormatName, str]], range_bytes: int) -> list[list[Part]]:
    def parts_of(file: File, kind: tuple[FormatName, str]) -> list[Part]:
        if kind == ("jsonl", ""):
            return [Part("range", begin, None) for begin in range(0, file.size, range_bytes)]
        if kind[0] == "jsonl":
            return [Part("compressed", 0, None)]
        return columnar.parquet_parts(file) if kind[0] == "parquet" else columnar.arrow_parts(file)

    if all(kind == "jsonl" for kind, _ in kinds):  # nothing is read
        return list(map(parts_of, found, kinds))
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(parts_of, found, kinds))


def _identity(found: list[File], range_bytes: int | None) -> str:
    """Names and sizes, wherever the files lie: a set that was moved is the same set."""
    names = [f"{name}:{file.size}" for name, file in zip(_relative(found), found, strict=True)]
    text = in_short(names)
    return text if range_bytes is None else f"{text} in ranges of {range_bytes} bytes"


def _relative(found: list[File]) -> list[str]:
    """Names without the folders that all files share (all of the same kind of storage, if there are several)."""
    paths = [_without_query(_inner(file.path)).split("/") for file in found]
    folders: dict[str, list[list[str]]] = {}
    for path in paths:
        folders.setdefault(path[0], []).append(path[:-1])
    shared = {storage: _num_shared(of_it) for storage, of_it in folders.items()}
    return ["/".join(path[shared[path[0]] :]) for path in paths]


def _num_shared(sequences: list[Any]) -> int:
    """How many characters, or folders, all of them begin with."""
    first, last = min(sequences), max(sequences)
    return next(
        (n for n, (one, other) in enumerate(zip(first, last, strict=False)) if one != other),
        min(map(len, (first, last))),
    )


def _check(columns: Sequence[str] | None, format: FormatName | None) -> None:
    if columns is not None and (isinstance(columns, str) or not all(isinstance(column, str) for column in columns)):
        raise TypeError(f"columns={columns!r}: pass a list of names, e.g. ['text']")
    if columns is not None and not columns:
        raise ValueError("columns=[]: name at least one column, or leave it out to read all")
    if format is not None and format not in get_args(FormatName):
        raise ValueError(f"format={format!r}: pass one of {', '.join(map(repr, get_args(FormatName)))}, or None")
