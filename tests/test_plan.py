"""Plans: the steps that a run takes, exactly where all was read."""

import json
import math

import pytest

from streampack import PackedDataset, PackedLoader, make_plan
from streampack.interval import Estimate

from .streams import Shards, examples, split_evenly

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"seq_len": 64, "lanes": 4, "buffer_size": 8, "shuffle_block": 20, "seed": 3}


def source():
    return Shards(split_evenly(examples(300), 9))


def passes_of(*, ranks, batch_size, passes):
    """For each pass the batches of each rank, as (all, those that are full); and the tokens of all."""
    found, tokens = [[] for _ in range(passes)], 0
    for rank in range(ranks):
        dataset = PackedDataset(source(), rank=rank, world_size=ranks, **SETTINGS)
        loader = PackedLoader(dataset, batch_size=batch_size, layout="rows")
        for of_pass in found:
            sizes = [len(batch["input_ids"]) for batch in loader]
            of_pass.append((len(sizes), sizes.count(batch_size)))
        tokens += loader.stats["tokens"]
    return found, tokens


@pytest.mark.parametrize(("ranks", "batch_size", "accumulation"), [(1, 1, 1), (1, 4, 3), (2, 3, 1), (4, 1, 2)])
@pytest.mark.parametrize("at_end", ["fill", "cut"])
def test_the_steps_are_those_of_a_run(ranks, batch_size, accumulation, at_end):
    passes, tokens = passes_of(ranks=ranks, batch_size=batch_size, passes=3)
    plan = make_plan(
        PackedDataset(source(), **SETTINGS),
        ranks=ranks,
        batch_size=batch_size,
        accumulation=accumulation,
        epochs=3,
        at_end=at_end,
        examples=None,
    )
    batches = [min(full for _, full in one) if at_end == "cut" else max(count for count, _ in one) for one in passes]
    steps = [math.ceil(count / accumulation) for count in batches]
    assert plan.is_exact
    assert plan.steps == Estimate.exactly(sum(steps))
    assert plan.steps_per_epoch == Estimate.exactly(steps[0])
    assert plan.num_training_steps == sum(steps)
    assert plan.tokens == Estimate.exactly(tokens)
    assert plan.examples == Estimate.exactly(900)
    assert plan.rows_per_step == ranks * batch_size * accumulation


def test_a_token_budget_is_planned_for_an_endless_stream():
    plan = make_plan(
        PackedDataset(source(), **SETTINGS), ranks=2, batch_size=2, tokens=20_000, examples=None, accumulation=2
    )
    loader = PackedLoader(PackedDataset(source(), epochs=None, **SETTINGS), batch_size=8)
    steps = 0
    for _ in loader:
        steps += 1
        if loader.stats["tokens"] >= 20_000:
            break
    assert plan.steps.low <= steps <= plan.steps.high
    assert plan.steps.high - plan.steps.low <= 3
    assert plan.num_training_steps == math.ceil(20_000 / plan.tokens_per_step)
    assert plan.epochs == 20_000 / plan.epoch.tokens.value
    assert plan.advice[0] == "an endless stream (epochs=None) trains exactly as many steps as it is told"


def test_a_sample_gives_an_interval_with_the_steps_in_it():
    large = Shards(split_evenly(examples(6000), 120))
    settings = SETTINGS | {"shuffle_block": 50}
    for seed in range(5):
        dataset = PackedDataset(large, **settings | {"seed": seed})
        exact = make_plan(dataset, ranks=4, batch_size=2, epochs=2, examples=None)
        plan = make_plan(dataset, ranks=4, batch_size=2, epochs=2, examples=1000)
        assert exact.is_exact
        assert not plan.is_exact
        assert plan.steps.low <= exact.steps.value <= plan.steps.high
        assert plan.steps.high < 1.5 * exact.steps.value
        assert plan.advice[0].startswith("the steps are an estimate: read all for the exact number")


def test_a_step_says_how_many_examples_it_holds():
    rows = [{"input_ids": [1] * 16} for _ in range(64)]
    plan = make_plan(PackedDataset(Shards([rows]), seq_len=64, lanes=1), batch_size=2, accumulation=4, examples=None)
    assert (plan.examples_per_step, plan.tokens_per_step, plan.loss_tokens_per_step) == (32, 512, 480)
    assert plan.advice[-1].startswith("a step of 8 rows holds about 32 examples")
    assert json.loads(json.dumps(plan.as_dict()))["num_training_steps"] == 2


def test_what_cannot_be_planned_is_refused():
    dataset = PackedDataset(Shards([examples(1000)]), **SETTINGS)
    with pytest.raises(ValueError, match=r"do not tell how many there are; read more of them, or all"):
        make_plan(dataset, examples=100)
    assert make_plan(dataset, examples=100, tokens=1000).epochs is None
    with pytest.raises(ValueError, match="lanes=4 cannot be dealt evenly to world_size=3"):
        make_plan(dataset, ranks=3)
    with pytest.raises(ValueError, match="batch_size=0: must be at least 1"):
        make_plan(dataset, batch_size=0)
    with pytest.raises(ValueError, match="at_end='never': pass 'own', 'fill' or 'cut'"):
        make_plan(dataset, at_end="never")
    with pytest.raises(ValueError, match="tokens=0: must be at least 1"):
        make_plan(dataset, tokens=0)
