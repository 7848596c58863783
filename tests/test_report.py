"""Reports: exact where all was read, else with an interval that holds; rows are those of training."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import FunctionSource, Mixture, PackedDataset, PackedLoader, make_report
from streampack.interval import Estimate, total, total_by_size
from streampack.recording import record
from streampack.replay import replay
from streampack.report import advise_lanes
from streampack.totals import totals

from .streams import Shards, examples, split_evenly, write_jsonl, write_parquet
from .tiny_tokenizers import word_tokenizer

LENGTHS = Path(__file__).parents[1] / "benchmarks" / "lengths"
SETS = sorted(path.stem for path in LENGTHS.glob("*.npy"))
ONE_SETTING = {"seq_lens": [2048], "buffer_sizes": [256]}
"""To compare with: less than the default, which takes a while."""
SMALL = {"seq_len": 64, "lanes": 4, "buffer_size": 8, "shuffle_block": 20}


class Lengths:
    """Examples of given lengths, in shards of `per_shard`."""

    def __init__(self, lengths, *, per_shard):
        self.parts = [lengths[first : first + per_shard] for first in range(0, len(lengths), per_shard)]
        self.name = f"{len(lengths)} lengths"
        self.num_shards = len(self.parts)

    def read(self, shard, start):
        part = self.parts[shard][start:]
        ids = pa.array(np.zeros(int(part.sum()), dtype=np.int32))
        yield pa.table({"input_ids": pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(part)]), ids)})


def lengths_of(name, *, most=None):
    return np.load(LENGTHS / f"{name}.npy").astype(np.int64)[:most]


def count_rows(dataset):
    loader = PackedLoader(dataset, batch_size=1)
    rows = sum(1 for _ in loader)
    return rows, loader.stats


# ---- exact -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_where_all_was_read_the_rows_are_those_that_come_out(name, seq_len):
    dataset = PackedDataset(Lengths(lengths_of(name, most=2000), per_shard=100), seq_len=seq_len)
    report = make_report(dataset, examples=None, **ONE_SETTING)
    rows, stats = count_rows(dataset)
    assert report.read.is_all
    assert report.epoch.rows == Estimate.exactly(rows)
    assert report.epoch.tokens == Estimate.exactly(stats["tokens"])
    assert report.epoch.examples == Estimate.exactly(stats["examples"])
    assert report.packed.fill == stats["fill"]
    assert (report.lanes.rows_least, report.lanes.rows_most) == (stats["lane_rows_min"], stats["lane_rows_max"])
    assert report.by_buffer_size == [report.packed]


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=120).filter(any),
    per_shard=st.integers(1, 40),
    lanes=st.sampled_from([1, 2, 4]),
    seq_len=st.sampled_from([16, 64]),
    packing=st.sampled_from(["auto", "oldest_first", "best_fit", "next_fit", "wrapped"]),
    overlong=st.sampled_from(["split", "truncate", "drop"]),
    shuffle=st.booleans(),
)
def test_a_recording_makes_the_rows_of_its_source(lengths, per_shard, lanes, seq_len, packing, overlong, shuffle):
    settings = {"lanes": lanes, "packing": packing, "overlong": overlong, "shuffle": shuffle, "buffer_size": 4}
    source = Lengths(np.array(lengths), per_shard=per_shard)
    dataset = PackedDataset(source, seq_len=seq_len, shuffle_block=7, **settings)
    recording = record(dataset.stream)
    made = replay(recording, recording.stream(dataset.stream))
    rows = list(dataset)
    assert made.rows == len(rows)
    assert made.tokens.sum() == sum(int(row["cu_seqlens"][len(row["examples"])]) for row in rows)
    assert sum(made.shard_tokens) == made.tokens.sum()
    assert sorted(made.segments.tolist()) == sorted(len(row["examples"]) for row in rows)


@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_targets_count_as_they_do_in_training(overlong):
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(5):
        lengths = rng.integers(1, 100, 40)
        parts.append([{"input_ids": [1] * n, "loss_mask": (rng.random(n) < 0.1).astype(int).tolist()} for n in lengths])
    dataset = PackedDataset(Shards(parts), overlong=overlong, **SMALL)
    report = make_report(dataset, examples=None)
    rows, stats = count_rows(dataset)
    reasons = ("empty", "no_target", "overlong")
    assert report.epoch.rows.value == rows
    assert report.loss_tokens_per_row == stats["loss_tokens"] / rows
    assert report.left_out == {name: stats[name] for name in reasons if stats[name]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "transform"])
def test_real_files_and_functions_are_read_as_in_training(tmp_path, kind):
    words = [{"text": " ".join("abcd"[place % 4] for place in range(1 + number % 50))} for number in range(200)]
    write = write_jsonl if kind != "parquet" else lambda *args: write_parquet(*args, row_group_size=17)
    source = FunctionSource(shard_of, num_shards=3) if kind == "transform" else None
    if source is None:
        from streampack import Files

        source = Files(write(tmp_path, split_evenly(words, 3)))
    transform = every_second if kind == "transform" else None
    dataset = PackedDataset(source, word_tokenizer(), transform=transform, **SMALL)
    report = make_report(dataset, examples=None)
    rows, stats = count_rows(dataset)
    assert (report.epoch.rows.value, report.epoch.tokens.value) == (rows, stats["tokens"])
    assert report.left_out == ({"transform": stats["transform"]} if kind == "transform" else {})


def shard_of(shard):
    for number in range(60):
        yield {"text": " ".join("abcd"[place % 4] for place in range(1 + (number + shard) % 50))}


def every_second(example):
    return example if len(example["text"]) % 4 == 1 else None


# ---- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seq_len", [8192, 32768])
def test_the_rows_lie_in_the_interval_of_a_sample(name, seq_len):
    lengths = lengths_of(name)
    dataset = PackedDataset(Lengths(lengths, per_shard=50), seq_len=seq_len, lanes=4)
    rows = make_report(dataset, examples=None, **ONE_SETTING).epoch.rows.value
    report = make_report(dataset, examples=len(lengths) // 6, **ONE_SETTING)
    assert not report.read.is_all
    assert report.read.shards < report.read.of_shards
    assert report.epoch.rows.low <= rows <= report.epoch.rows.high
    assert report.epoch.rows.high < 2 * rows


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("per_shard", [20, 100])
def test_of_a_hundred_samples_95_have_the_tokens_in_their_interval(name, per_shard):
    lengths = lengths_of(name)
    shards = [int(lengths[first : first + per_shard].sum()) for first in range(0, len(lengths), per_shard)]
    inside = 0
    for seed in range(100):
        sample = np.random.default_rng(seed).choice(shards, max(5, len(shards) // 6), replace=False)
        inside += total(sample, of=len(shards)).low <= sum(shards) <= total(sample, of=len(shards)).high
    assert inside >= 95


def test_a_short_last_shard_does_not_mislead_a_sample():
    lengths = np.full(15 * 100 + 3, 50)
    dataset = PackedDataset(Lengths(lengths, per_shard=100), seq_len=100, lanes=1)
    report = make_report(dataset, examples=300)
    assert report.read.shards == 5
    assert report.epoch.examples == Estimate.exactly(1503)
    assert report.epoch.tokens == Estimate.exactly(1503 * 50)


def test_where_the_number_of_examples_is_known_a_sample_need_not_read_whole_shards(tmp_path):
    dataset = PackedDataset(
        parquet(tmp_path, examples(1000), row_group_size=100), seq_len=64, lanes=2, shuffle_block=50, buffer_size=8
    )
    report = make_report(dataset, examples=100)
    assert report.epoch.examples == Estimate.exactly(1000)
    assert (report.read.examples, report.read.shards) == (100, 10)
    exact = make_report(dataset, examples=None).epoch
    assert report.epoch.rows.low <= exact.rows.value <= report.epoch.rows.high


def parquet(folder, rows, **settings):
    from streampack import Files

    return Files(write_parquet(folder, [rows], **settings))


def test_one_shard_that_is_not_read_to_its_end_does_not_tell_how_much_there_is():
    dataset = PackedDataset(Shards([examples(1000)]), **SMALL)
    report = make_report(dataset, examples=100)
    assert report.epoch is None
    assert 400 <= report.read.examples < 1000
    assert not report.read.is_all


def test_totals_are_exact_where_the_parts_are_all_there():
    assert total([1, 2, 3], of=3) == Estimate(6, 6, 6)
    assert total_by_size([10, 20], [1, 2], of=3) == Estimate(30, 30, 30)
    assert total_by_size([10, 20], [1, 2], of=9) == Estimate(90, 90, 90)  # in proportion


def test_an_interval_is_as_wide_as_the_parts_differ():
    estimate = total([90, 100, 100, 110], of=40)
    error = 40 * np.std([90, 100, 100, 110], ddof=1) * math.sqrt(0.9 / 4)
    assert estimate.value == 4000
    assert math.isclose(estimate.high, 4000 * math.exp(5.84 * error / 4000))
    assert math.isclose(estimate.low, 4000 / math.exp(5.84 * error / 4000))
    assert (round(estimate.low), round(estimate.high)) == (3190, 5015)


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=20), st.integers(0, 50))
def test_an_interval_holds_the_value_and_what_was_seen(parts, more):
    estimate = total(parts, of=len(parts) + more)
    assert sum(parts) - 1e-6 <= estimate.low <= estimate.value + 1e-6
    assert estimate.value <= estimate.high + 1e-6


# ---- what it says ------------------------------------------------------------------------------------------------


def test_a_report_counts_what_is_left_out_and_says_what_would_stop_training():
    rows = [{"input_ids": [1] * 10} for _ in range(20)] + [{"input_ids": []}, {"input_ids": [1] * 70}]
    rows += [{"input_ids": None}, {"input_ids": "no"}]
    report = make_report(PackedDataset(Shards([rows]), overlong="error", **SMALL | {"lanes": 1}), examples=None)
    assert report.left_out == {"empty": 1, "overlong": 1, "bad_null": 1, "bad_type": 1}
    assert report.overlong == 1
    assert report.stops == [
        "1 examples are over-long: choose overlong='truncate', 'drop' or 'split', or longer rows",
        "2 examples are bad: mend the data, or choose bad='drop'",
    ]
    assert report.bad == [
        ("source '1 lists', shard 0, index 22", "null", "'input_ids' is null"),
        ("source '1 lists', shard 0, index 23", "type", "'input_ids' is str 'no', not one list of integers"),
    ]
    assert report.epoch.examples.value == 24


def test_a_report_of_equal_examples_says_what_can_be_worked_out():
    rows = [{"input_ids": [1] * 16} for _ in range(64)]
    dataset = PackedDataset(Shards([rows]), seq_len=64, lanes=1)
    report = make_report(dataset, examples=None, seq_lens=[32, 48, 64], ranks=[2])
    assert report.lengths.mean == 16
    assert set(report.lengths.quantiles.values()) == {16}
    assert report.histogram == [(16.0, 17.0, 64)]
    assert [(one.seq_len, one.rows, one.fill, one.saved) for one in report.by_seq_len] == [
        (32, 32, 1.0, 0.0),
        (48, 22, 16 * 64 / (22 * 48), 1 - 22 * 48 / (16 * 64)),
        (64, 16, 1.0, 0.0),
    ]
    assert report.examples_per_row.mean == 4
    assert report.attention.mean == 4 * 16**2 / 64**2
    assert (report.slowest, report.tokens_per_row, report.loss_tokens_per_row) == (1.0, 64.0, 60.0)
    assert report.strip == [[16, 16, 16, 16]] * 16


def test_the_padding_saved_is_that_of_batches_padded_to_their_longest():
    rows = [{"input_ids": [1] * length} for length in (60, 4) * 400]
    report = make_report(PackedDataset(Shards([rows]), seq_len=64, lanes=1), examples=None)
    assert report.packed.rows == 400
    assert 0.45 < report.packed.saved < 0.48  # of 8 examples one is nearly always long: 60 cells for 32 tokens


def test_a_report_is_plain_values():
    report = make_report(PackedDataset(Shards([examples(50)]), **SMALL), examples=None)
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["epoch"]["rows"] == dict.fromkeys(("value", "low", "high"), report.packed.rows)
    assert values["read"] == {"examples": 50, "shards": 1, "of_shards": 1, "is_all": True}


def test_a_report_leaves_the_dataset_as_it_is():
    dataset = PackedDataset(Shards([examples(50)]), **SMALL)
    before = dataset.state_dict()
    read = []
    make_report(dataset, examples=None, progress=read.append)
    assert sum(read) == 50
    assert dataset.state_dict() == before


@pytest.mark.parametrize(
    ("rows", "ranks", "workers", "advised", "says"),
    [
        (10_000, [4], 0, 16, "a multiple of 4, for 4 ranks"),
        (10_000, [4, 6], 0, 24, "a multiple of 12, for ranks 4, 6"),
        (100_000, [8], 8, 64, "8 lanes on each rank, so that each of 8 workers has one"),
        (200, [2], 0, 4, "few, since an epoch has only about 200 rows and each lane ends with a part-filled one"),
        (480, [1], 0, 8, "few, since an epoch has only about 480 rows"),  # not 9, which only 1, 3 and 9 ranks divide
        (10, [4], 0, 4, "few, since an epoch has only about 10 rows and each lane ends with a part-filled one"),
        (400, [4], 4, 8, "2 of 4 workers of a rank would have work then, so use no more"),
    ],
)
def test_the_advice_on_lanes_fits_ranks_workers_and_rows(rows, ranks, workers, advised, says):
    lanes, reasons = advise_lanes(Estimate.exactly(rows), ranks=ranks, workers=workers)
    assert lanes == advised
    assert any(reason.startswith(says) for reason in reasons)


def test_what_has_no_report_is_refused():
    with pytest.raises(ValueError, match=r"has no examples"):
        make_report(PackedDataset(Shards([[]]), **SMALL))
    with pytest.raises(ValueError, match=r"none of 1 examples of source '1 lists' has any tokens"):
        make_report(PackedDataset(Shards([[{"input_ids": []}]]), **SMALL))
    with pytest.raises(ValueError, match=r"no column 'input_ids' \(there are: text, id\); pass a tokenizer"):
        make_report(PackedDataset(Shards([[{"text": "a", "id": 1}]]), **SMALL))
    with pytest.raises(ValueError, match=r"no column 'body' \(there are: text, id\); pass text_column"):
        make_report(PackedDataset(Shards([[{"text": "a", "id": 1}]]), word_tokenizer(), text_column="body", **SMALL))
    mixture = Mixture({"a": Shards([examples(5)]), "b": Shards([examples(5)])}, {"a": 1, "b": 1}, stop="each_once")
    with pytest.raises(ValueError, match=r"report on its sources by themselves: a, b"):
        make_report(PackedDataset(mixture, **SMALL))
    with pytest.raises(ValueError, match=r"examples=0: must be at least 1"):
        make_report(PackedDataset(Shards([examples(5)]), **SMALL), examples=0)


def test_the_totals_of_a_sample_of_a_recording_are_those_of_its_shards():
    dataset = PackedDataset(Shards(split_evenly(examples(400), 20)), **SMALL)
    recording = record(dataset.stream)
    some = recording.sample(100)
    assert (some.num_examples, some.num_shards, some.of_shards) == (100, 5, 20)
    assert not some.is_complete
    assert recording.sample(1000) is recording
    made = replay(some, some.stream(dataset.stream))
    assert totals(some, made, lanes=4) is not None
