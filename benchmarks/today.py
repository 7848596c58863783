"""What people do today with a stream of examples, beside streampack: fill, same rows with workers, resume.

    pip install trl; python benchmarks/today.py [--set code_funcs] [--seq-len 2048]

The same tokenized Parquet files go through a `datasets` stream packed by TRL's `pack_dataset` (best-fit-decreasing, in
chunks of 1000 examples), the same with a shuffle buffer, and streampack. Every example begins with its own number, so
that the rows say which examples they hold. Measured in one run, one after the other:

- fill: share of the rows' cells that hold tokens; tokens lost: share of all tokens that is in no row;
- rows with 2 workers: are they (in any order) those of one process;
- resume at half of the rows: state saved, loaded into everything made anew, the rest read: examples that are lost or
  come twice, rows that differ from the uninterrupted run, seconds to the first row against seconds to get there.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

import streampack

FILES = 3
Row = tuple[tuple[int, ...], int]  # the numbers of its examples, its tokens


def write(folder: Path, lengths: np.ndarray) -> list[str]:
    """Three Parquet files of ids; the first id of each example is its number."""
    table = data.table_of_ids(lengths, seed=(1,))
    ids = table["input_ids"].combine_chunks()
    values = ids.values.to_numpy().copy()
    values[ids.offsets.to_numpy()[:-1]] = np.arange(len(lengths))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(ids.offsets, pa.array(values))})
    size = -(-len(lengths) // FILES)
    for part in range(FILES):
        pq.write_table(table.slice(part * size, size), folder / f"{part}.parquet", row_group_size=1000)
    return [str(folder / f"{part}.parquet") for part in range(FILES)]


class Trl:
    """A `datasets` stream, packed by TRL; its state is that of `datasets`."""

    def __init__(self, files: list[str], seq_len: int, *, strategy: str, shuffle: bool) -> None:
        from trl import pack_dataset

        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        if shuffle:
            stream = stream.shuffle(seed=0, buffer_size=1000)
        self.stream = pack_dataset(stream, seq_len, strategy)
        self.state_dict, self.load_state_dict = self.stream.state_dict, self.stream.load_state_dict

    def rows(self, num_workers: int = 0) -> Iterator[Row]:
        source = DataLoader(self.stream, batch_size=None, num_workers=num_workers) if num_workers else self.stream
        for row in source:
            starts = np.cumsum([0, *row["seq_lengths"][:-1]])
            yield tuple(int(row["input_ids"][start]) for start in starts), len(row["input_ids"])


class Streampack:
    """The same files in a PackedLoader."""

    def __init__(self, files: list[str], seq_len: int) -> None:
        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        self.dataset = streampack.PackedDataset(stream, None, seq_len=seq_len)
        self.loader = streampack.PackedLoader(self.dataset)
        self.state_dict, self.load_state_dict = self.loader.state_dict, self.loader.load_state_dict

    def rows(self, num_workers: int = 0) -> Iterator[Row]:
        loader = streampack.PackedLoader(self.dataset, num_workers=num_workers) if num_workers else self.loader
        for batch in loader:
            lengths = np.diff(batch["cu_seq_lens_q"].numpy())
            segments = len(loader.provenance[0])
            firsts = (np.cumsum(lengths) - lengths)[:segments]
            yield tuple(batch["input_ids"][0, firsts].tolist()), int(lengths[:segments].sum())


def measure(make: Callable[[], Any], lengths: np.ndarray, seq_len: int) -> list[str]:
    whole = list(make().rows())
    workers = Counter(make().rows(num_workers=2))
    fill = sum(tokens for _, tokens in whole) / (len(whole) * seq_len)
    lost_tokens = 1 - sum(tokens for _, tokens in whole) / lengths.sum()

    half, started = len(whole) // 2, time.perf_counter()
    first = make()
    rows = first.rows()
    head = [next(rows) for _ in range(half)]
    there = time.perf_counter() - started
    state = first.state_dict()
    again, started = make(), time.perf_counter()
    again.load_state_dict(state)
    rest = again.rows()
    tail = [next(rest)]
    back = time.perf_counter() - started
    tail += rest
    held = Counter(number for numbers, _ in head + tail for number in set(numbers))
    expected = Counter(number for numbers, _ in whole for number in set(numbers))
    differ = sum((Counter(tail) - Counter(whole[half:])).values())
    return [
        str(len(whole)),
        f"{fill:.4f}",
        f"{100 * lost_tokens:.1f} %",
        "yes" if workers == Counter(whole) else "no",
        str(sum((expected - held).values())),
        str(sum((held - expected).values())),
        str(differ),
        f"{back:.2f} / {there:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", default="code_funcs", choices=data.SETS)
    parser.add_argument("--seq-len", type=int, default=2048)
    arguments = parser.parse_args()
    lengths = data.lengths_of(arguments.set)[:20_000].clip(2)
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), lengths)
        kinds: dict[str, Callable[[], Any]] = {
            "datasets + TRL bfd (truncates)": lambda: Trl(files, arguments.seq_len, strategy="bfd", shuffle=False),
            "datasets + TRL bfd_split": lambda: Trl(files, arguments.seq_len, strategy="bfd_split", shuffle=False),
            "bfd_split, shuffle buffer of 1000": lambda: Trl(
                files, arguments.seq_len, strategy="bfd_split", shuffle=True
            ),
            "streampack (shuffled)": lambda: Streampack(files, arguments.seq_len),
        }
        table = []
        for name, make in kinds.items():
            try:
                table.append([name, *measure(make, lengths, arguments.seq_len)])
            except ImportError as missing:
                print(f"left out: {name} ({missing})")
    data.show(
        ["way", "rows", "fill", "tokens lost", "same rows with 2 workers", "examples lost by a resume", "twice",
         "other rows", "s to the first row / to get there"],
        table,
    )  # fmt: skip


if __name__ == "__main__":
    main()
