"""The stream: sources, encoding and packing put together. What it gives depends on nothing else: no torch, no ranks."""

import bisect
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from streampack.blocks import BlockReader
from streampack.dealing import Deal
from streampack.encode import Encoder
from streampack.hosting import Given, Host, Message, in_order
from streampack.items import ItemReader, Transform
from streampack.lane_state import LaneState
from streampack.lanes import Lane
from streampack.mixture import Mix
from streampack.packing import Packer
from streampack.reading import ShardReader
from streampack.retry import ReadStats, Retry
from streampack.sources import Source, locate, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A source of the stream, and how its examples are encoded."""

    source: Source
    encoder: Encoder
    transform: Transform | None = None
    name: str | None = None
    """In a mixture."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One sequence of rows: for equal fields, equal rows in equal order, whoever hosts the lanes."""

    parts: Sequence[Part]
    """One source, or those of a mixture."""
    mix: Mix | None = None
    packer: Packer
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

    def messages(
        self,
        host: Host,
        *,
        first_epoch: int = 0,
        states: Mapping[int, LaneState] | None = None,
        closed: Callable[[], bool] | None = None,
    ) -> Iterator[Message]:
        """What the lanes of a host give in a pass from `first_epoch`; those with a state continue from it.

        closed: says whether the pass was closed, so that a reader which waits for the network gives up.
        """
        with closing(LaneOpener(self, first_epoch, states or {}, closed=closed, lanes=host.num_lanes)) as opener:
            for message in host.messages(opener):
                yield replace(message, reading=opener.read_stats())

    def rows(
        self, host: Host, *, first_epoch: int = 0, states: Mapping[int, LaneState] | None = None
    ) -> Iterator[Given]:
        """The same in order, where the host has all lanes of a rank."""
        with closing(LaneOpener(self, first_epoch, states or {}, lanes=host.num_lanes)) as opener:
            yield from in_order(host.messages(opener), num_workers=1)

    def deal(self, part: Part) -> Deal:
        """Which lane reads what of a source. The sources of a mixture have orders of their own, by their names."""
        seed = self.seed
        if part.name is not None:
            seed = int(np.random.SeedSequence((seed, zlib.crc32(part.name.encode()))).generate_state(1)[0])
        return Deal(num_shards=part.source.num_shards, lanes=self.lanes, seed=seed, shuffle=self.shuffle)

    @cached_property
    def first_shards(self) -> list[int]:
        """The number that the first shard of each part has among all."""
        return list(itertools.accumulate((part.source.num_shards for part in self.parts[:-1]), initial=0))

    def place(self, shard: int, index: int) -> tuple[str, int | str, int]:
        """(source, shard, index) of an example as a person knows them; in a mixture the source is its name there."""
        part, shard = self._part_of(shard)
        name = part.source.name if part.name is None else part.name
        return (name, *locate(part.source, shard, index))

    def where(self, shard: int, index: int) -> str:
        """The same for messages and lists of bad examples, as exact as the source knows it."""
        part, shard = self._part_of(shard)
        return where(part.source, shard, index)

    def _part_of(self, shard: int) -> tuple[Part, int]:
        firsts = self.first_shards
        at = bisect.bisect_right(firsts, shard) - 1
        return self.parts[at], shard - firsts[at]

    @property
    def num_shards(self) -> int:
        return sum(part.source.num_shards for part in self.parts)

    def identity(self) -> dict[str, Any]:
        """What identifies the stream in a state: a state with anything else here is refused. Plain values."""
        packer = self.packer
        mixed: dict[str, Any] = {}
        if self.mix is not None:
            names = [part.name for part in self.parts]
            mixed = {
                "weights": dict(zip(names, self.mix.weights, strict=True)),
                "by": self.mix.by,
                "stop": self.mix.stop,
            }
        sources = [part.source.name if part.name is None else f"{part.name}: {part.source.name}" for part in self.parts]
        return {
            "source": "; ".join(sources),
            "num_shards": self.num_shards,
            **mixed,
            "tokenizer": self.parts[0].encoder.fingerprint(),
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
    """Opens the lanes of a pass in one process, which share its readers. lanes: how many of them it has (default:
    all)."""

    def __init__(
        self,
        stream: Stream,
        first_epoch: int,
        states: Mapping[int, LaneState],
        *,
        closed: Callable[[], bool] | None = None,
        lanes: int | None = None,
    ) -> None:
        self.stream = stream
        self.first_epoch = first_epoch
        self.states = states
        self._first_shards = stream.first_shards
        self._deals = [stream.deal(part) for part in stream.parts]
        self._readers = [
            ShardReader(
                part.source,
                lanes=lanes or stream.lanes,
                select=part.encoder.select if part.transform is None else None,
                retry=stream.retry,
                closed=closed,
            )
            for part in stream.parts
        ]

    def read_stats(self) -> ReadStats:
        """What reading cost so far in this process, shards numbered among all."""
        found = ReadStats()
        for reader, first in zip(self._readers, self._first_shards, strict=True):
            of, shard = reader.reading, reader.reading.slowest_shard
            found = found.merged(replace(of, slowest_shard=None if shard is None else shard + first))
        return found

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def __call__(self, lane: int) -> Lane:
        stream = self.stream
        readers = [self._items(lane, place) for place in range(len(stream.parts))]
        stop = None if stream.epochs is None else self.first_epoch + stream.epochs
        state = self.states.get(lane) or LaneState.start(self.first_epoch, feeds=len(readers), mixed=bool(stream.mix))
        return Lane(readers, packer=stream.packer, stop_epoch=stop, state=state, mix=stream.mix)

    def _items(self, lane: int, place: int) -> ItemReader:
        stream, part, deal = self.stream, self.stream.parts[place], self._deals[place]
        return ItemReader(
            lane,
            blocks=BlockReader(self._readers[place], deal, lane=lane, size=stream.shuffle_block),
            encoder=part.encoder,
            transform=part.transform,
            shuffle=stream.shuffle,
            seed=deal.seed,
            limit=stream.max_example_len or (None if stream.packer.packing == "wrapped" else stream.packer.seq_len),
            multiple=stream.packer.pad_to_multiple_of,
            feed=place,
            first_shard=self._first_shards[place],
        )
