import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import StateError, merge_states
from streampack.lane_state import COUNTS, FeedState, LaneState
from streampack.state import VERSION, check
from streampack.tables import Position

small = st.integers(0, 10**4)


@st.composite
def fragment_starts(draw):
    """First tokens of what waits of an example: mostly in equal steps, some gone, the last step shorter by one."""
    step, count = draw(st.integers(1, 4096)), draw(st.integers(1, 12))
    starts = [step * place for place in range(count)]
    starts[-1] -= draw(st.integers(0, 1)) if count > 1 else 0
    kept = draw(st.lists(st.sampled_from(starts), min_size=1, unique=True)) if draw(st.booleans()) else starts
    return tuple(sorted(set(kept)))


@st.composite
def feed_states(draw):
    first = draw(st.integers(0, 10**12))
    waiting = bytes(draw(st.lists(st.integers(0, 1), max_size=60)))
    numbers = draw(st.lists(st.integers(0, 60), max_size=4, unique=True))
    return FeedState(
        position=Position(*draw(st.tuples(small, small, st.integers(0, 10**12), small))),
        first=first,
        waiting=waiting,
        head=(first + draw(small), draw(small)),
        fragments=tuple((first + number, draw(fragment_starts())) for number in numbers),
        epoch=draw(st.tuples(small, st.integers(0, 10**12), small)),
        entered=draw(st.one_of(st.just(()), st.tuples(small, small, small))),
    )


@st.composite
def lane_states(draw):
    feeds = tuple(draw(st.lists(feed_states(), min_size=1, max_size=4)))
    return LaneState(
        feeds=feeds,
        arrivals=bytes(draw(st.lists(st.integers(0, 200), max_size=60))),
        planned=draw(small),
        counts=draw(st.tuples(*[st.integers(0, 10**15)] * len(COUNTS))),
        given=draw(st.one_of(st.just(()), st.tuples(*[small] * len(feeds)))),
        done=draw(st.booleans()),
    )


def lane_of(*, waiting=b"", head=(0, 0), fragments=(), epoch=0, first=0):
    feed = FeedState(Position(epoch, 0, 0, 0), first, waiting, head, fragments, (epoch, 0, 0))
    return LaneState((feed,), b"", 0, (0,) * len(COUNTS), (), False)


# ---- lanes ------------------------------------------------------------------------------------------------------


@given(lane_states())
def test_a_lane_state_comes_back_from_json_as_it_was(state):
    text = state.to_json()
    assert LaneState.from_json(text) == state
    assert LaneState.from_json(json.dumps(json.loads(text))) == state
    assert LaneState.from_json(text).to_json() == text


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True))
def test_any_set_of_fragments_comes_back_from_json(starts):
    state = lane_of(first=5, waiting=b"\x01", head=(6, 0), fragments=((5, tuple(sorted(starts))),))
    assert LaneState.from_json(state.to_json()) == state


def test_a_lane_state_is_this_text():
    feed = FeedState(
        position=Position(epoch=1, turn=2, index=300, block=4),
        first=1000,
        waiting=bytes([0, 0, 1, 0, 0, 1, 1, 0, 1, 1]),
        head=(1010, 64),
        fragments=((1009, (0, 64, 128, 192)), (1008, (0, 64, 130))),
        epoch=(1, 900, 800),
        entered=(5, 6, 7),
    )
    state = LaneState(
        feeds=(feed, FeedState.start(3)),
        arrivals=bytes([0, 1, 1, 0, 2]),
        planned=3,
        counts=tuple(range(len(COUNTS))),
        given=(11, 12),
        done=False,
    )
    assert VERSION == 3  # another text needs another version
    assert state.to_json() == (
        '[[[[1,2,300,4],1000,"mw==",[2,10],[10,64],[9,0,64,4,8,0,0,1,-1,64,0,1,-1,130,0,1],[1,900,800],[5,6,7]],'
        '[[3,0,0,0],0,"",[0,0],[0,0],[],[3,0,0],[]]],"2,5,FIA=",3,'
        "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22],[11,12],0]"
    )


