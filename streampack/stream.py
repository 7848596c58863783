"""The stream: source, encoding and packing put together. What it gives depends on nothing else: no torch, no ranks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streampack.blocks import BlockReader, ShardReader
from streampack.dealing import Deal
from streampack.encode import Encoder
from streampack.hosting import Given, Host, in_order
from streampack.items import ItemReader, Transform
from streampack.lanes import Lane, Packer
from streampack.retry import Retry
from streampack.sources import Source
from streampack.state import LaneState


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One sequence of rows: for equal fields, equal rows in equal order, whoever hosts the lanes."""

    source: Source
    encoder: Encoder
    packer: Packer
    transform: Transform | None = None
    lanes: int = 16
    shuffle: bool = True
    shuffle_block: int = 1024
    seed: int = 0
    epochs: int | None = 1
    max_example_len: int | None = None
    """Longest fragment in tokens; None: seq_len (or no limit, with `wrapped`)."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """More that identifies the stream: settings of the encoding."""
    retry: Retry = field(default_factory=Retry)
    """How reading goes on after transient errors; not part of the identity."""

    def open_lanes(
        self, *, first_epoch: int, states: Mapping[int, LaneState], closed: Callable[[], bool] | None = None
    ) -> "LaneOpener":
        """Opens lanes of a pass from `first_epoch`; those with a state continue from it. One for each process.

        closed: says whether the pass was closed, so that a reader which waits for the network gives up.
        """
        return LaneOpener(self, first_epoch, states, closed)

    def rows(
        self, host: Host, *, first_epoch: int = 0, states: Mapping[int, LaneState] | None = None
    ) -> Iterator[Given]:
        """All that one host's lanes give, in order, in this process."""
        opener = self.open_lanes(first_epoch=first_epoch, states=states or {})
        return in_order(host.messages(opener), num_workers=1)

    def deal(self) -> Deal:
        """Which lane reads what."""
        return Deal(num_shards=self.source.num_shards, lanes=self.lanes, seed=self.seed, shuffle=self.shuffle)

    def identity(self) -> dict[str, Any]:
        """What identifies the stream in a state: a state with anything else here is refused. Plain values."""
        packer = self.packer
        return {
            "source": self.source.name,
            "num_shards": self.source.num_shards,
            "tokenizer": self.encoder.fingerprint(),
            "seq_len": packer.seq_len,
            "lanes": self.lanes,
            "buffer_size": packer.buffer_size,
            "packing": packer.packing,
            "max_examples_per_row": packer.max_examples,
            "pad_to_multiple_of": packer.pad_to_multiple_of,
            "max_example_len": self.max_example_len,
            "shuffle": self.shuffle,
            "shuffle_block": self.shuffle_block,
            "seed": self.seed,
            "epochs": self.epochs,
            **self.names,
        }


class LaneOpener:
    """Opens the lanes of a pass in one process, which share its readers."""

    def __init__(
        self,
        stream: Stream,
        first_epoch: int,
        states: Mapping[int, LaneState],
        closed: Callable[[], bool] | None = None,
    ) -> None:
        self.stream = stream
        self.first_epoch = first_epoch
        self.states = states
        needed = stream.encoder.needed if stream.transform is None else None
        self._reader = ShardReader(stream.source, needed=needed, retry=stream.retry, closed=closed)
        self._deal = stream.deal()

    def __call__(self, lane: int) -> Lane:
        stream, packer = self.stream, self.stream.packer
        items = ItemReader(
            lane,
            blocks=BlockReader(self._reader, self._deal, lane=lane, size=stream.shuffle_block),
            encoder=stream.encoder,
            transform=stream.transform,
            shuffle=stream.shuffle,
            seed=stream.seed,
            limit=stream.max_example_len or (None if packer.packing == "wrapped" else packer.seq_len),
            multiple=packer.pad_to_multiple_of,
        )
        stop = None if stream.epochs is None else self.first_epoch + stream.epochs
        state = self.states.get(lane) or LaneState.start(self.first_epoch)
        return Lane(items, packer=packer, stop_epoch=stop, state=state)
