"""Whether the estimates of a report hold: rows of an epoch from samples, against the rows that come out.

    python benchmarks/report.py

For each length set and row length: the rows that the lanes of a PackedLoader give, those of a report that read all
(exact: they must be equal), and of reports that read about a tenth, 20 times with other shards: how many had the rows,
and the tokens, in their interval, how wide it is, and how far off the estimate was on average. Shards of 50 examples. A
line is "ok" if the exact rows are equal and at most 1 sample of 20 is outside. Exit status 1 on a MISS.
"""

import sys
import time

import numpy as np
from data import SETS, LengthSource, exit_status, lengths_of, show, show_versions

from streampack import PackedDataset
from streampack.recording import record
from streampack.replay import replay
from streampack.stream import LaneOpener
from streampack.totals import totals

SEQ_LENS = (2048, 8192, 32768)
SHARD = 50
SAMPLES = 20


def rows_that_come(dataset: PackedDataset) -> int:
    opener = LaneOpener(dataset.stream, 0, {})
    return sum(1 for lane in map(opener, range(dataset.stream.lanes)) for _ in iter(lane.next_row, None))


def compare(name: str, seq_len: int) -> list[object]:
    lengths = lengths_of(name)
    files = [min(SHARD, len(lengths) - start) for start in range(0, len(lengths), SHARD)]
    dataset = PackedDataset(LengthSource(lengths, files=files), seq_len=seq_len)
    rows = rows_that_come(dataset)
    begin = time.perf_counter()
    recording = record(dataset.stream)
    exact = replay(recording, recording.stream(dataset.stream)).rows
    seconds = time.perf_counter() - begin
    rows_in = tokens_in = 0
    widths, off = [], []
    for seed in range(SAMPLES):
        sample = record(dataset.stream, examples=len(lengths) // 10, seed=seed)
        found = totals(sample, replay(sample, sample.stream(dataset.stream)), lanes=dataset.stream.lanes)
        assert found is not None
        rows_in += found.rows.low <= rows <= found.rows.high
        tokens_in += found.tokens.low <= int(lengths.sum()) <= found.tokens.high
        widths.append((found.rows.high - found.rows.low) / 2 / rows)
        off.append(abs(found.rows.value - rows) / rows)
    verdict = "ok" if exact == rows and rows_in >= SAMPLES - 1 else "MISS"
    inside = [f"{count}/{SAMPLES}" for count in (rows_in, tokens_in)]
    return [
        *(name, seq_len, rows, exact, f"{seconds:.2f}", *inside),
        *(f"{np.mean(widths):.1%}", f"{np.mean(off):.1%}", verdict),
    ]


def main() -> int:
    show_versions()
    head = [
        "set",
        "seq_len",
        "rows",
        "report of all",
        "seconds",
        "rows inside",
        "tokens inside",
        "interval ±",
        "off by",
    ]
    lines = [compare(name, seq_len) for name in SETS for seq_len in SEQ_LENS]
    show([*head, "verdict"], lines)
    return exit_status(lines)


if __name__ == "__main__":
    sys.exit(main())
