"""How even the lanes are at the end of a finite pass, and what unevenness costs.

    python benchmarks/even_lanes.py

Rows of each of 16 lanes (seq_len 4096, shuffled) for sources of several shapes. Ranks that run out of rows before
others get filler rows: filler is their share of all rows, with 16 ranks of one lane each, and with 4 ranks of four
lanes. Loss of `cut`: the share of the rows that is left over when all 16 ranks stop with the first that is out.

Lengths are those of the math set, 8 times over in random order (112,544 examples), or of the instructions (55,185).
`blind`: the filler if single examples were dealt at random in equal numbers (mean, and 95th percentile, of 400 draws):
the tokens of lanes differ by chance, the more the more lengths vary and the fewer there are. `files`: tokens of the
largest file over those of the smallest. A line is "ok" up to 2 % of filler with 16 ranks; over that it is "by chance"
up to the 95th percentile of blind, "whole files" where lanes get whole files that differ (dealing single examples would
do better, so this is the price of reading each file once), and else a MISS.
"""

import sys

import numpy as np
from data import LengthSource, exit_status, lengths_of, show, show_versions, table_of_ids

from streampack import PackedDataset
from streampack.stream import LaneOpener

LANES = 16
SEQ_LEN = 4096
LIMIT = 0.02


def equal_files(lengths: np.ndarray, count: int) -> list[int]:
    """Sizes of files of as many examples each, to one."""
    return np.diff(np.linspace(0, len(lengths), count + 1).astype(int)).tolist()


def shapes() -> list[tuple[str, np.ndarray, list[int] | None]]:
    """(name, lengths, examples in each file or None for a list)"""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.tile(lengths_of("math"), 8))
    by_length = np.sort(lengths)
    unequal = [100_000, 1_000, 1_000]
    lines = [(f"equal files: {count}", lengths, equal_files(lengths, count)) for count in (1, 16, 17, 31, 400)]
    lines += [("files of 100,000 / 1,000 / 1,000", lengths[: sum(unequal)], unequal)]
    lines += [("sorted by length, a list", by_length, None)]
    for count in (1, 40, 400, 2000):
        lines += [(f"sorted by length, files: {count}", by_length, equal_files(by_length, count))]
    short_long = np.tile([60, 300], len(lengths) // 2)
    lines += [("short, long, short ..., a list", short_long, None)]
    for count in (1, 17):
        lines += [(f"short, long, short ..., files: {count}", short_long, equal_files(short_long, count))]
    lines += [("the first 1,000, a list", lengths[:1000], None)]
    instructions = lengths_of("flan_like")
    for count in (1, 17):
        lines += [(f"instructions, files: {count}", instructions, equal_files(instructions, count))]
    lines += [("instructions, a list", instructions, None)]
    return lines


def rows_of_lanes(lengths: np.ndarray, files: list[int] | None) -> np.ndarray:
    if files is None:
        column = table_of_ids(lengths, seed=(0,)).column("input_ids")
        source: object = [{"input_ids": ids.values.to_numpy()} for ids in column]
    else:
        source = LengthSource(lengths, files=files)
    dataset = PackedDataset(source, seq_len=SEQ_LEN, lanes=LANES)
    rows = []
    for lane in map(LaneOpener(dataset.stream, 0, {}), range(LANES)):
        count = 0
        while lane.next_row() is not None:
            count += 1
        rows.append(count)
    return np.array(rows)


def filler(rows: np.ndarray) -> float:
    """Share of filler where all get as many rows as the one with the most."""
    return float(1 - rows.mean() / rows.max())


def blind_filler(lengths: np.ndarray) -> tuple[float, float]:
    """(mean, 95th percentile)"""
    rng = np.random.default_rng(1)
    many = len(lengths) // LANES * LANES
    draws = [rng.permutation(lengths)[:many].reshape(LANES, -1).sum(axis=1) for _ in range(400)]
    fillers = [filler(np.ceil(draw / SEQ_LEN)) for draw in draws]
    return float(np.mean(fillers)), float(np.percentile(fillers, 95))


def report(name: str, lengths: np.ndarray, files: list[int] | None) -> list[object]:
    rows = rows_of_lanes(lengths, files)
    tokens = np.add.reduceat(lengths, np.cumsum([0, *files[:-1]])) if files else np.ones(1)
    (blind, most), spread = blind_filler(lengths), float(tokens.max() / tokens.min())
    over = filler(rows)
    why = [
        (over <= LIMIT, "ok"),
        (over <= most, "by chance"),
        (len(tokens) >= LANES and spread > 1 + LIMIT, "whole files"),
        (True, "MISS"),
    ]
    of_four = rows.reshape(4, 4).sum(axis=0)  # rank r of 4 hosts the lanes r, r + 4, ...
    loss = float(1 - LANES * rows.min() / rows.sum())
    shares = [f"{share:.2%}" for share in (over, filler(of_four), loss, blind, most)]
    verdict = next(text for holds, text in why if holds)
    return [name, rows.sum(), f"{rows.min()} .. {rows.max()}", *shares, f"{spread:.2f}" if files else "-", verdict]


def main() -> int:
    show_versions()
    lines = [report(*shape) for shape in shapes()]
    head = ["source", "rows", "rows of a lane", "filler, 16 ranks", "4 ranks", "loss of cut"]
    show([*head, "blind", "95 %", "files", "verdict"], lines)
    return exit_status(lines)


if __name__ == "__main__":
    sys.exit(main())
