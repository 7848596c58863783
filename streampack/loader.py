"""PackedLoader: a DataLoader of packed batches whose state covers exactly what it handed out."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from streampack.ahead import WorkAhead
from streampack.arguments import check_numbers
from streampack.callers import refuse_checkpointing_by_key, warn_of_fetched_batch
from streampack.collate import Collator, LayoutName, PackedRow, pinned
from streampack.dataset import PackedDataset, overtaken, warn_if_loaded
from streampack.ending import AtEnd, CpuGroup, check_at_end, resolve, together
from streampack.hosting import Given, Message, in_order
from streampack.lane_state import COUNTS
from streampack.loss import LossWeighting
from streampack.messages import Messages, as_it_is, quiet_fork, warn_of_reading
from streampack.progress import Progress, Start
from streampack.remaining import Remaining, remaining
from streampack.rows import Row, filler_row
from streampack.sources import BadExample
from streampack.state import accept, check_whole

MESSAGE_TOKENS = 1 << 18
"""Tokens in a message from a worker, about: enough that its fixed cost does not show, little enough to hold many."""
AHEAD = 8
"""Batches that the thread of num_workers=0 works ahead."""


class PackedLoader(DataLoader[Any]):
    """Batches of `batch_size` rows of a PackedDataset. Any number of workers gives the same batches.

    `iter(loader)` begins a pass: where a loaded state says, else with the next epoch (nothing happens before its first
    batch is asked for). With num_workers=0, which is best for text, a thread reads, tokenizes and packs ahead, and the
    tokenizer uses its own threads; workers are for sources and functions of your own that keep Python busy.

    Args:
        dataset: the PackedDataset.
        batch_size: rows in a batch of this rank. Not part of the stream's identity: change it at any resume.
        layout: "flat" or "rows", see `Collator`.
        shift_labels, loss_weights, seq_idx, fixed_segments, cu_seqlens_padded: see `Collator`.
        num_workers: worker processes.
        at_end: of a finite pass on several ranks, which have not all the same number of rows. "fill": ranks that are
            out, and short batches, get rows of nothing but padding, until all ranks are out; "cut": all ranks end
            before the first batch that is not full on one of them, and what is left is counted (`stats`); "own": each
            rank ends by itself. Default: "fill" with a process group, else "own".
        collate_fn: makes the batch from a list of `PackedRow` instead; what `Collator` takes does not apply then.
        prefetch_factor: messages that each worker prepares ahead (torch's default: 2); with num_workers=0: batches.
        pin_memory: put tensors into pinned memory, where CUDA is available.
        persistent_workers, multiprocessing_context, timeout, worker_init_fn: as in torch's DataLoader.

    Raises:
        ValueError, TypeError: for arguments that cannot be used.
    """

    batch_size: int  # torch's own may be None
    # For accelerate: prepare() must give it back as it is. It is dealt to ranks already, and would be once more.
    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: PackedDataset,
        batch_size: int = 1,
        *,
        layout: LayoutName = "flat",
        shift_labels: bool = False,
        loss_weights: LossWeighting | None = None,
        seq_idx: bool = False,
        fixed_segments: int | None = None,
        cu_seqlens_padded: bool = False,
        num_workers: int = 0,
        at_end: AtEnd | None = None,
        collate_fn: Callable[[list[PackedRow]], Any] | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        if not isinstance(dataset, PackedDataset):
            raise TypeError(f"PackedLoader takes a PackedDataset, not {type(dataset).__name__}")
        check_at_end(at_end)
        check_numbers({"batch_size": (batch_size or 0, 1), "prefetch_factor": (prefetch_factor, 1)})
        self.packed = dataset
        self._messages = Messages(dataset)
        self._collator = Collator(
            layout,
            shift_labels=shift_labels,
            loss_weights=loss_weights,
            seq_idx=seq_idx,
            fixed_segments=fixed_segments,
            cu_seqlens_padded=cu_seqlens_padded,
        )
        self._collate_rows = collate_fn
        self._ahead = prefetch_factor or AHEAD
        super().__init__(
            self._messages,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=as_it_is,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
        )
        # torch must not batch what workers send, but to everyone else this is the batch size (past torch's guard).
        self.__dict__.update(batch_size=batch_size)
        self.at_end = at_end
        self.saved_by_callback = False  # see lightning.py
        self._group = CpuGroup()
        self._pin = pin_memory and torch.cuda.is_available()
        self._loaded: dict[str, Any] | None = None
        self._loads = 0
        self._progress: Progress | None = None
        self._said = False
        self._last: list[Row] = []

    # ---- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """A pass. Batches come as the collator makes them; the last one of a finite pass may be short (at_end="own").

        Raises:
            StateError: if a state is loaded, or another pass begun, while this one is running.
        """
        progress = self._progress = Progress(self.packed.stream, self._start())
        self._loads = self.packed.passes.loads
        at_end = resolve(self.at_end, endless=self.packed.stream.epochs is None, world_size=progress.start.world_size)
        packed = self.packed.row_len is not None
        closed = threading.Event()
        batches = self._batches(progress, closed)
        ahead = WorkAhead(batches, depth=self._ahead, stopped=closed) if self.num_workers == 0 else None
        source = ahead or batches
        try:
            for given in source if at_end == "own" else self._together(source, progress, at_end):
                self._check_current(progress)
                rows = [one.row for one in given if one.row is not None]
                if at_end == "fill" and len(rows) < self.batch_size:
                    progress.filler_rows += self.batch_size - len(rows)
                    rows += [filler_row()] * (self.batch_size - len(rows))
                batch = self._collate(rows) if rows else None
                for one in given:
                    progress.take(one)
                if rows:
                    progress.end_batch(cells=0 if packed else sum(self._collator.widths(rows, seq_len=None)))
                    self._last = rows
                    if ahead is not None:
                        ahead.away()
                    yield batch
                    self._check_current(progress)
            progress.ended = True
        finally:
            source.close()

    def _together(self, source: Iterable[list[Given]], progress: Progress, at_end: AtEnd) -> Iterator[list[Given]]:
        return together(source, at_end=at_end, batch_size=self.batch_size, group=self._group, leave=progress.leave)

    def _check_current(self, progress: Progress) -> None:
        if self._progress is not progress or self.packed.passes.loads != self._loads:
            raise overtaken("loader")

    def _start(self) -> Start:
        """Where the next pass begins. The dataset counts epochs, so its `set_epoch` and loaded state hold here too."""
        rank, world_size = self.packed.resolve_rank()
        if not self._said:
            self._said = True
            warn_of_reading(self.packed.stream, processes=world_size * max(1, self.num_workers))
        passes, step = self.packed.passes, self.packed.stream.epochs or 1
        state, self._loaded = self._loaded, None
        if state is None:
            epoch = passes.next_pass(step=step)
            state = self.packed.take_loaded() if epoch is None else None
            if epoch is not None:
                return self._fresh_start(epoch, rank, world_size)
        assert state is not None
        start = Start.of(state, rank=rank, world_size=world_size)
        passes.set(start.first_epoch + step)
        return start

    def _fresh_start(self, epoch: int, rank: int, world_size: int) -> Start:
        totals = self._progress.counts() if self._progress is not None else dict.fromkeys(COUNTS, 0)
        return Start(first_epoch=epoch, rank=rank, world_size=world_size, totals=totals)

    def _batches(self, progress: Progress, closed: threading.Event) -> "Generator[list[Given], None, None]":
        """What lanes give, cut after each `batch_size` rows; the last may have fewer rows, or none."""
        given: list[Given] = []
        rows = 0
        for one in in_order(self._receive(progress, closed), num_workers=max(1, self.num_workers)):
            given.append(one)
            rows += one.row is not None
            if rows == self.batch_size:
                yield given
                given, rows = [], 0
        yield given

    def _collate(self, rows: Sequence[Row]) -> Any:
        dataset = self.packed
        if self._collate_rows is not None:
            batch = self._collate_rows([dataset.as_dict(row) for row in rows])
        else:
            batch = self._collator.compact(rows, seq_len=dataset.row_len, pad_token_id=dataset.pad_token_id)
            if not any(row.num_loss_tokens for row in rows):
                batch["num_items_in_batch"] = 1  # the mean over no targets would be NaN, their sum over 1 is 0
        return pinned(batch) if self._pin else batch

    def filler_batch(self) -> Any:
        """A batch of nothing but padding: no loss, no gradient. It counts nowhere."""
        return self._collate([filler_row()] * self.batch_size)

    def _receive(self, progress: Progress, closed: threading.Event) -> Iterator[Message]:
        for message in self._make_messages(progress.start, closed):
            if message.reading is not None:
                progress.reading[message.worker] = message.reading
            yield message

    def _make_messages(self, start: Start, closed: threading.Event) -> Iterator[Message]:
        rows_per_message = max(1, MESSAGE_TOKENS // self.packed.seq_len)
        if self.num_workers == 0:
            stream = self.packed.stream
            host = start.host(stream, rows_per_message=rows_per_message)
            yield from stream.messages(host, first_epoch=start.first_epoch, states=start.states, closed=closed.is_set)
            return
        if not self._messages.renew(start, rows_per_message, running=self._iterator is not None):
            self._iterator = None  # living workers cannot be told where to resume: start new ones
        serial = self._messages.serial
        with quiet_fork():
            iterator = super().__iter__()
        try:
            yield from iterator
        finally:
            self._messages.close(serial)

    # ---- passes and states ---------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next pass begins with this epoch. A loaded state goes first: it says itself in which epoch it is."""
        if self._loaded is not None:
            warn_if_loaded(self._loaded, epoch)
        self.packed.set_epoch(epoch)

    def state_dict(self, *, batches: int | None = None) -> dict[str, Any]:
        """The state of this rank after the batches handed out: plain values, for `torch.save` or JSON.

        With several ranks, save `merge_states` of all ranks' states.

        Args:
            batches: the state after so many batches of this pass (since it began or resumed) instead, for loops that
                fetch batches ahead of training. Only the last few can be asked for.

        Raises:
            StateError: for a number of batches that is not kept; where torch.distributed.checkpoint asks for it.
        """
        refuse_checkpointing_by_key("PackedLoader")
        if not self.saved_by_callback:
            warn_of_fetched_batch()
        return self.state_of_rank(batches=batches)

    def state_of_rank(self, *, batches: int | None = None) -> dict[str, Any]:
        """The same for `streampack.checkpoint`, which puts the states of all ranks together."""
        progress = self._current()
        return progress.state(batches=progress.batches if batches is None else batches)

    def _current(self) -> Progress:
        """The running (or last) pass, or the one that comes where none began since a state was loaded."""
        dataset, progress = self.packed, self._progress
        if progress is not None and not (progress.ended and progress.epochs[1] != dataset.passes.upcoming):
            return progress
        rank, world_size = dataset.resolve_rank()
        loaded = self._loaded or dataset.loaded
        if loaded is not None:
            return Progress(dataset.stream, Start.of(loaded, rank=rank, world_size=world_size))
        return Progress(dataset.stream, self._fresh_start(dataset.passes.upcoming, rank, world_size))

    def load_state_dict(self, state: Mapping[str, Any], *, change_weights: bool = False) -> None:
        """Continue from a state, on any number of ranks (that divides lanes) and workers. Used by the next pass.

        A pass that is running raises at its next batch.

        change_weights: a Mixture may have other weights than when the state was saved; they apply from here on.

        Raises:
            StateError: naming both values, if the state is not one of this stream, or is that of one of several ranks.
        """
        state = accept(state, stream=self.packed.stream.identity(), change_weights=change_weights)
        check_whole(state)
        rank, world_size = self.packed.resolve_rank()
        Start.of(state, rank=rank, world_size=world_size)
        self._loaded = state
        self._progress = None
        self._last = []

    # ---- about the last batch ------------------------------------------------------------------------------------

    @property
    def num_loss_tokens(self) -> int:
        """Targets in the last batch: its labels that are not -100."""
        return sum(row.num_loss_tokens for row in self._last)

    @property
    def num_examples(self) -> int:
        """Examples (and fragments of split ones) in the last batch: with packing many more than rows."""
        return sum(len(row.lengths) for row in self._last)

    @property
    def provenance(self) -> list[list[tuple[str, int | str, int]]]:
        """Of the last batch: for each row the (source, shard, index) of its examples, in the order of its segments."""
        return [self.packed.examples_of(row) for row in self._last]

    @property
    def stats(self) -> dict[str, float]:
        """Statistics of this rank up to the last batch, plain numbers to log; they travel with the state.

        rows, segments, tokens, loss_tokens: made so far; cells: of these rows, padding_tokens: those without a token,
        fill: the share of the others (where rows have no fixed length, the three are of the batches of this pass since
        it began or resumed); examples, split: taken from the source (also those that still wait for a row), and cut
        into fragments; truncated_tokens; empty, no_target, bad, overlong, transform: examples left out, by reason, and
        bad_malformed, bad_null ...: the bad ones, see `bad_examples`; no_target_tokens: in rows left out since they
        held no target; filler_rows: rows of padding given at the end of this pass; cut_rows, cut_tokens: what
        at_end="cut" left in it; retries, retry_seconds: of reading in this pass, and the seconds spent waiting for
        them; longest_read_seconds, longest_read_shard: the longest wait for a source, and its shard (-1: none); epoch:
        epochs given in rows, with the share of the present one; lane_rows_min, lane_rows_max: how even the lanes are.
        """
        return self._current().stats()

    @property
    def remaining(self) -> Remaining:
        """The share of this pass that was handed out, and about how many rows of this rank are still to come."""
        return remaining(self._current())

    @property
    def source_stats(self) -> dict[str, dict[str, float]]:
        """Of each source of a Mixture, on this rank in this pass: {} for a stream of one source.

        weight: what its share should be (of tokens, or with by="examples" of examples); share_entered, share: its
        share of the tokens that entered the lanes, and of those in rows; tokens_entered, tokens, examples: their
        numbers; epoch: its own, with the share of the present one.
        """
        return self._current().source_stats()

    @property
    def bad_examples(self) -> list[BadExample]:
        """The last 1000 bad examples that were left out in this pass since it began or resumed, oldest first."""
        where = self.packed.stream.where
        return [BadExample(where(bad.shard, bad.index), bad.reason, bad.what) for bad in self._current().bad]
