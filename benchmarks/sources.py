"""What each source gives: speed against reading it bare, time to resume, memory; and many row groups on many lanes.

    python benchmarks/sources.py

EXAMPLES examples as token ids (instruction lengths) and as texts of 15 lines, in each format. Each line runs in a
process of its own. `bare`: the loop that a user of the library itself writes (json.loads of lines, Parquet and Arrow
batches, `stream.iter`, `dataset[i]`), nothing kept; `read`: the same examples through streampack's source, one shard
after the other; `packed`: batches of a PackedLoader in that process. Resume: seconds from a state to the first batch,
the best of three. `peak`: what the resident memory of the process grew by while it packed.

With mosaicml-streaming installed (the extra [mds]) there are two lines for MDS.
"""

import gzip
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from data import exit_status, kept, lengths_of, show, show_versions, snippets, table_of_ids, tokenizer

EXAMPLES = 50_000
PLACES = (0.1, 0.5, 0.9)
GROUP = 1000


def table(kind: str) -> pa.Table:
    """All examples: ids or texts."""
    if kind == "ids":
        return table_of_ids(lengths_of("flan_like")[:EXAMPLES], seed=(1,))
    return pa.table({"text": snippets(EXAMPLES, size=15)})


# ---- files ---------------------------------------------------------------------------------------------------------


def jsonl(kind: str) -> str:
    def write(path: pathlib.Path) -> None:
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in table(kind).to_pylist())

    return kept(f"sources-{kind}-{EXAMPLES}.jsonl", write)


def jsonl_gz(kind: str) -> str:
    def write(path: pathlib.Path) -> None:
        with gzip.open(path, "wb", compresslevel=3) as file:
            file.write(pathlib.Path(jsonl(kind)).read_bytes())

    return kept(f"sources-{kind}-{EXAMPLES}.jsonl.gz", write)


def parquet(kind: str) -> str:
    return kept(
        f"sources-{kind}-{EXAMPLES}.parquet", lambda path: pq.write_table(table(kind), path, row_group_size=GROUP)
    )


def arrow(kind: str) -> str:
    import datasets

    return kept(f"sources-{kind}-{EXAMPLES}-arrow", lambda path: datasets.Dataset(table(kind)).save_to_disk(str(path)))


def mds(kind: str) -> str:
    import streampack

    def write(path: pathlib.Path) -> None:
        if kind == "ids":
            streampack.write_mds(table(kind).to_pylist(), str(path), vocab_size=32_000, size_limit=4 << 20)
            return
        from streaming import MDSWriter

        with MDSWriter(out=str(path), columns={"text": "str"}, size_limit=4 << 20) as out:
            for row in table(kind).to_pylist():
                out.write(row)

    return kept(f"sources-{kind}-{EXAMPLES}-mds", write)


def stream_of(builder: str, path: str) -> Any:
    import datasets

    return datasets.load_dataset(builder, data_files=path, split="train", streaming=True)


# ---- bare ----------------------------------------------------------------------------------------------------------


def json_lines(file: Any) -> Iterator[int]:
    for line in file:
        json.loads(line)
        yield 1


def bare_jsonl(path: str) -> Iterator[int]:
    with open(path, "rb") as file:
        yield from json_lines(file)


def bare_jsonl_gz(path: str) -> Iterator[int]:
    with gzip.open(path, "rb") as file:
        yield from json_lines(file)


def bare_parquet(path: str) -> Iterator[int]:
    yield from (len(batch) for batch in pq.ParquetFile(path).iter_batches(batch_size=256))


def bare_arrow_file(path: str) -> Iterator[int]:
    for file in sorted(pathlib.Path(path).glob("*.arrow")):
        with pa.memory_map(str(file)) as source:
            yield from (len(batch) for batch in pa.ipc.open_stream(source))


def bare_dataset(path: str) -> Iterator[int]:
    import datasets

    data = datasets.load_from_disk(path).with_format("arrow")
    yield from (len(data[start : start + 256]) for start in range(0, len(data), 256))


def bare_stream(builder: str) -> Callable[[str], Iterator[int]]:
    def read(path: str) -> Iterator[int]:
        stream = stream_of(builder, path).with_format("arrow")
        yield from (len(batch) for batch in stream.iter(batch_size=256))

    return read


def bare_mds(path: str) -> Iterator[int]:
    from streaming import LocalDataset

    data = LocalDataset(path)
    for place in range(len(data)):
        data[place]
        yield 1


# ---- the lines -----------------------------------------------------------------------------------------------------


def files(path: str) -> Any:
    import streampack

    return streampack.Files(path)


def arrow_files(path: str) -> Any:
    import streampack

    return streampack.Files(f"{path}/*.arrow")


def dataset_of(path: str) -> Any:
    import datasets

    return datasets.load_from_disk(path)


def mds_of(path: str) -> Any:
    import streampack

    return streampack.MDSSource(path)


KINDS: dict[str, tuple[Callable[[str], str], Callable[[str], Iterator[int]], Callable[[str], Any]]] = {
    "Files, JSONL": (jsonl, bare_jsonl, files),
    "Files, JSONL.gz": (jsonl_gz, bare_jsonl_gz, files),
    "Files, Parquet": (parquet, bare_parquet, files),
    "Files, Arrow": (arrow, bare_arrow_file, arrow_files),
    "datasets stream, JSONL": (jsonl, bare_stream("json"), lambda path: stream_of("json", path)),
    "datasets stream, Parquet": (parquet, bare_stream("parquet"), lambda path: stream_of("parquet", path)),
    "datasets Dataset, Arrow": (arrow, bare_dataset, dataset_of),
    "MDS": (mds, bare_mds, mds_of),
}


