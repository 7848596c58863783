"""A trace names exactly the examples that a run trained on, and nothing else has to run for it."""

import pytest

import streampack
from streampack import Files, PackedDataset, PackedLoader, StateError, merge_states, trace_rows, trace_step

from .streams import examples, split_evenly, write_jsonl
from .tiny_tokenizers import word_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"seq_len": 64, "lanes": 4, "buffer_size": 8, "shuffle_block": 20, "seed": 3}
TOPOLOGIES = [(1, 0, 1), (1, 2, 3), (2, 0, 2), (4, 2, 1), (2, 1, 3)]
"""(ranks, workers, batch size)"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """300 examples in 9 files for 4 lanes: one of them is dealt example by example."""
    return Files(write_jsonl(tmp_path_factory.mktemp("data"), split_evenly(examples(300), 9)))


def run(files, *, ranks, workers, batch_size, steps=None, state=None, **settings):
    """What a run trains on: for each rank its batches, each a list of rows, each a list of (source, shard, index); and
    the state at the end."""
    trained, states = [], []
    for rank in range(ranks):
        dataset = PackedDataset(files, rank=rank, world_size=ranks, **SETTINGS | settings)
        loader = PackedLoader(dataset, batch_size=batch_size, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for _ in loader:
            batches.append(loader.provenance)
            if len(batches) == steps:
                break
        trained.append(batches)
        states.append(loader.state_dict())
    return trained, merge_states(states) if steps is not None else None


def batches_of(traced, *, ranks):
    """The same of a trace: for each rank its batches in the step."""
    found = [{} for _ in range(ranks)]
    for row in traced:
        names = [(example.source, example.shard, example.index) for example in row.examples]
        found[row.rank].setdefault(row.batch, []).append(names)
    return [list(of_rank.values()) for of_rank in found]


@pytest.mark.parametrize(("ranks", "workers", "batch_size"), TOPOLOGIES)
def test_a_traced_step_is_what_each_rank_trained_on(files, ranks, workers, batch_size):
    trained, _ = run(files, ranks=ranks, workers=workers, batch_size=batch_size)
    dataset = PackedDataset(files, **SETTINGS)
    last = max(map(len, trained)) - 1
    assert last >= 7
    for step in (0, 1, 5, last - 1, last):
        traced = trace_step(dataset, step=step, batch_size=batch_size, world_size=ranks)
        assert batches_of(traced, ranks=ranks) == [batches[step : step + 1] for batches in trained]
    with pytest.raises(ValueError, match=f"ends after {last + 1} steps, before step {last + 1}"):
        trace_step(dataset, step=last + 1, batch_size=batch_size, world_size=ranks)


@pytest.mark.parametrize("packing", ["best_fit", "next_fit", "wrapped"])
def test_a_traced_step_is_what_was_trained_on_with_any_packing(files, packing):
    trained, state = run(files, ranks=2, workers=0, batch_size=2, steps=6, packing=packing)
    dataset = PackedDataset(files, packing=packing, **SETTINGS)
    for step in (0, 3, 5):
        traced = trace_step(dataset, step=step, batch_size=2, world_size=2)
        assert batches_of(traced, ranks=2) == [batches[step : step + 1] for batches in trained]
    assert len(trace_step(dataset, state, step=6, batch_size=2, world_size=2)) == 4


def test_a_step_is_traced_from_a_state_before_it_as_from_the_start(files):
    _, state = run(files, ranks=2, workers=2, batch_size=2, steps=4)
    dataset = PackedDataset(files, **SETTINGS)
    for step in (4, 5, 8):
        topology = {"step": step, "batch_size": 2, "world_size": 2}
        assert names(trace_step(dataset, state, **topology)) == names(trace_step(dataset, **topology))


def names(traced):
    return [row.as_dict() for row in traced]


@pytest.mark.parametrize(("ranks", "workers", "batch_size"), [(4, 2, 1), (1, 0, 4), (2, 2, 2)])
def test_a_step_after_a_resume_on_other_ranks_is_what_was_trained_on_there(files, ranks, workers, batch_size):
    _, state = run(files, ranks=2, workers=0, batch_size=2, steps=3)  # 12 rows
    trained, later = run(files, ranks=ranks, workers=workers, batch_size=batch_size, steps=4, state=state)
    dataset = PackedDataset(files, **SETTINGS)
    for number in range(4):
        traced = trace_step(dataset, state, step=3 + number, batch_size=batch_size, world_size=ranks)
        assert batches_of(traced, ranks=ranks) == [batches[number : number + 1] for batches in trained]
    again, _ = run(files, ranks=1, workers=0, batch_size=3, steps=2, state=later)
    traced = trace_step(dataset, later, step=8, batch_size=3, saved_after=7)
    assert batches_of(traced, ranks=1) == [again[0][1:2]]


def test_accumulated_batches_are_one_step(files):
    trained, _ = run(files, ranks=2, workers=0, batch_size=2, steps=9)
    traced = trace_step(PackedDataset(files, **SETTINGS), step=2, batch_size=2, world_size=2, accumulation=3)
    assert batches_of(traced, ranks=2) == [batches[6:9] for batches in trained]
    assert sorted(row.row for row in traced) == list(range(24, 36))
    assert [(row.rank, row.batch, row.place) for row in traced[:7]] == [
        *[(0, batch, place) for batch in range(3) for place in range(2)],
        (1, 0, 0),
    ]


def test_the_second_epoch_and_an_endless_stream_are_traced_too(files):
    dataset = PackedDataset(files, **SETTINGS)
    loader = PackedLoader(dataset, batch_size=2)
    loader.set_epoch(1)
    second = [loader.provenance for _ in loader]
    assert batches_of(trace_step(dataset, step=3, batch_size=2, epoch=1), ranks=1) == [second[3:4]]
    trained, state = run(files, ranks=2, workers=0, batch_size=4, steps=30, epochs=None)
    endless = PackedDataset(files, **SETTINGS, epochs=None)
    for step in (0, 17, 29):
        traced = trace_step(endless, step=step, batch_size=4, world_size=2)
        assert batches_of(traced, ranks=2) == [batches[step : step + 1] for batches in trained]
    assert {example.epoch for row in traced for example in row.examples} == {3, 4}
    assert len(trace_step(endless, state, step=31, batch_size=4, world_size=2)) == 8


def test_rows_are_traced_by_their_number(files):
    trained, state = run(files, ranks=2, workers=0, batch_size=1, steps=10)
    dataset = PackedDataset(files, **SETTINGS)
    rows = trace_rows(dataset, first=7, count=4)
    assert [(row.row, row.lane) for row in rows] == [(7, 3), (8, 0), (9, 1), (10, 2)]
    assert [batches_of([row], ranks=1)[0][0][0] for row in rows] == [
        trained[row % 2][row // 2][0] for row in (7, 8, 9, 10)
    ]
    assert names(trace_rows(dataset, state, first=25)) == names(trace_rows(dataset, first=25))
    with pytest.raises(ValueError, match=r"the pass ends before row 1000: its last row is \d+"):
        trace_rows(dataset, first=1000)


def test_a_trace_says_where_in_the_row_an_example_is_and_what_it_is(tmp_path):
    texts = [{"text": text} for text in ("a b", "c c c", "d", "a a a a a a a")]
    source = Files(write_jsonl(tmp_path, [texts]), name="four")
    dataset = PackedDataset(source, word_tokenizer(), seq_len=6, lanes=1, shuffle=False, packing="next_fit")
    first, second = trace_rows(dataset, first=0, count=2)
    where = str(tmp_path / "part-000.jsonl")
    assert first.as_dict() == {
        "row": 0,
        "lane": 0,
        "rank": 0,
        "batch": 0,
        "place": 0,
        "num_loss_tokens": 2,
        "examples": [
            {
                "epoch": 0,
                "source": "four",
                "shard": where,
                "index": 0,
                "first_token": 0,
                "tokens": 3,
                "begin": 0,
                "end": 3,
                "ids": [3, 4, 2],
            }
        ],
    }
    assert [(one.index, one.first_token, one.tokens, one.begin, one.end) for one in second.examples] == [
        (1, 0, 4, 0, 4),
        (2, 0, 2, 4, 6),
    ]
    fragments = [one for row in trace_rows(dataset, first=2, count=2) for one in row.examples]
    assert [(one.index, one.first_token, one.tokens) for one in fragments] == [(3, 0, 6), (3, 6, 2)]


def test_a_state_that_does_not_fit_is_refused(files):
    _, state = run(files, ranks=2, workers=0, batch_size=2, steps=3)
    dataset = PackedDataset(files, **SETTINGS)
    other = PackedDataset(files, **SETTINGS | {"seed": 4})
    with pytest.raises(StateError, match="saved with seed=3, this stream has seed=4"):
        trace_step(other, state, step=5)
    with pytest.raises(StateError, match="step 2 comes before the state, which was saved after 3 steps"):
        trace_step(dataset, state, step=2, batch_size=2, world_size=2)
    with pytest.raises(StateError, match="row 11 comes before the state, which is after row 12"):
        trace_rows(dataset, state, first=11)
    with pytest.raises(StateError, match="after 12 rows, no multiple of the 5 rows of a step"):
        trace_step(dataset, state, step=9, batch_size=5)
    alone = PackedLoader(PackedDataset(files, rank=1, world_size=2, **SETTINGS))
    next(iter(alone))
    with pytest.raises(StateError, match="of rank 1 of 2 alone"):
        trace_step(dataset, alone.state_dict(), step=9)
    with pytest.raises(ValueError, match="lanes=4 cannot be dealt evenly to world_size=3"):
        trace_step(dataset, step=0, world_size=3)


def test_a_trace_leaves_the_dataset_as_it_is(files):
    dataset = PackedDataset(files, **SETTINGS)
    before = dataset.state_dict()
    trace_step(dataset, step=2)
    assert dataset.state_dict() == before
    assert streampack.trace_step is trace_step
