"""Plan: how many steps, tokens and examples a training run takes, and what its schedule should be told.

With 1000 rows in an epoch, 2 ranks, batches of 4 and 2 of them accumulated, a step is 16 rows, an epoch 63 steps.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from streampack.arguments import check_numbers
from streampack.dataset import PackedDataset
from streampack.ending import AtEnd, check_at_end
from streampack.interval import Estimate
from streampack.ranks import check_rank
from streampack.recording import Recording, record
from streampack.replay import Replay, replay
from streampack.report import SAMPLE, stops
from streampack.stream import Stream
from streampack.totals import Totals, totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """See `make_plan`."""

    is_exact: bool
    """All was read, so that the numbers of steps are exact; else they come with an interval."""
    ranks: int
    batch_size: int
    accumulation: int
    epochs: float | None
    """Epochs that the plan takes; None where the sample does not tell."""
    budget: int | None
    """The token budget, if there was one."""
    rows_per_step: int
    tokens_per_step: float
    """Without padding, on average."""
    loss_tokens_per_step: float
    examples_per_step: float
    """On average: what padded training calls the batch size."""
    epoch: Totals | None
    """Of the first epoch; None where the sample does not tell."""
    steps_per_epoch: Estimate | None
    """Of the first epoch."""
    steps: Estimate
    """Optimizer steps of the whole plan."""
    tokens: Estimate
    """In rows of the whole plan."""
    examples: Estimate | None
    """Of the whole plan, also those that are left out."""
    left_out: float
    """The share of examples that are left out: empty, bad, over-long, without a target."""
    stops: list[str]
    """What would stop training, as `Report.stops`."""
    num_training_steps: int
    """For the learning-rate schedule (and `max_steps`)."""
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def make_plan(
    dataset: PackedDataset,
    *,
    ranks: int = 1,
    batch_size: int = 1,
    accumulation: int = 1,
    epochs: int = 1,
    tokens: int | None = None,
    at_end: AtEnd | None = None,
    examples: int | None = SAMPLE,
    progress: Callable[[int], object] | None = None,
) -> Plan:
    """How many steps a run takes: `epochs` passes of one epoch each, or as many as a budget of tokens pays for.

    Args:
        dataset: of one source. Nothing about it changes.
        ranks: data-parallel ranks.
        batch_size: rows in a batch of a rank.
        accumulation: batches of a rank in an optimizer step; what is missing to the last step of a pass is left out or
            filled up, as PackedTrainer does it: that is a step.
        epochs: passes over the data.
        tokens: of an endless stream instead: so many, without padding.
        at_end: as in `PackedLoader`; default: "fill".
        examples: read about so many, of shards drawn at random; None: all, for exact numbers.
        progress: called with the number of examples that were read since the last call.

    Raises:
        ValueError: for numbers that cannot be used, a source without examples, or a sample that does not tell how much
            there is.
    """
    numbers = {"batch_size": batch_size, "accumulation": accumulation, "ranks": ranks, "epochs": epochs}
    check_numbers({name: (value, 1) for name, value in numbers.items()} | {"examples": (examples, 1)})
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens={tokens}: must be at least 1")
    check_at_end(at_end)
    stream = dataset.stream
    check_rank(0, ranks, lanes=stream.lanes)
    recording = record(stream, examples=examples, seed=stream.seed, progress=progress)
    made = replay(recording, recording.stream(stream))
    if not made.rows:
        raise ValueError(f"{recording.num_examples} examples of source {recording.name!r} make no row")
    epoch = totals(recording, made, lanes=stream.lanes)
    rows_per_step = ranks * batch_size * accumulation
    per_step = rows_per_step * made.tokens.mean()
    taken = rows_per_step * made.counts["examples"] / made.rows
    steps_of = _Steps(
        recording=recording,
        stream=stream,
        ranks=ranks,
        batch_size=batch_size,
        accumulation=accumulation,
        at_end=at_end or "fill",
    )
    per_epoch = None if epoch is None else steps_of.first(epoch, made)
    if tokens is not None:
        steps, all_tokens, all_examples = _of_budget(tokens, per_step, taken, made, recording)
        num_epochs = None if epoch is None else tokens / epoch.tokens.value
        schedule = math.ceil(steps.value)
    else:
        if epoch is None or per_epoch is None:
            raise ValueError(
                f"{recording.num_examples} examples of {recording.num_shards} of {recording.of_shards} shards do not "
                "tell how many there are; read more of them, or all (examples=None), or plan a number of tokens"
            )
        steps, all_tokens = steps_of.all(epochs, epoch, made)
        all_examples, num_epochs = epoch.examples.times(epochs), float(epochs)
        schedule = round(steps.value)
    return Plan(
        is_exact=recording.is_complete and tokens is None,
        ranks=ranks,
        batch_size=batch_size,
        accumulation=accumulation,
        epochs=num_epochs,
        budget=tokens,
        rows_per_step=rows_per_step,
        tokens_per_step=float(per_step),
        loss_tokens_per_step=rows_per_step * made.loss_tokens / made.rows,
        examples_per_step=float(taken),
        epoch=epoch,
        steps_per_epoch=per_epoch,
        steps=steps,
        tokens=all_tokens,
        examples=all_examples,
        left_out=sum(recording.left_out().values()) / recording.num_examples,
        stops=stops(recording, stream),
        num_training_steps=schedule,
        advice=_advice(steps, is_budget=tokens is not None, examples_per_step=taken, rows_per_step=rows_per_step),
    )


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Counts the steps of passes."""

    recording: Recording
    stream: Stream
    ranks: int
    batch_size: int
    accumulation: int
    at_end: AtEnd

    def exact(self, made: Replay) -> int:
        """The steps of a pass with these rows: rank r hosts the lanes r, r + ranks, ..."""
        of_rank = [sum(made.lane_rows[rank :: self.ranks]) for rank in range(self.ranks)]
        if self.at_end == "cut":
            batches = min(rows // self.batch_size for rows in of_rank)
        else:
            batches = max(-(-rows // self.batch_size) for rows in of_rank)
        return -(-batches // self.accumulation)

    def first(self, epoch: Totals, made: Replay) -> Estimate:
        """The steps of the first epoch."""
        if self.recording.is_complete:
            return Estimate.exactly(self.exact(made))
        rows_per_step = self.ranks * self.batch_size * self.accumulation
        uneven = self.ranks * self._uneven_rows(made)
        low, high = (-uneven, 0.0) if self.at_end == "cut" else (0.0, uneven)
        rows = epoch.rows
        steps = Estimate(
            (rows.value + (low + high) / 2) / rows_per_step,
            (rows.low + low) / rows_per_step,
            (rows.high + high) / rows_per_step + 1,
        )
        return Estimate(max(1, round(steps.value)), max(1, math.floor(steps.low)), math.ceil(steps.high))

    def _uneven_rows(self, made: Replay) -> float:
        """About by how many rows the rank with the most (or fewest) is off the mean: it has its share of the shards."""
        if self.ranks == 1:
            return 0.0
        counts = np.diff(self.recording.starts)
        factor = 1.0
        if self.recording.of_examples is not None:
            factor = self.recording.of_examples / self.recording.of_shards / float(counts.mean())
        spread = float(made.shard_tokens.std(ddof=1)) * factor / made.seq_len
        return 2 * spread * math.sqrt(self.recording.of_shards / self.ranks) + 1

    def all(self, epochs: int, epoch: Totals, made: Replay) -> tuple[Estimate, Estimate]:
        """(steps, tokens) of so many passes. Each has an order of its own, so the rows differ a little."""
        if not self.recording.is_complete:
            return self.first(epoch, made).times(epochs), epoch.tokens.times(epochs)
        passes = [made]
        passes += [replay(self.recording, self.recording.stream(self.stream), epoch=one) for one in range(1, epochs)]
        tokens = sum(int(one.tokens.sum()) for one in passes)
        return Estimate.exactly(sum(map(self.exact, passes))), Estimate.exactly(tokens)


def _of_budget(
    tokens: int, per_step: float, examples: float, made: Replay, recording: Recording
) -> tuple[Estimate, Estimate, Estimate]:
    """(steps, tokens, examples) of an endless stream. Its rows have no ends of lanes, so they are a little fuller."""
    full = made.full_tokens / made.full_rows if made.full_rows else made.seq_len
    value = math.ceil(tokens / per_step)
    least = math.ceil(tokens / (per_step * full / float(made.tokens.mean())))
    steps = Estimate(value, min(least, value), value)
    means = np.array(made.shard_tokens) / np.maximum(1, np.diff(recording.starts))
    means = means[means > 0]
    off = float(means.std(ddof=1) / means.mean()) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    off = 0.0 if recording.is_complete else 2 * off
    count = examples * tokens / per_step
    return steps, Estimate.exactly(tokens), Estimate(count, count * (1 - off), count * (1 + off)).rounded()


def _advice(steps: Estimate, *, is_budget: bool, examples_per_step: float, rows_per_step: int) -> list[str]:
    advice = []
    if is_budget:
        advice.append("an endless stream (epochs=None) trains exactly as many steps as it is told")
    elif not steps.is_exact:
        advice.append(
            "the steps are an estimate: read all for the exact number, or train an endless stream (epochs=None) for "
            f"max_steps={round(steps.value):,}, so that the schedule ends where it should"
        )
    advice.append(
        f"a step of {rows_per_step:,} rows holds about {examples_per_step:,.0f} examples: that is the batch size that "
        "learning rates and warm-ups of padded training go by"
    )
    return advice
