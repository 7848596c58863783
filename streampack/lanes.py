"""Lanes: each reads its share of the source, keeps a buffer of waiting examples and makes rows, as if it were alone.

The buffer is the shortest run of unused examples that holds `buffer_size` of them and 4 rows of tokens (or 64 rows of
tokens): a function of what is unused. A row is a function of the buffer. So the state of a lane is which examples wait,
by number, and where to read them again.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from streampack.feeds import Feed
from streampack.items import Bad, Item, ItemReader
from streampack.lane_state import BAD, COUNTS, FeedState, LaneState
from streampack.mixture import Mix
from streampack.packing import Packer, best_fit, by_length, first_row, resolve
from streampack.rows import Row

MIN_ROWS, MAX_ROWS = 4, 64
"""Rows of tokens in a buffer: at least, and at most."""
BAD_ALLOWED = 10
"""So many bad examples a lane leaves out before it looks at their share."""


class Lane:
    """One lane of a pass. `next_row()` gives its rows, `state()` the state after the last one.

    Args:
        readers: read its items, one for each source.
        mix: which source comes next; None: there is one only.
        packer: how rows are made.
        stop_epoch: the pass ends before this epoch; None: never.
        state: continue from here, or begin (`LaneState.start`).
    """

    def __init__(
        self,
        readers: Sequence[ItemReader],
        *,
        packer: Packer,
        stop_epoch: int | None,
        state: LaneState,
        mix: Mix | None = None,
    ) -> None:
        self.packer = packer
        self.number = readers[0].lane
        self.done = state.done
        self.stop_epoch = stop_epoch
        self.mix = mix
        self.counts = dict(zip(COUNTS, state.counts, strict=True))
        self.bad: list[Bad] = []
        """Bad examples left out since the last row, for whoever takes the row to remove."""
        self._given = list(state.given)
        self._arrivals = bytearray(state.arrivals)
        self._feeds = [
            Feed(
                reader,
                stop_epoch=stop_epoch if mix is None else mix.feed_stop(stop_epoch),
                state=feed,
                counts=self.counts,
                bad=self.bad,
                arrivals=None if mix is None else self._arrivals,
            )
            for reader, feed in zip(readers, state.feeds, strict=True)
        ]
        self._items: list[Item] = []  # by age
        self._cells: list[int] = []  # of the items
        self._tokens = 0  # their sum
        self._epochs: Counter[tuple[int, int]] = Counter()  # of a mixture: how many items of (feed, epoch) wait
        self._plan: deque[list[Item]] = deque()
        self._plan_state: LaneState | None = None  # of the buffer that was planned
        if not self.done:
            self._restore(state)

    def next_row(self) -> Row | None:
        """The lane's next row; None at the end of the pass.

        Raises:
            ValueError: for an example that a policy refuses, more bad examples than may be left out, or an endless
                stream that brings this lane nothing.
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
            targets = row.num_loss_tokens
            if targets or self.packer.keep_no_target:
                self._count_row(row, items, targets)
                return row
            self.counts["no_target_tokens"] += row.num_cells
            epoch = items[0].epoch
            barren = epoch if barren is None else barren
            if self.stop_epoch is None and epoch > barren + 1:
                raise ValueError(
                    f"lane {self.number} got only rows without a target in epoch {barren + 1} of an endless stream"
                    "; use fewer lanes (lanes=...) or more data, or pass no_target='keep'"
                )
        return None

    def state(self) -> LaneState:
        """The state after the last row. Cheap: it is taken with every row."""
        if not self._plan or self._plan_state is None:
            return self._buffer_state(0)
        of = self._plan_state
        counts, given = tuple(self.counts.values()), tuple(self._given)
        return LaneState(of.feeds, of.arrivals, of.planned - len(self._plan), counts, given, False)

    def _buffer_state(self, planned: int) -> LaneState:
        """The state of the buffer as it is, with `planned` rows of its plan out."""
        if self.mix is None:
            oldest = self._items[0].number if self._items else None
            feeds: tuple[FeedState, ...] = (self._feeds[0].state(oldest),)
        else:
            oldest_of: dict[int, int] = {}
            for item in self._items:
                oldest_of.setdefault(item.feed, item.number)
            feeds = tuple(feed.state(oldest_of.get(place)) for place, feed in enumerate(self._feeds))
            arrived = self._arrived
            inside = any(feed.is_inside_example for feed in self._feeds)  # the example that came last
            oldest_age = self._items[0].age if self._items else arrived - inside
            del self._arrivals[: oldest_age - (arrived - len(self._arrivals))]
        counts, given = tuple(self.counts.values()), tuple(self._given)
        return LaneState(feeds, bytes(self._arrivals), planned, counts, given, self.done)

    @property
    def _arrived(self) -> int:
        """How many examples the lane has taken, from all sources."""
        return sum(feed.taken for feed in self._feeds)

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        """Plan the next row or rows of the buffer and take their items out of it."""
        rows = self._plan_places()
        self._plan_state = self._buffer_state(len(rows)) if len(rows) > 1 else None
        self._plan = deque([self._items[place] for place in row] for row in rows)
        waiting, cells = self._items, self._cells
        for place in sorted([place for row in rows for place in row], reverse=True):
            self._tokens -= cells[place]
            del waiting[place], cells[place]
        rest = self._cut_to_row(self._plan[-1])
        feeds, mixed = self._feeds, self.mix is not None
        for items in self._plan:
            for item in items:
                feeds[item.feed].leave(item)
                if mixed:
                    self._count_epoch(item, -1)
        if rest is not None:
            self._return(rest)

    def _plan_places(self) -> list[list[int]]:
        packer = self.packer
        places: Sequence[int] = range(len(self._items))
        cells = self._cells
        if self.mix is not None:
            if len(self._epochs) > len({feed for feed, _ in self._epochs}):
                places = self._without_doubles()
                cells = [self._cells[place] for place in places]
        elif olds := self._left_of_epoch():
            return [self._crossing_row(olds)]
        packing = resolve(packer.packing, tokens=self._tokens, count=len(self._items), seq_len=packer.seq_len)
        if packing == "best_fit":
            arrived = self._arrived
            ages = [arrived - self._items[place].age for place in places]
            rows = best_fit(cells, ages, seq_len=packer.seq_len, max_examples=packer.max_examples)
        elif packing == "by_length":
            rows = by_length(cells)
        else:
            rows = [first_row(packing, cells, seq_len=packer.seq_len, must=1, max_examples=packer.max_examples)]
        return rows if len(cells) == len(self._cells) else [[places[place] for place in row] for row in rows]

    def _without_doubles(self) -> list[int]:
        """The items of a mixture that may go into rows: of an example that waits for two epochs the older one only."""
        epochs: dict[tuple[int, ...], int] = {}
        return [
            place
            for place, item in enumerate(self._items)
            if epochs.setdefault((item.shard, item.index), item.epoch) == item.epoch
        ]

    def _left_of_epoch(self) -> int:
        """How many items wait of the oldest epoch, if those of the next have come in behind them; else 0."""
        epoch = self._items[0].epoch
        if self._items[-1].epoch == epoch:
            return 0
        return sum(item.epoch == epoch for item in self._items)

    def _crossing_row(self, olds: int) -> list[int]:
        """The row that ends an epoch: all that waits of it, and nothing of the next that the row already holds."""
        held = {(item.shard, item.index) for item in self._items[:olds]}
        places = [
            place for place, item in enumerate(self._items) if place < olds or (item.shard, item.index) not in held
        ]
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
        if self.packer.packing != "wrapped":
            return None
        over = sum(item.cells for item in items) - self.packer.seq_len
        if over <= 0:
            return None
        keep = items[-1].cells - max(over, 2)
        if keep <= 0:
            return items.pop()
        items[-1], rest = items[-1].cut(keep)
        self._feeds[rest.feed].split(items[-1], rest)
        return rest

    def _return(self, rest: Item) -> None:
        """Put the rest of a cut item back where its age belongs."""
        age = rest.age, rest.start
        later = (at for at, item in enumerate(self._items) if (item.age, item.start) > age)
        place = next(later, len(self._items))
        self._items.insert(place, rest)
        self._cells.insert(place, rest.cells)
        self._tokens += rest.cells
        if self.mix is not None:
            self._count_epoch(rest, 1)

    def _row(self, items: list[Item]) -> Row:
        pad = self.packer.pad_token_id if self.packer.pad_to_multiple_of > 1 else None
        pieces = [item.ids if pad is None else item.padded_ids(pad) for item in items]
        targets = None
        if pad is not None or [item for item in items if item.targets is not None]:
            targets = np.concatenate([item.padded_targets() for item in items])
        lengths, origin = [item.cells for item in items], [item.origin for item in items]
        return Row(pieces=pieces, lengths=lengths, targets=targets, origin=origin)

    def _count_row(self, row: Row, items: list[Item], targets: int) -> None:
        counts = self.counts
        counts["rows"] += 1
        counts["segments"] += len(items)
        counts["tokens"] += row.num_tokens
        counts["loss_tokens"] += targets
        if self.mix is not None:
            for item in items:
                self._given[item.feed] += len(item.ids)

    # ---- buffer --------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Let items enter until the buffer is full, or must not take more before the epoch is finished."""
        size, row, mix = self.packer.buffer_size, self.packer.seq_len, self.mix
        least, most = MIN_ROWS * row, MAX_ROWS * row
        if self.packer.row_len is None:
            least, most = 0, size * row  # by the number of examples alone, so that lanes keep in step
        feeds, items, cells, tokens = self._feeds, self._items, self._cells, self._tokens
        while tokens < most and (len(items) < size or tokens < least):
            feed = feeds[0] if mix is None else mix.choose(feeds, stop_epoch=self.stop_epoch)
            item = None if feed is None else feed.peek()
            if feed is None or item is None:
                break
            if mix is None and items and item.epoch != items[0].epoch and not self._may_begin(item.epoch):
                break
            feed.enter()
            if mix is None:
                item.age = item.number
            else:
                item.age = self._arrived - 1
                mix.count(feed.entered, item)
                self._count_epoch(item, 1)
            items.append(item)
            cells.append(item.cells)
            tokens += item.cells
        self._tokens = tokens
        if self.bad:
            self._check_bad_share()

    def _may_begin(self, epoch: int) -> bool:
        """The next epoch enters only when what waits of this one fits into one row, which then takes all of it."""
        oldest = self._items[0].epoch
        olds = [cells for cells, item in zip(self._cells, self._items, strict=True) if item.epoch == oldest]
        fits = sum(olds) <= self.packer.seq_len and len(olds) <= (self.packer.max_examples or len(olds))
        return fits and epoch == oldest + 1

    def _count_epoch(self, item: Item, change: int) -> None:
        self._epochs[item.feed, item.epoch] += change
        if not self._epochs[item.feed, item.epoch]:
            del self._epochs[item.feed, item.epoch]

    def _check_bad_share(self) -> None:
        bad = {name.removeprefix("bad_"): self.counts[name] for name in BAD if self.counts[name]}
        count, taken = sum(bad.values()), self._arrived
        if count > BAD_ALLOWED and count > self.packer.max_bad_share * taken:
            last = self.bad[-1]
            reader = next(one.reader for one in reversed(self._feeds) if one.reader.first_shard <= last.shard)
            reasons = ", ".join(f"{many} {reason}" for reason, many in bad.items())
            raise ValueError(
                f"{count} of the first {taken} examples of lane {self.number} are bad ({reasons}), more than "
                f"max_bad_share={self.packer.max_bad_share:g}; the last one, {reader.where(last.shard, last.index)}: "
                f"{last.what}; mend the data, or allow a larger share"
            )

    # ---- resuming ------------------------------------------------------------------------------------------------

    def _restore(self, state: LaneState) -> None:
        """Rebuild the buffer: encode what waits, pass over what is used, and plan again what was planned."""
        for feed in self._feeds:
            self._items += feed.restore(cuts=self.packer.packing == "wrapped")
        self._restore_ages()
        self._cells = [item.cells for item in self._items]
        self._tokens = sum(self._cells)
        if state.planned:
            self._make_plan()
            for _ in range(state.planned):
                self._plan.popleft()

    def _restore_ages(self) -> None:
        if self.mix is None:
            for item in self._items:
                item.age = item.number
            return
        numbers = [feed.taken - self._arrivals.count(place) for place, feed in enumerate(self._feeds)]
        ages: dict[tuple[int, int], int] = {}
        for age, feed in enumerate(self._arrivals, self._arrived - len(self._arrivals)):
            ages[feed, numbers[feed]] = age
            numbers[feed] += 1
        for item in self._items:
            item.age = ages[item.feed, item.number]
            self._count_epoch(item, 1)
        self._items.sort(key=lambda item: (item.age, item.start))
