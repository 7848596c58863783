"""Lines: JSON objects, one a line, from a range of the bytes of a file or from a compressed file.

With ranges of 10 bytes, a file whose lines begin at the bytes 0, 4, 9, 27 and 30 gives three lines to the range 0 .. 9,
none to 10 .. 19 (the line that begins at 9 goes on through it), and one to each of 20 .. 29 and 30 .. 39. So a range
is found by a seek; what comes before is neither read nor parsed. Blank lines are no examples and are not counted.
"""

import bz2
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from streampack.sources import Example, Fault
from streampack.storage import Opened

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")

MARGIN = 16 << 10
"""Bytes asked for beyond a range at first, to finish its last line without a second request."""
EXCERPT = 80
"""Characters of a bad line in a message."""

_MARK = b"\xef\xbb\xbf"
_COMPRESSED_PIECE = 64 << 10

_decode = json.JSONDecoder().decode


def read_range(source: Opened, *, begin: int, end: int, start: int) -> Iterator[list[bytes]]:
    """The lines `start`, `start + 1`, ... of those that begin in the bytes begin .. end - 1, for `parse`."""
    yield from _lines((piece for _, piece in line_pieces(source, begin=begin, end=end)), start)


def read_compressed(source: Opened, *, compression: str, name: str, start: int) -> Iterator[list[bytes] | Fault]:
    """The lines `start`, `start + 1`, ... of a compressed file, for `parse`. One that ends early gives the lines that
    are whole and then a Fault.

    Raises:
        ValueError: where the compressed data is damaged.
    """
    stream = _Decompressed(source, compression, name)
    missing = yield from _lines(stream, start)
    if stream.cut_short and not missing:
        yield Fault("cut_short", f"the {compression} file ends early: what came after its {source.size} bytes is lost")


def parse(line: bytes, columns: list[str] | None) -> Example | Fault:
    """The example of a line, or what is wrong with it. columns: the keys to keep; None: all."""
    try:
        example = _decode(line.decode())
    except (ValueError, RecursionError) as error:  # those of UTF-8 and of JSON are ValueErrors
        return Fault("malformed", _what_is_wrong(line, error))
    if type(example) is not dict:
        what = f"the line is a JSON {type(example).__name__}, not an object: {_excerpt(line.decode().strip(), 0)}"
        return Fault("malformed", what)
    return example if columns is None else {column: example[column] for column in columns if column in example}


def place_of(source: Opened, *, begin: int, end: int, index: int) -> int:
    """The byte at which example `index` of a range begins.

    Raises:
        IndexError: if the range has fewer examples.
    """
    for first, piece in line_pieces(source, begin=begin, end=end):
        place = first
        for line in io.BytesIO(piece):
            if not line.isspace():
                if not index:
                    return place
                index -= 1
            place += len(line)
    raise IndexError(index)


def compressed_line_number(source: Opened, compression: str, name: str, index: int) -> int:
    """The number of the line, from 1, of example `index` of a compressed file.

    Raises:
        IndexError: if it has fewer examples.
    """
    all_lines = itertools.chain.from_iterable(map(io.BytesIO, _Decompressed(source, compression, name)))
    numbers = (number for number, line in enumerate(all_lines, start=1) if not line.isspace())
    for number in itertools.islice(numbers, index, None):
        return number
    raise IndexError(index)


def line_number(source: Opened, place: int) -> int:
    """The number of the line that begins at a byte, from 1."""
    starts = range(0, place, source.piece)
    return 1 + sum(source.read(start, min(start + source.piece, place)).count(b"\n") for start in starts)


def require(compression: str, name: str) -> None:
    """Raise ImportError, with what to install, if files of this compression cannot be read here."""
    if compression == ".zst":
        try:
            import zstandard  # noqa: F401
        except ImportError as error:
            raise ImportError(f"{name} is compressed with Zstandard: pip install zstandard") from error


