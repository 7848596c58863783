"""Resuming anywhere gives the uninterrupted rows, on any topology. The torch-free core, in one process."""

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.files import Files
from streampack.progress import Start
from streampack.state import StateError, check

from .streams import (
    Ranks,
    Shards,
    all_examples,
    examples,
    files_in_ranges,
    fingerprints,
    make_stream,
    split_evenly,
    tokens_by_example,
    write_jsonl,
    write_parquet,
)

WORLDS = [(1, 0), (1, 3), (2, 1), (2, 2), (4, 1), (4, 3), (8, 1), (16, 1)]


def run_to_the_end(stream: Any, state: Any, world_size: int = 1, num_workers: int = 0) -> list[str]:
    return fingerprints(Ranks(stream, world_size, num_workers, state).take(10**6))


@pytest.mark.parametrize("packing", ["auto", "best_fit", "next_fit", "wrapped", "none", "by_length"])
@pytest.mark.parametrize("longest", [30, 150], ids=["short", "over-long"])
def test_a_small_set_resumes_after_every_row_to_the_very_end(packing: Any, longest: int) -> None:
    stream = make_stream(examples(60, longest=longest), epochs=2, lanes=4, packing=packing)
    run = Ranks(stream, 1, 0)
    states, rows = [run.state()], []
    while step := run.step():
        rows += step
        states.append(run.state())
    assert len(rows) > 12
    for done, state in enumerate(states):
        assert run_to_the_end(stream, state) == fingerprints(rows)[done:], f"after row {done}"


