"""What packing costs: text to batches against tokenizing alone, and tokenized input against plain copies.

    python benchmarks/overhead.py

Text (functions of the standard library, one Parquet file, seq_len 4096): `tokenize` reads the same stream in the same
way, tokenizes it in the same batches, and turns the ids into NumPy arrays. `loader` makes packed batches in one process
(num_workers=0). One tokenizer thread means RAYON_NUM_THREADS=1 (the loader's own thread stays); "one core" holds the
whole process on one CPU as well. Each in a process of its own that is told to run again and again, in turns. Ratio: of
tokens/s; CPU: of tokens for a second of CPU time, which other programs on the machine disturb less.

Token ids (lengths of code functions, one Parquet file, seq_len 2048, batches of 8 rows): tokens/s of a loader without
workers; and with one worker, against a plain DataLoader whose one worker sends the same rows, made before, each as
three int64 tensors. CPU: Mtoken for a second of CPU time of the main process. Share of copy: against np.copy of the
same three int64 arrays of each batch.
"""

import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from data import exit_status, functions, kept, lengths_of, parquet_of_ids, show, show_versions, tokenizer

TEXTS = 24_000
ROUNDS = 5


def texts_in_parquet() -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(path: str) -> None:
        texts = functions()
        order = np.random.default_rng(0).permutation(len(texts))[:TEXTS]
        pq.write_table(pa.table({"text": [texts[place] for place in order]}), path, row_group_size=1000)

    return kept(f"functions-{TEXTS}.parquet", write)


def stream(path: str):  # type: ignore[no-untyped-def]
    import datasets

    return datasets.load_dataset("parquet", data_files=path, split="train", streaming=True)


# ---- text: these run in processes of their own --------------------------------------------------------------------


def set_up(one_core: bool) -> None:
    """Before the first run: modules loaded, the tokenizer at hand, so that no run pays for it."""
    global TOKENIZER
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    TOKENIZER = tokenizer()
    for run in (tokenize, pack):
        run(texts_in_parquet(), most=1000)


def tokenize(path: str, *, most: int = TEXTS) -> tuple[float, float]:
    """Tokens a second, and a second of CPU time, of reading, tokenizing and making arrays."""
    begin, cpu = time.perf_counter(), time.process_time()
    data = stream(path).reshard().with_format("arrow")
    tokens = examples = 0
    for table in data.iter(batch_size=256):
        texts = table["text"].to_pylist()
        for first in range(0, len(texts), 128):
            ids = TOKENIZER(
                texts[first : first + 128],
                truncation=False,
                padding=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
            tokens += sum(len(array) for array in [np.array(one, dtype=np.int32) for one in ids])
        examples += len(texts)
        if examples >= most:
            break
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu)


def pack(path: str, *, most: int = TEXTS) -> tuple[float, float]:
    """The same of packed batches."""
    from streampack import PackedDataset, PackedLoader

    begin, cpu = time.perf_counter(), time.process_time()
    dataset = PackedDataset(stream(path), TOKENIZER, seq_len=4096, append_eos=False)
    loader = PackedLoader(dataset, batch_size=4)
    for _ in loader:
        if most < TEXTS:
            break
    tokens = loader.stats["tokens"]
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu)


def spread_of(values: np.ndarray) -> str:
    return f"{values.min():.2f} .. {values.max():.2f}"