def line_pieces(source: Opened, *, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(place, bytes) of whole lines, in pieces: all lines that begin in the bytes begin .. end - 1.

    That is what lies between the first newline at or after begin - 1 and the first at or after end - 1.
    """
    at = max(0, begin - 1)
    place = None if begin else 0  # where the line begins that `parts` holds; None: none has begun in this range
    parts: list[bytes] = []
    beyond = MARGIN
    while at < source.size:
        stop, beyond = _next_stop(source, at, end, beyond)
        data = source.read(at, stop)
        if place is None:
            newline = data.find(b"\n")
            if newline < 0 or at + newline + 1 >= end:
                if stop >= end - 1:
                    return
                at = stop
                continue
            at += newline + 1
            place, data = at, data[newline + 1 :]
        last = data.find(b"\n", max(0, end - 1 - at))
        cut = (last if last >= 0 else data.rfind(b"\n")) + 1
        if cut:
            yield _without_mark(place, b"".join([*parts, memoryview(data)[:cut]]))
            if last >= 0:
                return
            place, parts = at + cut, []
        parts.append(data[cut:])
        at = stop
    if place is not None and any(parts):
        yield _without_mark(place, b"".join(parts))


def _next_stop(source: Opened, at: int, end: int, beyond: int) -> tuple[int, int]:
    """(where the next piece ends, how many bytes to ask for after that, beyond the range)."""
    if at + source.piece + beyond < end:
        return at + source.piece, beyond
    if at < end:
        return min(end + beyond, source.size), beyond
    return min(at + beyond, source.size), min(2 * beyond, source.piece)  # the last line is long


def _without_mark(place: int, piece: bytes) -> tuple[int, bytes]:
    """The byte order mark that some editors put at the start of a file is no part of its first line."""
    return (len(_MARK), piece[len(_MARK) :]) if place == 0 and piece.startswith(_MARK) else (place, piece)


def _lines(pieces: Iterable[bytes], start: int) -> Generator[list[bytes], None, int]:
    """The lines that are not blank, from number `start` on; returns by how many fewer than `start` there are. (No
    Python code runs for each.)"""
    for piece in pieces:
        lines = list(itertools.filterfalse(bytes.isspace, io.BytesIO(piece)))
        if start < len(lines):
            yield lines[start:]
        start = max(0, start - len(lines))
    return start


def _what_is_wrong(line: bytes, error: Exception) -> str:
    text = line.decode(errors="backslashreplace").strip()
    if isinstance(error, UnicodeDecodeError):
        around = len(line[: error.start].decode())
        return f"the line is not UTF-8: {error.reason} (byte {error.start}), in {_excerpt(text, around)}"
    if isinstance(error, json.JSONDecodeError):
        what = f"{error.msg.removesuffix(' at')} (character {error.pos})"
        whole = " (is this one document over several lines?)" if text in ("[", "{") else ""
        return f"the line is not JSON: {what}, in {_excerpt(text, error.pos)}{whole}"
    return f"the line cannot be parsed: {error}: {_excerpt(text, 0)}"


def _excerpt(text: str, around: int) -> str:
    first = max(0, around - EXCERPT // 2)
    more = "..." if len(text) > first + EXCERPT else ""
    return f"{'...' if first else ''}{text[first : first + EXCERPT]!r}{more}"


class _Decompressed:
    """The whole lines of a compressed file, in pieces. `cut_short` says afterwards whether the file ended early."""

    def __init__(self, source: Opened, compression: str, name: str) -> None:
        self.source = source
        self.new_frame = _decompressors(compression)
        self.name = name
        self.cut_short = False

    def __iter__(self) -> Iterator[bytes]:
        parts: list[bytes] = []
        place = 0
        for data in self._pieces():
            cut = data.rfind(b"\n") + 1
            if cut:
                piece = b"".join([*parts, memoryview(data)[:cut]])
                yield _without_mark(place, piece)[1]
                place, parts = place + len(piece), []
            parts.append(data[cut:])
        if not self.cut_short:  # else the last line is not whole
            yield _without_mark(place, b"".join(parts))[1]

    def _pieces(self) -> Iterator[bytes]:
        """What it holds: often several compressed files in succession ("frames"), sometimes with zeros after them."""
        frame, frames = self.new_frame(), 0
        begun = False
        for at in range(0, self.source.size, _COMPRESSED_PIECE):
            data = self.source.read(at, min(at + _COMPRESSED_PIECE, self.source.size))
            while data := data if begun else data.lstrip(b"\0"):
                try:
                    plain = frame.decompress(data)
                except Exception as error:  # each library has a class of its own
                    raise ValueError(
                        f"{self.name} is damaged near its byte {at}: {error}; fetch or write it again"
                    ) from error
                begun = not frame.eof
                if plain:
                    yield plain
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame, frames = self.new_frame(), frames + 1
        self.cut_short = begun or not frames


def _decompressors(compression: str) -> Callable[[], Any]:
    """Makes decompressors, one for a frame."""
    if compression == ".zst":
        import zstandard

        # Large public sets are often written with windows of 2 GiB (`--long=31`).
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
    return {".gz": lambda: zlib.decompressobj(31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}[
        compression
    ]
