"""Tiny real sources, and hosts of lanes without torch, for tests of the whole stream."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streampack.files
from streampack.encode import Encoder, Policies
from streampack.files import Files
from streampack.hosting import Given, Message, in_order
from streampack.mixture import Mix, Mixture
from streampack.packing import UNPACKED, Packer
from streampack.progress import Progress, Start
from streampack.sources import Source, as_source
from streampack.state import merge_states
from streampack.stream import Part, Stream

SEQ_LEN = 64
PACKER = ("buffer_size", "max_examples", "pad_to_multiple_of", "max_bad_share")


def examples(count: int, *, seed: int = 0, longest: int = 60) -> list[dict[str, Any]]:
    """`count` tokenized examples; the first token of each says which one it is."""
    lengths = np.random.default_rng(seed).lognormal(2.3, 0.8, size=count).astype(int).clip(2, longest)
    return [{"input_ids": [number, *range(1, int(length))]} for number, length in enumerate(lengths)]


def split_evenly(rows: list[dict[str, Any]], parts: int) -> list[list[dict[str, Any]]]:
    return [rows[part * len(rows) // parts : (part + 1) * len(rows) // parts] for part in range(parts)]


def write_jsonl(folder: Path, parts: Sequence[list[dict[str, Any]]]) -> list[str]:
    files = [folder / f"part-{number:03}.jsonl" for number in range(len(parts))]
    for file, rows in zip(files, parts, strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(file) for file in files]


def write_parquet(folder: Path, parts: Sequence[list[dict[str, Any]]], *, row_group_size: int) -> list[str]:
    files = [folder / f"part-{number:03}.parquet" for number in range(len(parts))]
    for file, rows in zip(files, parts, strict=True):
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=row_group_size)
    return [str(file) for file in files]


def files_in_ranges(files: Any, *, range_bytes: int, **settings: Any) -> Files:
    """JSONL files in ranges of a few bytes, as files of gigabytes are in ranges of megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streampack.files, "RANGE_BYTES", range_bytes)
        return Files(files, **settings)


class Shards:
    """Lists of examples as a source of one's own; yields dicts."""

    def __init__(self, parts: Sequence[list[dict[str, Any]]]) -> None:
        self.parts = parts
        self.name = f"{len(parts)} lists"
        self.num_shards = len(parts)

    def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
        yield from self.parts[shard][start:]


def make_stream(source: Any, *, epochs: int | None = 1, **changes: Any) -> Stream:
    """A small stream of tokenized examples: 16 lanes, rows of 64, buffers of 8, blocks of 10."""
    packing = changes.pop("packing", "auto")
    packer = {"seq_len": SEQ_LEN, "buffer_size": 8, "packing": packing}
    packer.update({key: changes.pop(key) for key in PACKER if key in changes})
    if packing in UNPACKED:
        packer["max_examples"] = 1
    policies = changes.pop("policies", Policies())

    def part(data: Any, name: str | None = None) -> Part:
        encoder = Encoder(
            None,
            text_column="",
            append_eos=False,
            limit=changes.get("max_example_len") or (None if packing == "wrapped" else SEQ_LEN),
            policies=policies,
            cuts_any=packing == "wrapped",
            vocab_size=vocab_size,
        )
        wrapped = data if isinstance(data, Source) else as_source(data, lanes=settings["lanes"], name="test")
        return Part(source=wrapped, encoder=encoder, name=name, transform=transform)

    transform, vocab_size = changes.pop("transform", None), changes.pop("vocab_size", None)
    settings = {"lanes": 16, "shuffle_block": 10, "seed": 3, "epochs": epochs, **changes}
    if isinstance(source, Mixture):
        parts = [part(data, name) for name, data in source.sources.items()]
        mix = Mix(weights=tuple(source.weights.values()), by=source.by, stop=source.stop)
    else:
        parts, mix = [part(source)], None
    return Stream(parts=parts, mix=mix, packer=Packer(**packer), **settings)


class Ranks:
    """All ranks of a run, their workers hosted by hand in this process, in step with each other."""

    def __init__(self, stream: Stream, world_size: int, num_workers: int, state: Any = None, **host: Any) -> None:
        self.stream = stream
        self.progress: list[Progress] = []
        self.rows: list[Iterator[Given]] = []
        for rank in range(world_size):
            if state is None:
                start = Start(first_epoch=0, rank=rank, world_size=world_size)
            else:
                start = Start.of(state, rank=rank, world_size=world_size)
            workers = max(1, num_workers)
            messages = [self._messages(start, worker, workers, **host) for worker in range(workers)]
            self.progress.append(Progress(stream, start))
            self.rows.append(in_order(_round_robin(messages), num_workers=workers))

    def _messages(self, start: Start, worker: int, workers: int, rows_per_message: int = 2) -> Iterator[Message]:
        host = start.host(self.stream, worker=worker, num_workers=workers, rows_per_message=rows_per_message)
        return self.stream.messages(host, first_epoch=start.first_epoch, states=start.states)

    def step(self) -> list[Given]:
        """The next row of every rank that has one, in rank order: the next rows of the stream."""
        step = []
        for progress, rows in zip(self.progress, self.rows, strict=True):
            for given in rows:
                progress.take(given)
                if given.row is not None:
                    step.append(given)
                    break
            else:
                progress.ended = True
        return step

    def take(self, steps: int) -> list[Given]:
        """The rows of so many steps, or to the end."""
        rows: list[Given] = []
        for _ in range(steps):
            step = self.step()
            if not step:
                break
            rows += step
        return rows

    def state(self) -> dict[str, Any]:
        """What would be saved, through JSON."""
        merged = merge_states([progress.state() for progress in self.progress])
        loaded: dict[str, Any] = json.loads(json.dumps(merged))
        return loaded


def _round_robin(messages: list[Iterator[Message]]) -> Iterator[Message]:
    """As a DataLoader gives them: one of each worker in turn, until a worker has ended."""
    live = list(messages)
    while live:
        for worker in list(live):
            message = next(worker, None)
            if message is None:
                live.remove(worker)
            else:
                yield message


def fingerprints(rows: Sequence[Given]) -> list[str]:
    """A hash of all there is in each row."""
    return [fingerprint(given.row) for given in rows]


def fingerprint(row: Any) -> str:
    targets = b"" if row.targets is None else row.targets.tobytes()
    return hashlib.sha256(row.ids.tobytes() + repr((row.lengths, row.origin)).encode() + targets).hexdigest()


def tokens_by_example(rows: Sequence[Given]) -> Counter[tuple[int, int, int]]:
    """How many tokens of each (epoch, shard, index) the rows hold."""
    found: Counter[tuple[int, int, int]] = Counter()
    for given in rows:
        for epoch, shard, index, _, tokens in given.row.origin:
            found[epoch, shard, index] += tokens
    return found


def all_examples(source: Source, *, epochs: int) -> Counter[tuple[int, int, int]]:
    """What `tokens_by_example` must be: every token of every example, once per epoch."""
    found: Counter[tuple[int, int, int]] = Counter()
    for shard in range(source.num_shards):
        rows: list[Any] = []
        for item in source.read(shard, 0):
            rows += item.to_pylist() if isinstance(item, pa.Table) else [item]
        for epoch in range(epochs):
            found.update({(epoch, shard, index): len(row["input_ids"]) for index, row in enumerate(rows)})
    return found
