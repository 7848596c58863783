"""Feeds: what a lane takes from one source, in order. Knows which of the examples that it took still wait."""

from collections.abc import Iterator, Sequence

from streampack.items import Bad, Dropped, Item, ItemReader
from streampack.lane_state import FeedState


class Feed:
    """The items of one source that enter a lane's buffer.

    Args:
        items: reads them.
        stop_epoch: read up to this epoch; None: without end.
        state: where to continue.
        counts: of the lane, by the names of COUNTS; what is left out is counted here.
        bad: of the lane, the bad examples that were left out are added.
        arrivals: of a lane with several feeds: the number of this feed is added for each example that it takes.
    """

    def __init__(
        self,
        items: ItemReader,
        *,
        stop_epoch: int | None,
        state: FeedState,
        counts: dict[str, int],
        bad: list[Bad],
        arrivals: bytearray | None = None,
    ) -> None:
        self.reader = items
        self.epoch = state.epoch
        self.entered = list(state.entered)
        self._counts = counts
        self._bad = bad
        self._arrivals = arrivals
        self._start = state
        self._waiting = bytearray(state.waiting)  # of the numbers from self._base on
        self._base = state.first
        self._fragments = dict(state.fragments)  # number: first tokens of what waits, ascending
        self._head = state.head
        self._next: Item | Dropped | None = None  # what comes, once it was looked at
        self._items: Iterator[Item | Dropped] = items.read(
            state.position, number=state.first, stop_epoch=stop_epoch, unused=self._unused
        )

    @property
    def taken(self) -> int:
        """How many examples were taken from the source: the number of the next one."""
        return self._base + len(self._waiting)

    @property
    def is_inside_example(self) -> bool:
        """Some fragments of an example have entered, and others not."""
        return self._head[1] > 0

    def peek(self) -> Item | None:
        """The item that enters next; None where there is none. Examples that are left out before it are taken."""
        while True:
            item = self._next
            if item is None:
                item = self._next = next(self._items, None)
            if item is None or isinstance(item, Item):
                return item
            self._next = None
            self._take(item.number, item.epoch, waits=0)
            self._head = (item.number + 1, 0)
            self._counts[item.reason] += 1
            if item.fault is not None:
                self._bad.append(item.fault)

    def enter(self) -> Item:
        """Take the item that `peek` gave: it waits from now on."""
        item, self._next = self._next, None
        assert isinstance(item, Item)
        number = item.number
        if item.start == 0:
            self._take(number, item.epoch, waits=1)
            self._counts["examples"] += 1
            self._counts["truncated_tokens"] += item.truncated
            if item.is_last:
                self._head = (number + 1, 0)
                return item
            self._counts["split"] += 1
        self._fragments[number] = (*self._fragments.get(number, ()), item.start)
        self._waiting[number - self._base] = 1
        self._head = (number + 1, 0) if item.is_last else (number, item.start + len(item.ids))
        return item

    def _take(self, number: int, epoch: int, *, waits: int) -> None:
        """An example is taken from the stream: to wait, or (waits=0) to be left out."""
        assert number == self._base + len(self._waiting)
        self._waiting.append(waits)
        if epoch != self.epoch[0]:
            self.epoch = (epoch, number, number - self.epoch[1])
        if self._arrivals is not None:
            self._arrivals.append(self.reader.feed)

    def leave(self, item: Item) -> None:
        """An item goes out in a row; its example is used up with its last one."""
        if self._fragments:
            starts = self._fragments.get(item.number)
            if starts is not None:
                if starts != (item.start,):
                    self._fragments[item.number] = tuple(start for start in starts if start != item.start)
                    return
                del self._fragments[item.number]
        self._waiting[item.number - self._base] = 0

    def split(self, item: Item, rest: Item) -> None:
        """An item was cut: `rest` goes on waiting beside it."""
        starts = self._fragments.get(rest.number, (item.start,))
        self._fragments[rest.number] = tuple(sorted({*starts, rest.start}))

    def state(self, oldest: int | None) -> FeedState:
        """The state while `oldest` is the number of the oldest example that waits; None: none does."""
        opened = self.reader.opened
        number = self._head[0] if oldest is None else oldest
        while len(opened) > 1 and opened[1][0] <= number:
            opened.pop(0)
        first, position = opened[0] if opened else (self._start.first, self._start.position)
        if first != self._base:
            del self._waiting[: first - self._base]
            self._base = first
        return FeedState(
            position,
            first,
            bytes(self._waiting),
            self._head,
            tuple(self._fragments.items()),
            self.epoch,
            tuple(self.entered),
        )

    # ---- resuming ------------------------------------------------------------------------------------------------

    def _unused(self, number: int, count: int) -> Sequence[int]:
        """Which of `count` examples from a number on were not used up (or left out) before the state that this feed
        began from, counted from there."""
        head, first, waiting = self._start.head[0], self._start.first, self._start.waiting
        if number >= head:
            return range(count)
        return [place for place in range(count) if number + place >= head or waiting[number + place - first]]

    def restore(self, *, cuts: bool) -> list[Item]:
        """The items that waited, encoded again.

        cuts: the packing cuts items where rows end (`wrapped`), so what waits may begin inside one.
        """
        state, again = self._start, []
        expected = any(state.waiting) or state.head[1] > 0
        while expected and self._next is None and (item := next(self._items, None)) is not None:
            if (item.number, getattr(item, "start", 0)) >= state.head:
                self._next = item
            elif isinstance(item, Item) and self._waiting[item.number - self._base]:
                again += self._readmit(item, cuts)
        return again

    def _readmit(self, item: Item, cuts: bool) -> list[Item]:
        starts = self._fragments.get(item.number, (item.start,))
        inside = [start for start in starts if item.start < start < item.start + len(item.ids)]
        if cuts and inside and item.start not in starts:  # its first part is out
            _, item = item.cut(inside[0] - item.start)
        return [item] if item.start in starts else []
