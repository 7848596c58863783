"""Blocks: consecutive examples of a lane, as Arrow tables or Python dicts, with one way to get at their columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streampack.order import IntArray
from streampack.sources import Example, Fault, Source, where

Chunk: TypeAlias = pa.Table | list[Any]
"""Consecutive examples of one shard, as a list of dicts; of `bytes` where they are not parsed yet. A fault stands for
one that could not be read."""
Hint: TypeAlias = str | Callable[[Sequence[str]], str]
"""What to do where a column is missing; it may depend on the columns that are there."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a block of a lane starts. Ordered as the lane reads."""

    epoch: int
    turn: int
    """Which of the shards that the lane reads in this epoch, counted from 0."""
    index: int
    """The next example of that shard; where it is dealt example by example, the next group of `lanes` examples."""
    block: int
    """Number of the block in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The examples that a lane reads, shuffles and encodes together."""

    source: Source
    position: Position
    shards: IntArray
    """int64 [n]: the shard of each example."""
    indices: IntArray
    """int64 [n]: its index there."""
    data: Chunk

    def __len__(self) -> int:
        return len(self.indices)

    def examples(self, picks: Sequence[int]) -> list[Example | Fault]:
        """The picked examples as dicts."""
        if isinstance(self.data, pa.Table):
            rows: list[Example | Fault] = self.data.take(pa.array(picks, type=pa.int64())).to_pylist()
            return rows
        return [self.data[pick] for pick in picks]

    def select(self, picks: Sequence[int], data: list[Example | Fault]) -> "Block":
        """The picked examples with other data."""
        return replace(self, shards=self.shards[picks], indices=self.indices[picks], data=data)

    def where(self, pick: int) -> str:
        return where(self.source, int(self.shards[pick]), int(self.indices[pick]))

    @property
    def names(self) -> list[str]:
        """The names of the columns of a table."""
        assert isinstance(self.data, pa.Table)
        return list(self.data.column_names)

    def holds_numbers(self, name: str) -> bool:
        """Whether a column of a table holds single values, not lists (or nothing but nulls)."""
        assert isinstance(self.data, pa.Table)
        kind = self.data.schema.field(name).type
        return not (_is_list(kind) or pa.types.is_null(kind))

    def value(self, pick: int, name: str) -> Any:
        """One value of an example that is a dict, as `Column.array` gives it."""
        example: Any = self.data[pick]
        return _as_array(example[name])

    def take(self, name: str, picks: Sequence[int], *, hint: Hint = "") -> list[Any]:
        """The picked values of a column as Python objects, or Faults as in `column`."""
        if not isinstance(self.data, pa.Table):
            return [_value(self.data[pick], name, hint) for pick in picks]
        if name not in self.data.column_names:
            return [missing(name, self.names, hint)] * len(picks)
        taken: list[Any] = self.data.column(name).take(pa.array(picks, type=pa.int64())).to_pylist()
        return taken

    def column(self, name: str, *, hint: Hint = "") -> "Column":
        """A column by name. Where an example has no such column, or is none, its value is a Fault that says so.

        Args:
            name: of the column.
            hint: what to do where it is missing.
        """
        if isinstance(self.data, pa.Table):
            if name in self.data.column_names:
                return Column(self.data.column(name))
            return Column([missing(name, self.names, hint)] * len(self))
        return Column([_value(example, name, hint) for example in self.data])


def _value(example: Any, name: str, hint: Hint) -> Any:
    if isinstance(example, Fault):
        return example
    if not isinstance(example, Mapping):
        return Fault("type", f"the example is {type(example).__name__}, not a dict of columns")
    return example[name] if name in example else missing(name, list(map(str, example)), hint)


def missing(name: str, names: list[str], hint: Hint) -> Fault:
    """An example that has no such column. hint: what to do about it."""
    hint = hint if isinstance(hint, str) else hint(names)
    return Fault("missing", f"no column {name!r} (there are: {', '.join(names) or 'none'}); {hint}")


class Column:
    """One column of a block."""

    def __init__(self, values: pa.ChunkedArray | list[Any]) -> None:
        self._values = values
        self._lists: tuple[npt.NDArray[Any], list[int], list[bool]] | None = None
        if isinstance(values, pa.ChunkedArray) and _is_list(values.type):
            self._lists = _flatten(values)

    def holds_ids(self, *, below: int) -> bool:
        """All values are lists of integers 0 .. below - 1 (some may be null), kept as int32: none needs a look."""
        if self._lists is None:
            return False
        values = self._lists[0]
        return values.dtype == np.int32 and (not len(values) or 0 <= int(values.min()) <= int(values.max()) < below)

    @property
    def is_all_ones(self) -> bool:
        """All values are lists of ones (or true), as attention masks without padding are."""
        if self._lists is None:
            return False
        values = self._lists[0]
        return values.dtype.kind in "iub" and bool((values == 1).all())

    def array(self, pick: int) -> Any:
        """One value as a NumPy array where it is a list of numbers (list, array, CPU tensor), else as it is."""
        if self._lists is not None:
            values, offsets, valid = self._lists
            if not valid[pick]:
                return None
            piece = values[offsets[pick] : offsets[pick + 1]]
            return piece if piece.dtype != object else _as_array(piece.tolist())
        return _as_array(self._values[pick] if isinstance(self._values, list) else self._values[pick].as_py())

    def arrays(self, picks: Sequence[int]) -> list[Any]:
        """`array` of each."""
        if self._lists is None or self._lists[0].dtype == object:
            return [self.array(pick) for pick in picks]
        values, offsets, valid = self._lists
        return [values[offsets[pick] : offsets[pick + 1]] if valid[pick] else None for pick in picks]


