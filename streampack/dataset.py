"""PackedDataset: the stream as a torch IterableDataset of packed rows."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from streampack.arguments import check_numbers
from streampack.callers import refuse_checkpointing_by_key, refuse_dealing
from streampack.chats import Targets
from streampack.collate import PackedRow, packed_row
from streampack.conversations import Format
from streampack.encode import Overlong
from streampack.epochs import PassCounter
from streampack.items import Transform
from streampack.lane_state import COUNTS
from streampack.packing import Packing
from streampack.progress import Progress, Start
from streampack.ranks import check_rank, limit_tokenizer_threads, rank_of_environment, rank_of_group, worker_of_process
from streampack.retry import Retry
from streampack.rows import Row
from streampack.settings import Settings
from streampack.state import StateError, accept


class PackedDataset(IterableDataset[PackedRow]):
    """Rows of exactly `seq_len` tokens, packed from streamed examples: the same rows in the same order for any number
    of ranks and workers. (With packing="none" and "by_length" a row is one example, as long as it is.)

    Each pass (`iter`) is one run over `epochs` epochs; the next pass takes the epochs after it. Use it in a
    `PackedLoader`, or in a plain DataLoader (`collate_fn=streampack.Collator(...)`).

    Args:
        source: a `datasets.IterableDataset` or `Dataset`, a list or map-style dataset, `FunctionSource`, any object
            with `name`, `num_shards` and `read(shard, start)`, or a `Mixture` of such.
        tokenizer: a Transformers tokenizer for examples with text; None for examples that have `input_ids` (and, if
            not every token is a target, `labels`, `completion_mask`, `assistant_masks` or `loss_mask`).
        seq_len: tokens in a row; without packing the most of an example.
        format: of the examples, with a tokenizer: "text"; "prompt_completion" (columns prompt and completion: text, or
            lists of messages); "messages" (role, content, tool calls ...; also a column tools); "sharegpt"
            (conversations: from, value). Of a Mixture also {source: format}. Conversations are made text by the
            tokenizer's chat template, with its special tokens and no others.
        targets: "all"; "completion": the completion, of conversations the last answer; "assistant": the assistant's
            turns, each with its end-of-turn token, by the template's {% generation %} marks or, where it has none,
            found in the text. Tokens that merge over the border are targets. "auto": all of a text, the completion of
            a prompt, the assistant's turns of conversations.
        text_column: the column of text; of a Mixture also {source: column}.
        lanes: a multiple of every number of ranks you may ever use; part of the stream's identity. Few for a small
            set: each lane ends with a part-filled row.
        buffer_size: examples that wait in each lane to be packed, at least; identity.
        shuffle: order of shards, and of examples within blocks of a lane, new in each epoch; False keeps the order.
        shuffle_block: examples of the source in a block (of a shard that all lanes share, those of all together).
        seed: of all orders, an integer >= 0.
        epochs: epochs in a pass; None: an endless stream.
        overlong: examples of more than `max_example_len` tokens: "split" into fragments, "truncate", "drop" or
            "error". "auto": split texts and ids of which every token is a target, else (conversations, and whatever
            has targets) error.
        truncate_keep: "start" or "end": which tokens overlong="truncate" keeps.
        packing: "auto" (exact fill, oldest first; best-fit-decreasing where examples are long), "oldest_first",
            "best_fit", "next_fit" (keeps the order of the stream), "wrapped" (concatenate and cut: examples are
            cut at row ends, and still isolated from each other). Two ways do without packing, and so without rows of
            fixed length: "none" (each row is one example, as long as it is, in the order of the stream) and "by_length"
            (the same, the longest of each buffer first). The loader pads their rows to the longest of the batch
            (layout="rows") or puts them one after the other without any padding (layout="flat"), so that a batch is
            `batch_size` examples.
        append_eos: "auto": end each text with eos_token_id unless it does already; True: the same, and an error if
            the tokenizer has none; False: as the tokenizer makes it. Conversations end as the chat template ends them.
        empty, no_target, bad: examples without tokens, without targets, or that cannot be used (malformed, null, no
            such column, wrong type, ragged ...): "drop" (counted in the statistics, by reason) or "error".
            no_target="keep" packs them.
        max_bad_share: with bad="drop": an error where more than this share of the examples is bad, looked at in each
            lane once it has left out 10.
        vocab_size: of examples that have `input_ids`: ids from it on are bad; None: any id.
        transform: a function on single examples (dicts), applied after seeking, so that it never runs again for
            examples that are used; returning None leaves one out. Of a Mixture also {source: function}.
        max_example_len: longest example (or fragment) in tokens; default seq_len.
        max_examples_per_row: most examples in a row.
        pad_to_multiple_of: pad each example to a multiple of this many cells.
        pad_token_id: fills what stays empty; default the tokenizer's pad, else eos token, else 0.
        rank, world_size: of data parallelism; default torch.distributed where it is initialised, else the launcher's
            RANK and WORLD_SIZE, else 0 of 1, looked up when iteration starts.
        source_name: identifies the data in saved states instead of file names and sizes.
        retry: how reading goes on after errors of the network, see `Retry`; not part of the stream's identity.

    Raises:
        ValueError, TypeError: for arguments that cannot be used, naming value and remedy.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any = None,
        *,
        seq_len: int,
        format: Format | Mapping[str, Format] = "text",
        targets: Targets = "auto",
        text_column: str | Mapping[str, str] = "text",
        lanes: int = 16,
        buffer_size: int = 256,
        shuffle: bool = True,
        shuffle_block: int = 1024,
        seed: int = 0,
        epochs: int | None = 1,
        overlong: Overlong = "auto",
        truncate_keep: Literal["start", "end"] = "start",
        packing: Packing = "auto",
        append_eos: bool | Literal["auto"] = "auto",
        empty: Literal["drop", "error"] = "drop",
        no_target: Literal["drop", "keep", "error"] = "drop",
        bad: Literal["drop", "error"] = "error",
        max_bad_share: float = 0.01,
        vocab_size: int | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        max_example_len: int | None = None,
        max_examples_per_row: int | None = None,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        source_name: str | None = None,
        retry: Retry | None = None,
    ) -> None:
        settings = Settings(
            seq_len=seq_len,
            format=format,
            targets=targets,
            text_column=text_column,
            lanes=lanes,
            buffer_size=buffer_size,
            shuffle=shuffle,
            shuffle_block=shuffle_block,
            seed=seed,
            epochs=epochs,
            overlong=overlong,
            truncate_keep=truncate_keep,
            packing=packing,
            append_eos=append_eos,
            empty=empty,
            no_target=no_target,
            bad=bad,
            max_bad_share=max_bad_share,
            vocab_size=vocab_size,
            transform=transform,
            max_example_len=max_example_len,
            max_examples_per_row=max_examples_per_row,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=pad_token_id,
            source_name=source_name,
            retry=retry,
        )
        settings.check()
        check_numbers({"rank": (rank, 0), "world_size": (world_size, 1)})
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank!r}, world_size={world_size!r}: pass both or neither")
        if rank is not None and world_size is not None:
            check_rank(rank, world_size, lanes=lanes)
        self.seq_len = seq_len
        self.stream = settings.stream(source, tokenizer)
        self.pad_token_id = self.stream.packer.pad_token_id
        self.row_len = self.stream.packer.row_len
        """Tokens of every row, seq_len; None where each row is as long as its example."""
        self._rank = None if rank is None or world_size is None else (rank, world_size)
        self._rank_of_parent: tuple[int, int] | None = None
        self.passes = PassCounter()
        """Which epoch comes next, shared with copies of this dataset in workers and with its loaders."""
        self.loaded: dict[str, Any] | None = None
        """The state that the next pass uses."""
        self._progress: Progress | None = None

    # ---- iteration -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PackedRow]:
        """The rows of a pass that fall to this rank (and, in a DataLoader worker, this worker)."""
        refuse_dealing(self.resolve_rank()[1])
        old = self._progress
        if get_worker_info() is not None and old is not None and old.ended and old.epochs[1] is not None:
            # StatefulDataLoader asks for the state now, before the first row: it is of the pass that begins.
            rank, world_size = self.resolve_rank()
            start = Start(first_epoch=old.epochs[1], rank=rank, world_size=world_size, totals=old.counts())
            self._progress = Progress(self.stream, start)
        return self._rows()

    def _rows(self) -> Iterator[PackedRow]:
        worker, num_workers = worker_of_process()
        start = self._start(worker, num_workers)
        progress = self._progress = Progress(self.stream, start)
        host = start.host(self.stream, worker=worker, num_workers=num_workers)
        for given in self.stream.rows(host, first_epoch=start.first_epoch, states=start.states):
            progress.take(given)
            if given.row is not None:
                yield self.as_dict(given.row)
                if self._progress is not progress:
                    raise overtaken("dataset")
        progress.ended = True

    def as_dict(self, row: Row) -> PackedRow:
        """A compact row as tensors."""
        return packed_row(row, seq_len=self.row_len, pad_token_id=self.pad_token_id, examples=self.examples_of(row))

    def examples_of(self, row: Row) -> list[tuple[str, int | str, int]]:
        """(source, shard, index) of each example in a row."""
        return [self.stream.place(shard, index) for _, shard, index, _, _ in row.origin]

    def _start(self, worker: int, num_workers: int) -> Start:
        if get_worker_info() is not None:
            limit_tokenizer_threads()
        rank, world_size = self.resolve_rank()
        epoch = self.passes.next_pass(step=self.stream.epochs or 1)
        state = self.take_loaded()
        if epoch is None and state is not None:
            return Start.of(state, rank=rank, world_size=world_size, worker=worker, num_workers=num_workers)
        assert epoch is not None
        totals = self._progress.counts() if self._progress else dict.fromkeys(COUNTS, 0)
        return Start(first_epoch=epoch, rank=rank, world_size=world_size, totals=totals)

    def take_loaded(self) -> dict[str, Any] | None:
        """The loaded state, which is used once."""
        state, self.loaded = self.loaded, None
        return state

    def resolve_rank(self) -> tuple[int, int]:
        """(rank, world size) now. Explicit ones win, then torch.distributed, then the launcher's environment."""
        rank, world_size = self._rank or rank_of_group() or self._rank_sent() or rank_of_environment()
        check_rank(rank, world_size, lanes=self.stream.lanes)
        return rank, world_size

    def _rank_sent(self) -> tuple[int, int] | None:
        """In a spawned worker, which has no process group: that of the process that started it."""
        return self._rank_of_parent if get_worker_info() is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """For pickling: the rank travels to spawned workers, the place in a running pass does not."""
        refuse_dealing(self.resolve_rank()[1])
        return {**self.__dict__, "_progress": None, "_rank_of_parent": rank_of_group()}

    # ---- passes and states ---------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next pass begins with this epoch, also in persistent workers. (A loaded state goes first.)"""
        check_numbers({"epoch": (epoch, 0)})
        if self.loaded is not None:
            warn_if_loaded(self.loaded, epoch)
        self.passes.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last row that this process has yielded (in a worker: of that worker alone).

        Raises:
            StateError: in the main process of a DataLoader whose workers iterate this dataset: only they know.
        """
        refuse_checkpointing_by_key("PackedDataset")
        worker, num_workers = worker_of_process()
        if self._progress is not None:
            return self._progress.worker_state(worker=worker, num_workers=num_workers)
        if self.loaded is not None:
            return dict(self.loaded)
        if get_worker_info() is None and self.passes.in_workers:
            raise StateError(
                "this dataset is iterated in DataLoader workers, so its state is not known here; use "
                "streampack.PackedLoader, whose state_dict() covers what it handed out, or a StatefulDataLoader"
            )
        rank, world_size = self.resolve_rank()
        start = Start(first_epoch=self.passes.upcoming, rank=rank, world_size=world_size)
        return Progress(self.stream, start).worker_state(worker=worker, num_workers=num_workers)

    def load_state_dict(self, state: Mapping[str, Any], *, change_weights: bool = False) -> None:
        """Continue from a state: of a PackedLoader or of this dataset. Used by the next pass.

        change_weights: a Mixture may have other weights than when the state was saved; they apply from here on.

        Raises:
            StateError: naming both values, if the state is not one of this stream, or of another rank or worker.
        """
        state = accept(state, stream=self.stream.identity(), change_weights=change_weights)
        worker, num_workers = worker_of_process()
        rank, world_size = self.resolve_rank()
        start = Start.of(state, rank=rank, world_size=world_size, worker=worker, num_workers=num_workers)
        self.loaded = state
        self._progress = None
        self.passes.load(next_epoch=start.first_epoch + (self.stream.epochs or 1))


def overtaken(what: str) -> StateError:
    """The error of a running pass that a load or another pass has made void."""
    return StateError(
        f"a state was loaded, or another pass begun, while this pass was running; go on with a new pass: iter({what})"
    )


def warn_if_loaded(state: Mapping[str, Any], epoch: int) -> None:
    """Say that `set_epoch` does not reach the next pass, if that resumes another epoch."""
    if state["pass"][0] != epoch:
        warnings.warn(
            f"set_epoch({epoch}) does not apply to the next pass, which resumes the loaded state in the pass of "
            f"epoch {state['pass'][0]}",
            stacklevel=3,
        )
