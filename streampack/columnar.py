"""Columnar files: which parts of a Parquet or Arrow file can each be read alone, and reading one from any row.

A Parquet file of 3 row groups has 3 parts, an Arrow file of 5 record batches 5. A file that ends early has a Fault in
the place of what is lost, so that it is never taken for a shorter one.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streampack.sources import Fault
from streampack.storage import LOCAL_PIECE, REMOTE_PIECE, File, Part, opened, opened_for_arrow

BATCH = 256
"""Rows of a Parquet file that are decoded at a time."""

_MAGIC = b"ARROW1"
_AFTER_MAGIC = 8


def parquet_parts(file: File) -> list[Part]:
    """The row groups of a Parquet file, from its footer.

    Raises:
        ValueError: for a local file whose footer is there, but damaged. (Errors of remote ones come as they are.)
    """
    with opened_for_arrow(file, memory_map=False) as source:
        try:
            footer = pq.read_metadata(source)
        except pa.ArrowInvalid:  # too short, or without the magic bytes of its end
            return [Part("cut short", 0, 1)]
        except OSError as error:
            if not _is_of_arrow(file, error):
                raise
            raise _damaged(file, "its footer", error) from error
    return [Part("row group", group, footer.row_group(group).num_rows) for group in range(footer.num_row_groups)]


def arrow_parts(file: File) -> list[Part]:
    """The record batches of an Arrow file; of a stream that is remote or has dictionaries, one part of all of them.

    Both formats are messages in succession; the file format has a footer that says where they lie. Rows are counted
    where that costs nothing: in local files, from the heads of the messages.
    """
    if file.is_remote:
        with opened(file) as remote:
            if remote.read(0, min(len(_MAGIC), remote.size)) != _MAGIC:
                return [Part("batches", 0, None)]
    with opened_for_arrow(file, memory_map=True) as source:
        is_file = _is_file(source)
        count = _count_batches(source) if is_file else None
        if count is not None and file.is_remote:
            return [Part("record batch", number, None) for number in range(count)]
        if file.is_remote:
            return [Part("cut short", 0, 1)]
        batches, has_dictionaries, is_whole = _walk(source, _AFTER_MAGIC if is_file else 0)
    if count is not None:
        rows = [rows for _, rows in batches]
        return [Part("record batch", number, rows[number] if len(rows) == count else None) for number in range(count)]
    if has_dictionaries:
        return [Part("cut short", 0, 1) if is_file else Part("batches", 0, None)]
    lost = [Part("cut short", 0, 1)] if is_file or not is_whole else []
    return [Part("batch at", place, rows) for place, rows in batches] + lost


def read_part(file: File, part: Part, *, start: int, columns: list[str] | None) -> Iterator[pa.Table | Fault]:
    """The rows `start`, `start + 1`, ... of a part, as tables of consecutive ones.

    Raises:
        ValueError: if the file was changed, or (a local one) is damaged. (Errors of remote ones come as they are.)
    """
    if part.kind == "batches":
        yield from _read_stream(file, start, columns)
        return
    with opened_for_arrow(file, memory_map=part.kind != "row group") as source:
        if part.kind == "cut short":
            if start == 0:
                yield _cut_short(file)
            return
        try:
            batches = (
                _row_group(file, source, part, columns) if part.kind == "row group" else _batch(source, part, columns)
            )
            for table in batches:
                if start < len(table):
                    yield _select(table.slice(start), columns)
                start = max(0, start - len(table))
        except (pa.ArrowException, OSError) as error:
            if not _is_of_arrow(file, error):
                raise
            raise _damaged(file, part.name, error) from error


def _row_group(file: File, source: Any, part: Part, columns: list[str] | None) -> Iterator[pa.Table]:
    # With buffers pages come one after the other; else a whole column of the row group is held, for each lane.
    buffer = REMOTE_PIECE if file.is_remote else LOCAL_PIECE
    reader = pq.ParquetFile(source, pre_buffer=False, buffer_size=buffer, page_checksum_verification=True)
    for batch in reader.iter_batches(BATCH, row_groups=[part.place], columns=columns, use_threads=False):
        yield pa.Table.from_batches([batch])


def _batch(source: Any, part: Part, columns: list[str] | None) -> Iterator[pa.Table]:
    if part.kind == "record batch":
        reader = pa.ipc.open_file(source)
        wanted = [number for number, name in enumerate(reader.schema.names) if columns is None or name in columns]
        if columns is not None and wanted:  # so that others are not fetched or decompressed
            reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
        yield pa.Table.from_batches([reader.get_batch(part.place)])
        return
    source.seek(_AFTER_MAGIC if _is_file(source) else 0)
    schema = pa.ipc.read_schema(source)
    source.seek(part.place)
    yield pa.Table.from_batches([pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)])


def _read_stream(file: File, start: int, columns: list[str] | None) -> Iterator[pa.Table | Fault]:
    with opened_for_arrow(file, memory_map=True) as source:
        try:
            for batch in pa.ipc.open_stream(source):
                if start < len(batch):
                    yield _select(pa.Table.from_batches([batch]).slice(start), columns)
                start -= min(start, len(batch))
        except (pa.ArrowException, OSError) as error:
            if source.tell() == file.size:
                if start == 0:
                    yield _cut_short(file)
                return
            if not _is_of_arrow(file, error):
                raise
            raise _damaged(file, "a record batch", error) from error


def _select(table: pa.Table, columns: list[str] | None) -> pa.Table:
    return table if columns is None else table.select([name for name in columns if name in table.column_names])


def _cut_short(file: File) -> Fault:
    return Fault("cut_short", f"{file.shown} ends early: what came after its {file.size} bytes is lost; fetch it again")


def _is_of_arrow(file: File, error: Exception) -> bool:
    """Whether an error tells of damaged data: not of the disk (those have a number), nor of a remote filesystem, which
    must come as it is, since whoever tries again knows it by its type."""
    return not file.is_remote and getattr(error, "errno", None) is None


def _damaged(file: File, what: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"{file.shown}, {what}: cannot be read ({reason}); fetch or write the file again")


def _is_file(source: Any) -> bool:
    return bool(source.read_at(len(_MAGIC), 0) == _MAGIC)


def _count_batches(source: Any) -> int | None:
    """None: there is no footer."""
    try:
        return int(pa.ipc.open_file(source).num_record_batches)
    except pa.ArrowInvalid:
        return None


def _walk(source: Any, begin: int) -> tuple[list[tuple[int, int]], bool, bool]:
    """((byte, rows) of each record batch, are there dictionaries, does it end where it should) of a local file."""
    batches: list[tuple[int, int]] = []
    kinds = set()
    source.seek(begin)
    while True:
        place = source.tell()
        try:
            message = pa.ipc.read_message(source)
        except EOFError:
            return batches, "dictionary" in kinds, "schema" in kinds
        except (pa.ArrowInvalid, OSError):
            return batches, "dictionary" in kinds, False
        kinds.add(message.type)
        if message.type == "record batch":  # read without columns, it tells its rows and nothing is decoded
            batches.append((place, pa.ipc.read_record_batch(message, pa.schema([])).num_rows))