def test_counters_that_are_rarely_used_are_not_written_while_they_are_0():
    state = lane_of()
    state.counts = (7, 8, 9, 9, 8, 1, *[0] * (len(COUNTS) - 6))
    assert '"",0,[7,8,9,9,8,1],[],0]' in state.to_json()
    assert LaneState.from_json(state.to_json()) == state


def test_a_lane_that_has_not_begun():
    state = LaneState.start(3)
    assert state == lane_of(epoch=3)
    assert LaneState.from_json(state.to_json()) == state


def test_many_fragments_of_one_example_take_little_room():
    starts = tuple(range(0, 4096 * 10_000, 4096))
    state = lane_of(waiting=b"\x01", head=(1, 0), fragments=((0, starts),))
    assert len(state.to_json()) < 140
    assert LaneState.from_json(state.to_json()) == state


def test_waiting_examples_take_a_bit_each():
    state = lane_of(waiting=bytes([0, 1] * 400), head=(800, 0))
    assert len(state.to_json()) < 800 / 8 * 4 / 3 + 120


# ---- refusing ---------------------------------------------------------------------------------------------------

STREAM = {"source": "data", "seq_len": 1024, "lanes": 4, "epochs": None}


def state_of(rank=0, world_size=1, *, row=8, rows=8, ended=False, epochs=(0, 1), stream=STREAM, tokens=100):
    """The state of a rank that hosts the lanes rank, rank + world_size ..., after row `row`."""
    lane = LaneState.start(0).to_json()
    return {
        "version": VERSION,
        "stream": dict(stream),
        "pass": list(epochs),
        "row": row,
        "after": -1,
        "rows": rows,
        "rank": rank,
        "world_size": world_size,
        "worker": [0, 1],
        "ended": ended,
        "totals": {**dict.fromkeys(COUNTS, 0), "tokens": tokens},
        "lanes": {str(number): lane for number in range(rank, 4, world_size)},
    }


def test_a_state_of_this_stream_is_accepted():
    check(state_of(), stream=STREAM)
    check(json.loads(json.dumps(state_of())), stream=STREAM)


@pytest.mark.parametrize(
    ("key", "here"), [("source", "other data"), ("seq_len", 2048), ("lanes", 8), ("epochs", 3), ("source", None)]
)
def test_a_state_of_another_stream_is_refused_with_both_values(key, here):
    with pytest.raises(StateError, match="cannot resume") as error:
        check(state_of(), stream={**STREAM, key: here})
    assert str(error.value) == (
        f"cannot resume: the state was saved with {key}={STREAM[key]!r}, this stream has {key}={here!r}; make them "
        "equal, or start without the state"
    )


def test_of_other_lanes_and_the_name_that_a_source_has_with_them_the_lanes_are_named():
    with pytest.raises(StateError, match="saved with lanes=4, this stream has lanes=8;"):
        check(state_of(), stream={**STREAM, "source": "data (8 shards)", "lanes": 8})


def test_a_setting_that_only_one_side_knows_is_refused():
    with pytest.raises(StateError, match="saved with seed=None, this stream has seed=1;"):
        check(state_of(), stream={**STREAM, "seed": 1})
    with pytest.raises(StateError, match="saved with seed=1, this stream has seed=None;"):
        check(state_of(stream={**STREAM, "seed": 1}), stream=STREAM)


@pytest.mark.parametrize("version", [0, VERSION + 1, None, "1"])
def test_a_state_of_another_version_is_refused(version):
    with pytest.raises(StateError, match="format version") as error:
        check({**state_of(), "version": version}, stream=STREAM)
    assert str(error.value) == (
        f"cannot resume: the state has format version {version}, this streampack reads version {VERSION}; resume with "
        "the streampack that saved it, or start without the state"
    )


@pytest.mark.parametrize(
    "state", [None, {}, [], "state", {"epoch": 1}, {"version": VERSION, "stream": STREAM}], ids=str
)
def test_what_is_not_a_state_is_refused(state):
    with pytest.raises(StateError, match=r"not a streampack state: .*; pass what state_dict\(\) returned") as error:
        check(state, stream=STREAM)
    assert type(state).__name__ in str(error.value)


def test_a_refused_state_is_a_value_error():
    assert issubclass(StateError, ValueError)


