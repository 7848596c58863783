"""Replay: the rows that a recording makes, packed by the lanes themselves, and what can be counted in them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from streampack.order import IntArray
from streampack.recording import Recording
from streampack.stream import LaneOpener, Stream

STRIP_ROWS = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """One epoch of rows. R = rows, in the order of the lanes."""

    seq_len: int
    lane_rows: list[int]
    """Rows of each lane."""
    pieces: npt.NDArray[np.int32]
    """int32: the lengths of all segments."""
    segments: IntArray
    """int64 [R]: examples (and fragments) in each row."""
    tokens: IntArray
    """int64 [R]: tokens in each row."""
    squares: IntArray
    """int64 [R]: the sum of the squared lengths of its segments, which attention costs."""
    shard_tokens: IntArray
    """int64 [shards of the recording]: tokens in rows of each."""
    loss_tokens: int
    left_out: dict[str, int]
    """Examples left out, by reason: empty, no_target, overlong, transform, bad_..."""
    counts: dict[str, int]
    """Of all lanes, see `PackedLoader.stats`."""
    full_rows: int
    """Rows that were made before their lane had come to the end of its share ..."""
    full_tokens: int
    """... and the tokens in them."""
    end_waste: list[float]
    """Of each lane, how many rows' worth of cells stayed empty at its end."""
    strip: list[list[int]]
    """The segment lengths of the first rows of the stream."""

    @property
    def rows(self) -> int:
        return len(self.segments)

    @property
    def cells(self) -> int:
        return self.rows * self.seq_len

    @property
    def fill(self) -> float:
        """Tokens / cells."""
        return float(self.tokens.sum()) / self.cells if self.rows else 0.0


def replay(recording: Recording, stream: Stream, *, epoch: int = 0) -> Replay:
    """One epoch of rows of `recording.stream(...)`, with all its lanes."""
    opener = LaneOpener(stream, epoch, {})
    seq_len = stream.packer.seq_len
    shard_tokens = np.zeros(recording.num_shards, dtype=np.int64)
    lane_rows, end_waste, of_row, pieces = [], [], [], [np.zeros(0, dtype=np.int32)]
    first_rows: list[list[list[int]]] = []
    full_rows = full_tokens = 0
    counts: dict[str, int] = {}
    for number in range(stream.lanes):
        lane = opener(number)
        heads, tokens = [], []
        first_rows.append([])
        while (row := lane.next_row()) is not None:
            _, shards, _, _, lengths = np.array(row.origin).T
            heads.append(lane.state().feeds[0].head)
            tokens.append(int(lengths.sum()))
            of_row.append((len(lengths), tokens[-1], sum(cells * cells for cells in row.lengths)))
            pieces.append(lengths.astype(np.int32))
            np.add.at(shard_tokens, shards, lengths)
            if len(first_rows[-1]) * stream.lanes < STRIP_ROWS:
                first_rows[-1].append(lengths.tolist())
        full = next((place for place, head in enumerate(heads) if head == heads[-1]), 0)
        full_rows += full
        full_tokens += sum(tokens[:full])
        lane_rows.append(len(tokens))
        end_waste.append((len(tokens) - full) - sum(tokens[full:]) / seq_len)
        for name, count in lane.counts.items():
            counts[name] = counts.get(name, 0) + count
    opener.close()
    rows: npt.NDArray[np.int64] = np.array(of_row, dtype=np.int64).reshape(-1, 3)
    reasons = ("empty", "no_target", "overlong", "transform", *(name for name in counts if name.startswith("bad_")))
    cycles = range(max(map(len, first_rows)))
    strip = [of_lane[cycle] for cycle in cycles for of_lane in first_rows if cycle < len(of_lane)]
    return Replay(
        seq_len=seq_len,
        lane_rows=lane_rows,
        pieces=np.concatenate(pieces),
        segments=rows[:, 0],
        tokens=rows[:, 1],
        squares=rows[:, 2],
        shard_tokens=shard_tokens,
        loss_tokens=counts["loss_tokens"],
        left_out={reason: counts[reason] for reason in reasons if counts[reason]},
        counts=counts,
        full_rows=full_rows,
        full_tokens=full_tokens,
        end_waste=end_waste,
        strip=strip[:STRIP_ROWS],
    )
