"""What the papers say, and whether the runs here show it: one line each, computed from the figures.

A claim about loss, rows or memory is judged in each seed, between runs that began with the same weights: "reproduced"
if it holds in all, "NOT reproduced" if in none, else "UNCLEAR". One about time is judged once, between those runs of
the two ways that took least, since other programs on the machine only make a run slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import published
import ways
from training import Run

Measure = Callable[[Run, Run], float]

SAME_LOSS = 0.004
"""Paper 1's largest difference between padding and flattened mini-batches (Llama-2-7B, Table 2)."""
LEAST = 0.002
"""A smaller difference in loss is none."""
FASTER = 1.1
"""A smaller ratio of speeds is none: concatenation and random packing, the same work, differed by as much."""
LIMITED = 0.05
"""A difference in loss that is called limited here; the papers give no figure."""


class Claim(NamedTuple):
    """A statement and what came out."""

    verdict: str
    text: str

    def __str__(self) -> str:
        return f"- {self.verdict}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """All runs: of (way, batch size), in the order of their seeds."""

    found: dict[tuple[str, int], list[Run]]
    batch_size: int
    equal_steps: int

    def of(self, way: str, *, size: int | None = None) -> list[Run]:
        return self.found[way, size or self.batch_size]

    def compare(self, way: str, other: str, measure: Measure, *, size: int | None = None) -> list[float]:
        """A measure between the two ways, for each seed."""
        return [measure(a, b) for a, b in zip(self.of(way, size=size), self.of(other, size=size), strict=True)]

    def compare_best(self, way: str, other: str, measure: Measure) -> list[float]:
        """A measure between the best runs, alone in a list."""
        return [measure(self.best(way), self.best(other))]

    def loss_at_equal_steps(self, a: Run, b: Run) -> float:
        return a.loss_from("steps", self.equal_steps) - b.loss_from("steps", self.equal_steps)

    def best(self, way: str) -> Run:
        """The run that took least: the one that other programs disturbed least."""
        return min(self.of(way), key=lambda run: run.end.seconds)

    def loss_at_second(self, run: Run, second: float) -> float:
        """Of a run, as if it had been as fast as the best run of its way."""
        return run.loss_at_second(second * run.end.seconds / self.best(run.way).end.seconds)

    @property
    def sizes(self) -> list[int]:
        """Batch sizes of the runs at equal steps, the largest first."""
        return sorted({size for way, size in self.found if way == ways.WRAPPED}, reverse=True)


def end_loss(a: Run, b: Run) -> float:
    return a.end.loss - b.end.loss


def fewer_steps(a: Run, b: Run) -> float:
    return b.end.steps / a.end.steps


def faster(a: Run, b: Run) -> float:
    """Of an epoch."""
    return b.end.seconds / a.end.seconds


def verdict(values: Sequence[float], holds: Callable[[float], bool]) -> str:
    """Of the values of each seed."""
    count = sum(map(holds, values))
    if count == len(values):
        return "reproduced"
    return f"UNCLEAR (in {count} of {len(values)} seeds)" if count else "NOT reproduced"


def spread(values: Sequence[float], *, digits: int = 3, sign: bool = False) -> str:
    """Mean (least .. most)."""
    shown = [
        f"{value:{'+' if sign else ''}.{digits}f}" for value in (min(values), sum(values) / len(values), max(values))
    ]
    return f"{shown[1]} ({shown[0]} .. {shown[2]})" if len(set(shown)) > 1 else shown[1]


def percent(values: Sequence[float]) -> str:
    return spread([100 * value for value in values], digits=1, sign=True) + " %"


def all_claims(runs: Runs) -> list[Claim]:
    """In the order of the papers."""
    return [*boundaries(runs), *steps_and_loss(runs), *speed_and_memory(runs), *choice_of_examples(runs)]


def boundaries(runs: Runs) -> list[Claim]:
    """Correct boundaries lower the loss at equal steps, rows being the same."""
    theirs = ["paper 1, Table 4: -0.073 at 35 steps", "paper 1, Table 4: -0.082 at 281 steps"]
    found = []
    for size, paper in zip(runs.sizes, theirs, strict=False):
        steps = runs.of(ways.WRAPPED, size=size)[0].end.steps
        changes = runs.compare(ways.WRAPPED, ways.CONTAMINATED, end_loss, size=size)
        text = f"correct boundaries lower the loss at equal steps ({steps}, rows a step: {size}): "
        found.append(Claim(verdict(changes, _below(-LEAST)), f"{text}{spread(changes, sign=True)} ({paper})"))
    for way, other in ((ways.RANDOM_POSID, ways.RANDOM), (ways.GREEDY_POSID, ways.GREEDY)):
        changes = runs.compare(way, other, end_loss)
        text = f"{way} has a lower loss than the same rows without PosID: {spread(changes, sign=True)}"
        found.append(Claim(verdict(changes, _below(-LEAST)), f"{text} (paper 2 did not isolate)"))
    return found


def steps_and_loss(runs: Runs) -> list[Claim]:
    """Packing takes fewer steps, and so has a higher loss after an epoch; flattening mini-batches changes neither."""
    ratios = runs.compare(ways.FLAT, ways.PADDING, fewer_steps)
    found = [
        Claim(
            verdict(ratios, _above(1)),
            f"maximal packing takes fewer steps: {spread(ratios, digits=2)} times fewer (paper 1: {311 / 35:.1f}, "
            "whose examples are shorter against a row)",
        )
    ]
    for way, paper in ((ways.FLAT, "+0.155, Table 2"), (ways.WRAPPED, "+0.104, Table 4")):
        changes = runs.compare(way, ways.PADDING, end_loss)
        text = f"at equal epochs {way} has a higher loss than padding: {spread(changes, sign=True)}"
        found.append(Claim(verdict(changes, _above(LEAST)), f"{text} (paper 1: {paper})"))
    steps = runs.equal_steps
    changes = runs.compare(ways.WRAPPED, ways.PADDING, runs.loss_at_equal_steps)
    text = f"that is the number of steps: after {steps} steps {ways.WRAPPED} has the lower loss: "
    found.append(
        Claim(
            verdict(changes, _below(-LEAST)),
            f"{text}{spread(changes, sign=True)} (paper 1 reasons so, without a figure)",
        )
    )
    changes = runs.compare(ways.FLATTENED, ways.PADDING, end_loss)
    text = f"flattening each mini-batch keeps the loss of padding, within {SAME_LOSS}: "
    text += spread(changes, digits=4, sign=True)
    found.append(Claim(verdict(changes, lambda change: abs(change) <= SAME_LOSS), f"{text} (paper 1: -0.002)"))
    return found


def speed_and_memory(runs: Runs) -> list[Claim]:
    """Less padding is more tokens/s and less memory."""
    found = []
    for way in (ways.CONTAMINATED, ways.FLAT, ways.FLATTENED):
        theirs = published.TABLE_2[way].tokens_per_second / published.TABLE_2[ways.PADDING].tokens_per_second
        ratios = runs.compare_best(way, ways.PADDING, lambda a, b: a.speed / b.speed)
        text = f"{way} gives more tokens/s than padding: {spread(ratios, digits=2)} times"
        found.append(Claim(verdict(ratios, _above(FASTER)), f"{text} (paper 1, Table 2, GPU: {theirs:.2f})"))
    shares = runs.compare(ways.FLATTENED, ways.PADDING, lambda a, b: a.megabytes / b.megabytes - 1)
    text = f"flattening each mini-batch needs less memory than padding: {percent(shares)}"
    paper = "paper 1: -19.8 %, of all memory; here of what training adds"
    found.append(Claim(verdict(shares, _below(0)), f"{text} ({paper})"))
    shares = runs.compare(ways.GROUPED, ways.PADDING, lambda a, b: 1 - a.padding / max(b.padding, 1e-9))
    text = f"grouping by length removes most of the padding: {percent(shares)} of it"
    found.append(Claim(verdict(shares, _above(0.5)), f"{text} (no figure in the papers)"))
    for way, place in ((ways.RANDOM, 1), (ways.GREEDY, 2)):
        theirs = [steps[0] / steps[place] for steps, _ in published.TABLE_3.values()]
        ratios = runs.compare_best(way, ways.PADDING, faster)
        text = f"{way} takes less time for an epoch than padding: {spread(ratios, digits=2)} times faster, with "
        text += f"{spread(runs.compare(way, ways.PADDING, fewer_steps), digits=2)} times fewer steps"
        paper = (
            f"paper 2: both {min(theirs):.1f} to {max(theirs):.1f} times, since its padded steps cost as much as packed"
        )
        found.append(Claim(verdict(ratios, _above(FASTER)), f"{text} ({paper})"))
    return found


def choice_of_examples(runs: Runs) -> list[Claim]:
    """Which examples share a row matters little."""
    shares = runs.compare(ways.GREEDY, ways.RANDOM, lambda a, b: a.end.rows / b.end.rows - 1)
    text = f"keeping examples whole costs under 2 % of rows, greedy against random: {percent(shares)}"
    found = [
        Claim(verdict(shares, _below(0.02)), f"{text} (paper 2, TULU: +1.5 % of steps; elsewhere greedy truncates)")
    ]
    changes = runs.compare(ways.MULTIPACK, ways.WRAPPED, runs.loss_at_equal_steps)
    text = f"after {runs.equal_steps} steps multipack changes the loss little against {ways.WRAPPED}, under {LIMITED}: "
    text += spread(changes, sign=True)
    paper = 'paper 1, sec. 4.3: choosing examples "adds limited benefit"'
    found.append(Claim(verdict(changes, lambda change: abs(change) < LIMITED), f"{text} ({paper})"))
    return found


def _below(limit: float) -> Callable[[float], bool]:
    return lambda value: value < limit


def _above(limit: float) -> Callable[[float], bool]:
    return lambda value: value > limit