# ---- merging ----------------------------------------------------------------------------------------------------


def test_states_of_all_ranks_make_one():
    states = [state_of(0, 2), state_of(1, 2, tokens=11)]
    merged = merge_states(states)
    assert merged == {
        **state_of(0, 1),
        "totals": {**dict.fromkeys(COUNTS, 0), "tokens": 111},
    }
    assert sorted(merged["lanes"]) == ["0", "1", "2", "3"]
    check(merged, stream=STREAM)
    assert states == [state_of(0, 2), state_of(1, 2, tokens=11)]  # as they were


def test_the_order_of_the_ranks_does_not_matter():
    states = [state_of(rank, 4, tokens=rank) for rank in range(4)]
    assert merge_states(states[::-1]) == merge_states(states)
    assert merge_states(tuple(states)) == merge_states(states)


def test_the_state_of_a_single_rank_is_the_state_of_all():
    assert merge_states([state_of()]) == state_of()


def test_a_merged_state_can_be_merged_again_and_saved_as_json():
    merged = merge_states([state_of(0, 2), state_of(1, 2)])
    assert merge_states([merged]) == merged
    assert json.loads(json.dumps(merged)) == merged


def test_ranks_that_have_ended_may_have_ended_earlier():
    merged = merge_states([state_of(0, 2, row=4, rows=4, ended=True), state_of(1, 2)])
    assert (merged["row"], merged["rows"], merged["ended"]) == (8, 8, False)
    merged = merge_states([state_of(0, 2, row=4, rows=4, ended=True), state_of(1, 2, ended=True)])
    assert (merged["rows"], merged["ended"]) == (8, True)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "merge_states got no states; pass the state_dict() of every rank"),
        (
            [state_of(0, 2)],
            "merge_states got the ranks [0] of world_size=2; pass each rank's state once",
        ),
        (
            [state_of(0, 4), state_of(1, 4), state_of(3, 4)],
            "merge_states got the ranks [0, 1, 3] of world_size=4; pass each rank's state once",
        ),
        (
            [state_of(0, 2), state_of(0, 2)],
            "merge_states got the ranks [0, 0] of world_size=2; pass each rank's state once",
        ),
        (
            [state_of(0, 2), state_of(1, 2), state_of(1, 2)],
            "merge_states got the ranks [0, 1, 1] of world_size=2; pass each rank's state once",
        ),
        (
            [state_of(0, 2), state_of(1, 2, row=6, rows=6)],
            "the states are of different steps: rank 1 was after row 6, rank 0 after row 8; save all ranks after the "
            "same step",
        ),
        (
            [state_of(0, 2, epochs=(0, 1)), state_of(1, 2, epochs=(1, 2))],
            "the states are of different passes: epochs [0, 1] and [1, 2]",
        ),
        (
            [state_of(0, 2), state_of(1, 2, stream={**STREAM, "seq_len": 512})],
            "cannot resume: the state was saved with seq_len=512, this stream has seq_len=1024; make them equal, or "
            "start without the state",
        ),
    ],
    ids=["none", "one of two", "one missing", "twice", "twice of three", "steps", "passes", "streams"],
)
def test_states_that_do_not_belong_together_are_refused(states, message):
    with pytest.raises(StateError) as error:
        merge_states(states)
    assert str(error.value) == message


def test_states_of_different_numbers_of_ranks_are_refused_with_both():
    with pytest.raises(StateError, match="world_size") as error:
        merge_states([state_of(0, 2), state_of(1, 4)])
    assert "2" in str(error.value)
    assert "4" in str(error.value)


@pytest.mark.parametrize("state", [None, {}, [], "state", {"epoch": 1}], ids=str)
def test_what_is_not_a_state_is_not_merged(state):
    for states in ([state], [state_of(0, 2), state], [state, state_of(0, 2)]):
        with pytest.raises(StateError, match=r"not a streampack state: .*; pass what state_dict\(\) returned"):
            merge_states(states)


def test_the_states_of_single_workers_are_not_merged():
    states = [{**state_of(rank, 2), "worker": [0, 2]} for rank in range(2)]
    with pytest.raises(StateError, match="worker 0 of 2"):
        merge_states(states)
