"""What a checkpoint of the stream costs: seconds to save and load, and bytes.

    python benchmarks/checkpoint.py

Streams of code functions at the default settings (seq_len 4096, buffer 256), every lane in the midst of its work, on 1
and 4 gloo ranks of this machine: with torch.distributed.checkpoint (a key for each lane), and as one JSON file. Loading
goes on to the state of the loader, not to the first row (`resume_cost.py` has that). Three times each, the median.
"""

import datetime
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from data import LengthSource, exit_status, lengths_of, show, show_versions

from streampack import PackedDataset, PackedLoader
from streampack.checkpoint import load_json, load_stream, save_json, save_stream

LIMIT_SECONDS = 2.0
REPEATS = 3


def loader_of(lanes: int, world_size: int) -> PackedLoader:
    """Of a source with a file for each lane, so that no lane reads those of others."""
    lengths = np.resize(lengths_of("code_funcs"), lanes * 320)
    source = LengthSource(lengths, files=[320] * lanes, name="code_funcs")
    return PackedLoader(PackedDataset(source, seq_len=4096, lanes=lanes, epochs=None), batch_size=lanes // world_size)


def seconds(work: Callable[[], None]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return took.item()


def size_of(path: pathlib.Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def measure(rank: int, world_size: int, lanes: int, folder: str) -> None:
    """Of one rank; rank 0 writes what all found."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=5)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timeout
    )
    loader, other = loader_of(lanes, world_size), loader_of(lanes, world_size)
    for _, _ in zip(loader, range(1), strict=False):  # a row of every lane
        pass
    found = []
    for how, save, load in (("DCP", save_stream, load_stream), ("JSON", save_json, load_json)):
        paths = [pathlib.Path(folder, f"{how}-{repeat}") for repeat in range(REPEATS)]
        saves = [seconds(lambda save=save, path=path: save(loader, path)) for path in paths]
        loads = [seconds(lambda load=load, path=path: load(other, path)) for path in paths]
        assert other.state_dict() == loader.state_dict()
        found.append((how, size_of(paths[0]), statistics.median(saves), statistics.median(loads)))
    if rank == 0:
        pathlib.Path(folder, "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def lines(lanes: int, world_size: int) -> list[list[object]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            measure, args=(world_size, lanes, folder), nprocs=world_size, start_method="fork"
        )
        found = json.loads(pathlib.Path(folder, "found").read_text())
    return [
        [
            how,
            lanes,
            world_size,
            size,
            f"{save:.2f}",
            f"{load:.2f}",
            "ok" if max(save, load) <= LIMIT_SECONDS else "MISS",
        ]
        for how, size, save, load in found
    ]


def main() -> int:
    show_versions()
    rows = [row for lanes in (16, 512) for world_size in (1, 4) for row in lines(lanes, world_size)]
    show(["how", "lanes", "ranks", "bytes", "seconds to save", "to load", "verdict"], rows)
    return exit_status(rows)


if __name__ == "__main__":
    sys.exit(main())