@pytest.mark.parametrize("packing", ["auto", "best_fit", "next_fit", "wrapped", "none", "by_length"])
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in-order"])
@pytest.mark.parametrize("shards", [1, 3, 17, 40])
def test_chains_of_random_cuts_and_topologies_give_the_uninterrupted_endless_rows(
    packing: Any, shuffle: bool, shards: int
) -> None:
    source = Shards(split_evenly(examples(400, longest=130), shards))
    stream = make_stream(source, epochs=None, shuffle=shuffle, packing=packing)
    count = 400  # rows: into the later epochs
    expected = fingerprints(Ranks(stream, 1, 0).take(count))
    chooser = random.Random(f"{packing} {shuffle} {shards}")
    for _ in range(3):
        rows: list[str] = []
        state = None
        while len(rows) < count:
            world_size, num_workers = chooser.choice(WORLDS)
            ranks = Ranks(stream, world_size, num_workers, state)
            rows += fingerprints(ranks.take(chooser.randint(0, 60 // world_size)))
            state = ranks.state()
        assert rows[:count] == expected


@pytest.mark.parametrize("packing", ["auto", "wrapped", "none", "by_length"])
def test_chains_over_three_epochs_to_the_end_give_every_token_once_per_epoch(packing: Any) -> None:
    source = Shards([examples(90, seed=1), examples(40, seed=2, longest=150), examples(7, seed=3), [], examples(63)])
    stream = make_stream(source, epochs=3, lanes=8, packing=packing)
    chooser = random.Random(5)
    for _ in range(4):
        rows: list[Any] = []
        state = None
        while True:
            world_size, num_workers = chooser.choice([(1, 0), (1, 2), (2, 2), (4, 1), (8, 1)])
            ranks = Ranks(stream, world_size, num_workers, state)
            rows += ranks.take(chooser.randint(1, 25))
            state = ranks.state()
            if state["ended"]:
                break
        assert tokens_by_example(rows) == all_examples(source, epochs=3)


def test_wrapped_fragments_of_limited_length_resume_after_every_row() -> None:
    stream = make_stream(examples(70, longest=150), epochs=2, lanes=2, packing="wrapped", max_example_len=20)
    expected = run_to_the_end(stream, None)
    assert len(expected) > 20
    for done in range(len(expected)):
        run = Ranks(stream, 1, 0)
        run.take(done)
        assert run_to_the_end(stream, run.state()) == expected[done:], f"after row {done}"


def test_blocks_bounded_by_bytes_resume_where_columns_change_their_type_on_the_way() -> None:
    class Tables:
        name, num_shards = "tables", 1

        def read(self, shard: int, start: int) -> Iterator[pa.Table]:
            for first in range(0, 900, 90):
                meta = list(range(90)) if first < 300 else ["é" * 20_000] * 90
                ids = [[number, 1, 2] for number in range(first, first + 90)]
                table = pa.table({"input_ids": ids, "meta": meta})
                if first + 90 > start:
                    yield table.slice(max(0, start - first))

    stream = make_stream(Tables(), lanes=1, shuffle_block=700, transform=lambda row: {"input_ids": row["input_ids"]})
    expected = run_to_the_end(stream, None)
    for done in range(0, len(expected), 7):
        run = Ranks(stream, 1, 0)
        run.take(done)
        assert run_to_the_end(stream, run.state()) == expected[done:], f"after row {done}"


def test_an_endless_lane_of_rows_without_targets_is_an_error_and_not_a_hang() -> None:
    stream = make_stream([{"input_ids": [7]}] * 50, epochs=None, lanes=1)
    with pytest.raises(ValueError, match=r"lane 0 got only rows without a target.*no_target='keep'"):
        Ranks(stream, 1, 0).step()


def test_a_damaged_state_is_refused() -> None:
    stream = make_stream(examples(200), lanes=4)
    run = Ranks(stream, 1, 0)
    run.take(10)
    state = run.state()

    def refusal(**changes: Any) -> str:
        with pytest.raises(StateError) as error:
            check({**state, **changes}, stream=stream.identity())
        return str(error.value)

    lanes = state["lanes"]
    assert "the state after row 10 lacks lane 2; merge the states of all ranks" in refusal(
        lanes={lane: text for lane, text in lanes.items() if lane != "2"}
    )
    assert "rows='many' of the state is damaged" in refusal(rows="many")
    assert "row=-1 of the state is damaged" in refusal(row=-1)
    assert "totals.rows=None of the state is damaged" in refusal(totals={"rows": None})
    assert "totals=[] of the state is damaged" in refusal(totals=[])
    assert "the state of lane '9' (of 4) is damaged" in refusal(lanes={**lanes, "9": lanes["1"]})
    assert "the state of lane '1' (of 4) is damaged" in refusal(lanes={**lanes, "1": lanes["1"][:-9]})
    with pytest.raises(StateError, match="the state has no 'row': it is damaged"):
        check({key: value for key, value in state.items() if key != "row"}, stream=stream.identity())


def test_real_files_resume_at_random_rows(tmp_path: Path) -> None:
    parts = split_evenly(examples(500), 3)
    jsonl, parquet = write_jsonl(tmp_path, parts), write_parquet(tmp_path, parts, row_group_size=20)
    for number, name in enumerate(jsonl):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(Path(name).read_bytes()))
    settings = {"split": "train", "streaming": True, "cache_dir": str(tmp_path)}
    sources = [
        datasets.load_dataset("json", data_files=jsonl, **settings),
        datasets.load_dataset("parquet", data_files=parquet[:2], **settings),
        files_in_ranges(jsonl, range_bytes=900),
        files_in_ranges(jsonl[0], range_bytes=300),
        Files(parquet),
        Files(tmp_path / "*.gz"),
    ]
    for source in sources:
        stream = make_stream(source, epochs=2)
        expected = run_to_the_end(stream, None)
        for done in (1, 17, len(expected) // 2, len(expected) - 1, len(expected)):
            run = Ranks(stream, 1, 0)
            assert fingerprints(run.take(done)) == expected[:done]
            assert run_to_the_end(stream, run.state(), num_workers=3) == expected[done:]


def test_a_mapped_and_filtered_stream_resumes_at_random_rows(tmp_path: Path) -> None:
    files = write_jsonl(tmp_path, split_evenly(examples(300), 3))
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path))
    data = data.filter(lambda row: row["input_ids"][0] % 3 > 0).map(
        lambda row: {"input_ids": [*row["input_ids"], 7777]}
    )
    stream = make_stream(data)
    expected = run_to_the_end(stream, None)
    assert len(expected) > 50
    for done in (5, 40, 50):
        run = Ranks(stream, 1, 0)
        run.take(done)
        assert run_to_the_end(stream, run.state()) == expected[done:]


@pytest.mark.parametrize("done", range(0, 40, 3))
def test_a_cut_in_the_middle_of_a_cycle_resumes_on_other_ranks_with_the_next_row(done: int) -> None:
    stream = make_stream(examples(400), epochs=None)
    expected = fingerprints(Ranks(stream, 1, 0).take(done + 64))
    run = Ranks(stream, 1, 0)
    run.take(done)
    for world_size, num_workers in WORLDS:
        assert (
            fingerprints(Ranks(stream, world_size, num_workers, run.state()).take(64 // world_size)) == expected[done:]
        )


def test_a_state_loaded_and_saved_at_once_is_the_same_state() -> None:
    stream = make_stream(examples(300), epochs=2)
    run = Ranks(stream, 2, 2)
    for _ in range(8):
        run.take(5)
        state = run.state()
        again = Ranks(stream, 4, 1, state)
        assert again.state()["lanes"] == state["lanes"]
        assert run_to_the_end(stream, again.state()) == run_to_the_end(stream, state)


def test_a_second_resume_counts_from_the_start_of_the_stream_and_not_from_the_first_resume() -> None:
    stream = make_stream(examples(300), epochs=None)
    expected = fingerprints(Ranks(stream, 1, 0).take(50))
    state, rows = None, []
    for _ in range(50):  # one row at a time
        run = Ranks(stream, 1, 0, state)
        rows += fingerprints(run.take(1))
        state = run.state()
    assert rows == expected
    assert state["rows"] == state["row"] == 50
    assert run.progress[0].counts()["rows"] == 50


def test_statistics_travel_with_the_state_and_are_those_of_the_uninterrupted_run() -> None:
    source = Shards([[*examples(50, longest=150), {"input_ids": []}, {"input_ids": [5]}], examples(33, seed=2)])
    stream = make_stream(source, epochs=2, lanes=4)
    whole = Ranks(stream, 1, 0)
    total = len(whole.take(10**6))
    for done in range(0, total, 7):
        run = Ranks(stream, 1, 0)
        run.take(done)
        resumed = Ranks(stream, 1, 0, run.state())
        resumed.take(10**6)
        assert resumed.progress[0].stats() == whole.progress[0].stats()
    counts = whole.progress[0].counts()
    assert counts["examples"] == 2 * (50 + 1 + 33)
    assert counts["empty"] == 2
    assert counts["tokens"] == 2 * sum(len(row["input_ids"]) for part in source.parts for row in part)


def test_the_state_of_every_cut_holds_references_only_and_stays_small() -> None:
    stream = make_stream(examples(2000), epochs=1, lanes=4)
    run = Ranks(stream, 1, 0)
    sizes = []
    while run.take(20):
        sizes.append(max(len(text) for text in run.state()["lanes"].values()))
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2]) + 10  # digits of the counters
    assert max(sizes) < 200


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_resume_at_any_row_equals_the_tail(data: st.DataObject) -> None:
    """The law, over random sets, settings and cuts."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=80))
    parts = data.draw(st.integers(1, 9))
    rows = [{"input_ids": list(range(number, number + length))} for number, length in enumerate(lengths)]
    stream = make_stream(
        Shards(split_evenly(rows, parts)),
        epochs=data.draw(st.integers(1, 3)),
        lanes=data.draw(st.sampled_from([1, 2, 4, 6])),
        shuffle=data.draw(st.booleans()),
        shuffle_block=data.draw(st.integers(1, 12)),
        packing=data.draw(
            st.sampled_from(["auto", "oldest_first", "best_fit", "next_fit", "wrapped", "none", "by_length"])
        ),
        max_examples=data.draw(st.sampled_from([None, 1, 3])),
    )
    run = Ranks(stream, 1, 0)
    expected = fingerprints(run.take(10**6))
    done = data.draw(st.integers(0, len(expected)))
    again = Ranks(stream, 1, 0)
    assert fingerprints(again.take(done)) == expected[:done]
    num_workers = data.draw(st.integers(0, 3))
    assert run_to_the_end(stream, again.state(), num_workers=num_workers) == expected[done:]
    assert run.progress[0].counts()["no_target_tokens"] + sum(
        tokens_by_example(Ranks(stream, 1, 0).take(10**6)).values()
    ) == stream.epochs * sum(lengths)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("seed", {"seed": 4}),
        ("lanes", {"lanes": 8}),
        ("shuffle", {"shuffle": False}),
        ("shuffle_block", {"shuffle_block": 11}),
        ("packing", {"packing": "next_fit"}),
        ("epochs", {"epochs": 2}),
        ("max_examples_per_row", {"max_examples": 5}),
    ],
)
def test_a_state_of_another_stream_is_refused_with_both_values(key: str, changes: dict[str, Any]) -> None:
    source = examples(100)
    state = Ranks(make_stream(source), 1, 0).state()
    other = make_stream(source, **changes)
    saved, here = state["stream"][key], other.identity()[key]
    assert saved != here
    with pytest.raises(StateError, match=f"{key}={saved!r}.*{key}={here!r}"):
        check(state, stream=other.identity())


def test_a_state_of_other_data_or_another_version_is_refused() -> None:
    stream = make_stream(Shards([examples(10)]))
    state = json.loads(json.dumps(Ranks(stream, 1, 0).state()))
    with pytest.raises(StateError, match=r"source='1 lists'.*source='2 lists'"):
        check(state, stream=make_stream(Shards([examples(10), examples(3)])).identity())
    with pytest.raises(StateError, match="format version 0, this streampack reads version 3"):
        check({**state, "version": 0}, stream=stream.identity())
    with pytest.raises(StateError, match="not a streampack state: dict"):
        check({}, stream=stream.identity())


def test_the_state_of_one_rank_alone_is_refused() -> None:
    stream = make_stream(examples(100))
    run = Ranks(stream, 4, 1)
    run.take(3)
    with pytest.raises(StateError, match=r"rank 1 of 4 alone, this is rank 0 of 2.*merge_states"):
        Start.of(run.progress[1].state(), rank=0, world_size=2)
