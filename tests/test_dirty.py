"""Dirty data: what is bad is an error that names the example, or left out, counted by reason and listed."""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import PackedDataset, PackedLoader
from streampack.encode import Policies
from streampack.sources import FAULTS, Fault

from .streams import Ranks, Shards, fingerprints, make_stream
from .tiny_tokenizers import word_tokenizer

DROP = Policies(bad="drop")

BAD: list[tuple[Any, str, str]] = [
    (Fault("malformed", "not JSON: '{'"), "malformed", "not JSON: '{'"),
    (Fault("cut_short", "the file ends early"), "cut_short", "the file ends early"),
    ({"input_ids": None}, "null", "'input_ids' is null"),
    ({"text": "a"}, "missing", "no column 'input_ids' (there are: text); pass a tokenizer for examples of text"),
    ({"input_ids": "a"}, "type", "'input_ids' is str 'a', not one list of integers"),
    ({"input_ids": [1.5, 2]}, "type", "'input_ids' is ndarray [1.5, 2.0], not one list of integers"),
    ("a", "type", "the example is str, not a dict of columns"),
    (None, "type", "the example is NoneType, not a dict of columns"),
    ({"input_ids": [1, -2]}, "vocabulary", "'input_ids' holds -2 .. 1, outside 0 .. 99"),
    ({"input_ids": [1, 100]}, "vocabulary", "'input_ids' holds 1 .. 100, outside 0 .. 99"),
    ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "padded", "attention_mask has zeros"),
]
BAD_LABELS: list[tuple[Any, str, str]] = [
    ({"input_ids": [1, 2], "labels": [1]}, "ragged", "'labels' has 1 entries for 2 input_ids"),
    ({"input_ids": [1, 2], "labels": None}, "null", "'labels' is null"),
    ({"input_ids": [1, 2], "labels": [1, 9]}, "labels", "'labels' holds 9 at token 1, where input_ids holds 2"),
]


def packed(examples: list[Any], **settings: Any) -> PackedDataset:
    arguments = {"seq_len": 8, "lanes": 1, "shuffle": False, "vocab_size": 100, "packing": "next_fit", **settings}
    return PackedDataset(Shards([examples]), **arguments)


def ids_of(loader: PackedLoader) -> list[int]:
    return [token for batch in loader for token in batch["input_ids"][batch["labels"] != 0].tolist() if token]


@pytest.mark.parametrize(("bad", "reason", "what"), BAD + BAD_LABELS)
def test_a_bad_example_is_refused_with_its_place_or_left_out_counted_by_reason_and_listed(
    bad: Any, reason: str, what: str
) -> None:
    good = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}]
    if isinstance(bad, dict) and "labels" in bad:
        good = [{**one, "labels": one["input_ids"]} for one in good]
    rows = [good[0], bad, good[1]]
    with pytest.raises(ValueError, match="source '1 lists', shard 0, index 1: ") as error:
        ids_of(PackedLoader(packed(rows)))
    assert what in str(error.value)
    assert "mend the data, or pass bad='drop' to leave it out" in str(error.value)

    loader = PackedLoader(packed(rows, bad="drop"))
    batch = next(iter(loader))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert loader.provenance == [[("1 lists", 0, 0), ("1 lists", 0, 2)]]  # those after it keep their places
    assert {name: loader.stats[f"bad_{name}"] for name in FAULTS} == {name: int(name == reason) for name in FAULTS}
    assert loader.stats["bad"] == 1
    (listed,) = loader.bad_examples
    assert (listed.where, listed.reason) == ("source '1 lists', shard 0, index 1", reason)
    assert what in listed.what


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_texts_are_left_out_and_listed_also_from_workers(num_workers: int) -> None:
    texts: list[Any] = [
        {"text": "a b"},
        {"text": None},
        {"body": "c"},
        {"text": 7},
        {"text": "c d"},
        {"text": "\ud800"},
    ]
    dataset = PackedDataset(
        Shards([texts, [{"text": "a"}, Fault("malformed", "no JSON")]]),
        word_tokenizer(),
        seq_len=16,
        lanes=2,
        shuffle=False,
        bad="drop",
    )
    loader = PackedLoader(dataset, 1, num_workers=num_workers)
    assert sum(1 for _ in loader) == 2
    assert [(bad.where, bad.reason) for bad in sorted(loader.bad_examples)] == [
        ("source '2 lists', shard 0, index 1", "null"),
        ("source '2 lists', shard 0, index 2", "missing"),
        ("source '2 lists', shard 0, index 3", "type"),
        ("source '2 lists', shard 0, index 5", "malformed"),
        ("source '2 lists', shard 1, index 1", "malformed"),
    ]
    assert (loader.stats["bad_malformed"], loader.stats["bad"], loader.stats["examples"]) == (2, 5, 3)


