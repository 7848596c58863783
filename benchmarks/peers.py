"""What people use to pack a stream today, and streampack: rows, speed, memory and resume, on the same data in one run.

    pip install trl grain torchdata; python benchmarks/peers.py [--set code_funcs] [--seq-len 2048]

The ways are in peer_ways.py. A way whose library is missing is named and left out. Each measurement runs in a process
of its own, the ways in turns, so that the host's ups and downs hit all of them.

- rows of token ids: fill (share of the rows' cells that hold tokens), tokens that are in no row, and whether 1 and 2
  workers give the rows of none, in any order;
- resume at PLACES of the rows: the state saved, loaded into everything made anew, the rest read. Examples that are
  lost or come twice in the whole, rows that differ from the uninterrupted run, seconds to the first row;
- tokens/s (padding not counted) of batches of BATCH rows as tensors, from ids and from text, without workers, the
  tokenizer with its own threads; medians of ROUNDS. MB: what the resident memory grew by meanwhile.
"""

import argparse
import importlib
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from data import SETS, functions, kept, lengths_of, show, show_versions, table_of_ids

EXAMPLES, FILES = 5_000, 3
PLACES = (0.1, 0.5, 0.9)
BATCH, ROUNDS = 8, 2
TEXTS = 4_000


def ids_files(name: str) -> list[str]:
    """Parquet files of ids; the first id of each example is its number."""
    lengths = lengths_of(name)[:EXAMPLES].clip(2)

    def table() -> pa.Table:
        ids = table_of_ids(lengths, seed=(1,))["input_ids"].combine_chunks()
        values = ids.values.to_numpy().copy()
        values[ids.offsets.to_numpy()[:-1]] = np.arange(len(lengths))
        return pa.table({"input_ids": pa.ListArray.from_arrays(ids.offsets, pa.array(values))})

    return _in_files(f"peers-{name}-{EXAMPLES}", table)


def text_files() -> list[str]:
    """Parquet files of texts: functions of the standard library."""
    return _in_files(f"peers-text-{TEXTS}", lambda: pa.table({"text": (functions() * 3)[:TEXTS]}))


