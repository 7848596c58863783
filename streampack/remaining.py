"""What remains: the share of a pass that was handed out, and about how many rows are still to come.

Lanes are the sample: where three have given 10, 12 and 11 rows in a quarter of the epoch each, about 99 are left, and
how much the lanes differ says how sure that is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from streampack.interval import student
from streampack.progress import Progress

FEWEST_LANES = 4
MANY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """Of one rank in the pass that is running; of an endless one, in the epoch that is."""

    share: float
    """Of the pass (the epoch) that was handed out: 0 .. 1."""
    rows_done: int
    """Rows of the pass that this rank has handed out, also before a resume."""
    rows_left: int | None
    """About so many are still to come; None: nothing is known yet."""
    low: int | None
    high: int | None
    """The interval around rows_left, see `interval`."""

    def as_dict(self) -> dict[str, float]:
        """Plain numbers to log beside `loader.stats`; what is not known yet is left out."""
        known: dict[str, float] = {"share": self.share, "rows_done": self.rows_done}
        later = {"rows_left": self.rows_left, "rows_left_low": self.low, "rows_left_high": self.high}
        return {**known, **{name: value for name, value in later.items() if value is not None}}


def remaining(progress: Progress) -> Remaining:
    """What remains of a pass on its rank. Cheap: it looks at the states of the lanes, and reads nothing."""
    stream, first = progress.stream, progress.start.first_epoch
    lanes = progress.lanes_here()
    idle = stream.lanes // progress.start.world_size - len(lanes)  # that have not begun
    now = [*(progress.epoch_of(lane) - first for lane in lanes), *[0.0] * idle]
    begin = math.floor(min(now, default=0.0)) if stream.epochs is None else 0
    end = begin + 1 if stream.epochs is None else stream.epochs
    done = sum(state.counts[0] for state in lanes.values())
    if progress.ended or (not idle and all(state.done for state in lanes.values())):
        return Remaining(share=1.0, rows_done=done, rows_left=0, low=0, high=0)
    share = 1.0 - sum(_left(now, begin, end)) / ((end - begin) * len(now))
    # The rows of a plan are not like each other: what is out of it is no sample, and makes the estimate less sure.
    given = [progress.epoch_of(lane, planned=False) - first for lane in lanes]
    if not sum(given):
        return Remaining(share=share, rows_done=done, rows_left=None, low=None, high=None)
    rows = [state.counts[0] for state in lanes.values()]
    left = _left([*given, *[0.0] * idle], begin, end)
    value, low, high = _rows_left(given, rows, left=sum(left), unsure=sum(map(progress.unsure_of, lanes)))
    # The last row of a lane is part filled, or does not exist. In an endless stream the next epoch fills it.
    last_rows = sum(part > 0 for part in left) if stream.epochs is not None else 1
    return Remaining(
        share=share,
        rows_done=done,
        rows_left=round(value + last_rows / 2),
        low=math.floor(low),
        high=math.ceil(high + last_rows),
    )


def _left(given: Sequence[float], begin: int, end: int) -> list[float]:
    """Epochs that are left to give, of each."""
    return [min(max(end - epochs, 0.0), end - begin) for epochs in given]


def _rows_left(
    given: Sequence[float], rows: Sequence[int], *, left: float, unsure: float
) -> tuple[float, float, float]:
    """(rows left, at least, at most), for lanes that have given `given` epochs and have `left` to give, all together.

    Rows come evenly over an epoch, give or take a noise that adds up. The lanes show how much of it there is in what
    they gave; it counts once for that, and once for what is to come. `unsure`: so many epochs more may be out, all
    together, where only whole shards can be counted.
    """
    seen, made = sum(given), sum(rows)
    rate, slowest = made / seen, made / (seen + unsure)
    noise, degrees = rate, MANY
    if len(given) > 1:
        off = sum((row - rate * epochs) ** 2 for row, epochs in zip(rows, given, strict=True))
        noise, degrees = off / (len(given) - 1) / (seen / len(given)), len(given) - 1
    if len(given) < FEWEST_LANES:  # two numbers say little of how much such numbers differ: as if rows came at random
        noise, degrees = max(noise, rate), MANY
    reach = student(degrees) * math.sqrt(noise * left * (1 + left / seen))
    least = max(0.0, left - unsure)
    value = made / (seen + unsure / 2) * max(0.0, left - unsure / 2)
    return value, max(0.0, slowest * least - reach), rate * left + reach
