import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import reading
from streampack.blocks import BlockReader
from streampack.dealing import Deal
from streampack.tables import Position

from .streams import Ranks, Shards, all_examples, examples, fingerprints, make_stream, split_evenly, tokens_by_example


def turns_of(deal: Deal, *, epoch: int, lane: int) -> list[tuple[int, bool]]:
    shards, are_dealt = deal.turns(epoch=epoch, lane=lane)
    return list(zip(shards.tolist(), are_dealt.tolist(), strict=True))


def deal_of(num_shards=5, lanes=2, seed=7, shuffle=True):
    return Deal(num_shards=num_shards, lanes=lanes, seed=seed, shuffle=shuffle)


def read_lane(deal, sizes, *, epoch, lane):
    """The (shard, index) of all that a lane reads in an epoch of shards of these sizes, in order."""
    read = []
    for shard, dealt in turns_of(deal, epoch=epoch, lane=lane):
        if dealt:
            groups = range(-(-sizes[shard] // deal.lanes))
            indices = deal.dealt_indices(epoch=epoch, shard=shard, lane=lane, groups=groups) if groups else []
            read += [(shard, int(index)) for index in indices if index < sizes[shard]]
        else:
            read += [(shard, index) for index in range(sizes[shard])]
    return read


def read_epoch(deal, sizes, *, epoch):
    return [read_lane(deal, sizes, epoch=epoch, lane=lane) for lane in range(deal.lanes)]


def everything(sizes):
    return [(shard, index) for shard, size in enumerate(sizes) for index in range(size)]


def test_without_shuffling_shards_are_dealt_in_turn_and_the_rest_example_by_example():
    deal = deal_of(5, 2, shuffle=False)
    assert turns_of(deal, epoch=0, lane=0) == [(0, False), (2, False), (4, True)]
    assert turns_of(deal, epoch=0, lane=1) == [(1, False), (3, False), (4, True)]


def test_with_fewer_shards_than_lanes_all_are_dealt_example_by_example():
    deal = deal_of(3, 4, shuffle=False)
    assert [turns_of(deal, epoch=0, lane=lane) for lane in range(4)] == [[(0, True), (1, True), (2, True)]] * 4


def test_a_shuffled_deal_is_the_same_for_ever():
    deal = deal_of(11, 4)
    assert [turns_of(deal, epoch=0, lane=lane) for lane in range(4)] == [
        [(1, False), (3, True), (10, False), (6, True), (4, True)],
        [(5, False), (3, True), (7, False), (6, True), (4, True)],
        [(2, False), (3, True), (8, False), (6, True), (4, True)],
        [(9, False), (3, True), (0, False), (6, True), (4, True)],
    ]
    assert [deal.dealt_indices(epoch=1, shard=2, lane=lane, groups=range(62, 67)).tolist() for lane in range(4)] == [
        [251, 253, 257, 262, 264],
        [250, 254, 259, 263, 266],
        [248, 255, 258, 261, 265],
        [249, 252, 256, 260, 267],
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 16])
def test_each_example_is_dealt_once_whatever_the_number_of_shards(lanes, shuffle):
    for num_shards in sorted({1, 2, 3, 7, lanes - 1, lanes, lanes + 1, 3 * lanes, 3 * lanes + 2} - {0}):
        sizes = [shard * 5 % 13 for shard in range(num_shards)]  # some are empty
        for epoch in (0, 1, 5):
            read = read_epoch(deal_of(num_shards, lanes, shuffle=shuffle), sizes, epoch=epoch)
            assert sorted(place for lane in read for place in lane) == everything(sizes)


@given(
    lanes=st.integers(1, 12),
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=30),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
)
def test_the_lanes_together_read_each_example_once(lanes, sizes, seed, epoch, shuffle):
    deal = deal_of(len(sizes), lanes, seed=seed, shuffle=shuffle)
    read = read_epoch(deal, sizes, epoch=epoch)
    assert sorted(place for lane in read for place in lane) == everything(sizes)