def test_more_bad_examples_than_allowed_are_an_error_that_gives_the_numbers() -> None:
    rows: list[Any] = [{"input_ids": [1, 2]}] * 50 + [{"input_ids": None}] * 40
    with pytest.raises(ValueError, match=r"max_bad_share=0\.01") as error:
        ids_of(PackedLoader(packed(rows, bad="drop")))
    assert str(error.value) == (
        "40 of the first 90 examples of lane 0 are bad (40 null), more than max_bad_share=0.01; the last one, source "
        "'1 lists', shard 0, index 89: 'input_ids' is null; mend the data, or allow a larger share"
    )
    loader = PackedLoader(packed(rows, bad="drop", max_bad_share=0.5))
    assert len(ids_of(loader)) == 100
    assert loader.stats["bad"] == 40


def test_ten_bad_examples_of_a_lane_are_allowed_whatever_their_share() -> None:
    rows: list[Any] = [{"input_ids": [1, 2]}] + [{"input_ids": None}] * 10
    loader = PackedLoader(packed(rows, bad="drop", max_bad_share=0))
    assert len(ids_of(loader)) == 2


@pytest.mark.parametrize("share", [-0.1, 1.5, "all"])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=f"max_bad_share={share!r}: pass a share of the examples, 0 .. 1"):
        packed([], max_bad_share=share)


def test_a_table_without_the_column_counts_as_missing_and_the_next_one_is_read() -> None:
    """One file of many has other columns; a column that is not needed may have any type anywhere."""

    class Drifting:
        name, num_shards = "drifting", 1

        def read(self, shard: int, start: int) -> Iterator[pa.Table]:
            tables = [
                pa.table({"text": ["a", "b"], "meta": pa.nulls(2)}),
                pa.table({"body": ["c", "d"]}),
                pa.table({"text": ["c", "d"], "meta": [{"k": 1}, {"k": 2}], "more": [1, 2]}),
            ]
            yield from (table[max(0, start - 2 * place) :] for place, table in enumerate(tables))

    def dataset(**settings: Any) -> PackedDataset:
        return PackedDataset(Drifting(), word_tokenizer(), seq_len=8, lanes=1, shuffle=False, **settings)

    loader = PackedLoader(dataset(bad="drop"))
    assert next(iter(loader))["input_ids"].tolist() == [[3, 2, 4, 2, 5, 2, 6, 2]]
    assert [(bad.where, bad.reason) for bad in loader.bad_examples] == [
        ("source 'drifting', shard 0, index 2", "missing"),
        ("source 'drifting', shard 0, index 3", "missing"),
    ]
    with pytest.raises(ValueError, match=r"index 2: no column 'text' \(there are: body\); pass text_column='...'"):
        next(iter(PackedLoader(dataset())))


def test_a_transform_is_not_asked_about_what_could_not_be_read() -> None:
    rows: list[Any] = [{"input_ids": [1, 2]}, Fault("malformed", "no JSON"), {"input_ids": [3]}]
    loader = PackedLoader(packed(rows, bad="drop", transform=lambda example: {"input_ids": [*example["input_ids"], 9]}))
    assert ids_of(loader) == [1, 2, 9, 3, 9]
    assert loader.stats["bad_malformed"] == 1


