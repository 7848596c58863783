"""Progress of a pass: where it starts, the newest state of each lane among the rows handed out, and statistics."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from streampack.hosting import Given, Host
from streampack.items import Bad
from streampack.lane_state import BAD, COUNTS, FeedState, LaneState
from streampack.retry import ReadStats
from streampack.state import VERSION, StateError
from streampack.stream import Stream

BAD_LISTED = 1000
HISTORY = 16
"""Batches back for which `state(batches=...)` can still be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a pass begins on one rank."""

    first_epoch: int
    rank: int
    world_size: int
    row: int = 0
    rows: int = 0
    """Rows of the pass that all ranks together have handed out before."""
    resume_after: int = -1
    states: dict[int, LaneState] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    """Counts of the passes before."""
    of_worker: tuple[int, int] = (0, 1)
    """(worker, workers) whose lanes the states are about: those of a worker alone know nothing of the others."""

    def host(self, stream: Stream, *, worker: int = 0, num_workers: int = 1, rows_per_message: int = 1) -> Host:
        return Host(
            lanes=stream.lanes,
            first_row=self.row,
            rank=self.rank,
            world_size=self.world_size,
            worker=worker,
            num_workers=num_workers,
            resume_after=self.resume_after,
            rows_per_message=rows_per_message,
            ahead=self._ahead(stream.lanes),
        )

    def _ahead(self, lanes: int) -> dict[int, int]:
        """By lane, how many more turns than others of this rank it has had: where lanes have ended, those that are left
        get their turns sooner, and ranks are no longer at the same place of the cycle."""
        turns = {}
        worker, workers = self.of_worker
        for place in range(worker, lanes // self.world_size, workers):
            lane = (self.row + place * self.world_size + self.rank) % lanes
            state = self.states.get(lane)
            if state is None or not state.done:
                rows = 0 if state is None else state.counts[0]
                turns[lane] = rows - (lane < self.row % lanes) - (place <= self.resume_after)
        least = min(turns.values(), default=0)
        return {lane: turn - least for lane, turn in turns.items() if turn > least}

    @staticmethod
    def of(state: Mapping[str, Any], *, rank: int, world_size: int, worker: int = 0, num_workers: int = 1) -> "Start":
        """Where a state (already checked to be of this stream) says.

        Raises:
            StateError: for the state of another rank or worker alone.
        """
        saved_rank, saved_world = state["rank"], state["world_size"]
        if saved_world > 1 and (saved_rank, saved_world) != (rank, world_size):
            raise StateError(
                f"the state is of rank {saved_rank} of {saved_world} alone, this is rank {rank} of {world_size}; load "
                "streampack.merge_states([the state of every rank])"
            )
        saved_worker, saved_workers = state["worker"]
        if saved_workers > 1 and (saved_worker, saved_workers) != (worker, num_workers):
            raise StateError(
                f"the state is of worker {saved_worker} of {saved_workers} alone, this is worker {worker} of "
                f"{num_workers}; use the same num_workers, or PackedLoader, which resumes with any number"
            )
        lanes = {int(lane): LaneState.from_json(text) for lane, text in state["lanes"].items()}
        totals = dict(state["totals"])
        if state["ended"] and saved_workers == 1:
            for lane_state in lanes.values():
                totals = {key: totals[key] + count for key, count in zip(COUNTS, lane_state.counts, strict=True)}
        if saved_world == 1 and rank > 0:  # of all ranks together: one of them keeps it, so that merging counts it once
            totals = dict.fromkeys(COUNTS, 0)
        if state["ended"] and saved_workers == 1:  # a worker alone: others of its pass may still have rows
            return Start(first_epoch=state["pass"][1], rank=rank, world_size=world_size, totals=totals)
        return Start(
            first_epoch=state["pass"][0],
            rank=rank,
            world_size=world_size,
            row=state["row"],
            rows=state["rows"],
            resume_after=state["after"],
            states=lanes,
            totals=totals,
            of_worker=(saved_worker, saved_workers),
        )


class Progress:
    """What one rank has handed out of a pass."""

    def __init__(self, stream: Stream, start: Start) -> None:
        self.stream = stream
        self.start = start
        self.host = start.host(stream)
        self.lanes = dict(start.states)
        self.row, self.rows = start.row, start.rows
        self.batches = 0
        self.last: Given | None = None
        self.bad: deque[Bad] = deque(maxlen=BAD_LISTED)
        """Bad examples left out on the way to what was handed out."""
        self.reading: dict[int, ReadStats] = {}
        """What reading has cost in each worker."""
        self.filler_rows = self.cut_rows = self.cut_tokens = 0
        self._counts_cells = stream.packer.row_len is None
        self._batch_cells = self._batch_tokens = 0  # where the number of rows does not tell them
        self.ended = False
        """The pass is over: the next one begins with the next epoch."""
        # By lane, the examples that began in the rows of its plan that are out. After a resume: about as many.
        self._begun = {lane: state.about_begun for lane, state in start.states.items()}
        self._changed: dict[int, LaneState | None] = {}
        self._texts: dict[int, tuple[LaneState, str]] = {}
        # What each of the last batches replaced: (row, rows, the lanes it changed as they were before).
        self._before = start.row, start.rows
        self._history: deque[tuple[int, int, dict[int, LaneState | None]]] = deque(maxlen=HISTORY)

    def take(self, given: Given) -> None:
        """A row is handed out (or a lane has ended)."""
        before, planned = self.lanes.get(given.lane), given.state.planned
        begun = self._begun.get(given.lane, 0) if before is not None and 0 < before.planned < planned else 0
        if planned and given.row is not None:
            begun += sum(origin[3] == 0 for origin in given.row.origin)
        self._begun[given.lane] = begun if planned else 0
        self._changed.setdefault(given.lane, before)
        self.lanes[given.lane] = given.state
        self.last = given
        self.bad.extend(given.bad)
        if given.row is not None:
            if self._counts_cells:
                self._batch_tokens += given.row.num_tokens
            self.row = self.host.row_after(given)
            self.rows += self.start.world_size

    def leave(self, given: list[Given]) -> None:
        """The pass ends without these rows."""
        for one in given:
            if one.row is None:
                self.take(one)
            else:
                self.cut_rows += 1
                self.cut_tokens += one.row.num_tokens

    def end_batch(self, *, cells: int = 0) -> None:
        """The rows taken since the last call were one batch. cells: of it, where rows have no fixed length."""
        self._batch_cells += cells
        self.batches += 1
        self._history.append((*self._before, self._changed))
        self._before = self.row, self.rows
        self._changed = {}

    def state(self, *, batches: int | None = None) -> dict[str, Any]:
        """The state after all that was taken, or after the first `batches` batches of this pass, without what was taken
        since (of a batch that an interrupt kept from being handed out).

        Raises:
            StateError: for a number of batches that is not among the last few.
        """
        all_taken = batches is None or (self.ended and batches == self.batches)
        lanes, row, rows = (self.lanes, self.row, self.rows) if all_taken else self._as_of(batches)
        return {
            "version": VERSION,
            "stream": self.stream.identity(),
            "pass": self.epochs,
            "row": row,
            "after": -1,
            "rows": rows,
            "rank": self.start.rank,
            "world_size": self.start.world_size,
            "worker": [0, 1],
            "ended": self.ended and batches in (None, self.batches),
            "totals": dict(self.start.totals),
            "lanes": {
                str(lane): self._text(lane, state)
                for lane, state in sorted(lanes.items())
                if state is not None and self._hosts(lane)
            },
        }

    def _text(self, lane: int, state: LaneState) -> str:
        """A lane's state as JSON; most lanes have not changed since the last time."""
        known, text = self._texts.get(lane, (None, ""))
        if known is not state:
            text = state.to_json()
            self._texts[lane] = state, text
        return text

    def worker_state(self, *, worker: int, num_workers: int) -> dict[str, Any]:
        """The state of one worker of several: its lanes, and how far it is in the cycle over all lanes."""
        state = self.state()
        if num_workers > 1:
            cycle, place = (self.last.cycle, self.last.place) if self.last else (0, self.start.resume_after)
            state.update(row=self.start.row + cycle * self.stream.lanes, after=place, worker=[worker, num_workers])
        return state

    def _as_of(self, batches: Any) -> tuple[Mapping[int, LaneState | None], int, int]:
        if not isinstance(batches, int):
            raise TypeError(f"state_dict(batches={batches!r}): pass a number of batches, an int")
        lanes: dict[int, LaneState | None] = dict(self.lanes)
        back = self.batches - batches
        if not 0 <= back <= len(self._history):
            raise StateError(
                f"state_dict(batches={batches}): this pass has handed out {self.batches} batches since it began or "
                f"resumed; the states after {self.batches - len(self._history)} .. {self.batches} are kept"
            )
        lanes.update(self._changed)
        for _, _, before in list(self._history)[: -back - 1 : -1]:
            lanes.update(before)
        row, rows = self._history[-back][:2] if back else self._before
        return lanes, row, rows

    @property
    def epochs(self) -> list[int | None]:
        """[first epoch of the pass, the epoch before which it ends or None]"""
        first = self.start.first_epoch
        return [first, None if self.stream.epochs is None else first + self.stream.epochs]

    def counts(self) -> dict[str, int]:
        """Counts of the lanes of this rank since the stream began, in the order of COUNTS."""
        mine = [state.counts for state in self.lanes_here().values()]
        sums = map(sum, zip(*mine, strict=True)) if mine else [0] * len(COUNTS)
        return {key: self.start.totals[key] + count for key, count in zip(COUNTS, sums, strict=True)}

    def lanes_here(self) -> dict[int, LaneState]:
        """The newest states of this rank's lanes that have begun."""
        return {lane: state for lane, state in self.lanes.items() if self._hosts(lane)}

    def _hosts(self, lane: int) -> bool:
        return (lane - self.start.row) % self.stream.lanes % self.start.world_size == self.start.rank

    def stats(self) -> dict[str, float]:
        """Plain numbers to log, of this rank. See `PackedLoader.stats`."""
        counts = self.counts()
        row_len = self.stream.packer.row_len
        cells, tokens = self._batch_cells, self._batch_tokens
        if row_len is not None:
            cells, tokens = counts["rows"] * row_len, counts["tokens"]
        mine = self.lanes_here()
        lane_rows = [state.counts[0] for state in mine.values()]
        return {
            **counts,
            "bad": sum(counts[name] for name in BAD),
            "filler_rows": self.filler_rows,
            "cut_rows": self.cut_rows,
            "cut_tokens": self.cut_tokens,
            **self._read_stats(),
            "cells": cells,
            "padding_tokens": cells - tokens,
            "fill": tokens / cells if cells else 0.0,
            "epoch": self._epoch(mine),
            "lane_rows_min": min(lane_rows, default=0),
            "lane_rows_max": max(lane_rows, default=0),
        }

    def _read_stats(self) -> dict[str, float]:
        reading = ReadStats()
        for one in list(self.reading.values()):
            reading = reading.merged(one)
        return {
            "retries": reading.retries,
            "retry_seconds": reading.seconds_waited,
            "longest_read_seconds": reading.longest_wait,
            "longest_read_shard": -1 if reading.slowest_shard is None else reading.slowest_shard,
        }

    def source_stats(self) -> dict[str, dict[str, float]]:
        """Of each source of a mixture, in this pass: see `PackedLoader.source_stats`."""
        mix, parts = self.stream.mix, self.stream.parts
        if mix is None:
            return {}
        mine = self.lanes_here()
        found: dict[str, dict[str, float]] = {}
        for place, part in enumerate(parts):
            entered = [state.feeds[place].entered for state in mine.values()]
            epochs = [self._epoch_of_feed(lane, place) for lane in mine]
            found[str(part.name)] = {
                "weight": mix.weights[place],
                "examples": sum(one[1] for one in entered),
                "tokens_entered": sum(one[2] for one in entered),
                "tokens": sum(state.given[place] for state in mine.values()),
                "epoch": sum(epochs) / len(epochs) if epochs else float(self.start.first_epoch),
            }
        for key, share in (("tokens_entered", "share_entered"), ("tokens", "share")):
            total = sum(one[key] for one in found.values())
            for one in found.values():
                one[share] = one[key] / total if total else 0.0
        return found

    def _epoch(self, mine: Collection[int]) -> float:
        """The mean of this rank's lanes, of which some may not have begun the pass."""
        lanes = self.stream.lanes // self.start.world_size
        return (sum(map(self.epoch_of, mine)) + (lanes - len(mine)) * self.start.first_epoch) / lanes

    def epoch_of(self, lane: int, *, planned: bool = True) -> float:
        """Epochs that a lane has given in rows (planned: also of its plan), with the share of the one it is in."""
        state = self.lanes[lane]
        if state.done and self.epochs[1] is not None:
            return float(self.epochs[1])
        epochs = [self._epoch_of_feed(lane, place, planned=planned) for place in range(len(state.feeds))]
        ends_with_first = self.stream.mix is not None and self.stream.mix.stop == "first_exhausted"
        return max(epochs) if ends_with_first else min(epochs)

    def unsure_of(self, lane: int) -> float:
        """By how much of an epoch `epoch_of` may lag: where whole shards are counted, up to that of the oldest waiting
        example, by that one and the one that the lane reads."""
        state = self.lanes[lane]
        places = [] if state.done else [at for at in range(len(state.feeds)) if not self._size_of_feed(state, at)]
        return max([2 / self._turns(place) for place in places], default=0.0)

    def _epoch_of_feed(self, lane: int, place: int, *, planned: bool = True) -> float:
        """By the examples whose first tokens are in rows, where it is known how many there are."""
        state = self.lanes[lane]
        feed: FeedState = state.feeds[place]
        size = self._size_of_feed(state, place)
        if not size:
            return feed.position.epoch + feed.position.turn / self._turns(place)
        epoch, first, _ = feed.epoch
        taken = feed.head[0] - first + (feed.head[1] > 0)
        waiting = feed.waiting.count(1) - sum(min(starts) > 0 for _, starts in feed.fragments)
        begun = min(self._begun.get(lane, 0), waiting) if planned and len(state.feeds) == 1 else 0
        return epoch + min(1.0, (taken - waiting + begun) / size)

    def _size_of_feed(self, state: LaneState, place: int) -> float:
        """Examples that a lane has of a source in an epoch; 0: not known."""
        total = getattr(self.stream.parts[place].source, "num_examples", None)
        return total / self.stream.lanes if total else state.feeds[place].epoch[2]

    def _turns(self, place: int) -> int:
        """Shards of a source that a lane reads in an epoch, alone or together with the others."""
        whole, dealt = divmod(self.stream.parts[place].source.num_shards, self.stream.lanes)
        return whole + dealt