@given(lanes=st.integers(1, 12), num_shards=st.integers(1, 60), seed=st.integers(0, 2**32), shuffle=st.booleans())
def test_each_lane_gets_equally_many_whole_shards_and_all_the_dealt_ones_at_the_same_turns(
    lanes, num_shards, seed, shuffle
):
    turns = [
        turns_of(deal_of(num_shards, lanes, seed=seed, shuffle=shuffle), epoch=3, lane=lane) for lane in range(lanes)
    ]
    assert all(sum(not dealt for _, dealt in lane) == num_shards // lanes for lane in turns)
    shared = [{(turn, shard) for turn, (shard, dealt) in enumerate(lane) if dealt} for lane in turns]
    assert all(one == shared[0] for one in shared)
    assert len(shared[0]) == num_shards % lanes


def test_whole_shards_are_dealt_in_groups_of_neighbours():
    lanes, num_shards = 4, 42
    whole = [
        sorted(shard for shard, dealt in turns_of(deal_of(num_shards, lanes), epoch=2, lane=lane) if not dealt)
        for lane in range(lanes)
    ]
    dealt = set(range(num_shards)) - {shard for lane in whole for shard in lane}
    rest = [shard for shard in range(num_shards) if shard not in dealt]
    groups = [set(rest[first : first + lanes]) for first in range(0, len(rest), lanes)]
    assert len(groups) == 10
    assert [set(group) for group in zip(*whole, strict=True)] == groups


def test_shards_sorted_by_length_give_even_lanes():
    lanes, sizes = 8, range(1, 801)  # 100 shards for each lane
    for epoch in range(5):
        turns = [turns_of(deal_of(800, lanes), epoch=epoch, lane=lane) for lane in range(lanes)]
        loads = [sum(sizes[shard] for shard, _ in lane) for lane in turns]
        assert max(loads) / min(loads) < 1.01


def test_examples_sorted_by_length_give_even_lanes():
    lanes, size = 8, 8000
    loads = [
        sum(index for _, index in read_lane(deal_of(1, lanes), [size], epoch=0, lane=lane)) for lane in range(lanes)
    ]
    assert max(loads) / min(loads) < 1.01


def test_data_that_repeats_with_the_number_of_lanes_is_mixed_in_every_lane():
    indices = deal_of(1, 4).dealt_indices(epoch=0, shard=0, lane=2, groups=range(400))
    phases = Counter((indices % 4).tolist())
    assert set(phases) == {0, 1, 2, 3}
    assert min(phases.values()) > 60


@pytest.mark.parametrize("num_shards", [3, 4, 30])
def test_epochs_differ_when_shuffled(num_shards):
    sizes = [40] * num_shards
    deal = deal_of(num_shards, 4)
    epochs = [read_epoch(deal, sizes, epoch=epoch) for epoch in range(4)]
    assert all(epochs[one] != epochs[other] for one in range(4) for other in range(one))
    assert epochs[1] == read_epoch(deal_of(num_shards, 4), sizes, epoch=1)


@pytest.mark.parametrize("num_shards", [3, 4, 30])
def test_epochs_are_equal_when_not_shuffled(num_shards):
    sizes = [40] * num_shards
    deal = deal_of(num_shards, 4, shuffle=False)
    assert read_epoch(deal, sizes, epoch=0) == read_epoch(deal, sizes, epoch=9)


def test_over_the_epochs_each_lane_meets_other_shards():
    deal = deal_of(16, 4)
    met = {shard for epoch in range(20) for shard, _ in turns_of(deal, epoch=epoch, lane=1)}
    assert met == set(range(16))


def test_seeds_give_different_deals():
    sizes = [40] * 9
    assert read_epoch(deal_of(9, 4, seed=1), sizes, epoch=0) != read_epoch(deal_of(9, 4, seed=2), sizes, epoch=0)


@given(
    lanes=st.integers(1, 12),
    epoch=st.integers(0, 3),
    shard=st.integers(0, 5),
    bounds=st.tuples(st.integers(0, 300), st.integers(1, 200)),
    shuffle=st.booleans(),
)
def test_any_range_of_groups_is_part_of_the_whole(lanes, epoch, shard, bounds, shuffle):
    start, count = bounds
    deal = deal_of(6, lanes, shuffle=shuffle)
    groups = range(start, start + count)
    parts = [deal.dealt_indices(epoch=epoch, shard=shard, lane=lane, groups=groups) for lane in range(lanes)]
    whole = [deal.dealt_indices(epoch=epoch, shard=shard, lane=lane, groups=range(500)) for lane in range(lanes)]
    assert [part.tolist() for part in parts] == [one[start : start + count].tolist() for one in whole]
    # Of each group of `lanes` consecutive examples every lane gets one.
    together = np.sort(np.stack(parts), axis=0)
    assert together.T.reshape(-1).tolist() == list(range(start * lanes, (start + count) * lanes))


@pytest.mark.parametrize(
    ("num_shards", "lanes", "processes", "expected"),
    [
        (32, 16, 8, 1.0),  # whole shards are read by one process each
        (4, 16, 1, 1.0),
        (4, 16, 8, 8.0),  # each process reads all four
        (17, 16, 4, 20 / 17),  # one shard is read by all four
        (1, 4, 100, 4.0),  # no more processes have work than there are lanes
    ],
)
def test_the_reading_factor_counts_how_often_dealt_shards_are_read(num_shards, lanes, processes, expected):
    assert deal_of(num_shards, lanes).reading_factor(processes) == expected


@given(lanes=st.integers(1, 12), num_shards=st.integers(1, 40), data=st.data())
def test_the_reading_factor_is_what_processes_read_together(lanes, num_shards, data):
    processes = data.draw(st.integers(1, lanes))
    deal = deal_of(num_shards, lanes)
    hosted = [range(process, lanes, processes) for process in range(processes)]
    read = [{shard for lane in mine for shard, _ in turns_of(deal, epoch=1, lane=lane)} for mine in hosted]
    assert deal.reading_factor(processes) == sum(map(len, read)) / num_shards


def test_a_deal_survives_pickling():
    deal = deal_of(11, 4)
    turns_of(deal, epoch=0, lane=0)
    copy = pickle.loads(pickle.dumps(deal))
    assert read_epoch(copy, [30] * 11, epoch=3) == read_epoch(deal, [30] * 11, epoch=3)


# ---- reading what is dealt -------------------------------------------------------------------------------------------


class Counted(Shards):
    """Counts how often each shard is read."""

    def __init__(self, parts):
        super().__init__(parts)
        self.reads = Counter()

    def read(self, shard, start):
        self.reads[shard] += 1
        return super().read(shard, start)


def test_a_shard_that_all_lanes_share_is_read_once_though_the_first_lane_reads_them_all_for_its_buffer(monkeypatch):
    monkeypatch.setattr(reading, "CACHE_BYTES", 1)
    source = Counted(split_evenly(examples(630), 63))
    stream = make_stream(source, lanes=32, buffer_size=15)  # 1 whole shard for each lane, and 31 that all share
    rows = Ranks(stream, 1, 0).take(10**6)
    assert source.reads == dict.fromkeys(range(63), 1)
    assert tokens_by_example(rows) == all_examples(source, epochs=1)


def test_what_all_lanes_have_taken_is_not_kept():
    source = Counted([examples(100), examples(300)])
    reader = reading.ShardReader(source, lanes=2, select=None)
    assert [len(reader.chunk(1, 0)), len(reader.chunk(0, 0)), len(reader.chunk(1, 0))] == [256, 100, 256]
    assert list(reader._chunks) == [(0, 0)]
    assert len(reader.chunk(1, 1)) == 44
    assert source.reads == {0: 1, 1: 1}
    reader.close()


# ---- parsing -----------------------------------------------------------------------------------------------------


class Lines(Shards):
    """JSON lines in lists of 7, parsed one by one. Counts how often each is parsed."""

    def __init__(self, parts):
        super().__init__(parts)
        self.parsed = Counter()

    def read(self, shard, start):
        raise AssertionError("read_unparsed is there")

    def read_unparsed(self, shard, start):
        lines = [json.dumps(example).encode() for example in self.parts[shard][start:]]
        yield from (lines[first : first + 7] for first in range(0, len(lines), 7))

    def parse_one(self, raw):
        self.parsed[raw] += 1
        return json.loads(raw)


@pytest.mark.parametrize("num_shards", [1, 16, 23])
def test_each_example_is_parsed_once_by_the_process_that_has_its_lane(num_shards):
    parts = split_evenly(examples(320), num_shards)
    source = Lines(parts)
    rows = Ranks(make_stream(source), 4, 2).take(10**6)
    assert list(source.parsed.values()) == [1] * 320
    assert fingerprints(rows) == fingerprints(Ranks(make_stream(Shards(parts)), 4, 2).take(10**6))


def test_a_read_that_an_object_was_given_is_not_passed_by():
    source = Lines(split_evenly(examples(320), 2))
    source.read = Shards(source.parts).read
    rows = Ranks(make_stream(source), 1, 0).take(10**6)
    assert not source.parsed
    assert tokens_by_example(rows) == all_examples(source, epochs=1)


class OfBytes:
    """Examples that are 40,000 bytes each, for a transform: 209 of them would fill a block if their size counted."""

    name, num_shards = "bytes", 1

    def read(self, shard, start):
        yield from (bytes([index % 256, index // 256]) * 20_000 for index in range(start, 600))


def test_bytes_of_a_source_of_ones_own_have_no_size_that_ends_blocks():
    reader = reading.ShardReader(OfBytes(), lanes=1, select=None)
    deal = deal_of(num_shards=1, lanes=1, shuffle=False)
    blocks = BlockReader(reader, deal, lane=0, size=1000).epoch(Position(0, 0, 0, 0))
    assert [len(block) for block in blocks] == [600]
    reader.close()


class ReadsItself(Lines):
    def read(self, shard, start):
        yield from self.parts[shard][start:]


def test_a_read_of_ones_own_is_not_passed_by_for_what_is_inherited():
    source = ReadsItself(split_evenly(examples(320), 2))
    rows = Ranks(make_stream(source), 1, 0).take(10**6)
    assert not source.parsed
    assert tokens_by_example(rows) == all_examples(source, epochs=1)
