"""How large a saved state is, and how long it takes to get it.

    python benchmarks/state_size.py

Bytes: the JSON text of a lane's state after each of its rows, for each length set at the default settings (seq_len
4096, buffer 256, 16 lanes, shuffled). Lanes at once: the largest mean over the 16 lanes of one moment. The first and
the last tenth of the rows show whether it grows. Lines at seq_len 512, without a verdict, show what many examples cut
into fragments cost. Time: `PackedLoader.state_dict()` with 64 lanes after each batch, and
batches of 64 rows, so that every lane's state is another one each time.
"""

import json
import statistics
import sys
import time

from data import SETS, LengthSource, exit_status, lengths_of, parquet_of_ids, show, show_versions, snippets, tokenizer

from streampack import PackedDataset, PackedLoader
from streampack.hosting import Host

LIMIT_BYTES, LIMIT_MS = 1024, 1.0


def sizes(name: str, *, seq_len: int = 4096) -> list[object]:
    dataset = PackedDataset(LengthSource(lengths_of(name), name=name), seq_len=seq_len)
    host = Host(lanes=16, first_row=0, rank=0, world_size=1)
    found: list[int] = []
    newest: dict[int, int] = {}
    together = 0.0
    for given in dataset.stream.rows(host):
        if given.row is not None:
            newest[given.lane] = len(given.state.to_json())
            found.append(newest[given.lane])
            together = max(together, statistics.mean(newest.values()))
    tenth = len(found) // 10
    ends = [(max(part), round(statistics.mean(part))) for part in (found[:tenth], found[-tenth:])]
    columns = [len(found), max(found), round(statistics.mean(found)), round(together)]
    columns += [f"{most} / {mean}" for most, mean in ends]
    verdict = "-" if seq_len != 4096 else "ok" if max(found) <= LIMIT_BYTES else "MISS"
    return [name, seq_len, *columns, verdict]


def seconds(name: str, *, num_workers: int, text: bool) -> list[object]:
    """Milliseconds of state_dict() after each batch. `text`: of a stream with a tokenizer, which identifies it."""
    if text:
        data = [{"text": text} for text in snippets(60_000)]
        dataset = PackedDataset(data, tokenizer(), seq_len=256, lanes=64)
    else:
        import datasets

        ids = datasets.load_dataset("parquet", data_files=parquet_of_ids(name, lengths_of(name)), streaming=True)
        dataset = PackedDataset(ids["train"], seq_len=1024, lanes=64)
    loader = PackedLoader(dataset, batch_size=64, num_workers=num_workers)
    times = []
    for _ in loader:
        begin = time.perf_counter()
        state = loader.state_dict()
        times.append(1000 * (time.perf_counter() - begin))
        if len(times) == 100:
            break
    times = times[16:]  # the first ones, until all lanes are open
    middle = statistics.median(times)
    size = len(json.dumps(state))
    label = "text, with a tokenizer" if text else "token ids, Parquet"
    row = [label, num_workers, len(times), size, f"{middle:.2f}", f"{max(times):.2f}"]
    return [*row, "ok" if middle <= LIMIT_MS else "MISS"]


def main() -> int:
    show_versions()
    rows = [sizes(name) for name in SETS]
    rows += [sizes(name, seq_len=512) for name in ("code_funcs", "longdoc", "code_files")]  # many split examples
    head = [
        "set",
        "seq_len",
        "rows",
        "bytes, most",
        "bytes, mean",
        "lanes at once, most",
        "first tenth",
        "last tenth",
        "verdict",
    ]
    show(head, rows)
    kinds = [(False, 1), (False, 0), (True, 1), (True, 0)]
    timed = [seconds("code_funcs", num_workers=workers, text=text) for text, workers in kinds]
    show(["stream", "workers", "calls", "bytes of the whole state", "ms, median", "ms, most", "verdict"], timed)
    return exit_status([*rows, *timed])


if __name__ == "__main__":
    sys.exit(main())
