"""Orders that are the same on every machine, for ever: permutations made from integer keys.

`permutation(5, 7, 0)` is one fixed order of 0..4 for the key (7, 0). Only raw bits of PCG64 and SeedSequence are used,
the two parts of `numpy.random` whose output NumPy promises never to change (NEP 19); `Generator.permutation` is not
among them. Global random state is neither read nor written.
"""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def permutation(size: int, *key: int) -> IntArray:
    """The order int64 [size] of 0 .. size - 1 that belongs to `key` (integers >= 0)."""
    return np.argsort(_bits(size, key), kind="stable")


def permutations(count: int, size: int, *key: int, first: int = 0) -> IntArray:
    """`count` independent orders of 0 .. size - 1 for `key`, from number `first` on, int64 [count, size]."""
    return np.argsort(_bits(count * size, key, skip=first * size).reshape(count, size), axis=1, kind="stable")


def _bits(size: int, key: tuple[int, ...], *, skip: int = 0) -> npt.NDArray[np.uint64]:
    bits: npt.NDArray[np.uint64] = np.random.PCG64(np.random.SeedSequence(key)).advance(skip).random_raw(size)
    return bits
