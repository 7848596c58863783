"""Intervals: how far an estimate may be off, from how much the parts that were seen differ.

Of 4 shards out of 40 with 90, 100, 100 and 110 tokens: 4000 tokens, 3500 .. 4500 (`total([90, 100, 100, 110], of=40)`
adds what is left of the sampling error after the correction for the shards that were seen).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13),
    *(2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04),
)
"""The 0.975 quantile of Student's t for 1 .. 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and the interval of 95 % around it; of an exact number all three are the same."""

    value: float
    low: float
    high: float

    @staticmethod
    def exactly(value: float) -> "Estimate":
        return Estimate(value, value, value)

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def plus(self, number: float) -> "Estimate":
        return Estimate(self.value + number, self.low + number, self.high + number)

    def times(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def rounded(self) -> "Estimate":
        """In whole numbers, the interval outwards."""
        return Estimate(round(self.value), math.floor(self.low + 1e-9), math.ceil(self.high - 1e-9))


def student(degrees: int) -> float:
    """How many standard errors an interval of 95 % reaches to each side."""
    return _T[degrees - 1] if degrees <= len(_T) else 2.04


def total(parts: Sequence[float], *, of: int) -> Estimate:
    """The sum over `of` parts of which these (two or more) were drawn at random."""
    seen = np.asarray(parts, dtype=np.float64)
    count, value = len(seen), float(seen.mean()) * of
    error = of * float(seen.std(ddof=1)) * math.sqrt((1 - count / of) / count)
    return _around(value, student(count - 1) * error, least=float(seen.sum()))


def total_by_size(parts: Sequence[float], sizes: Sequence[float], *, of: float) -> Estimate:
    """The sum over parts of the size `of` together; these (two or more), with their sizes, were drawn at random."""
    seen, seen_sizes = np.asarray(parts, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    count, size = len(seen), float(seen_sizes.sum())
    ratio = float(seen.sum()) / size
    spread = float(np.sqrt(((seen - ratio * seen_sizes) ** 2).sum() / (count - 1)))
    error = of * spread * math.sqrt(count * max(0.0, 1 - size / of)) / size
    return _around(ratio * of, student(count - 1) * error, least=float(seen.sum()))


def _around(value: float, reach: float, *, least: float) -> Estimate:
    """What was seen is there at least."""
    return Estimate(value, max(value - reach, least), value + reach)
