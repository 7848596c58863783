"""Whether memory grows with the length of a run. Linux only.

    python benchmarks/memory.py

One pass over 2 million short examples (random ids, 4 to 28 of them each, made by a source in tables of 1000), at the
default settings but seq_len 1024, without workers and with two. From 200,000 to 2 million examples, of the main process
and all its children, in MB: private memory (anonymous and shared pages, those of several processes counted once; not
the code of libraries, whose share depends on what else runs on the machine), and RSS (counted in each process). More
than 20 MB of growth in either is a MISS. Each number of workers runs in a process of its own.
"""

import gc
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import psutil
import pyarrow as pa
from data import exit_status, show, show_versions, table_of_ids

from streampack import PackedDataset, PackedLoader

EXAMPLES = 2_000_000
PLACES = (200_000, 500_000, 1_000_000, 1_500_000, 1_990_000)
LIMIT_MB = 20


class ShortExamples:
    """2,000 shards of 1,000 examples."""

    name = "short examples"
    num_shards = EXAMPLES // 1000

    def read(self, shard: int, start: int) -> Iterator[pa.Table]:
        lengths = np.random.default_rng(shard).integers(4, 29, 1000)
        yield table_of_ids(lengths, seed=(shard,)).slice(start)


def memory() -> tuple[float, float]:
    """(private memory, RSS) of this process and its children, in MB."""
    gc.collect()
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    private = 0
    for process in processes:
        for line in pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                private += int(line.split()[1])
    return private / 1000, sum(process.memory_info().rss for process in processes) / 1e6


def run(num_workers: int) -> list[list[object]]:
    loader = PackedLoader(PackedDataset(ShortExamples(), seq_len=1024), batch_size=8, num_workers=num_workers)
    places = iter(PLACES)
    wanted = next(places)
    lines: list[list[object]] = []
    first: tuple[float, float] | None = None
    begin = time.perf_counter()
    for number, _ in enumerate(loader):
        if number % 32 or (taken := int(loader.stats["examples"])) < wanted:
            continue
        now = memory()
        first = first or now
        growth = [now[kind] - first[kind] for kind in (0, 1)]
        state = sum(map(len, loader.state_dict()["lanes"].values()))
        figures = [f"{value:.1f}" for value in now] + [f"{value:+.1f}" for value in growth]
        lines.append([num_workers, taken, f"{time.perf_counter() - begin:.0f}", *figures, state])
        wanted = next(places, EXAMPLES + 1)
    assert len(lines) == len(PLACES)
    lines[-1].append("ok" if max(growth) < LIMIT_MB else "MISS")
    return lines


def main() -> int:
    show_versions()
    context = multiprocessing.get_context("spawn")
    lines: list[list[object]] = []
    for num_workers in (0, 2):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            lines += pool.submit(run, num_workers).result()
    lines = [[*line, ""][:9] for line in lines]
    head = ["workers", "examples", "seconds", "private", "RSS", "private growth", "RSS growth"]
    show([*head, "bytes of the lanes' states", "verdict"], lines)
    return exit_status(lines)


if __name__ == "__main__":
    sys.exit(main())
