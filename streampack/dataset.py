"""PackedDataset: the stream as a torch IterableDataset of packed rows."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from torch.utils.data import IterableDataset, get_worker_info

from streampack.collate import PackedRow, packed_row
from streampack.encode import Encoder, Overlong, Policies
from streampack.epochs import PassCounter
from streampack.items import Transform
from streampack.lanes import Packer
from streampack.packing import Packing
from streampack.progress import Progress, Start
from streampack.ranks import check_rank, limit_tokenizer_threads, rank_of_environment, rank_of_group, worker_of_process
from streampack.retry import Retry
from streampack.rows import Row
from streampack.sources import as_source, locate
from streampack.state import COUNTS, StateError, check
from streampack.stream import Stream


class PackedDataset(IterableDataset[PackedRow]):
    """Rows of exactly `seq_len` tokens, packed from streamed examples: the same rows in the same order for any number
    of ranks and workers.

    Each pass (`iter`) is one run over `epochs` epochs; the next pass takes the epochs after it. Use it in a
    `PackedLoader`, or in a plain DataLoader (`collate_fn=streampack.Collator(...)`).

    Args:
        source: a `datasets.IterableDataset` or `Dataset`, a list or map-style dataset, `FunctionSource`, or any object
            with `name`, `num_shards` and `read(shard, start)`.
        tokenizer: a Transformers tokenizer for examples with text; None for examples that have `input_ids` (and, if
            not every token is a target, `labels`, `completion_mask`, `assistant_masks` or `loss_mask`).
        seq_len: tokens in a row.
        text_column: the column of text.
        lanes: a multiple of every number of ranks you may ever use; part of the stream's identity. Few for a small
            set: each lane ends with a part-filled row.
        buffer_size: examples that wait in each lane to be packed, at least; identity.
        shuffle: order of shards, and of examples within blocks of a lane, new in each epoch; False keeps the order.
        shuffle_block: examples of the source in a block (of a shard that all lanes share, those of all together).
        seed: of all orders, an integer >= 0.
        epochs: epochs in a pass; None: an endless stream.
        overlong: examples of more than `max_example_len` tokens: "split" into fragments, "truncate" (keep the first
            tokens), "drop" or "error". "auto": split where every token is a target, else error.
        packing: "auto" (exact fill, oldest first; best-fit-decreasing where examples are long), "oldest_first",
            "best_fit", "next_fit" (keeps the order of the stream), "wrapped" (concatenate and cut: examples are
            cut at row ends, and still isolated from each other).
        append_eos: "auto": end each text with eos_token_id unless it does already; True: the same, and an error if
            the tokenizer has none; False: as the tokenizer makes it.
        empty, no_target, bad: examples without tokens, without targets, or that cannot be read (null, wrong type,
            ragged): "drop" (counted in the statistics) or "error". no_target="keep" packs them.
        transform: a function on single examples (dicts), applied after seeking, so that it never runs again for
            examples that are used; returning None leaves one out.
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
        text_column: str = "text",
        lanes: int = 16,
        buffer_size: int = 256,
        shuffle: bool = True,
        shuffle_block: int = 1024,
        seed: int = 0,
        epochs: int | None = 1,
        overlong: Overlong = "auto",
        packing: Packing = "auto",
        append_eos: bool | Literal["auto"] = "auto",
        empty: Literal["drop", "error"] = "drop",
        no_target: Literal["drop", "keep", "error"] = "drop",
        bad: Literal["drop", "error"] = "error",
        transform: Transform | None = None,
        max_example_len: int | None = None,
        max_examples_per_row: int | None = None,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        source_name: str | None = None,
        retry: Retry | None = None,
    ) -> None:
        _check_numbers(
            {
                "seq_len": (seq_len, 2),
                "lanes": (lanes, 1),
                "buffer_size": (buffer_size, 1),
                "shuffle_block": (shuffle_block, 1),
                "seed": (seed, 0),
                "epochs": (epochs, 1),
                "max_example_len": (max_example_len, 2),
                "max_examples_per_row": (max_examples_per_row, 1),
                "pad_to_multiple_of": (pad_to_multiple_of, 1),
                "pad_token_id": (pad_token_id, 0),
                "rank": (rank, 0),
                "world_size": (world_size, 1),
            }
        )
        _check_choices(
            {
                "overlong": (overlong, get_args(Overlong)),
                "packing": (packing, get_args(Packing)),
                "append_eos": (append_eos, (True, False, "auto")),
                "empty": (empty, ("drop", "error")),
                "no_target": (no_target, ("drop", "keep", "error")),
                "bad": (bad, ("drop", "error")),
            }
        )
        multiple = pad_to_multiple_of or 1
        _check_lengths(seq_len, max_example_len, multiple, packing)
        _check_kinds(text_column=text_column, source_name=source_name or "", transform=transform)
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank!r}, world_size={world_size!r}: pass both or neither")
        if rank is not None and world_size is not None:
            check_rank(rank, world_size, lanes=lanes)
        if tokenizer is not None and not callable(tokenizer):
            raise TypeError(f"tokenizer is {type(tokenizer).__name__}, not a Transformers tokenizer (or None)")
        # `wrapped` cuts examples where rows end, so none is too long unless a policy or a limit says so.
        cuts_anyway = packing == "wrapped" and max_example_len is None and overlong in ("auto", "split")
        encoder = Encoder(
            tokenizer,
            text_column=text_column,
            append_eos=append_eos,
            limit=None if cuts_anyway else max_example_len or seq_len,
            policies=Policies(overlong=overlong, empty=empty, no_target=no_target, bad=bad),
            cuts_any=packing == "wrapped",
        )
        self.seq_len = seq_len
        self.pad_token_id = _pad_token_id(tokenizer) if pad_token_id is None else pad_token_id
        self.stream = Stream(
            source=as_source(source, lanes=lanes, name=source_name),
            encoder=encoder,
            packer=Packer(
                seq_len=seq_len,
                buffer_size=buffer_size,
                packing=packing,
                max_examples=max_examples_per_row,
                pad_to_multiple_of=multiple,
                pad_token_id=self.pad_token_id,
                keep_no_target=no_target == "keep",
            ),
            transform=transform,
            lanes=lanes,
            shuffle=shuffle,
            shuffle_block=shuffle_block,
            seed=seed,
            epochs=epochs,
            max_example_len=max_example_len,
            retry=Retry.of(retry),
            names={
                "text_column": text_column if tokenizer is not None else None,
                "append_eos": append_eos,
                "overlong": overlong,
                "empty": empty,
                "no_target": no_target,
                "bad": bad,
                "pad_token_id": self.pad_token_id,
                "transform": _function_name(transform),
            },
        )
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
        return packed_row(row, seq_len=self.seq_len, pad_token_id=self.pad_token_id, examples=self.examples_of(row))

    def examples_of(self, row: Row) -> list[tuple[str, int | str, int]]:
        """(source, shard, index) of each example in a row."""
        source = self.stream.source
        return [(source.name, *locate(source, shard, index)) for shard, index in row.origin[:, 1:3].tolist()]

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
        return {**self.__dict__, "_progress": None, "_rank_of_parent": rank_of_group()}

    # ---- passes and states ---------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """The next pass begins with this epoch, also in persistent workers. (A loaded state goes first.)"""
        _check_numbers({"epoch": (epoch, 0)})
        if self.loaded is not None:
            warn_if_loaded(self.loaded, epoch)
        self.passes.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last row that this process has yielded (in a worker: of that worker alone).

        Raises:
            StateError: in the main process of a DataLoader whose workers iterate this dataset: only they know.
        """
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: of a PackedLoader or of this dataset. Used by the next pass.

        Raises:
            StateError: naming both values, if the state is not one of this stream, or of another rank or worker.
        """
        check(state, stream=self.stream.identity())
        worker, num_workers = worker_of_process()
        rank, world_size = self.resolve_rank()
        start = Start.of(state, rank=rank, world_size=world_size, worker=worker, num_workers=num_workers)
        self.loaded = dict(state)
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


