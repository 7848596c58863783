"""Writing MDS, the format of mosaicml-streaming: tokenized examples, to be packed later, or rows that are packed.

A packed row of 4096 tokens takes about 12 kB: input_ids, a mask of the targets, the lengths of its segments and where
its examples came from. All else follows from these.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from streampack.collate import PackedRow, packed_row
from streampack.dataset import PackedDataset
from streampack.mds import import_streaming
from streampack.rows import IGNORE, Row
from streampack.sources import Fault, SequenceSource
from streampack.tables import Block, Position
from streampack.token_ids import Encoded, IdReader

IdType = Literal["uint16", "uint32"]
SHARD_BYTES = 1 << 26
HASHES = ("xxh64",)
"""Written by default: with a hash, a damaged file is found when it is fetched, and data of equal sizes told apart."""
_CHUNK = 256


def write_mds(
    examples: Iterable[Mapping[str, Any]],
    out: str | tuple[str, str],
    *,
    vocab_size: int | None = None,
    dtype: IdType | None = None,
    columns: Mapping[str, str] | None = None,
    compression: str | None = None,
    hashes: Sequence[str] = HASHES,
    size_limit: int | str | None = SHARD_BYTES,
    keep_local: bool = False,
) -> int:
    """Write tokenized examples as MDS: `input_ids`, and if not every token is a target, `loss_mask` (uint8).

    Args:
        examples: dicts with `input_ids`, and if they have it, one of `labels`, `completion_mask`, `assistant_masks`
            and `loss_mask`: what PackedDataset takes without a tokenizer.
        out: an empty (or new) folder, or one to upload to, or (folder, one to upload to), as MDSWriter has it.
        vocab_size: ids must be below it; up to 65,536 they are written as uint16.
        dtype: "uint16" or "uint32"; default by `vocab_size`, without it uint32.
        columns: other columns to write, name -> MDS encoding: {"url": "str"}. Those not named are not written.
        compression: "zstd", "gz", "zstd:7" ...; None: none.
        hashes: algorithms; a file is compared with its hash when it is fetched.
        size_limit: bytes of a shard before compression (an int, or "64mb"). At least as many shards as `lanes` let
            every lane read shards of its own.
        keep_local: keep the local copy of what is uploaded.

    Returns:
        How many examples were written.

    Raises:
        ValueError: for an example that is bad or has no tokens, or an id that does not fit; names its index. No
            index.json is written then, so that the part is not taken for the whole.
        FileExistsError: if the folder is not empty.
        ImportError: without mosaicml-streaming.
    """
    ids_type, limit = _id_type(vocab_size, dtype)
    others = dict(columns or {})
    taken = sorted({"input_ids", "loss_mask"} & set(others))
    if taken:
        raise ValueError(f"columns={others!r}: {taken[0]!r} is written anyway; leave it out")
    samples = _token_samples(examples, ids_type, limit, list(others))
    first = next(samples, None)
    if first is None:
        raise ValueError("there are no examples to write")
    encodings = {"input_ids": f"ndarray:{ids_type}", "loss_mask": "ndarray:uint8", **others}
    return _write(
        itertools.chain([first], samples),
        {name: encodings[name] for name in first},
        out,
        compression=compression,
        hashes=hashes,
        size_limit=size_limit,
        keep_local=keep_local,
    )


def write_packed_mds(
    rows: Iterable[PackedRow],
    out: str | tuple[str, str],
    *,
    vocab_size: int | None = None,
    dtype: IdType | None = None,
    compression: str | None = None,
    hashes: Sequence[str] = HASHES,
    size_limit: int | str | None = SHARD_BYTES,
    keep_local: bool = False,
) -> int:
    """Write packed rows as MDS, in their order; `read_packed_row` makes exactly these rows of the samples again.

    Columns, T = seq_len: `input_ids` (uint16 or uint32 [T]), `loss_mask` (uint8 [T], 1 where labels are not -100),
    `lengths` (uint32 [segments], of the padding tail too), `tokens` (uint32 [segments], without the cells by which
    `pad_to_multiple_of` pads an example) and `examples` (JSON: source, shard, index of each).

    Args:
        rows: a PackedDataset (the rows of its next pass that fall to this rank), or any iterable of its rows.
        out, vocab_size, dtype, compression, hashes, size_limit, keep_local: see `write_mds`.

    Returns:
        How many rows were written.

    Raises:
        ValueError: for an endless PackedDataset, an id that does not fit, or a row that would not come back as it
            is (with other keys, say). No index.json is written then.
        FileExistsError: if the folder is not empty.
        ImportError: without mosaicml-streaming.
    """
    if isinstance(rows, PackedDataset) and rows.stream.epochs is None:
        raise ValueError(
            "this PackedDataset has epochs=None, which never ends; pass epochs=1, or itertools.islice(dataset, count)"
        )
    if isinstance(rows, PackedDataset) and rows.row_len is None:
        raise ValueError(
            f"packing={rows.stream.packer.packing!r} makes no packed rows; write single examples with write_mds"
        )
    ids_type, limit = _id_type(vocab_size, dtype)
    samples = (_packed_sample(row, number, ids_type, limit) for number, row in enumerate(rows))
    first = next(samples, None)
    if first is None:
        raise ValueError("there are no rows to write")
    encodings = {
        "input_ids": f"ndarray:{ids_type}:{len(first['input_ids'])}",
        "loss_mask": f"ndarray:uint8:{len(first['input_ids'])}",
        "lengths": "ndarray:uint32",
        "tokens": "ndarray:uint32",
        "examples": "json",
    }
    return _write(
        itertools.chain([first], samples),
        encodings,
        out,
        compression=compression,
        hashes=hashes,
        size_limit=size_limit,
        keep_local=keep_local,
    )


def read_packed_row(sample: Mapping[str, Any]) -> PackedRow:
    """The row of a sample that `write_packed_mds` wrote.

    With mosaicml-streaming's own order: `StreamingDataset(local=..., batch_size=4)` in a DataLoader whose collate_fn
    is `lambda samples: collator([read_packed_row(sample) for sample in samples])`, collator = Collator("flat").

    Raises:
        ValueError: for a sample of something else.
    """
    missing = [name for name in ("input_ids", "loss_mask", "lengths", "tokens", "examples") if name not in sample]
    if missing:
        raise ValueError(f"the sample has no {missing[0]!r} (there are: {', '.join(sample)}): not a packed row")
    ids = np.array(sample["input_ids"], dtype=np.int32)
    examples = [(source, shard, index) for source, shard, index in sample["examples"]]
    lengths = [int(length) for length in sample["lengths"][: len(examples)]]  # the padding tail has no example
    cells = sum(lengths)
    row = Row(
        pieces=[ids[:cells]],
        lengths=lengths,
        targets=np.array(sample["loss_mask"][:cells], dtype=bool),
        origin=[(0, 0, 0, 0, int(tokens)) for tokens in sample["tokens"][: len(examples)]],
    )
    return packed_row(row, seq_len=len(ids), pad_token_id=int(ids[-1]), examples=examples)


def _id_type(vocab_size: int | None, dtype: IdType | None) -> tuple[IdType, int]:
    """(type of ids, the first id that is too large)"""
    if dtype not in (None, "uint16", "uint32"):
        raise ValueError(f"dtype={dtype!r}: pass 'uint16' or 'uint32'")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size}: must be at least 1")
    chosen: IdType = dtype or ("uint16" if vocab_size is not None and vocab_size <= 1 << 16 else "uint32")
    limit = 1 << (16 if chosen == "uint16" else 32)
    if vocab_size is not None and vocab_size > limit:
        raise ValueError(f"vocab_size={vocab_size} does not fit into dtype={chosen!r}; pass 'uint32'")
    return chosen, vocab_size or limit


def _fit(ids: npt.NDArray[Any], ids_type: IdType, limit: int, where: str) -> npt.NDArray[Any]:
    outside = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"{where}: the id {int(ids[at])} at token {at} does not fit: ids are 0 .. {limit - 1} ({ids_type}); pass "
            "the tokenizer's len() as vocab_size, or dtype='uint32'"
        )
    return ids.astype(ids_type)


def _token_samples(
    examples: Iterable[Mapping[str, Any]], ids_type: IdType, limit: int, others: list[str]
) -> Iterator[dict[str, Any]]:
    """Examples as the encoder reads them, so that what is written is what the stream would have had."""
    reader = IdReader()
    source = SequenceSource([], name="examples")  # for error messages
    iterator, done = iter(examples), 0
    while chunk := list(itertools.islice(iterator, _CHUNK)):
        indices = np.arange(done, done + len(chunk))
        block = Block(
            source=source, position=Position(0, 0, 0, 0), shards=np.zeros_like(indices), indices=indices, data=chunk
        )
        for pick, found in enumerate(reader.read(block, range(len(chunk)))):
            where = block.where(pick)
            if isinstance(found, Fault):
                raise ValueError(f"{where}: {found.what}; mend it, or leave it out")
            assert isinstance(found, Encoded)  # of dicts
            if not len(found.ids):
                raise ValueError(f"{where}: the example has no tokens, and MDS cannot hold empty arrays; leave it out")
            sample: dict[str, Any] = {"input_ids": _fit(found.ids, ids_type, limit, where)}
            if found.targets is not None:
                sample["loss_mask"] = found.targets.astype(np.uint8)
            for name in others:
                if name not in chunk[pick]:
                    raise ValueError(f"{where}: no column {name!r} (there are: {', '.join(chunk[pick])})")
                sample[name] = chunk[pick][name]
            yield sample
        done += len(chunk)


def _packed_sample(row: PackedRow, number: int, ids_type: IdType, limit: int) -> dict[str, Any]:
    lengths = np.diff(row["cu_seqlens"].numpy()).astype(np.uint32)
    sample = {
        "input_ids": _fit(row["input_ids"].numpy(), ids_type, limit, f"row {number}"),
        "loss_mask": (row["labels"].numpy() != IGNORE).astype(np.uint8),
        "lengths": lengths,
        "tokens": row["segment_tokens"].numpy().astype(np.uint32) if "segment_tokens" in row else lengths,
        "examples": [list(example) for example in row["examples"]],
    }
    again = read_packed_row(sample)
    for name in {**row, **again}:
        if name not in row or name not in again or not _is_equal(row[name], again[name]):
            raise ValueError(
                f"row {number}: {name!r} would not come back as it is; write rows as PackedDataset has them"
            )
    return sample


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _write(
    samples: Iterable[dict[str, Any]],
    columns: Mapping[str, str],
    out: str | tuple[str, str],
    *,
    compression: str | None,
    hashes: Sequence[str],
    size_limit: int | str | None,
    keep_local: bool,
) -> int:
    writer = import_streaming().MDSWriter(
        columns=dict(columns),
        out=out,
        keep_local=keep_local,
        compression=compression,
        hashes=sorted(hashes),
        size_limit=size_limit,
    )
    count = 0
    try:
        for sample in samples:
            writer.write(sample)
            count += 1
    except BaseException:
        writer.cancel_future_jobs()  # its finish() would write an index.json of the part
        raise
    writer.finish()
    return count
