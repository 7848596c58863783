"""Describe: what a saved state says, for people: where the stream was, what it had given, what it would refuse."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from streampack.dealing import Deal
from streampack.lane_state import COUNTS, FeedState, LaneState
from streampack.packing import UNPACKED
from streampack.state import StateError, check, check_is_state

_NEEDED = ("source", "tokenizer", "num_shards", "lanes", "seq_len", "packing", "seed", "shuffle")
"""Of what identifies the stream, what is described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlace:
    """Where a lane is in a source."""

    lane: int
    source: str | None
    """Of a mixture: its name."""
    epoch: int
    share: float | None
    """Of that epoch that is out; None: not known without the source."""
    shard: int | None
    """Where it reads; of a mixture, whose shards a state does not tell apart: None."""
    index: int
    """Of that shard, where the block begins in which the oldest waiting example is: the number of an example, or,
    where the shard is dealt to all lanes example by example, of a group of them."""
    waiting: int
    """Examples that were read and are not out yet, or not with all of their tokens."""
    taken: int
    """Examples taken from the source since the pass began."""
    rows: int
    """That the lane has given in this pass."""
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescription:
    """See `describe_state`."""

    version: int
    stream: dict[str, Any]
    """What identifies the stream."""
    epochs: tuple[int, int | None]
    """First epoch of the pass, and the one before which it ends (None: never)."""
    ended: bool
    rows: int
    """Handed out in the pass by all ranks."""
    next_row: int
    rank: int
    world_size: int
    worker: tuple[int, int]
    share: float | None
    """Of the present epoch, about: the mean of the lanes of which it is known; None: not known without the source."""
    lanes_begun: int
    places: list[LanePlace]
    """Lane by lane, and of a mixture source by source."""
    totals: dict[str, int]
    """Counts since the stream began, see `PackedLoader.stats`."""
    fill: float | None
    """Share of the rows' cells that hold tokens; None: rows have no fixed length, and a state does not tell of batches.
    """
    refuses: list[str]
    """Where it cannot be loaded."""
    allows: list[str]
    """What may change."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """See `diff_states`."""

    stream: dict[str, tuple[Any, Any]]
    """What identifies the streams, where they differ: a state is not loaded where any of it does."""
    place: dict[str, tuple[Any, Any]]
    """Epochs, rows, ranks: where they differ."""
    counts: dict[str, tuple[int, int]]
    """Counts since the streams began, where they differ."""
    lanes: dict[int, tuple[int, int]]
    """Rows in the pass of the lanes that are not in the same place."""

    @property
    def is_empty(self) -> bool:
        """Both say the same."""
        return not (self.stream or self.place or self.counts or self.lanes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def describe_state(state: Mapping[str, Any]) -> StateDescription:
    """What a state says that `state_dict()` returned, or that was read from a checkpoint. Reads no data.

    Raises:
        StateError: for what is no state, one of another version, or a damaged one.
    """
    check_is_state(state)
    check(state, stream=state["stream"])
    stream = dict(state["stream"])
    missing = [key for key in _NEEDED if key not in stream]
    if missing:
        raise StateError(
            f"the state has no {missing[0]!r} of its stream: it is damaged; pass what state_dict() returned"
        )
    lanes = {int(lane): LaneState.from_json(text) for lane, text in state["lanes"].items()}
    # One for all lanes: it keeps the order that they share.
    deal = Deal(num_shards=stream["num_shards"], lanes=stream["lanes"], seed=stream["seed"], shuffle=stream["shuffle"])
    names = list(stream.get("weights", [None]))
    places = [place for number, lane in sorted(lanes.items()) for place in _places(deal, names, number, lane)]
    totals = _totals(state, lanes)
    cells = totals["rows"] * stream["seq_len"] if stream["packing"] not in UNPACKED else None
    known = [place.share for place in places if place.share is not None]
    begun = len(lanes)
    is_known = len(known) >= (len(places) if "weights" in stream else 1)
    share = sum(known) / len(known) * begun / stream["lanes"] if known and is_known else None
    return StateDescription(
        version=state["version"],
        stream=stream,
        epochs=(state["pass"][0], state["pass"][1]),
        ended=state["ended"],
        rows=state["rows"],
        next_row=state["row"],
        rank=state["rank"],
        world_size=state["world_size"],
        worker=(state["worker"][0], state["worker"][1]),
        share=0.0 if not lanes else share,
        lanes_begun=begun,
        places=places,
        totals=totals,
        fill=None if cells is None else totals["tokens"] / cells if cells else 0.0,
        refuses=_refuses(state),
        allows=_allows(state),
    )


def _places(deal: Deal, names: Sequence[str | None], number: int, lane: LaneState) -> list[LanePlace]:
    """names: of the sources of a mixture; [None] of a single one."""
    return [
        LanePlace(
            lane=number,
            source=name,
            epoch=feed.position.epoch,
            share=1.0 if lane.done else _share(deal, number, feed) if name is None else None,
            shard=_shard(deal, number, feed) if name is None else None,
            index=feed.position.index,
            waiting=feed.waiting.count(1),
            taken=feed.first + len(feed.waiting),
            rows=lane.counts[0],
            done=lane.done,
        )
        for name, feed in zip(names, lane.feeds, strict=True)
    ]


def _share(deal: Deal, lane: int, feed: FeedState) -> float | None:
    """By the size of the epoch before; in the first one as if the shards to come were as long as those that were read,
    of which the lane has all examples, or one of so many lanes. Before a shard was read nothing is known."""
    _epoch, first, size = feed.epoch
    out = feed.head[0] - first - feed.waiting.count(1)
    if not size:
        _, is_dealt = deal.turns(epoch=feed.position.epoch, lane=lane)
        parts = np.where(is_dealt, 1 / deal.lanes, 1.0)
        read = feed.first - first - feed.position.index
        passed = parts[: feed.position.turn].sum()
        if read <= 0 or not passed:
            return None
        size = read / passed * parts.sum()
    return float(min(1.0, out / size))


def _shard(deal: Deal, lane: int, feed: FeedState) -> int | None:
    shards, _ = deal.turns(epoch=feed.position.epoch, lane=lane)
    turn = feed.position.turn
    return int(shards[turn]) if turn < len(shards) else None


def _totals(state: Mapping[str, Any], lanes: Mapping[int, LaneState]) -> dict[str, int]:
    totals = {name: int(state["totals"].get(name, 0)) for name in COUNTS}
    for lane in lanes.values():
        for name, count in zip(COUNTS, lane.counts, strict=True):
            totals[name] += count
    return totals


def _refuses(state: Mapping[str, Any]) -> list[str]:
    stream = state["stream"]
    refused = []
    if state["world_size"] > 1:
        refused.append(
            f"it is of rank {state['rank']} of {state['world_size']} alone: any other rank, until merge_states() has "
            "put the states of all ranks together"
        )
    if state["worker"][1] > 1:
        refused.append(f"it is of worker {state['worker'][0]} of {state['worker'][1]} alone: any other worker")
    if stream.get("transform") is not None:
        refused.append(f"a stream without the transform {stream['transform']!r}")
    names = ", ".join(name for name in stream if name not in ("source", "tokenizer", "transform"))
    refused.append(f"another source ({stream['source']})")
    refused.append(f"another tokenizer ({stream['tokenizer']})")
    refused.append(f"other settings: {names}")
    ranks = [count for count in range(1, stream["lanes"] + 1) if stream["lanes"] % count == 0]
    refused.append(f"a number of ranks that does not divide lanes={stream['lanes']}: use {_or(ranks)}")
    return refused


def _allows(state: Mapping[str, Any]) -> list[str]:
    allowed = ["batch size, DataLoader workers, prefetching, layout"]
    if "weights" in state["stream"]:
        allowed.append("other weights of the mixture, with change_weights=True")
    return allowed


def _or(numbers: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def diff_states(a: Mapping[str, Any], b: Mapping[str, Any]) -> StateDifference:
    """How two states differ: of other streams, or how far one is ahead of the other. Reads no data.

    Raises:
        StateError: for what is no state, or one of another version.
    """
    one, other = describe_state(a), describe_state(b)
    names = [*one.stream, *(name for name in other.stream if name not in one.stream)]
    stream = {name: (one.stream.get(name), other.stream.get(name)) for name in names}
    fields = ("epochs", "ended", "rows", "next_row", "rank", "world_size", "worker")
    place = {name: (getattr(one, name), getattr(other, name)) for name in fields}
    counts = {name: (one.totals[name], other.totals[name]) for name in COUNTS}
    rows = [{place.lane: place.rows for place in each.places} for each in (one, other)]
    lanes = {
        lane: (rows[0].get(lane, 0), rows[1].get(lane, 0))
        for lane in sorted({*rows[0], *rows[1]})
        if a["lanes"].get(str(lane)) != b["lanes"].get(str(lane))
    }
    return StateDifference(stream=_unequal(stream), place=_unequal(place), counts=_unequal(counts), lanes=lanes)


def _unequal(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}