def _pad_token_id(tokenizer: Any) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    return 0


def _function_name(function: Any) -> str | None:
    return None if function is None else getattr(function, "__qualname__", type(function).__qualname__)


def _check_numbers(numbers: Mapping[str, tuple[int | None, int]]) -> None:
    """Each is name: (value, least); None is an argument that was left out."""
    for name, (value, least) in numbers.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}, not an int")
        if value is not None and not least <= value < 1 << 31:
            raise ValueError(f"{name}={value}: must be at least {least}" + (", below 2**31" if value > least else ""))


def _check_kinds(*, text_column: Any, source_name: Any, transform: Any) -> None:
    for name, value in (("text_column", text_column), ("source_name", source_name)):
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r} is {type(value).__name__}, not a str")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform={transform!r} is {type(transform).__name__}, not a function")


def _check_choices(choices: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
    for name, (choice, allowed) in choices.items():
        if choice not in allowed:
            raise ValueError(f"{name}={choice!r}: pass one of {', '.join(map(repr, allowed))}")


def _check_lengths(seq_len: int, max_example_len: int | None, multiple: int, packing: str) -> None:
    if seq_len % multiple:
        raise ValueError(f"seq_len={seq_len} is not a multiple of pad_to_multiple_of={multiple}")
    if multiple > 1 and packing == "wrapped":
        raise ValueError("packing='wrapped' cuts examples anywhere, so pad_to_multiple_of cannot hold; use another")
    if max_example_len is not None and max_example_len > seq_len and packing != "wrapped":
        raise ValueError(f"max_example_len={max_example_len} does not fit into seq_len={seq_len}")