def text_to_batches() -> list[list[object]]:
    path = texts_in_parquet()
    tokenizer()  # trained here once, not in each process
    spawn = multiprocessing.get_context("spawn")
    pools = {}
    for label, threads, one_core in (("one thread", 1, False), ("one core", 1, True), ("all threads", None, False)):
        if threads:
            os.environ["RAYON_NUM_THREADS"] = str(threads)
        pools[label] = ProcessPoolExecutor(1, mp_context=spawn, initializer=set_up, initargs=(one_core,))
        pools[label].submit(tokenize, path, most=1000).result()
        os.environ.pop("RAYON_NUM_THREADS", None)
    speeds: dict[tuple[str, Callable[..., tuple[float, float]]], list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for label, run in itertools.product(pools, (tokenize, pack)):
            speeds.setdefault((label, run), []).append(pools[label].submit(run, path).result())
    for pool in pools.values():
        pool.shutdown()

    def line(label: str, base: str, wanted: float | None) -> list[object]:
        ours, theirs = np.array(speeds[label, pack]), np.array(speeds[base, tokenize])
        ratio, cpu = np.median(ours / theirs, axis=0)
        spread = spread_of((ours / theirs)[:, 0])
        verdict = "-" if wanted is None else "ok" if ratio >= wanted else "MISS"
        figures = [f"{np.median(those[:, 0]) / 1e6:.3f}" for those in (ours, theirs)]
        return [
            f"loader, {label}",
            f"tokenize, {base}",
            *figures,
            f"{ratio:.2f}",
            spread,
            f"{cpu:.2f}",
            wanted or "-",
            verdict,
        ]

    return [
        line("one thread", "one thread", 0.95),
        line("one core", "one core", 0.95),
        line("all threads", "one thread", 1.5),
        line("all threads", "all threads", None),
    ]


# ---- token ids -----------------------------------------------------------------------------------------------------


def ids_loader(path: str, num_workers: int):  # type: ignore[no-untyped-def]
    from streampack import PackedDataset, PackedLoader

    return PackedLoader(PackedDataset(stream(path), seq_len=2048), batch_size=8, num_workers=num_workers)


def speed(batches: Iterator[object], *, skip: int) -> tuple[float, float]:
    """(tokens/s, tokens a second of CPU time of this process) after the first `skip` batches (until workers run)."""
    for _ in itertools.islice(batches, skip):
        pass
    begin, cpu = time.perf_counter(), time.process_time()
    tokens = sum(batch["input_ids"].numel() for batch in batches)  # type: ignore[index]
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu)


def ids_to_batches() -> list[list[object]]:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    path = parquet_of_ids("code_funcs", lengths_of("code_funcs"))
    kept_batches = list(itertools.islice(ids_loader(path, 0), 200))
    keys = ("input_ids", "labels", "position_ids")
    arrays = [[batch[key].numpy() for key in keys] for batch in kept_batches]
    in_rows = [{key: batch[key].reshape(8, -1) for key in keys} for batch in kept_batches]
    rows = [{key: batch[key][place].clone() for key in keys} for batch in in_rows for place in range(8)]

    class Rows(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            # A tensor that was sent lies in shared memory from then on; a loader would have made new ones.
            return ({key: row[key].clone() for key in keys} for row in rows)

    def copies() -> Iterator[dict[str, torch.Tensor]]:
        for batch in arrays:
            yield {key: torch.from_numpy(np.copy(array)) for key, array in zip(keys, batch, strict=True)}

    runs: dict[str, Callable[[], tuple[float, float]]] = {
        "np.copy": lambda: speed(copies(), skip=0),
        "no workers": lambda: speed(iter(ids_loader(path, 0)), skip=0),
        "one worker": lambda: speed(iter(ids_loader(path, 1)), skip=32),
        "plain DataLoader": lambda: speed(iter(DataLoader(Rows(), batch_size=None, num_workers=1)), skip=32),
    }
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            speeds[name].append(run())
    middle = {name: np.median(values, axis=0) for name, values in speeds.items()}
    pairs = zip(speeds["one worker"], speeds["plain DataLoader"], strict=True)
    ratios = np.array([ours / plain for (ours, _), (plain, _) in pairs])
    times = float(np.median(ratios))
    verdicts = {
        "no workers": ("20 Mtoken/s", middle["no workers"][0] >= 20e6),
        "one worker": (f"10 times plain; is {times:.1f} ({spread_of(ratios)})", times >= 10),
    }
    lines: list[list[object]] = []
    for name, (wall, cpu) in middle.items():
        wanted, fine = verdicts.get(name, ("-", None))
        verdict = "-" if fine is None else "ok" if fine else "MISS"
        share = f"{wall / middle['np.copy'][0]:.2%}"
        spread = spread_of(np.array(speeds[name])[:, 0] / 1e6)
        lines.append([name, f"{wall / 1e6:.1f}", spread, f"{cpu / 1e6:.1f}", share, wanted, verdict])
    return lines


def main() -> int:
    show_versions()
    text = text_to_batches()
    print("Text, Mtoken/s (medians of rounds in turns; ratio: median over the rounds):\n")
    show(["ours", "against", "ours", "theirs", "ratio", "least .. most", "CPU", "wanted", "verdict"], text)
    print("Token ids, Mtoken/s (medians of rounds in turns):\n")
    ids = ids_to_batches()
    show(["loader", "Mtoken/s", "least .. most", "CPU", "share of copy", "wanted", "verdict"], ids)
    return exit_status([*text, *ids])


if __name__ == "__main__":
    sys.exit(main())
