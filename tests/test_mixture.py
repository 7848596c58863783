"""Mixtures: shares by tokens, each source with epochs of its own, the same rows everywhere, exact resume."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import Mixture, PackedDataset, PackedLoader, StateError
from streampack.stream import Stream

from .streams import Ranks, Shards, examples, fingerprints, make_stream, split_evenly, tokens_by_example
from .tiny_tokenizers import word_tokenizer

TOPOLOGIES = [(1, 0), (1, 3), (2, 2), (4, 1), (8, 1)]
STOPS = ["endless", "first_exhausted", "all_seen", "each_once"]


def sources(web: int = 300, code: int = 120, chat: int = 40) -> dict[str, Any]:
    """Sources of different lengths: the first token of an example says which one it is."""
    return {
        "web": Shards(split_evenly(examples(web, seed=1), 11)),
        "code": Shards(split_evenly(examples(code, seed=2, longest=40), 3)),
        "chat": Shards([examples(chat, seed=3, longest=20)]),
    }


WEIGHTS = {"web": 0.6, "code": 0.3, "chat": 0.1}


def mixed(stop: Any, *, by: Any = "tokens", weights: Any = WEIGHTS, data: Any = None, **changes: Any) -> Stream:
    mixture = Mixture(data or sources(), weights, stop=stop, by=by)
    changes = {"lanes": 8, "epochs": None if stop == "endless" else 1, **changes}
    return make_stream(mixture, **changes)


def rows_of(stream: Stream, topology: tuple[int, int], state: Any = None, *, most: int = 400) -> list[Any]:
    ranks = Ranks(stream, *topology, state)
    rows: list[Any] = []
    while len(rows) < most and (step := ranks.step()):
        rows += step
    return rows[:most]


def every_example(stream: Stream, epochs: int) -> Counter[tuple[int, int, int]]:
    found: Counter[tuple[int, int, int]] = Counter()
    for part, first in zip(stream.parts, stream.first_shards, strict=True):
        for shard in range(part.source.num_shards):
            for index, row in enumerate(part.source.read(shard, 0)):
                found.update({(epoch, first + shard, index): len(row["input_ids"]) for epoch in range(epochs)})
    return found


def of_source(stream: Stream, counted: Counter[tuple[int, int, int]], place: int) -> Counter[tuple[int, int, int]]:
    firsts = [*stream.first_shards, stream.num_shards]
    return Counter({key: n for key, n in counted.items() if firsts[place] <= key[1] < firsts[place + 1]})


# ---- one sequence of rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in-order"])
@pytest.mark.parametrize("stop", STOPS)
def test_a_mixture_is_the_same_rows_on_every_topology(stop: str, shuffle: bool) -> None:
    stream = mixed(stop, shuffle=shuffle)
    alone = rows_of(stream, (1, 0))
    assert len(alone) > 60
    for topology in TOPOLOGIES[1:]:
        rows = rows_of(stream, topology)
        if stop == "endless":
            assert fingerprints(rows) == fingerprints(alone)
        else:  # in the end lanes run out one by one, and the order may depend on the ranks
            assert fingerprints(rows)[:30] == fingerprints(alone)[:30]
            assert sorted(fingerprints(rows)) == sorted(fingerprints(alone))


@pytest.mark.parametrize("packing", ["auto", "best_fit", "next_fit", "wrapped", "by_length"])
def test_each_once_gives_every_example_of_every_source_once_per_epoch(packing: Any) -> None:
    stream = mixed("each_once", packing=packing, epochs=2)
    for topology in TOPOLOGIES:
        assert tokens_by_example(rows_of(stream, topology, most=10**6)) == every_example(stream, epochs=2)


def test_all_seen_gives_every_example_and_repeats_the_sources_that_end_before() -> None:
    stream = mixed("all_seen", weights={"web": 0.6, "code": 0.1, "chat": 0.3})
    seen = tokens_by_example(rows_of(stream, (2, 1), most=10**6))
    once = every_example(stream, epochs=1)
    assert {key: seen[key] for key in once} == dict(once)
    more = Counter({key: n for key, n in seen.items() if key[0] > 0})
    # By its tokens `code` is the longest for its weight: it decides, and never begins again.
    assert not of_source(stream, more, 1)
    assert of_source(stream, more, 2)
    epochs_of_chat = Counter(key[1:] for key in of_source(stream, seen, 2))
    assert min(epochs_of_chat.values()) > 0.5 * max(epochs_of_chat.values())  # each lane by itself


def test_first_exhausted_ends_each_lane_with_the_first_source_that_has_given_all() -> None:
    stream = mixed("first_exhausted")
    rows = rows_of(stream, (1, 0), most=10**6)
    seen, once = tokens_by_example(rows), every_example(stream, epochs=1)
    assert {key[0] for key in seen} == {0}
    assert seen == {key: once[key] for key in seen}
    complete = []
    for lane in range(8):
        of_lane = tokens_by_example([given for given in rows if given.lane == lane])
        complete.append([len(of_source(stream, of_lane, place)) for place in range(3)])
    wanted = [_examples_of_lane(stream, place) for place in range(3)]
    for lane in range(8):
        assert any(complete[lane][place] == wanted[place][lane] for place in range(3))
        assert not all(complete[lane][place] == wanted[place][lane] for place in range(3))


def _examples_of_lane(stream: Stream, place: int) -> list[int]:
    """How many examples each lane gets of a source in an epoch."""
    alone = make_stream(stream.parts[place].source, lanes=8, shuffle_block=10)
    object.__setattr__(alone, "parts", [stream.parts[place]])  # with its name, which its order depends on
    counts = [0] * 8
    for one in Ranks(alone, 1, 0).take(10**6):
        counts[one.lane] += len({(shard, index) for _, shard, index, *_ in one.row.origin})
    return counts


# ---- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["auto", "best_fit", "next_fit", "wrapped", "by_length"])
@pytest.mark.parametrize("longest", [None, 7], ids=["whole", "in-fragments"])
@pytest.mark.parametrize("stop", STOPS)
def test_a_mixture_goes_on_after_every_row(stop: str, packing: Any, longest: int | None) -> None:
    data = sources(web=60, code=30, chat=24)
    stream = mixed(stop, data=data, packing=packing, lanes=2, max_example_len=longest)
    ranks = Ranks(stream, 1, 0)
    rows, states = [], [ranks.state()]
    while len(rows) < 40 and (step := ranks.step()):
        rows += step
        states.append(ranks.state())
    rows += ranks.take(20)
    for done, state in enumerate(states):
        resumed = rows_of(stream, (1, 0), state, most=len(rows) - done)
        assert fingerprints(resumed) == fingerprints(rows[done:])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    stop=st.sampled_from(STOPS),
    by=st.sampled_from(["tokens", "examples"]),
    packing=st.sampled_from(["auto", "best_fit", "next_fit", "wrapped", "by_length"]),
    cuts=st.lists(st.tuples(st.sampled_from(TOPOLOGIES[:4]), st.integers(0, 9)), max_size=4),
    sizes=st.tuples(*[st.integers(22, 60)] * 3),
    seed=st.integers(0, 5),
    limit=st.sampled_from([None, 7]),
)
def test_a_mixture_resumed_on_any_topologies_is_the_mixture(
    stop: Any, by: Any, packing: Any, cuts: Any, sizes: Any, seed: int, limit: Any
) -> None:
    data = sources(*sizes)
    changes = {"packing": packing, "seed": seed, "buffer_size": 5, "max_example_len": limit, "lanes": 4}
    stream = mixed(stop, by=by, data=data, **changes)
    whole = rows_of(stream, (1, 0), most=150)
    rows: list[Any] = []
    state = None
    for topology, steps in cuts:
        ranks = Ranks(stream, *topology, state)
        rows += ranks.take(steps)
        state = ranks.state()
        if state["ended"]:  # the next pass would begin
            break
    else:
        rows += rows_of(stream, (1, 0), state, most=max(0, 150 - len(rows)))
    if stop == "endless":
        assert fingerprints(rows)[:150] == fingerprints(whole)
    elif len(whole) < 150 and len(rows) < 150:
        assert sorted(fingerprints(rows)) == sorted(fingerprints(whole))


def test_a_tiny_source_beside_a_big_one_is_repeated_evenly_and_never_twice_in_a_row() -> None:
    """Resumed in the middle, after several epochs of the tiny one."""
    data = {"big": Shards(split_evenly(examples(3000, seed=1), 12)), "tiny": Shards([examples(24, seed=2)])}
    stream = mixed("endless", data=data, weights={"big": 3, "tiny": 1}, buffer_size=16)
    ranks = Ranks(stream, 2, 1)
    rows = ranks.take(100)
    resumed = rows_of(stream, (4, 2), ranks.state(), most=200)
    whole = rows_of(stream, (1, 0))
    assert fingerprints(rows + resumed) == fingerprints(whole)

    for one in whole:
        places = [(shard, index) for _, shard, index, *_ in one.row.origin]
        assert len(set(places)) == len(places)
    of_tiny = of_source(stream, tokens_by_example(whole), 1)
    lengths = {key[1:]: tokens for key, tokens in every_example(stream, epochs=1).items()}
    assert of_tiny == {key: lengths[key[1:]] for key in of_tiny}
    times = Counter(key[1:] for key in of_tiny)
    assert min(times.values()) > max(10, 0.8 * max(times.values()))


# ---- shares ------------------------------------------------------------------------------------------------------


def long_and_short() -> dict[str, Any]:
    """Examples of 4 and of 40 tokens."""
    return {
        "short": Shards(split_evenly([{"input_ids": [1] * 4}] * 4000, 8)),
        "long": Shards(split_evenly([{"input_ids": [2] * 40}] * 1000, 8)),
    }


def share_of_rows(rows: Sequence[Any], token: int) -> float:
    ids = np.concatenate([given.row.ids for given in rows])
    return float(np.mean(ids == token))


@pytest.mark.parametrize(("by", "share"), [("tokens", 0.5), ("examples", 4 / 44)])
def test_weights_are_shares_of_tokens_or_of_examples(by: str, share: float) -> None:
    stream = mixed("endless", data=long_and_short(), weights={"short": 1, "long": 1}, by=by)
    ranks = Ranks(stream, 2, 1)
    rows = ranks.take(1200)
    assert share_of_rows(rows, 1) == pytest.approx(share, abs=0.01)
    for progress in ranks.progress:
        stats = progress.source_stats()
        assert stats["short"]["share_entered"] == pytest.approx(share, abs=0.01)
        assert stats["short"]["share"] == pytest.approx(share, abs=0.01)


def test_shares_of_what_entered_keep_to_the_weights_after_some_rows_and_those_of_rows_after_some_hundreds() -> None:
    stream = mixed("endless", weights=WEIGHTS, buffer_size=64)
    ranks = Ranks(stream, 1, 0)
    ranks.take(200)
    early = ranks.progress[0].source_stats()
    ranks.take(200 * 8)
    late = ranks.progress[0].source_stats()
    for name, weight in WEIGHTS.items():
        assert early[name]["weight"] == late[name]["weight"] == weight
        assert early[name]["share_entered"] == pytest.approx(weight, abs=0.01)
        assert late[name]["share"] == pytest.approx(weight, abs=0.01)


def test_the_loader_tells_of_each_source_and_the_numbers_travel_with_the_state() -> None:
    def loader() -> PackedLoader:
        mixture = Mixture(long_and_short(), {"short": 1, "long": 3}, stop="endless")
        return PackedLoader(PackedDataset(mixture, seq_len=64, lanes=4, buffer_size=8, epochs=None), 2)

    first = loader()
    batches = iter(first)
    for _ in range(50):
        next(batches)
    stats = first.source_stats
    assert stats["short"] == {
        "weight": 0.25,
        "examples": stats["short"]["examples"],
        "tokens_entered": 4 * stats["short"]["examples"],
        "tokens": stats["short"]["tokens"],
        "epoch": stats["short"]["epoch"],
        "share_entered": pytest.approx(0.25, abs=0.01),
        "share": pytest.approx(0.25, abs=0.05),
    }
    assert stats["short"]["tokens"] + stats["long"]["tokens"] == first.stats["tokens"]
    assert 0 <= stats["long"]["epoch"] < 1
    assert {name for row in first.provenance for name, _, _ in row} == {"short", "long"}
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.source_stats == stats


# ---- what the sources of a mixture have of their own -------------------------------------------------------------


def upper(example: Any) -> Any:
    return {"content": example["content"].upper()}


def test_each_source_has_its_own_text_column_and_transform() -> None:
    data = {"one": [{"text": "a b"}] * 8, "two": [{"content": "c d"}] * 8}
    dataset = PackedDataset(
        Mixture(data, {"one": 1, "two": 1}, stop="each_once"),
        word_tokenizer(),
        seq_len=8,
        lanes=1,
        text_column={"two": "content"},
        transform={"two": upper},
        shuffle=False,
    )
    by_source: dict[str, set[tuple[int, ...]]] = {}
    for row in dataset:
        cuts = row["cu_seqlens"].tolist()
        for (source, _, _), start, stop in zip(row["examples"], cuts, cuts[1:], strict=False):
            by_source.setdefault(source, set()).add(tuple(row["input_ids"][start:stop].tolist()))
    assert by_source == {"one": {(3, 4, 2)}, "two": {(0, 0, 2)}}  # "C D" is unknown to the tokenizer


def test_another_source_in_the_mixture_leaves_the_orders_of_the_others_as_they_are() -> None:
    data = sources()

    def order(stream: Stream, name: str) -> list[tuple[int, int]]:
        place = [part.name for part in stream.parts].index(name)
        first = stream.first_shards[place]
        rows = Ranks(stream, 1, 0).take(10**6)
        found = [one for given in rows if given.lane == 0 for one in given.row.origin]
        return [(one[1] - first, one[2]) for one in found if 0 <= one[1] - first < data[name].num_shards]

    both = {"web": data["web"], "chat": data["chat"]}
    without = mixed("each_once", data=both, weights={"web": 1, "chat": 1}, packing="next_fit")
    with_code = mixed("each_once", weights={"web": 1, "code": 1, "chat": 1}, packing="next_fit")
    assert order(without, "web") == order(with_code, "web")
    assert order(without, "chat") == order(with_code, "chat")


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_other_weights_are_refused_at_a_resume_unless_they_are_meant() -> None:
    def loader(**weights: float) -> PackedLoader:
        mixture = Mixture(long_and_short(), weights, stop="endless")
        return PackedLoader(PackedDataset(mixture, seq_len=64, lanes=4, buffer_size=8, epochs=None), 4)

    first = loader(short=1, long=1)
    batches = iter(first)
    for _ in range(100):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))

    changed = loader(short=9, long=1)
    with pytest.raises(StateError, match=r"weights=.*0\.5.*weights=.*0\.9.*change_weights=True"):
        changed.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"weights of the mixture change with row 400: from .*0\.5.* to .*0\.9"):
        changed.load_state_dict(state, change_weights=True)
    before = changed.source_stats
    batches = iter(changed)
    for _ in range(200):
        next(batches)
    after = changed.source_stats
    entered = {name: after[name]["tokens_entered"] - before[name]["tokens_entered"] for name in after}
    assert entered["short"] / sum(entered.values()) == pytest.approx(0.9, abs=0.01)
    again = loader(short=9, long=1)
    again.load_state_dict(changed.state_dict())  # the new weights are those of the state now


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": {}, "weights": {}}, r"a Mixture of \[\] got weights for \[\]"),
        ({"weights": {"a": 1}}, r"a Mixture of \['a', 'b'\] got weights for \['a'\]; give each source a weight"),
        ({"weights": {"a": 1, "b": 0}}, "the weight of 'b' is 0: pass a number above 0"),
        ({"weights": {"a": 1, "b": "x"}}, "the weight of 'b' is 'x'"),
        ({"stop": "never"}, "stop='never': pass one of 'endless', 'first_exhausted', 'all_seen', 'each_once'"),
        ({"by": "bytes"}, "by='bytes': pass one of 'tokens', 'examples'"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    good = {"sources": {"a": [1], "b": [2]}, "weights": {"a": 1, "b": 1}, "stop": "endless", "by": "tokens"}
    with pytest.raises(ValueError, match=message):
        Mixture(**{**good, **arguments})


@pytest.mark.parametrize(
    ("mixture", "arguments", "message"),
    [
        ({"stop": "endless"}, {"epochs": 1}, r"epochs=1 with a Mixture of stop='endless': pass epochs=None"),
        ({"stop": "all_seen"}, {"epochs": None}, r"epochs=None with a Mixture of stop='all_seen': pass epochs=1"),
        ({"stop": "endless"}, {"epochs": None, "source_name": "x"}, "source_name='x': the sources of a Mixture have"),
        ({"stop": "endless"}, {"epochs": None, "text_column": {"c": "x"}}, "text_column names 'c', the Mixture has"),
        (
            {"stop": "endless"},
            {"epochs": None, "lanes": 16},
            "source 'b' has 8 examples for lanes=16.*use lanes=8 or fewer",
        ),
    ],
)
def test_a_mixture_and_arguments_that_do_not_go_together_are_refused(
    mixture: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    data = {"a": examples(100), "b": examples(8)}
    arguments = {"seq_len": 64, "lanes": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        PackedDataset(Mixture(data, {"a": 1, "b": 1}, **mixture), **arguments)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("endless", r"lane \d of 8 got no usable example from source '1 lists'"),
        ("all_seen", r"lane \d of 8 got no usable example from source '1 lists'"),
        ("first_exhausted", r"lane \d of 8 gets no example of source '1 lists'"),
    ],
)
def test_a_source_with_fewer_examples_than_lanes_is_refused_when_a_lane_misses_it(stop: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(mixed(stop, data=sources(chat=5)), (1, 0))


def test_a_source_with_fewer_examples_than_lanes_is_fine_where_each_comes_once() -> None:
    stream = mixed("each_once", data=sources(chat=5))
    assert tokens_by_example(rows_of(stream, (2, 1), most=10**6)) == every_example(stream, epochs=1)


def test_dicts_for_the_sources_of_a_mixture_are_refused_for_one_source() -> None:
    with pytest.raises(TypeError, match="text_column is a dict, which is for the sources of a Mixture"):
        PackedDataset(examples(10), seq_len=64, text_column={"a": "b"})