def list_columns(table: pa.Table) -> list[str]:
    """The columns of a table that hold a list for each example."""
    return [field.name for field in table.schema if _is_list(field.type)]


def is_list_like(value: Any) -> bool:
    """Whether a value of an example that is a dict is a list, array or tensor."""
    return hasattr(value, "__len__") and not _is_text(value)


def concatenate(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks one after the other. Columns that some chunks lack, or hold as null, become null there."""
    if len(chunks) == 1:
        return chunks[0]
    if all(isinstance(chunk, pa.Table) for chunk in chunks):
        try:
            return pa.concat_tables(chunks, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # a column has another type in each: only dicts can hold that
            pass
    return [row for chunk in chunks for row in (chunk.to_pylist() if isinstance(chunk, pa.Table) else chunk)]


def take(chunk: Chunk, rows: IntArray) -> Chunk:
    """Some rows of a chunk. Those of a run share its memory; others are copied."""
    first, last = int(rows[0]), int(rows[-1]) + 1
    if isinstance(chunk, pa.Table):
        return chunk.slice(first, last - first) if last - first == len(rows) else chunk.take(pa.array(rows))
    return [chunk[row] for row in rows]


def sizes(chunk: Chunk) -> IntArray:
    """About how many bytes each example takes, int64 [n]: what bounds blocks and caches."""
    total = np.zeros(len(chunk), dtype=np.int64)
    if not isinstance(chunk, pa.Table):
        return np.array([size_of(row) for row in chunk], dtype=np.int64)
    for column in chunk.columns:
        if _is_list(column.type):
            total += 8 * _lengths(column, pc.list_value_length)
        elif any(is_type(column.type) for is_type in _TEXTS):
            total += _lengths(column, pc.binary_length)
    return total


def _lengths(column: pa.ChunkedArray, length: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> npt.NDArray[Any]:
    """The length of each value, 0 of null."""
    lengths = length(column)
    return (pc.fill_null(lengths, 0) if column.null_count else lengths).to_numpy()  # type: ignore[no-any-return]


def _as_array(value: Any) -> Any:
    """A list of numbers, an array or a CPU tensor as an array; anything else as it is, for the caller to refuse."""
    if value is None or _is_text(value) or isinstance(value, Fault):
        return value
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # ragged, or a tensor that NumPy cannot take
        return value


def size_of(example: Any) -> int:
    """About how many bytes an example takes that is a dict: its texts and lists."""
    if type(example) is not dict and not isinstance(example, Mapping):
        return 0
    size = 0
    for value in example.values():
        size += len(value) if isinstance(value, str) and value.isascii() else _size(value)
    return size


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    return 8 * len(value) if hasattr(value, "__len__") and not isinstance(value, Mapping) else 0


_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes | Mapping)


def _fits(values: npt.NDArray[Any], dtype: type[np.signedinteger[Any]]) -> bool:
    limits = np.iinfo(dtype)
    return bool(len(values) and values.min() >= limits.min and values.max() <= limits.max)


def _flatten(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], list[int], list[bool]]:
    """(values, offsets [n + 1], not null [n]) of a column of lists. Integers become int32 where they fit."""
    valid = column.is_valid().to_numpy().tolist() if column.null_count else [True] * len(column)
    offsets = np.concatenate([[0], np.cumsum(_lengths(column, pc.list_value_length))])
    inner = pc.list_flatten(column)
    if inner.null_count or not (pa.types.is_integer(inner.type) or pa.types.is_boolean(inner.type)):
        values = np.array(inner.to_pylist(), dtype=object)  # its dtype tells the caller that these are not integers
    else:
        values = inner.to_numpy()
    if values.dtype.kind in "iu" and (np.can_cast(values.dtype, np.int32) or _fits(values, np.int32)):
        # A copy, which lets go of the table, unless it is one already.
        values = values.astype(np.int32, copy=not values.flags.owndata)
    return values, offsets.tolist(), valid  # lists: single elements are fetched much faster than from arrays