def _in_files(name: str, table: Any) -> list[str]:
    def write(folder: Path) -> None:
        folder.mkdir()
        whole = table()
        size = -(-len(whole) // FILES)
        for part in range(FILES):
            pq.write_table(whole.slice(part * size, size), folder / f"{part}.parquet", row_group_size=1000)

    folder = Path(kept(name, write))
    return [str(folder / f"{part}.parquet") for part in range(FILES)]


# ---- in a process of its own -----------------------------------------------------------------------------------------


def way_of(name: str, kind: str, files: list[str], seq_len: int) -> Any:
    from peer_ways import WAYS

    return WAYS[name](files=files, kind=kind, seq_len=seq_len, batch_size=BATCH)


def rows_of(name: str, files: list[str], seq_len: int, num_workers: int) -> list[Any]:
    return list(way_of(name, "ids", files, seq_len).rows(num_workers=num_workers))


def resumed(name: str, files: list[str], seq_len: int, place: float, whole: list[Any]) -> list[Any]:
    """[examples lost, examples twice, other rows, seconds to the first row]"""
    at = int(len(whole) * place)
    first = way_of(name, "ids", files, seq_len)
    rows = first.rows(num_workers=0)
    head = [next(rows) for _ in range(at)]
    state = first.state_dict()
    again, begin = way_of(name, "ids", files, seq_len), time.perf_counter()
    again.load_state_dict(state)
    rest = again.rows(num_workers=0)
    tail = [next(rest)]
    spent = time.perf_counter() - begin
    tail += rest

    def numbers(some: list[Any]) -> Counter[int]:
        return Counter(number for row in some for number in set(row[0]))

    held, expected = numbers(head + tail), numbers(whole)
    differ = sum((Counter(tail) - Counter(whole[at:])).values())
    return [sum((expected - held).values()), sum((held - expected).values()), differ, spent]


def speed(name: str, kind: str, files: list[str], seq_len: int) -> tuple[float, float]:
    """(tokens/s, MB)"""
    way = way_of(name, kind, files, seq_len)
    process = psutil.Process()
    before, most, tokens = process.memory_info().rss, 0, 0
    begin = time.perf_counter()
    for number, count in enumerate(way.batches()):
        tokens += count
        if number % 20 == 0:
            most = max(most, process.memory_info().rss)
    return tokens / (time.perf_counter() - begin), (most - before) / 1e6


# ---- tables ----------------------------------------------------------------------------------------------------------


def apart(function: Any, *arguments: Any) -> Any:
    """The result of a function in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def found_ways() -> list[str]:
    """The ways whose libraries are there."""
    from peer_ways import NEEDS, WAYS

    names = []
    for name in WAYS:
        missing = [library for library in NEEDS.get(name, ()) if not _is_there(library)]
        if missing:
            print(f"left out: {name} (no {', '.join(missing)})\n")
        else:
            names.append(name)
    return names


def _is_there(library: str) -> bool:
    try:
        importlib.import_module(library)
    except ImportError:
        return False
    return True


def line_of_rows(name: str, files: list[str], seq_len: int, total: int) -> tuple[list[object], list[Any]]:
    whole, *others = (apart(rows_of, name, files, seq_len, num_workers) for num_workers in (0, 1, 2))
    cells = sum(row[2] for row in whole)
    tokens = sum(row[1] for row in whole)
    same = ["yes" if Counter(rows) == Counter(whole) else "no" for rows in others]
    lost = f"{100 * (1 - tokens / total):.1f}%"
    return [name, len(whole), f"{tokens / cells:.4f}", lost, " / ".join(same)], whole


def lines_of_resume(name: str, files: list[str], seq_len: int, whole: list[Any]) -> list[object]:
    found = [apart(resumed, name, files, seq_len, place, whole) for place in PLACES]
    lost, twice, differ, spent = zip(*found, strict=True)
    joined = [" / ".join(map(str, values)) for values in (lost, twice, differ)]
    return [name, *joined, " / ".join(f"{one:.2f}" for one in spent)]


def lines_of_speed(names: list[str], files: dict[str, list[str]], seq_len: int) -> Iterator[list[object]]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for kind, those in files.items():
            for name in names:
                found.setdefault((name, kind), []).append(apart(speed, name, kind, those, seq_len))
    for name in names:
        cells: list[object] = [name]
        for kind in files:
            ours, theirs = (np.array(found[one, kind]) for one in (names[-1], name))
            ratio = np.median(theirs[:, 0] / ours[:, 0])
            cells += [f"{np.median(theirs[:, 0]) / 1e6:.2f}", f"{ratio:.2f}", f"{np.median(theirs[:, 1]):.0f}"]
        yield cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", default="code_funcs", choices=SETS)
    parser.add_argument("--seq-len", type=int, default=2048)
    arguments = parser.parse_args()
    seq_len = arguments.seq_len
    show_versions()
    names = found_ways()
    files = {"ids": ids_files(arguments.set), "text": text_files()}
    total = int(lengths_of(arguments.set)[:EXAMPLES].clip(2).sum())

    rows, resumes = [], []
    for name in names:
        line, whole = line_of_rows(name, files["ids"], seq_len, total)
        rows.append(line)
        resumes.append(lines_of_resume(name, files["ids"], seq_len, whole))
        print(line, resumes[-1], file=sys.stderr, flush=True)  # it takes a while
    print(f"Rows of {seq_len}, {EXAMPLES} examples of {arguments.set} as token ids, {total / 1e6:.1f} Mtoken:\n")
    show(["way", "rows", "fill", "tokens lost", "same rows with 1 / 2 workers"], rows)
    print("Resume at " + " / ".join(f"{place:.0%}" for place in PLACES) + " of the rows, same number of processes:\n")
    show(["way", "examples lost", "examples twice", "other rows", "seconds to the first row"], resumes)
    print(f"Speed in one process; the ratio is to {names[-1]}, in the same rounds:\n")
    head = ["way", "ids, Mtoken/s", "ratio", "MB", "text, Mtoken/s", "ratio", "MB"]
    show(head, list(lines_of_speed(names, files, seq_len)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
