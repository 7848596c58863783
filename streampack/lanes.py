"""Lanes: each reads its share of the source, keeps a buffer of waiting examples and makes rows, as if it were alone.

The buffer is the shortest run of unused examples that holds `buffer_size` of them and 4 rows of tokens (or 64 rows of
tokens): a function of what is unused. A row is a function of the buffer. So the state of a lane is which examples wait,
by number, and where to read them again.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from streampack.items import Dropped, Item, ItemReader
from streampack.packing import Packing, best_fit, first_row, resolve
from streampack.rows import Row
from streampack.state import COUNTS, LaneState

MIN_ROWS, MAX_ROWS = 4, 64
"""Rows of tokens in a buffer: at least, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """What shapes the rows of a lane; part of the stream's identity."""

    seq_len: int
    buffer_size: int = 256
    packing: Packing = "auto"
    max_examples: int | None = None
    pad_to_multiple_of: int = 1
    pad_token_id: int = 0
    keep_no_target: bool = False
    """Emit rows without any target too."""


class Lane:
    """One lane of a pass. `next_row()` gives its rows, `state()` the state after the last one.

    Args:
        items: reads its items.
        packer: how rows are made.
        stop_epoch: the pass ends before this epoch; None: never.
        state: continue from here, or begin (`LaneState.start`).
    """

    def __init__(self, items: ItemReader, *, packer: Packer, stop_epoch: int | None, state: LaneState) -> None:
        self.packer = packer
        self.reader = items
        self.done = state.done
        self.stop_epoch = stop_epoch
        self.counts = dict(zip(COUNTS, state.counts, strict=True))
        self._items: list[Item] = []
        self._cells: list[int] = []  # of the items
        self._tokens = 0  # their sum
        self._plan: deque[list[Item]] = deque()
        self._plan_state: LaneState | None = None  # of the buffer that was planned
        self._waiting = bytearray(state.waiting)  # of the numbers from self._base on
        self._base = state.first
        self._fragments = dict(state.fragments)  # number: first tokens of what waits, ascending
        self._head = state.head
        self._epoch = state.epoch
        self._start = state
        self._next: Item | None = None
        self._pending: deque[Item | Dropped] = deque()
        self._stream: Iterator[list[Item | Dropped]] = items.read(
            state.position, number=state.first, stop_epoch=stop_epoch, is_used=self._was_used
        )
        if not self.done:
            self._restore(state)

    def next_row(self) -> Row | None:
        """The lane's next row; None at the end of the pass.

        Raises:
            ValueError: for an example that a policy refuses, or an endless stream that brings this lane nothing.
        """
        barren: int | None = None
        while not self.done:
            if not self._plan:
                self._fill()
                if not self._items:
                    self.done = True
                    break
                self._make_plan()
            items = self._plan.popleft()
            row = self._row(items)
            if row.num_loss_tokens or self.packer.keep_no_target:
                self._count_row(row, items)
                return row
            self.counts["no_target_tokens"] += len(row.ids)
            epoch = items[0].place[0]
            barren = epoch if barren is None else barren
            if self.stop_epoch is None and epoch > barren + 1:
                raise ValueError(
                    f"lane {self.reader.lane} got only rows without a target in epoch {barren + 1} of an endless stream"
                    "; use fewer lanes (lanes=...) or more data, or pass no_target='keep'"
                )
        return None

    def state(self) -> LaneState:
        """The state after the last row. Cheap: it is taken with every row."""
        if not self._plan or self._plan_state is None:
            return self._buffer_state(0)
        of = self._plan_state
        return LaneState(
            of.position,
            of.first,
            of.waiting,
            of.head,
            of.fragments,
            of.planned - len(self._plan),
            of.epoch,
            tuple(self.counts.values()),
            False,
        )

    def _buffer_state(self, planned: int) -> LaneState:
        """The state of the buffer as it is, with `planned` rows of its plan out."""
        oldest = self._items[0].number if self._items else self._head[0]
        opened = self.reader.opened
        while len(opened) > 1 and opened[1][0] <= oldest:
            opened.pop(0)
        first, position = opened[0] if opened else (self._start.first, self._start.position)
        del self._waiting[: first - self._base]
        self._base = first
        return LaneState(
            position,
            first,
            bytes(self._waiting),
            self._head,
            tuple(self._fragments.items()),
            planned,
            self._epoch,
            tuple(self.counts.values()),
            self.done,
        )

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        """Plan the next row or rows of the buffer and take their items out of it."""
        rows = self._plan_places()
        self._plan_state = self._buffer_state(len(rows)) if len(rows) > 1 else None
        self._plan = deque([self._items[place] for place in row] for row in rows)
        for place in sorted((place for row in rows for place in row), reverse=True):
            self._tokens -= self._cells[place]
            del self._items[place], self._cells[place]
        rest = self._cut_to_row(self._plan[-1])
        for items in self._plan:
            for item in items:
                self._leave(item)
        if rest is not None:
            self._return(rest)

    def _plan_places(self) -> list[list[int]]:
        packer = self.packer
        olds = self._left_of_epoch()
        if olds:
            return [self._crossing_row(olds)]
        packing = resolve(packer.packing, tokens=self._tokens, count=len(self._items), seq_len=packer.seq_len)
        if packing == "best_fit":
            ages = [self._head[0] - item.number for item in self._items]
            return best_fit(self._cells, ages, seq_len=packer.seq_len, max_examples=packer.max_examples)
        return [first_row(packing, self._cells, seq_len=packer.seq_len, must=1, max_examples=packer.max_examples)]

    def _left_of_epoch(self) -> int:
        """How many items wait of the oldest epoch, if those of the next have come in behind them; else 0."""
        epoch = self._items[0].place[0]
        if self._items[-1].place[0] == epoch:
            return 0
        return sum(item.place[0] == epoch for item in self._items)

    def _crossing_row(self, olds: int) -> list[int]:
        """The row that ends an epoch: all that waits of it, and nothing of the next that the row already holds."""
        held = {item.place[1:] for item in self._items[:olds]}
        places = [place for place, item in enumerate(self._items) if place < olds or item.place[1:] not in held]
        row = first_row(
            resolve(self.packer.packing, tokens=0, count=1, seq_len=self.packer.seq_len),
            [self._cells[place] for place in places],
            seq_len=self.packer.seq_len,
            must=olds,
            max_examples=self.packer.max_examples,
        )
        return [places[place] for place in row]

    def _cut_to_row(self, items: list[Item]) -> Item | None:
        """`wrapped` gives a row that is more than full: cut its last item, and return what is left of that.

        No rest is a single token, which would have nothing to learn: then one cell of the row stays empty.
        """
        over = sum(item.cells for item in items) - self.packer.seq_len
        if over <= 0:
            return None
        keep = items[-1].cells - max(over, 2)
        if keep <= 0:
            return items.pop()
        items[-1], rest = items[-1].cut(keep)
        starts = self._fragments.get(rest.number, (items[-1].start,))
        self._fragments[rest.number] = tuple(sorted({*starts, rest.start}))
        return rest

    def _leave(self, item: Item) -> None:
        """An item goes out; its example is used up with its last one."""
        starts = self._fragments.get(item.number)
        if starts is not None:
            if starts != (item.start,):
                self._fragments[item.number] = tuple(start for start in starts if start != item.start)
                return
            del self._fragments[item.number]
        self._waiting[item.number - self._base] = 0

    def _return(self, rest: Item) -> None:
        """Put the rest of a cut item back where its age belongs."""
        age = rest.number, rest.start
        later = (at for at, item in enumerate(self._items) if (item.number, item.start) > age)
        place = next(later, len(self._items))
        self._items.insert(place, rest)
        self._cells.insert(place, rest.cells)
        self._tokens += rest.cells

    def _row(self, items: list[Item]) -> Row:
        lengths = np.array([item.cells for item in items], dtype=np.int64)
        origin = np.array([(*item.place, item.start, len(item.ids)) for item in items], dtype=np.int64)
        masked = any(item.targets is not None for item in items)
        if self.packer.pad_to_multiple_of == 1 and not masked:
            return Row(ids=np.concatenate([item.ids for item in items]), lengths=lengths, targets=None, origin=origin)
        # Padding to a multiple lies inside the example's segment, and is not a target.
        ids = np.full(int(lengths.sum()), self.packer.pad_token_id, dtype=np.int32)
        targets = np.zeros(len(ids), dtype=bool)
        for item, end in zip(items, np.cumsum(lengths).tolist(), strict=True):
            cells = slice(end - item.cells, end - item.cells + len(item.ids))
            ids[cells] = item.ids
            targets[cells] = True if item.targets is None else item.targets
        return Row(ids=ids, lengths=lengths, targets=targets, origin=origin)

    def _count_row(self, row: Row, items: list[Item]) -> None:
        self.counts["rows"] += 1
        self.counts["segments"] += len(items)
        self.counts["tokens"] += sum(len(item.ids) for item in items)
        self.counts["loss_tokens"] += row.num_loss_tokens

    # ---- buffer --------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Let items enter until the buffer is full, or must not take more before the epoch is finished."""
        size, row = self.packer.buffer_size, self.packer.seq_len
        while self._tokens < MAX_ROWS * row and (len(self._items) < size or self._tokens < MIN_ROWS * row):
            if self._next is None:
                self._next = self._next_item()
            if self._next is None or not self._may_enter(self._next):
                return
            self._enter(self._next)
            self._next = None

    def _may_enter(self, item: Item) -> bool:
        """The next epoch enters only when what waits of this one fits into one row, which then takes all of it."""
        epoch = self._items[0].place[0] if self._items else item.place[0]
        if item.place[0] == epoch:
            return True
        olds = [cells for cells, old in zip(self._cells, self._items, strict=True) if old.place[0] == epoch]
        fits = sum(olds) <= self.packer.seq_len and len(olds) <= (self.packer.max_examples or len(olds))
        return fits and item.place[0] == epoch + 1

    def _enter(self, item: Item) -> None:
        if item.start == 0:
            self._take(item.number, item.place[0], waits=1)
            self.counts["examples"] += 1
            self.counts["split"] += not item.is_last
            self.counts["truncated_tokens"] += item.truncated
        if item.start or not item.is_last:
            self._fragments[item.number] = (*self._fragments.get(item.number, ()), item.start)
            self._waiting[item.number - self._base] = 1
        self._head = (item.number + 1, 0) if item.is_last else (item.number, item.start + len(item.ids))
        self._items.append(item)
        self._cells.append(item.cells)
        self._tokens += item.cells

    def _take(self, number: int, epoch: int, *, waits: int) -> None:
        """An example is taken from the stream: to wait, or (waits=0) to be left out."""
        assert number == self._base + len(self._waiting)
        self._waiting.append(waits)
        if epoch != self._epoch[0]:
            self._epoch = (epoch, number, number - self._epoch[1])

    def _next_item(self) -> Item | None:
        while True:
            if not self._pending:
                found = next(self._stream, None)
                if found is None:
                    return None
                self._pending.extend(found)
                continue
            item = self._pending.popleft()
            if isinstance(item, Item):
                return item
            self._take(item.number, item.place[0], waits=0)
            self._head = (item.number + 1, 0)
            self.counts[item.reason] += 1

    # ---- resuming ------------------------------------------------------------------------------------------------

    def _was_used(self, number: int) -> bool:
        """Whether an example was used up (or left out) before the state that this lane began from."""
        return number < self._start.head[0] and not self._start.waiting[number - self._start.first]

    def _restore(self, state: LaneState) -> None:
        """Rebuild the buffer: encode what waits, pass over what is used, and plan again what was planned."""
        expected = any(state.waiting) or state.head[1] > 0
        while expected and not self._pending and (found := next(self._stream, None)):
            for item in found:
                if (item.number, getattr(item, "start", 0)) >= state.head:
                    self._pending.append(item)
                elif isinstance(item, Item):
                    self._readmit(item)
        if state.planned:
            self._make_plan()
            for _ in range(state.planned):
                self._plan.popleft()

    def _readmit(self, item: Item) -> None:
        if not self._waiting[item.number - self._base]:
            return
        starts = self._fragments.get(item.number, (item.start,))
        inside = [start for start in starts if item.start < start < item.start + len(item.ids)]
        if self.packer.packing == "wrapped" and inside and item.start not in starts:  # its first part is out
            _, item = item.cut(inside[0] - item.start)
        if item.start in starts:
            self._items.append(item)
            self._cells.append(item.cells)
            self._tokens += item.cells
