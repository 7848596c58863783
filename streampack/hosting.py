"""Hosting: which rank and worker runs which lanes, and how the rows of a rank come back into one order.

Row g comes from lane g % lanes. Counting lanes from the row where a run begins, `first_row`, rank r of R hosts the
offsets j with j % R == r, at its places q = j // R; worker w of W runs the places with q % W == w. In each cycle over
the lanes every worker sends its share as a message (several where rows are long), and the rank lays them out by place.
With 4 lanes, 2 ranks, 2 workers, from row 0: rank 1 hosts lanes 1 and 3; its worker 0 runs lane 1, its worker 1 lane 3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from streampack.items import Bad
from streampack.lane_state import LaneState
from streampack.lanes import Lane
from streampack.retry import ReadStats
from streampack.rows import Row


@dataclass(slots=True)  # not frozen, which would take twice as long to make
class Given:
    """A row that a lane gives (or None: it has ended), with the lane's state after it."""

    cycle: int
    place: int
    lane: int
    row: Row | None
    state: LaneState
    bad: tuple[Bad, ...] = ()
    """Bad examples that were left out on the way to this row."""


@dataclass(frozen=True, slots=True)
class Message:
    """A worker's share of a part of a cycle."""

    worker: int
    part: tuple[int, int]
    """(cycle, part of it)"""
    given: list[Given]
    is_last: bool
    """All lanes of this worker have ended."""
    reading: ReadStats | None = None
    """What reading cost in this worker until now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The lanes of one worker of one rank.

    first_row: the row where the run begins or resumed.
    resume_after: places of the first cycle up to this one are out already.
    ahead: by lane, in how many cycles it has no turn since it had those before.
    rows_per_message: most rows in a message; the first cycle sends single rows, so that the first one comes soon.
    """

    lanes: int
    first_row: int
    rank: int
    world_size: int
    worker: int = 0
    num_workers: int = 1
    resume_after: int = -1
    rows_per_message: int = 1
    ahead: Mapping[int, int] = field(default_factory=dict)

    def messages(self, open_lane: Callable[[int], Lane]) -> Iterator[Message]:
        """The messages of this worker, one for each part of each cycle, to the end of its last lane.

        Lanes are opened when their turn comes, by number.
        """
        open_lanes: dict[int, Lane] = {}
        places = range(self.lanes // self.world_size)
        mine = {place: self._lane(place) for place in places if place % self.num_workers == self.worker}
        cycle = 0
        while True:
            step = (self.rows_per_message if cycle else 1) * self.num_workers
            for part, start in enumerate(range(0, len(places), step)):
                given = []
                for place in places[start : start + step]:
                    if place not in mine or self._had_turn(cycle, place, mine[place]):
                        continue
                    lane = open_lanes.get(place) or open_lanes.setdefault(place, open_lane(mine[place]))
                    row = lane.next_row()
                    given.append(Given(cycle, place, mine[place], row, lane.state(), tuple(lane.bad)))
                    lane.bad.clear()
                    if row is None:
                        del mine[place], open_lanes[place]
                yield Message(self.worker, (cycle, part), given, not mine)
                if not mine:
                    return
            cycle += 1

    def _had_turn(self, cycle: int, place: int, lane: int) -> bool:
        return cycle < self.ahead.get(lane, 0) or (cycle == 0 and place <= self.resume_after)

    @property
    def num_lanes(self) -> int:
        """How many lanes this worker has."""
        return len(range(self.worker, self.lanes // self.world_size, self.num_workers))

    def _lane(self, place: int) -> int:
        return (self.first_row + place * self.world_size + self.rank) % self.lanes

    def row_after(self, given: Given) -> int:
        """The next row of the stream once every rank has given its row of this turn."""
        return self.first_row + given.cycle * self.lanes + (given.place + 1) * self.world_size


def in_order(messages: Iterable[Message], *, num_workers: int) -> Iterator[Given]:
    """What the workers of a rank give, in the order of its places. Holds at most one part of a cycle."""
    running = set(range(num_workers))
    parts: dict[tuple[int, int], list[Message]] = {}
    for message in messages:
        parts.setdefault(message.part, []).append(message)
        while parts:
            part = min(parts)
            if not running <= {one.worker for one in parts[part]}:
                break
            together = parts.pop(part)
            yield from _by_place(together)
            running -= {one.worker for one in together if one.is_last}
    for part in sorted(parts):
        yield from _by_place(parts[part])


def _by_place(messages: list[Message]) -> list[Given]:
    if len(messages) == 1:
        return messages[0].given  # of one worker, which goes by place
    return sorted((given for message in messages for given in message.given), key=lambda given: given.place)
