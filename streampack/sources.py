"""Sources: where examples come from, as shards that can each be read alone from any index.

A source of your own is one small class; nothing needs to be inherited:

    class Lines:
        def __init__(self, paths):
            self.paths = sorted(paths)                      # the same order on every machine
            self.name = " ".join(self.paths)                # identifies the data in saved states
            self.num_shards = len(self.paths)

        def read(self, shard, start):                       # examples start, start + 1, ... of one shard
            with open(self.paths[shard]) as file:
                for line in itertools.islice(file, start, None):
                    yield {"text": line}

`read` must give the same examples in the same order each time, and be picklable with its object (open files in `read`).
It may yield `pyarrow.Table`s of consecutive examples instead of single ones: that is faster.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import pyarrow as pa

from streampack.arguments import packages_of

Example = Mapping[str, Any]

FaultReason = Literal[
    "malformed",
    "cut_short",
    "null",
    "missing",
    "type",
    "ragged",
    "labels",
    "padded",
    "vocabulary",
    "template",
    "targets",
]
FAULTS: tuple[FaultReason, ...] = get_args(FaultReason)
"""Why an example is bad: it cannot be parsed (JSON, UTF-8); its file ends early; a column is null, not there, of a
wrong type, ragged; labels contradict the ids; it is padded; ids are outside of the vocabulary; the chat template fails
on it, or makes a text of it in which nothing says what is a target."""


class Fault:
    """What is wrong with an example, with the value. A source yields one in the place of an example that it cannot
    read, so that those after it keep their indices; `bad=` says what happens to it."""

    __slots__ = ("reason", "what")

    def __init__(self, reason: FaultReason, what: str) -> None:
        assert reason in FAULTS
        self.reason = reason
        self.what = what

    def __repr__(self) -> str:
        return f"Fault({self.reason!r}, {self.what!r})"


class BadExample(NamedTuple):
    """An example that bad="drop" left out."""

    where: str
    """Source, shard and index; of a plain text file its line."""
    reason: str
    what: str
    """What is wrong, with the value."""


@runtime_checkable
class Source(Protocol):
    """What streampack asks of a source.

    `read` may go on in another thread than it began in, but only one runs at a time, unless the source says that it is
    `concurrent`.

    Optional: `num_examples` (int or None), from which statistics say the share of an epoch; `random_access` (bool),
    where seeking and reading single examples cost nothing; `concurrent` (bool): several shards may be read at the same
    time, by threads, so that a thread reads ahead; `locate(shard, index)`, see `locate`, which reads nothing;
    `describe(shard, index)`, a text like "a.jsonl, line 17" for messages about an example, which may read the source
    but must not raise; `prefetch(shard)`, called when a lane begins a shard with the one that it reads next, to fetch
    it in the background; `sizes(table)`, about how many bytes each example of a table takes, int64 [n], where it cannot
    be seen from the table; `shard_sizes()`, int64 [num_shards], for estimates from some of the shards: what their
    tokens are about proportional to (bytes), or None. `read_unparsed(shard, start)` and `parse_one(raw)`, used where
    one class defines them and `read`: where examples take longer to parse than to find, `read_unparsed` gives lists of
    consecutive ones as `bytes`, and `parse_one` makes an example (or a Fault) of one, so that a process parses only its
    own.
    """

    @property
    def name(self) -> str:
        """Identifies the data: a state saved with another name is refused."""

    @property
    def num_shards(self) -> int:
        """How many shards there are; at least 1."""

    def read(self, shard: int, start: int) -> Iterator[Example | Fault | pa.Table]:
        """The examples `start`, `start + 1`, ... of a shard, in a fixed order, to its end."""


class SequenceSource:
    """A list, a map-style dataset, anything with `len()` and `[i]`: random access, so seeking costs nothing.

    Shards are runs of `RUN` consecutive examples, so that lanes get even shares and shuffling reaches across the data.
    """

    RUN = 64
    random_access = True

    def __init__(self, sequence: Any, *, name: str | None = None) -> None:
        self.sequence = sequence
        self.num_examples = len(sequence)
        self.num_shards = max(1, -(-self.num_examples // self.RUN))
        self.name = name or f"{type(sequence).__name__} of {self.num_examples} examples"

    def read(self, shard: int, start: int) -> Iterator[Example]:
        for index in range(shard * self.RUN + start, min((shard + 1) * self.RUN, self.num_examples)):
            yield self.sequence[index]

    def locate(self, shard: int, index: int) -> tuple[int, int]:
        return 0, shard * self.RUN + index


class FunctionSource:
    """A plain function `shard -> iterator of examples`. Seeking runs the function and passes over what came before.

    Args:
        function: called with a shard number in 0 .. num_shards - 1; must be picklable (defined at module level) for
            DataLoader workers that are spawned.
        num_shards: how many shards there are.
        name: identifies the data in states; default: the function's qualified name.
    """

    def __init__(self, function: Callable[[int], Any], *, num_shards: int, name: str | None = None) -> None:
        if num_shards < 1:
            raise ValueError(f"num_shards={num_shards}: a FunctionSource needs at least 1 shard")
        self.function = function
        self.num_shards = num_shards
        self.name = name or f"{getattr(function, '__qualname__', type(function).__name__)} of {num_shards} shards"

    def read(self, shard: int, start: int) -> Iterator[Example]:
        return itertools.islice(iter(self.function(shard)), start, None)


def as_source(data: Any, *, lanes: int, name: str | None = None) -> Source:
    """Wrap whatever a user hands over as a Source.

    Args:
        data: a Source, a `datasets.IterableDataset` or `datasets.Dataset`, a `streaming.StreamingDataset` or
            `streaming.LocalDataset`, or a sequence / map-style dataset.
        lanes: lanes of the stream; a Parquet stream with fewer shards than this is cut into its row groups.
        name: identifies the data in states instead of what the source would say itself.

    Raises:
        TypeError: for anything else, with what to do about it.
    """
    if "datasets" in packages_of(data):
        from streampack.huggingface import as_huggingface_source

        return as_huggingface_source(data, lanes=lanes, name=name)
    if any(kind.__module__.startswith("streaming.base.") for kind in type(data).__mro__):
        from streampack.mds import as_mds_source

        return as_mds_source(data, name=name)
    if isinstance(data, Source):
        if name is not None and name != data.name:
            raise ValueError(f"source_name={name!r}: this source names itself {data.name!r}; set its .name instead")
        if data.num_shards < 1:
            raise ValueError(f"source {data.name!r} has num_shards={data.num_shards}: did its files match nothing?")
        return data
    is_stream = any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)  # torch's has a __getitem__ too
    is_sequence = (
        hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes | Mapping)
    )
    if is_sequence and not is_stream:
        return SequenceSource(data, name=name)
    raise TypeError(
        f"cannot stream from {type(data).__name__}: pass a datasets.IterableDataset or Dataset, a list or map-style "
        "dataset, streampack.FunctionSource(shard -> iterator, num_shards=...), or an object with `name`, "
        "`num_shards` and `read(shard, start)`"
    )


def in_short(files: list[str]) -> str:
    """Many file names in the name of a source: the first, the last, and a digest of all."""
    if len(files) <= 4:
        return " ".join(files)
    digest = hashlib.sha256("\n".join(files).encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{files[0]} .. {files[-1]}, {len(files)} files ({digest})"


def locate(source: Source, shard: int, index: int) -> tuple[int | str, int]:
    """(shard, index) as a person knows them: a source's own `locate(shard, index)` if it has one."""
    own = getattr(source, "locate", None)
    return own(shard, index) if own else (shard, index)


def parser_of(source: Source) -> Callable[[bytes], Example | Fault] | None:
    """A source's `parse_one`, where examples are read by `read_unparsed`; not where its class inherits that, or the
    object was given another `read`, which must not be passed by."""
    own = {"read", "read_unparsed", "parse_one"} <= vars(type(source)).keys()
    return source.parse_one if own and "read" not in getattr(source, "__dict__", ()) else None  # type: ignore[attr-defined]


def where(source: Source, shard: int, index: int, *, may_read: bool = True) -> str:
    """The place of an example, for error messages: a source's own `describe(shard, index)` if it has one.

    may_read: False where it is reading that failed, and `describe` might wait for the same server again.
    """
    describe = getattr(source, "describe", None)
    if describe and may_read:
        return f"source {source.name!r}, {describe(shard, index)}"
    shard_name, place = locate(source, shard, index)
    return f"source {source.name!r}, shard {shard_name}, index {place}"
