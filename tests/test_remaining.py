"""What remains of a pass, and the bar that shows it."""

import io
import itertools

import numpy as np
import pytest

from streampack import PackedDataset, PackedLoader, ProgressBar
from streampack.remaining import Remaining

from .streams import Shards, examples, split_evenly

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"seq_len": 64, "lanes": 4, "buffer_size": 8, "shuffle_block": 20, "seed": 3}


class Counted(Shards):
    """Says how many examples it has."""

    def __init__(self, parts):
        super().__init__(parts)
        self.num_examples = sum(map(len, parts))


def loader_of(kind=Counted, *, batch_size=2, rank=0, world_size=1, **settings):
    source = kind(split_evenly(examples(1000), 40))
    dataset = PackedDataset(source, rank=rank, world_size=world_size, **SETTINGS | settings)
    return PackedLoader(dataset, batch_size=batch_size)


def watch(loader, *, most=None):
    found = []
    for _ in zip(range(most or 1 << 30), loader, strict=False):
        found.append(loader.remaining)
    return found


@pytest.mark.parametrize("kind", [Counted, Shards])
@pytest.mark.parametrize("rank", [None, 1])
def test_the_rows_that_come_lie_in_the_interval_from_early_on(kind, rank):
    ranks = {} if rank is None else {"rank": rank, "world_size": 2}
    loader = loader_of(kind, **ranks)
    watched = watch(loader)
    rows = watched[-1].rows_done
    known = [one for one in watched if one.rows_left is not None]
    inside = [one.low <= rows - one.rows_done <= one.high for one in known]
    assert len(known) >= 0.8 * len(watched)
    assert sum(inside) >= 0.95 * len(inside)
    middle = watched[len(watched) // 2]
    assert abs(middle.rows_left - (rows - middle.rows_done)) < rows / 5


def test_the_interval_is_narrow_where_the_number_of_examples_is_known():
    loader = loader_of()
    watched = watch(loader)
    rows, middle = watched[-1].rows_done, watched[len(watched) // 2]
    assert abs(middle.rows_left - (rows - middle.rows_done)) < rows / 10
    assert middle.high - middle.low < rows / 2


def test_the_share_goes_up_to_all():
    loader = loader_of()
    before = loader.remaining
    assert before == Remaining(share=0.0, rows_done=0, rows_left=None, low=None, high=None)
    shares = [one.share for one in watch(loader)]
    assert shares == sorted(shares)
    assert abs(shares[len(shares) // 2] - 0.5) < 0.1
    done = loader.stats["rows"]
    assert loader.remaining == Remaining(share=1.0, rows_done=done, rows_left=0, low=0, high=0)


def test_what_remains_travels_with_the_state():
    loader = loader_of()
    watch(loader, most=30)
    resumed = loader_of(batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.remaining == loader.remaining
    assert resumed.remaining.rows_done == 60


def test_of_an_endless_stream_it_is_the_present_epoch_that_remains():
    shares = [one.share for one in watch(loader_of(epochs=None), most=250)]
    falls = [number for number, (one, other) in enumerate(itertools.pairwise(shares)) if other < one]
    assert len(falls) == 2  # three epochs
    assert all(shares[number] > 0.9 and shares[number + 1] < 0.1 for number in falls)


def test_of_several_epochs_in_a_pass_all_remain():
    one, three = loader_of(), loader_of(epochs=3)
    watch(one, most=50)
    watch(three, most=50)
    assert abs(three.remaining.share - one.remaining.share / 3) < 0.01
    total = three.remaining.rows_done + three.remaining.rows_left
    assert abs(total - 3 * (one.remaining.rows_done + one.remaining.rows_left)) < 20


def test_one_file_of_unknown_length_tells_nothing_in_its_first_epoch_and_the_rows_in_its_second():
    dataset = PackedDataset(Shards([examples(1000)]), epochs=None, **SETTINGS)
    loader = PackedLoader(dataset, batch_size=2)
    watched = watch(loader, most=200)
    assert watched[30] == Remaining(share=0.0, rows_done=62, rows_left=None, low=None, high=None)
    assert watched[-1].rows_left is not None


def test_it_is_logged_as_plain_numbers():
    loader = loader_of()
    watch(loader, most=20)
    left = loader.remaining
    assert left.as_dict() == {
        "share": left.share,
        "rows_done": 40,
        "rows_left": left.rows_left,
        "rows_left_low": left.low,
        "rows_left_high": left.high,
    }
    logged = {**loader.stats, **left.as_dict()}
    assert {type(value) for value in logged.values()} <= {int, float}
    assert loader_of().remaining.as_dict() == {"share": 0.0, "rows_done": 0}


def test_a_bar_counts_rows_to_the_end_and_is_a_tqdm_bar():
    out = io.StringIO()
    loader = loader_of()
    bar = ProgressBar(loader, desc="training", file=out, mininterval=0)
    totals = []
    for number, batch in enumerate(bar):
        bar.set_postfix(loss=number, refresh=False)
        totals.append(bar.total)
        assert batch["input_ids"].shape[1] == 128 or bar.n == bar.total
    rows = loader.stats["rows"]
    assert (bar.n, bar.total) == (rows, rows)
    assert None in totals[:1] or totals[0] > 0
    shown = out.getvalue()
    assert "training: " in shown
    assert f"{rows}/{rows}" in shown
    assert f"loss={number}" in shown


def test_a_bar_after_a_resume_goes_on_where_the_pass_was():
    loader = loader_of()
    watch(loader, most=30)
    resumed = loader_of()
    resumed.load_state_dict(loader.state_dict())
    bar = ProgressBar(resumed, disable=None, file=io.StringIO())
    assert (bar.n if not bar.disable else 60) == 60
    out = io.StringIO()
    bar = ProgressBar(resumed, file=out)
    assert bar.n == 60
    assert sum(1 for _ in bar) > 0
    assert bar.n == resumed.stats["rows"]


@pytest.mark.parametrize("packing", ["auto", "best_fit", "next_fit", "by_length"])
def test_the_epoch_is_the_share_of_the_examples_that_have_begun_in_rows_also_in_the_middle_of_a_plan(packing):
    lengths = np.random.default_rng(0).integers(2, 150, size=256)
    source = [{"input_ids": list(range(1, length + 1))} for length in lengths]

    def loader():
        dataset = PackedDataset(source, seq_len=64, lanes=4, packing=packing, source_name="test")
        return PackedLoader(dataset, batch_size=4)

    running, begun = loader(), 0
    for batch, _ in enumerate(running):
        begun += sum(first == 0 for row in running._last for _, _, _, first, _ in row.origin)
        assert running.stats["epoch"] == pytest.approx(begun / 256)
        if running.stats["rows"] < 256:
            assert running.remaining.share == pytest.approx(begun / 256)
        if batch == 9:
            state, there = running.state_dict(), running.stats["epoch"]
    assert begun == 256
    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.stats["epoch"] == pytest.approx(there, abs=0.1)  # of the plan that is begun about as many are known
