"""Dealing: which lane reads which examples in an epoch. The lanes together read each example once.

Of N shards each lane reads N // lanes whole ones. Whole shards are dealt in groups of `lanes` neighbours, one to each
lane, so that a source that is sorted (by length, say) gives all lanes the same mixture. The N % lanes shards that are
left are dealt example by example: of each `lanes` consecutive examples every lane gets one, by a seeded permutation
(striding would alias with periodic data). With 5 shards and 2 lanes: two whole shards a lane, and half of the fifth.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from streampack.order import IntArray, permutation, permutations

BoolArray = npt.NDArray[np.bool_]

_DEALT, _WHOLE, _ORDER, _GROUPS = range(4)  # keep the random streams of different decisions apart
_GROUPS_PER_KEY = 64
_CELLS_PER_DRAW, _DRAWS_KEPT = 1024, 2048


class Deal:
    """The assignment of shards and examples to lanes, a pure function of (num_shards, lanes, seed, epoch, shuffle)."""

    def __init__(self, *, num_shards: int, lanes: int, seed: int, shuffle: bool) -> None:
        self.num_shards = num_shards
        self.lanes = lanes
        self.seed = seed
        self.shuffle = shuffle
        # A process hosts many lanes, in at most two epochs at a time; they ask for the same orders.
        self._epoch = lru_cache(maxsize=2)(self._deal_epoch)
        self._draw = lru_cache(maxsize=_DRAWS_KEPT)(self._draw_groups)
        # A power of two: a shard that is short for its lanes must not pay for groups that it does not have.
        self._groups_per_draw = 1 << min(_GROUPS_PER_KEY, max(1, _CELLS_PER_DRAW // lanes)).bit_length() - 1

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.num_shards, self.lanes, self.seed, self.shuffle)

    def reading_factor(self, processes: int) -> float:
        """How often the source is read, all in all, by `processes` that share the lanes: those that are left of
        N % lanes shards are read by each of them."""
        num_dealt = self.num_shards % self.lanes
        return (self.num_shards + num_dealt * (min(processes, self.lanes) - 1)) / self.num_shards

    def turns(self, *, epoch: int, lane: int) -> tuple[IntArray, BoolArray]:
        """What a lane reads in an epoch, in order: (shards, are they dealt example by example among all lanes), [n]."""
        whole, dealt, dealt_turns = self._epoch(epoch if self.shuffle else 0)
        mine = whole[:, lane]
        if self.shuffle:
            mine = mine[permutation(len(mine), self.seed, _ORDER, epoch, lane)]
        is_dealt = np.zeros(len(mine) + len(dealt), dtype=bool)
        is_dealt[dealt_turns] = True
        shards = np.empty(len(is_dealt), dtype=np.int64)
        shards[dealt_turns], shards[~is_dealt] = dealt, mine
        return shards, is_dealt

    def dealt_indices(self, *, epoch: int, shard: int, lane: int, groups: range) -> IntArray:
        """The index in a dealt shard that a lane gets of each group of `lanes` consecutive examples, int64 [groups]."""
        size = self._groups_per_draw
        first, last = groups.start // size, -(-groups.stop // size)
        draws = [self._draw(epoch if self.shuffle else 0, shard, draw)[:, lane] for draw in range(first, last)]
        offsets = np.concatenate(draws)[groups.start - first * size :][: len(groups)]
        indices: IntArray = np.arange(groups.start, groups.stop) * self.lanes + offsets
        return indices

    def _deal_epoch(self, epoch: int) -> tuple[IntArray, IntArray, IntArray]:
        """(whole shards [rounds, lanes], dealt shards [d], the turns at which every lane reads those [d])."""
        rounds, num_dealt = divmod(self.num_shards, self.lanes)
        if not self.shuffle:
            whole = np.arange(rounds * self.lanes).reshape(rounds, self.lanes)
            return whole, np.arange(rounds * self.lanes, self.num_shards), np.arange(rounds, rounds + num_dealt)
        order = permutation(self.num_shards, self.seed, _DEALT, epoch)
        dealt, whole = order[:num_dealt], np.sort(order[num_dealt:]).reshape(rounds, self.lanes)
        whole = np.take_along_axis(whole, permutations(rounds, self.lanes, self.seed, _WHOLE, epoch), axis=1)
        # All lanes meet a dealt shard at the same turn, so that one reader serves those of a process.
        return whole, dealt, permutation(rounds + num_dealt, self.seed, _DEALT, epoch, 1)[:num_dealt]

    def _draw_groups(self, epoch: int, shard: int, draw: int) -> IntArray:
        key, first = divmod(draw * self._groups_per_draw, _GROUPS_PER_KEY)
        return permutations(self._groups_per_draw, self.lanes, self.seed, _GROUPS, epoch, shard, key, first=first)


def _rebuild(num_shards: int, lanes: int, seed: int, shuffle: bool) -> Deal:
    return Deal(num_shards=num_shards, lanes=lanes, seed=seed, shuffle=shuffle)
