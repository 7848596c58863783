"""Trace: which examples a step of training was made of, from a saved state or from the start, without training.

Step K of a run with 2 ranks, batches of 4 and 2 of them accumulated is its rows 16 K .. 16 K + 15; rank 0 trains on
every second of them. The lanes run forward from the state to the step, as they do in training.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from streampack.arguments import check_numbers
from streampack.dataset import PackedDataset
from streampack.hosting import Given, in_order
from streampack.progress import Start
from streampack.ranks import check_rank
from streampack.rows import Row
from streampack.state import StateError, accept, check_whole
from streampack.stream import LaneOpener


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedExample:
    """An example (or a fragment of one) in a row."""

    epoch: int
    source: str
    shard: int | str
    index: int
    first_token: int
    """Of the fragment in the example; 0 for a whole one."""
    tokens: int
    begin: int
    end: int
    """Its cells in the row: begin .. end - 1."""
    ids: list[int]
    """Its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRow:
    """A row of the stream."""

    row: int
    """Its number in the pass."""
    lane: int
    rank: int
    batch: int
    """Which of the accumulated batches of its rank in the step, from 0."""
    place: int
    """Its place in that batch."""
    num_loss_tokens: int
    examples: list[TracedExample]
    packed: Row
    """The row itself."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {name: getattr(self, name) for name in ("row", "lane", "rank", "batch", "place", "num_loss_tokens")}
        return {**values, "examples": [asdict(example) for example in self.examples]}


def trace_step(
    dataset: PackedDataset,
    state: Mapping[str, Any] | None = None,
    *,
    step: int,
    batch_size: int = 1,
    world_size: int = 1,
    accumulation: int = 1,
    saved_after: int | None = None,
    epoch: int = 0,
) -> list[TracedRow]:
    """The rows that a run trains on at a step, of all ranks, by rank, batch and place.

    Steps are counted from 0 in each pass, as in `for step, batch in enumerate(loader)`; a trainer that logs "step 10"
    after ten steps has trained on step 9 then. Cost: what lies between the state and the step is read, tokenized and
    packed.

    Args:
        dataset: the stream, as it was trained on. Nothing about it changes.
        state: of a run before that step, of all ranks (merged); None: from the start of a pass.
        step: which one.
        batch_size, world_size, accumulation: rows in a batch of a rank, ranks, batches in an optimizer step.
        saved_after: how many steps were done when the state was saved; default: its rows / the rows of a step, which
            is right where these settings have not changed since the pass began.
        epoch: without a state, the one in which the pass begins.

    Raises:
        StateError: if the state is of another stream, naming both values, or after that step.
        ValueError: if the pass ends before that step; for numbers that cannot be used.
    """
    _check(batch_size=batch_size, accumulation=accumulation, step=step, epoch=epoch)
    check_numbers({"saved_after": (saved_after, 0)})
    start = _start(dataset, state, world_size=world_size, epoch=epoch)
    rows_per_step = batch_size * world_size * accumulation
    done = _steps_done(start[0], rows_per_step, saved_after)
    if step < done:
        raise StateError(
            f"step {step} comes before the state, which was saved after {done} steps ({start[0].rows} rows, "
            f"{rows_per_step} in a step of batch_size={batch_size} on world_size={world_size} ranks with "
            f"accumulation={accumulation}); pass an older state, or none"
        )
    skip = (step - done) * batch_size * accumulation
    traced: list[TracedRow] = []
    found = 0
    with closing(LaneOpener(dataset.stream, start[0].first_epoch, start[0].states)) as opener:
        runs = [_rows_of(dataset, one, opener) for one in start]
        # All ranks go forward together, so that they share what they read.
        for number in range(skip + batch_size * accumulation):
            turn = [(rank, given) for rank, run in enumerate(runs) if (given := next(run, None)) is not None]
            if not turn:
                break
            found = number + 1
            if number >= skip:
                batch, place = divmod(number - skip, batch_size)
                traced += [
                    _traced(dataset, start[rank], given, rank=rank, batch=batch, place=place) for rank, given in turn
                ]
    if not traced:
        batches = -(-found // (batch_size * accumulation))
        raise ValueError(f"the pass ends after {done + batches} steps, before step {step}")
    return sorted(traced, key=lambda row: (row.rank, row.batch, row.place))


def trace_rows(
    dataset: PackedDataset,
    state: Mapping[str, Any] | None = None,
    *,
    first: int,
    count: int = 1,
    epoch: int = 0,
) -> list[TracedRow]:
    """Rows `first`, `first + 1`, ... of the stream, up to the end of the pass.

    Row g comes from lane g % lanes, on any number of ranks; at the very end of a pass, where lanes have run out, only
    `trace_step` has the order of several ranks.

    Args:
        dataset: the stream, as it was trained on. Nothing about it changes.
        state: of a run before that row, of all ranks (merged); None: from the start of a pass.
        first: the first row, counted from 0 in each pass.
        count: how many rows.
        epoch: without a state, the one in which the pass begins.

    Raises:
        StateError: if the state is of another stream, naming both values, or after that row.
        ValueError: if the pass ends before that row.
    """
    check_numbers({"first": (first, 0), "count": (count, 1), "epoch": (epoch, 0)})
    start = _start(dataset, state, world_size=1, epoch=epoch)[0]
    if first < start.row:
        raise StateError(f"row {first} comes before the state, which is after row {start.row}; pass an older one")
    traced: list[TracedRow] = []
    last: int | None = None
    with closing(LaneOpener(dataset.stream, start.first_epoch, start.states)) as opener:
        for given in _rows_of(dataset, start, opener):
            last = _number(dataset, start, given)
            if last >= first:
                traced.append(_traced(dataset, start, given, rank=0, batch=0, place=len(traced)))
            if last >= first + count - 1:
                break
    if not traced:
        raise ValueError(
            f"the pass ends before row {first}: "
            + (f"its last row is {last}" if last is not None else "it has no more")
        )
    return traced


def _check(*, batch_size: int, accumulation: int, step: int, epoch: int) -> None:
    check_numbers({"batch_size": (batch_size, 1), "accumulation": (accumulation, 1)})
    check_numbers({"step": (step, 0), "epoch": (epoch, 0)})


def _start(dataset: PackedDataset, state: Mapping[str, Any] | None, *, world_size: int, epoch: int) -> list[Start]:
    """Where each rank begins."""
    check_rank(0, world_size, lanes=dataset.stream.lanes)
    if state is None:
        return [Start(first_epoch=epoch, rank=rank, world_size=world_size) for rank in range(world_size)]
    accepted = accept(state, stream=dataset.stream.identity(), change_weights=False)
    check_whole(accepted)
    return [Start.of(accepted, rank=rank, world_size=world_size) for rank in range(world_size)]


def _steps_done(start: Start, rows_per_step: int, saved_after: int | None) -> int:
    if saved_after is not None:
        return saved_after
    if start.rows % rows_per_step:
        raise StateError(
            f"the state is after {start.rows} rows, no multiple of the {rows_per_step} rows of a step, so the run had "
            "another batch size, ranks or accumulation before; say after how many steps it was saved (saved_after=...)"
        )
    return start.rows // rows_per_step


def _rows_of(dataset: PackedDataset, start: Start, opener: LaneOpener) -> Iterator[Given]:
    """The rows of a rank."""
    messages = start.host(dataset.stream).messages(opener)
    return (given for given in in_order(messages, num_workers=1) if given.row is not None)


def _number(dataset: PackedDataset, start: Start, given: Given) -> int:
    return start.host(dataset.stream).row_after(given) - start.world_size + start.rank


def _traced(dataset: PackedDataset, start: Start, given: Given, *, rank: int, batch: int, place: int) -> TracedRow:
    row = given.row
    assert row is not None
    ids, ends = row.ids, itertools.accumulate(row.lengths)
    examples = []
    for origin, (source, shard, index), length, end in zip(
        row.origin, dataset.examples_of(row), row.lengths, ends, strict=True
    ):
        epoch, _, _, first, tokens = origin
        begin = end - length
        examples.append(
            TracedExample(
                epoch=epoch,
                source=source,
                shard=shard,
                index=index,
                first_token=first,
                tokens=tokens,
                begin=begin,
                end=begin + tokens,
                ids=ids[begin : begin + tokens].tolist(),
            )
        )
    return TracedRow(
        row=_number(dataset, start, given),
        lane=given.lane,
        rank=rank,
        batch=batch,
        place=place,
        num_loss_tokens=row.num_loss_tokens,
        examples=examples,
        packed=row,
    )