def loader_of(name: str, kind: str, path: str) -> Any:
    from streampack import PackedDataset, PackedLoader

    words = tokenizer() if kind == "text" else None
    return PackedLoader(PackedDataset(KINDS[name][2](path), words, seq_len=2048), batch_size=8)


def seconds(items: Iterator[Any]) -> tuple[float, int]:
    """(seconds to the end, sum of what came)"""
    begin = time.perf_counter()
    count = sum(items)
    return time.perf_counter() - begin, count


def read_all(name: str, path: str) -> Iterator[int]:
    from streampack.sources import as_source

    source = as_source(KINDS[name][2](path), lanes=16)
    for shard in range(source.num_shards):
        yield from (len(item) if isinstance(item, pa.Table) else 1 for item in source.read(shard, 0))


def speeds(name: str, kind: str, path: str) -> dict[str, float]:
    """Examples a second bare and through the source (medians of three in turns), tokens a second packed, MB."""
    bare, read = [], []
    for _ in range(3):
        for found, items in ((bare, KINDS[name][1](path)), (read, read_all(name, path))):
            spent, count = seconds(items)
            assert count == EXAMPLES
            found.append(EXAMPLES / spent)
    loader = loader_of(name, kind, path)
    before = psutil.Process().memory_info().rss
    spent, tokens = seconds(int(batch["input_ids"].numel()) for batch in loader)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ratio = float(np.median(np.array(read) / np.array(bare)))
    return {
        "bare": float(np.median(bare)),
        "read": float(np.median(read)),
        "ratio": ratio,
        "packed": tokens / spent,
        "megabytes": (peak - before) / 1e6,
    }


def resumes(name: str, kind: str, path: str) -> list[float]:
    """Seconds to the first batch from states at PLACES."""
    loader = loader_of(name, kind, path)
    states = []
    wanted = iter([*PLACES, 2.0])
    place = next(wanted)
    for _ in loader:
        if loader.stats["examples"] >= place * EXAMPLES:
            states.append(loader.state_dict())
            place = next(wanted)
    best = []
    for state in states:
        times = []
        for _ in range(3):
            again = loader_of(name, kind, path)
            begin = time.perf_counter()
            again.load_state_dict(state)
            next(iter(again))
            times.append(time.perf_counter() - begin)
        best.append(min(times))
    return best


def one_line(name: str, kind: str, path: str) -> list[object]:
    figures, times = speeds(name, kind, path), resumes(name, kind, path)
    grows = times[-1] > 2 * times[0] + 0.05
    verdict = "-"
    if "Arrow" in name or name == "MDS":
        verdict = "MISS" if grows else "ok"
    return [
        f"{name}, {kind}",
        f"{figures['bare'] / 1e3:.0f}",
        f"{figures['read'] / 1e3:.0f}",
        f"{figures['ratio']:.2f}",
        f"{figures['packed'] / 1e6:.2f}",
        f"{figures['megabytes']:.0f}",
        " / ".join(f"{one:.3f}" for one in times),
        verdict,
    ]


def in_process_of_its_own(work: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# ---- many row groups, many lanes -----------------------------------------------------------------------------------

LANES, GROUPS = 512, 2000


def many_groups() -> str:
    lengths = np.resize(lengths_of("flan_like"), GROUPS * 100)
    return kept(
        f"sources-groups-{GROUPS}.parquet",
        lambda path: pq.write_table(table_of_ids(lengths, seed=(2,)), path, row_group_size=100),
    )


def many_lanes(num_workers: int, source: str, path: str) -> list[object]:
    """Seconds to the first batch and from there to 1024 more rows; memory and open files of each worker after it."""
    from streampack import PackedDataset, PackedLoader

    data = files(path) if source == "Files" else stream_of("parquet", path)
    dataset = PackedDataset(data, seq_len=2048, lanes=LANES, epochs=None)
    loader = PackedLoader(dataset, batch_size=8, num_workers=num_workers)
    base = psutil.Process().memory_full_info().uss
    begin = time.perf_counter()
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - begin
    for _ in itertools.islice(batches, 128):
        pass
    more = time.perf_counter() - begin - first
    processes = psutil.Process().children() if num_workers else [psutil.Process()]
    workers = [one for one in processes if "resource_tracker" not in " ".join(one.cmdline())]
    uss = [one.memory_full_info().uss - (0 if num_workers else base) for one in workers]
    fds = [one.num_fds() for one in workers]
    megabytes = f"{max(uss) / 1e6:.0f}"
    return [source, num_workers, f"{first:.2f}", f"{more:.2f}", megabytes, max(fds), str(len(workers))]


def main() -> int:
    show_versions()
    names = [name for name in KINDS if name != "MDS" or importlib.util.find_spec("streaming")]
    lines = []
    for kind in ("ids", "text"):
        for name in names:
            path = KINDS[name][0](kind)
            lines.append(in_process_of_its_own(one_line, name, kind, path))
    head = ["source", "bare", "read", "read / bare", "packed", "peak MB", "resume at 10 / 50 / 90 %, s", "verdict"]
    print("Thousand examples/s bare and through the source; Mtoken/s packed:\n")
    show(head, lines)
    print(f"{GROUPS} row groups, {LANES} lanes, rows of 2048; MB and open files of the worker that has most:\n")
    path = many_groups()
    many = [
        in_process_of_its_own(many_lanes, count, name, path) for name in ("Files", "datasets") for count in (0, 1, 4)
    ]
    show(["source", "workers", "first batch, s", "1024 rows more, s", "MB", "open files", "processes"], many)
    return exit_status(lines)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main())