def test_the_list_goes_on_after_a_resume_and_counts_travel_with_the_state() -> None:
    rows: list[Any] = [example for number in range(1, 40) for example in ({"input_ids": [number] * 8}, None)]
    first = PackedLoader(packed(rows, bad="drop", max_bad_share=1, buffer_size=1))
    batches = iter(first)
    for _ in range(10):
        next(batches)
    second = PackedLoader(packed(rows, bad="drop", max_bad_share=1, buffer_size=1))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = ids_of(second)
    assert rest == [number for number in range(11, 40) for _ in range(8)]
    assert second.stats["bad"] == 39
    assert len(first.bad_examples) + len(second.bad_examples) == 39


# ---- fuzz --------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
good_ids = st.lists(st.integers(1, 99), min_size=2, max_size=12)
dirty_examples = st.one_of(
    good_ids.map(lambda ids: {"input_ids": ids}),
    good_ids.map(lambda ids: {"input_ids": ids}),
    st.fixed_dictionaries({"input_ids": json_values}),
    json_values,
    st.sampled_from(FAULTS).map(lambda reason: Fault(reason, "as it was read")),
)


def is_good(example: Any) -> bool:
    ids = example.get("input_ids") if isinstance(example, dict) else None
    return (
        isinstance(ids, list)
        and set(example) == {"input_ids"}
        and all(isinstance(token, int) and 0 <= token < 100 for token in ids)
        and any(type(token) is int for token in ids)  # true among numbers is 1, as NumPy has it; a list of them is none
    )


def holds_another_list(example: Any) -> bool:
    """A list beside input_ids would be dropped silently, so it is an error whatever the policy."""
    return isinstance(example, dict) and any(
        isinstance(value, list) for key, value in example.items() if key != "input_ids"
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(dirty_examples, max_size=25), min_size=1, max_size=4), st.sampled_from([(1, 0), (2, 2), (4, 1)])
)
def test_whatever_is_in_the_data_rows_hold_the_good_examples_and_all_others_are_counted(
    shards: list[list[Any]], topology: tuple[int, int]
) -> None:
    shards = [[one for one in shard if not holds_another_list(one)] for shard in shards]
    stream = make_stream(Shards(shards), lanes=4, policies=DROP, buffer_size=3, vocab_size=100)
    rows = Ranks(stream, *topology).take(10**6)
    given_ids: dict[tuple[int, int], list[int]] = {}
    for one in rows:
        ids, at = one.row.ids.tolist(), 0
        for (_, shard, index, _, tokens), cells in zip(one.row.origin, one.row.lengths, strict=True):
            given_ids[shard, index] = ids[at : at + tokens]
            at += cells
    good = {
        (shard, index): example["input_ids"]
        for shard, examples in enumerate(shards)
        for index, example in enumerate(examples)
        if is_good(example)
    }
    # A row of single tokens has nothing to learn, and is left out (and counted).
    assert given_ids == {place: good[place] for place in given_ids}
    assert all(len(good[place]) == 1 for place in set(good) - set(given_ids))
    alone = Ranks(stream, 1, 0)
    everything = alone.take(10**6)
    counts = alone.progress[0].counts()
    left_out = sum(counts[name] for name in counts if name.startswith("bad_")) + counts["empty"]
    assert counts["examples"] == len(good)
    assert left_out + len(good) == sum(map(len, shards))
    assert sorted(fingerprints(everything)) == sorted(fingerprints(rows))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(dirty_examples, min_size=1, max_size=12))
def test_an_error_over_dirty_data_always_names_the_example_and_the_remedy(examples: list[Any]) -> None:
    stream = make_stream(Shards([examples]), lanes=1, vocab_size=100)
    first_bad = next(
        (index for index, one in enumerate(examples) if not is_good(one) and one != {"input_ids": []}), None
    )
    if first_bad is None:
        Ranks(stream, 1, 0).take(10**6)
        return
    with pytest.raises(ValueError, match=r"shard 0, index \d+: .*; .*"):
        Ranks(make_stream(Shards([examples]), lanes=1, vocab_size=100, shuffle=False), 1, 0).take(10**6)
