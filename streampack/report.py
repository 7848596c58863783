"""Report: what a source is made of, and what rows it makes: numbers to choose settings by, before training.

Of 1000 examples with 250 tokens on average, in rows of 2048: 123 rows, 8 examples in each, fill 0.99; padded in batches
they would take twice the cells. All rows are made by the lanes that make them in training, from lengths.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.arguments import check_numbers
from streampack.dataset import PackedDataset
from streampack.interval import Estimate
from streampack.lanes import BAD_ALLOWED
from streampack.recording import Recording, lenient, record
from streampack.replay import Replay, replay
from streampack.stream import Stream
from streampack.totals import Totals, totals
from streampack.wording import many

SAMPLE = 20_000
"""Examples that a report reads unless it is told to read all."""
COMPARED = 20_000
"""Examples that row lengths and buffer sizes are compared with."""
BUFFER_SIZES = (16, 64, 256, 1024)
PADDED_BATCH = 8
QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
BINS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a number is spread."""

    mean: float
    quantiles: dict[str, float]
    """"0" (the least), "1", "5", "25", "50", "75", "95", "99", "100" (the most): at most so much in that % of cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What was read of the source."""

    examples: int
    shards: int
    of_shards: int
    is_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The rows that some settings make of (a sample of) the examples."""

    seq_len: int
    buffer_size: int
    rows: int
    fill: float
    """Tokens / cells."""
    fill_before_ends: float | None
    """The same of the rows that were made while their lane had more examples to come: what a long stream has. None:
    there are none."""
    saved: float
    """The share of cells saved against padding in batches of 8, in random order."""
    overlong: int
    """Examples of more tokens than fit."""
    examples_per_row: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """How even the lanes are, and which number would do."""

    lanes: int
    rows_least: int | None
    rows_most: int | None
    """Rows of the lanes with the fewest and the most; None where not all was read."""
    advised: int
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """See `make_report`."""

    source: str
    settings: dict[str, Any]
    """What identifies the stream."""
    read: Read
    lengths: Spread
    """Tokens of the examples that have any."""
    histogram: list[tuple[float, float, int]]
    """(from, to, how many of the examples read); the steps grow by equal factors."""
    left_out: dict[str, int]
    """Examples left out, by reason, of those read."""
    overlong: int
    """Examples over the longest that fits, of those read: what `overlong=` is for."""
    stops: list[str]
    """What would stop a training run with these settings, of what was read."""
    bad: list[tuple[str, str, str]]
    """(place, reason, what is wrong) of the first bad examples."""
    epoch: Totals | None
    """Of one epoch; None where the sample does not tell."""
    packed: Packed
    """With the settings of the stream."""
    tokens_per_row: float
    loss_tokens_per_row: float
    examples_per_row: Spread
    attention: Spread
    """What attention costs in rows, the sum of squared segment lengths: 1 is one example that fills the row."""
    slowest: float | None
    """The attention cost of the dearest rank, on average over steps, as a multiple of the mean of all ranks; None for
    too few rows to say."""
    ranks: int
    by_seq_len: list[Packed]
    by_buffer_size: list[Packed]
    lanes: Lanes
    strip: list[list[int]]
    """The segment lengths of the first rows (of a sample: of what was read)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def make_report(
    dataset: PackedDataset,
    *,
    examples: int | None = SAMPLE,
    seq_lens: Sequence[int] | None = None,
    buffer_sizes: Sequence[int] = BUFFER_SIZES,
    ranks: Sequence[int] = (1,),
    workers: int = 0,
    batch_size: int = 1,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Read a source, or a sample of it, and say what it is made of and what rows it makes.

    Where all is read, tokens and rows are those of the first epoch of the dataset exactly.

    Args:
        dataset: of one source. Nothing about it changes.
        examples: read about so many, of shards drawn at random; None: all.
        seq_lens: row lengths to compare; default: a half, the same, twice and four times the dataset's.
        buffer_sizes: buffer sizes to compare.
        ranks: the numbers of data-parallel ranks that may be used; the largest first counts for costs.
        workers: DataLoader workers of each.
        batch_size: rows in a batch of a rank.
        progress: called with the number of examples that were read since the last call.

    Raises:
        ValueError: for a source without examples or columns, a mixture, or numbers that cannot be used.
    """
    check_numbers({"examples": (examples, 1), "workers": (workers, 0), "batch_size": (batch_size, 1)})
    for count in ranks:
        check_numbers({"ranks": (count, 1)})
    stream = dataset.stream
    recording = record(stream, examples=examples, seed=stream.seed, progress=progress)
    if not recording.tokens.any():
        raise ValueError(f"none of {recording.num_examples} examples of source {recording.name!r} has any tokens")
    made = replay(recording, recording.stream(stream))
    if not made.rows:
        raise ValueError(
            f"{recording.num_examples} examples of source {recording.name!r} make no row; left out: {made.left_out}"
        )
    epoch = totals(recording, made, lanes=stream.lanes)
    some = recording.sample(COMPARED)
    lengths = recording.tokens[recording.tokens > 0]
    return Report(
        source=recording.name,
        settings=stream.identity(),
        read=Read(
            examples=recording.num_examples,
            shards=recording.num_shards,
            of_shards=recording.of_shards,
            is_all=recording.is_complete,
        ),
        lengths=_spread(lengths),
        histogram=_histogram(lengths),
        left_out=made.left_out,
        overlong=_overlong(recording, stream, stream.packer.seq_len),
        stops=stops(recording, stream),
        bad=recording.bad,
        epoch=epoch,
        packed=_packed(recording, stream, made),
        tokens_per_row=float(made.tokens.mean()),
        loss_tokens_per_row=made.loss_tokens / made.rows,
        examples_per_row=_spread(made.segments),
        attention=_spread(made.squares / made.seq_len**2),
        slowest=_slowest(made, ranks=max(ranks), batch_size=batch_size),
        ranks=max(ranks),
        by_seq_len=[_try(some, stream, seq_len=one) for one in _seq_lens(stream, seq_lens)],
        by_buffer_size=[_try(some, stream, buffer_size=one) for one in sorted({*buffer_sizes})],
        lanes=_lanes(stream, recording, made, epoch, ranks=ranks, workers=workers),
        strip=made.strip,
    )


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _spread(values: npt.NDArray[Any]) -> Spread:
    found = np.quantile(values, [one / 100 for one in QUANTILES], method="inverted_cdf").tolist()
    return Spread(mean=float(values.mean()), quantiles=dict(zip(map(str, QUANTILES), found, strict=True)))


def _histogram(lengths: npt.NDArray[np.int32]) -> list[tuple[float, float, int]]:
    least, most = int(lengths.min()), int(lengths.max())
    edges = np.geomspace(least, most + 1, num=min(BINS, most - least + 1) + 1)
    counts, _ = np.histogram(lengths, edges)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))


def _overlong(recording: Recording, stream: Stream, seq_len: int) -> int:
    longest = seq_len if stream.max_example_len is None else min(stream.max_example_len, seq_len)
    return int(np.count_nonzero(recording.tokens > longest))


def stops(recording: Recording, stream: Stream) -> list[str]:
    """What of the examples would stop training, with the remedy: policies that say "error", or are not chosen."""
    policies, found = stream.parts[0].encoder.policies, []
    overlong = _overlong(recording, stream, stream.packer.seq_len)
    if overlong and policies.overlong in ("auto", "error") and lenient(policies.overlong, recording) == "drop":
        found.append(
            f"{overlong:,} examples are over-long: choose overlong='truncate', 'drop' or 'split', or longer rows"
        )
    left = recording.left_out()
    bad = sum(count for reason, count in left.items() if reason.startswith("bad_"))
    allowed = stream.packer.max_bad_share
    if bad and policies.bad == "error":
        found.append(f"{bad:,} examples are bad: mend the data, or choose bad='drop'")
    elif bad > max(BAD_ALLOWED, allowed * recording.num_examples):
        found.append(f"{bad:,} examples are bad, more than max_bad_share={allowed:g}: mend the data")
    if left.get("empty") and policies.empty == "error":
        found.append(f"{left['empty']:,} examples are empty: choose empty='drop'")
    return found


# ---- rows ------------------------------------------------------------------------------------------------------------


def _seq_lens(stream: Stream, given: Sequence[int] | None) -> list[int]:
    own, multiple = stream.packer.seq_len, stream.packer.pad_to_multiple_of
    wanted = given or (own // 2, own, 2 * own, 4 * own)
    return sorted({one for one in wanted if one >= 2 and one % multiple == 0})


def _try(recording: Recording, stream: Stream, *, seq_len: int | None = None, buffer_size: int | None = None) -> Packed:
    other = recording.stream(stream, seq_len=seq_len, buffer_size=buffer_size)
    return _packed(recording, other, replay(recording, other))


def _packed(recording: Recording, stream: Stream, made: Replay) -> Packed:
    padded = _padded_cells(made.pieces)
    return Packed(
        seq_len=made.seq_len,
        buffer_size=stream.packer.buffer_size,
        rows=made.rows,
        fill=made.fill,
        fill_before_ends=made.full_tokens / (made.full_rows * made.seq_len) if made.full_rows else None,
        saved=1 - made.cells / padded if padded else 0.0,
        overlong=_overlong(recording, stream, made.seq_len),
        examples_per_row=float(made.segments.mean()) if made.rows else 0.0,
    )


def _padded_cells(pieces: npt.NDArray[np.int32]) -> int:
    """Cells of the same segments in batches, each padded to the longest of its batch."""
    mixed = np.random.default_rng(0).permutation(pieces)
    whole = len(mixed) // PADDED_BATCH * PADDED_BATCH
    cells = int(mixed[:whole].reshape(-1, PADDED_BATCH).max(axis=1, initial=0).sum()) * PADDED_BATCH
    rest = mixed[whole:]
    return cells + int(rest.max(initial=0)) * len(rest)


def _slowest(made: Replay, *, ranks: int, batch_size: int) -> float | None:
    """Rows in random order, dealt to ranks: which rows meet in a step depends on how many ranks there are."""
    squares = np.random.default_rng(0).permutation(made.squares).astype(np.float64)
    steps = len(squares) // (ranks * batch_size)
    if not steps:
        return None
    of_ranks = squares[: steps * ranks * batch_size].reshape(steps, ranks, batch_size).sum(axis=2)
    return float((of_ranks.max(axis=1) / of_ranks.mean(axis=1)).mean())


# ---- lanes -----------------------------------------------------------------------------------------------------------

ROWS_OF_A_LANE = 50
"""With so many rows in each lane, its part-filled last row is 1 % of them at most."""


def _lanes(
    stream: Stream,
    recording: Recording,
    made: Replay,
    epoch: Totals | None,
    *,
    ranks: Sequence[int],
    workers: int,
) -> Lanes:
    rows = None if epoch is None else epoch.rows
    advised, reasons = advise_lanes(rows, ranks=ranks, workers=workers)
    if recording.of_shards < advised:
        reasons.append(
            f"the source has {many(recording.of_shards, 'shard')}, fewer than lanes: every process reads all of it and "
            "leaves what is not its own; more files, or shorter row groups, avoid that"
        )
    return Lanes(
        lanes=stream.lanes,
        rows_least=min(made.lane_rows) if recording.is_complete else None,
        rows_most=max(made.lane_rows) if recording.is_complete else None,
        advised=advised,
        reasons=reasons,
    )


def advise_lanes(rows: Estimate | None, *, ranks: Sequence[int], workers: int = 0) -> tuple[int, list[str]]:
    """(a number of lanes, why), for the numbers of ranks that may be used and the rows of an epoch."""
    multiple, most = math.lcm(*ranks), max(ranks)
    of_ranks = f"ranks {', '.join(map(str, sorted({*ranks})))}" if len({*ranks}) > 1 else f"{most} ranks"
    reasons = [f"a multiple of {multiple}, for {of_ranks if most > 1 else '1 rank'}"]
    wanted = max(16, most * max(1, workers))
    lanes = multiple * -(-wanted // multiple)
    if workers:
        reasons.append(f"{lanes // most} lanes on each rank, so that each of {workers} workers has one")
    if rows is None or rows.value / lanes >= ROWS_OF_A_LANE:
        return lanes, reasons
    most_units = max(1, int(rows.value / ROWS_OF_A_LANE / multiple))
    few = multiple << (most_units.bit_length() - 1)  # so that twice or four times the ranks may come, too
    share = few / 2 / max(rows.value, 1)
    reasons = reasons[:1]
    reasons.append(
        f"few, since an epoch has only about {rows.value:,.0f} rows and each lane ends with a part-filled one: "
        f"{few} of them are about {share:.1%} of the rows"
        + (f", {lanes} would be {lanes / 2 / max(rows.value, 1):.1%}" if lanes != few else "")
    )
    if few // most < workers:
        reasons.append(f"{few // most} of {workers} workers of a rank would have work then, so use no more")
    return few, reasons
