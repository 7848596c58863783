"""Totals: examples, tokens and rows of an epoch, from a recording of all of it or of a sample."""

import math
from dataclasses import dataclass

import numpy as np

from streampack.interval import Estimate, student, total, total_by_size
from streampack.recording import Recording
from streampack.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of one epoch; exact where all was read."""

    examples: Estimate
    """In the source, also those that are left out."""
    tokens: Estimate
    """In rows."""
    rows: Estimate


def totals(recording: Recording, made: Replay, *, lanes: int) -> Totals | None:
    """The totals of the source; None where the sample does not tell them: a shard was not read to its end, and the
    source does not say how many examples it has, or there is only one shard to judge by."""
    if recording.is_complete:
        numbers = (recording.num_examples, int(made.tokens.sum()), made.rows)
        examples, tokens, rows = map(Estimate.exactly, numbers)
        return Totals(examples=examples, tokens=tokens, rows=rows)
    counts, of_shards = np.diff(recording.starts).tolist(), made.shard_tokens.tolist()
    whole = all(recording.is_whole)
    if recording.of_examples is not None and len(counts) > 1:
        examples = Estimate.exactly(recording.of_examples)
        tokens = total_by_size(of_shards, counts, of=recording.of_examples)
    elif recording.shard_sizes is not None and recording.of_size is not None and len(counts) > 1 and whole:
        sizes = recording.shard_sizes.tolist()
        examples = total_by_size(counts, sizes, of=recording.of_size)
        tokens = total_by_size(of_shards, sizes, of=recording.of_size)
    elif len(counts) > 2 and whole:  # the first one is the last of the source, which stands for itself
        rest = recording.of_shards - 1
        examples = total(counts[1:], of=rest).plus(counts[0])
        tokens = total(of_shards[1:], of=rest).plus(of_shards[0])
    else:
        return None
    rows = _rows(tokens, made, lanes=lanes)
    return Totals(examples=examples.rounded(), tokens=tokens.rounded(), rows=rows.rounded())


def _rows(tokens: Estimate, made: Replay, *, lanes: int) -> Estimate:
    """Rows are tokens / (seq_len * fill), and what each lane leaves empty at its end.

    The fill is that of the rows before the ends, which have more of the buffer to choose from. Where a sample is too
    small to have any, it is between that of all its rows and 1. How a lane ends depends on where its tokens end in a
    row, so a sample shows only how much it can be: between nothing and the most that a lane had, or one row.
    """
    seq_len = made.seq_len
    fill = least_fill = made.full_tokens / (made.full_rows * seq_len) if made.full_rows else 1.0
    if made.full_rows >= 2 * lanes:
        least_fill -= student(lanes) * (1 - fill) / math.sqrt(lanes)
    else:
        least_fill = min(fill, made.fill)
    waste = float(np.mean(made.end_waste))
    most = max(1.0, *made.end_waste)
    return Estimate(
        tokens.value / (seq_len * fill) + lanes * waste,
        tokens.low / seq_len,
        tokens.high / (seq_len * least_fill) + lanes * most,
    )
