"""Transformers' Trainer on packed streams: exact resume, epochs, losses and evaluation, in one process and in two."""

import itertools
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

from streampack import Collator, PackedDataset, PackedLoader, StateError
from streampack.trainer import STREAM_FILE, PackedTrainer, PackedTrainerMixin, count_steps, newest_checkpoint

from .streams import SEQ_LEN, Shards, examples, split_evenly
from .test_loader import rows_of
from .test_ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("one_thread"),
]


def packed(epochs: int | None = None, count: int = 120, **changes: Any) -> PackedDataset:
    settings = {"seq_len": SEQ_LEN, "lanes": 4, "buffer_size": 8, "shuffle_block": 10, "seed": 3, **changes}
    return PackedDataset(Shards(split_evenly(examples(count), 4)), epochs=epochs, **settings)


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "logging_steps": 1,
        **changes,
    }
    return TrainingArguments(**settings)


class Recorded(PackedTrainer):
    """Keeps the rows of each training step, and of each evaluation."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        self.steps: list[list[list[int]]] = []
        self.evaluated: list[list[int]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        rows = inputs["input_ids"].reshape(-1, SEQ_LEN).tolist()
        if self.state.global_step == len(self.steps) + self.begun:
            self.steps.append([])
        self.steps[-1] += rows
        return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, *rest: Any, **others: Any) -> Any:
        self.evaluated += inputs["input_ids"].reshape(-1, SEQ_LEN).tolist()
        return super().prediction_step(model, inputs, *rest, **others)

    def train(self, resume_from_checkpoint: Any = None) -> Any:
        newest = newest_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self.begun = int(newest.rpartition("-")[2]) if newest else 0
        self.steps = []
        return super().train(resume_from_checkpoint=resume_from_checkpoint)

    @property
    def rows(self) -> list[list[int]]:
        """All that were trained on, without those of nothing but padding."""
        return [row for step in self.steps for row in step if any(row)]

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.state.log_history if "loss" in entry]


def trainer(dataset: Any, args: TrainingArguments, **others: Any) -> Recorded:
    return Recorded(model=tiny_model(), args=args, train_dataset=dataset, **others)


def assert_same_model(one: Any, other: Any) -> None:
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(tmp_path: Path, num_workers: int) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=3, dataloader_num_workers=num_workers)
    whole = trainer(packed(), args)
    whole.train()
    assert whole.rows == rows_of(PackedLoader(packed(), 1), 8 * 4)
    resumed = trainer(packed(), args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.steps == whole.steps[3:]
    assert resumed.losses[-5:] == whole.losses[-5:]
    assert_same_model(resumed, whole)


@pytest.mark.parametrize("written", [0, 1, 200, -1])
def test_a_training_killed_while_it_saves_goes_on_from_the_newest_checkpoint_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    whole = trainer(packed(), arguments(tmp_path / "whole", save_strategy="steps", save_steps=3))
    whole.train()
    save = TrainerState.save_to_json

    def killed_at_6(state: TrainerState, path: str) -> None:
        save(state, path)
        if state.global_step == 6:
            Path(path).write_text(Path(path).read_text().rstrip()[:written])
            raise KeyboardInterrupt

    args = arguments(tmp_path / "killed", save_strategy="steps", save_steps=3)
    monkeypatch.setattr(TrainerState, "save_to_json", killed_at_6)
    with pytest.raises(KeyboardInterrupt):
        trainer(packed(), args).train()
    monkeypatch.undo()
    assert newest_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / "checkpoint-3")
    resumed = trainer(packed(), args)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.steps == whole.steps[3:]
    assert_same_model(resumed, whole)
    assert newest_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / "checkpoint-8")


def test_a_checkpoint_that_is_written_again_is_not_whole_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=3)
    trainer(packed(), args).train()
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-8")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Recorded, "save_model", killed)
    for step in (6, 3):
        with pytest.raises(KeyboardInterrupt):
            trainer(packed(), args).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    assert newest_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True: .* has no checkpoint that is whole; leave it"):
        trainer(packed(), args).train(resume_from_checkpoint=True)


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("checkpoint-7", "checkpoint-old-500", "checkpoint-12b", "other-9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-99").write_text("a file")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-7")
    assert newest_checkpoint(tmp_path / "missing") is None


def test_trainers_with_a_train_of_their_own_are_called_as_they_want_to_be(tmp_path: Path) -> None:
    class Theirs(Trainer):
        def train(self, resume_from_checkpoint: Any = None, tag: str = "") -> Any:
            return resume_from_checkpoint, tag

    class Mine(PackedTrainerMixin, Theirs):
        pass

    mine = Mine(model=tiny_model(), args=arguments(tmp_path), train_dataset=packed())
    assert mine.train() == (None, "")
    assert mine.train("folder", tag="x") == ("folder", "x")
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "trainer_state.json").write_text("{}")
    assert mine.train(resume_from_checkpoint=True) == (str(tmp_path / "checkpoint-7"), "")


def passes_of(dataset: PackedDataset, count: int) -> list[list[list[int]]]:
    loader = PackedLoader(dataset, 1)
    return [rows_of(loader) for _ in range(count)]


def test_epochs_of_a_finite_stream_are_passes_and_their_last_batches_make_a_step(tmp_path: Path) -> None:
    args = arguments(tmp_path, num_train_epochs=3, gradient_accumulation_steps=3)
    args.max_steps = count_steps(packed(1), args)
    passes = passes_of(packed(1), 3)
    assert args.max_steps == sum(-(-len(rows) // 6) for rows in passes)
    assert any(len(rows) % 6 for rows in passes)
    whole = trainer(packed(1), args)
    whole.train()
    assert whole.state.global_step == args.max_steps
    assert whole.rows == list(itertools.chain(*passes))
    assert whole.state.log_history[-1]["epoch"] == 3


def test_a_part_of_an_epoch_and_an_endless_stream_are_counted_or_refused(tmp_path: Path) -> None:
    one, two = (count_steps(packed(1), arguments(tmp_path, num_train_epochs=number)) for number in (1, 2))
    assert count_steps(packed(1), arguments(tmp_path, num_train_epochs=1.5)) == one + -(-(two - one) // 2)
    with pytest.raises(ValueError, match=r"an endless stream \(epochs=None\) has no number of batches"):
        count_steps(packed(), arguments(tmp_path))


def test_each_step_has_the_mean_over_the_targets_of_all_its_batches_and_nothing_of_other_steps(tmp_path: Path) -> None:
    """The same by hand: plain SGD on the sum over targets / their number, also at the ends of epochs."""
    args = arguments(
        tmp_path,
        max_steps=14,
        gradient_accumulation_steps=3,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
    )
    whole = trainer(packed(1, count=60, no_target="drop"), args)
    whole.train()

    model, losses = tiny_model(), []
    loader = PackedLoader(packed(1, count=60), 2, layout="rows")
    groups: list[list[Any]] = []
    while len(groups) < 14:
        batches = list(loader)
        groups += [batches[at : at + 3] for at in range(0, len(batches), 3)]
    for group in groups[:14]:
        targets = sum(int((batch["labels"] != -100).sum()) for batch in group)
        parts = [model(**{**batch, "num_items_in_batch": targets}).loss for batch in group]
        sum(parts).backward()
        losses.append(sum(parts).item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= args.learning_rate * parameter.grad
                parameter.grad = None
    assert len({len(group) for group in groups[:14]}) > 1
    assert whole.losses == pytest.approx(losses, abs=1e-4)  # Transformers 4 rounds them in its log
    for mine, theirs in zip(whole.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_resumed_at_any_step_of_any_epoch_the_rest_is_the_same(tmp_path: Path) -> None:
    """Also right after the last step of an epoch, where the loader has not been asked for more yet."""
    settings = {"max_steps": 11, "gradient_accumulation_steps": 3}
    whole = trainer(packed(1, count=60), arguments(tmp_path, save_strategy="steps", save_steps=1, **settings))
    whole.train()
    steps = [-(-len(rows) // 6) for rows in passes_of(packed(1, count=60), 3)]
    assert sum(steps) < 10  # so that the last one is in a fourth epoch
    for step in (steps[0], sum(steps[:2]), sum(steps[:2]) - 1, sum(steps) + 1):
        resumed = trainer(packed(1, count=60), arguments(tmp_path, **settings))
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.steps == whole.steps[step:]
        assert_same_model(resumed, whole)


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=11, save_strategy="epoch")
    whole = trainer(packed(1, count=60), args)
    whole.train()
    first = sorted(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[0]
    assert json.loads((first / STREAM_FILE).read_text())["ended"] is True
    assert json.loads((first / "trainer_state.json").read_text())["epoch"] == 1
    resumed = trainer(packed(1, count=60), args)
    resumed.train(resume_from_checkpoint=str(first))
    assert resumed.steps == whole.steps[int(first.name[11:]) :]
    assert_same_model(resumed, whole)


class StopInGroup(TrainerCallback):
    """Stops, and asks for a checkpoint, when the third step has seen one of its two batches."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            control.should_training_stop = control.should_save = True


def test_a_checkpoint_in_the_midst_of_a_step_has_the_stream_as_of_the_step_before(tmp_path: Path) -> None:
    whole = trainer(packed(), arguments(tmp_path))
    whole.train()
    stopped = trainer(packed(), arguments(tmp_path, save_strategy="steps", save_steps=100), callbacks=[StopInGroup()])
    stopped.train()
    resumed = trainer(packed(), arguments(tmp_path))
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.steps == whole.steps[2:]


def test_every_training_begins_with_the_first_epoch_whatever_was_read_before(tmp_path: Path) -> None:
    dataset = packed(1)
    next(iter(dataset))  # a look at the first row
    again = trainer(dataset, arguments(tmp_path, max_steps=3))
    again.train()
    rows = again.rows
    again.train()
    assert again.rows == rows == rows_of(PackedLoader(packed(1), 1), 12)


def test_a_loader_of_ones_own_may_be_passed_with_a_state_of_ones_own(tmp_path: Path) -> None:
    first = PackedLoader(packed(1), 2)
    rows_of(first)
    rows_of(first, 5)
    loader = PackedLoader(packed(1), 2, layout="flat")
    loader.load_state_dict(first.state_dict())
    mine = trainer(loader, arguments(tmp_path, max_steps=2))
    mine.train()
    assert mine.rows == passes_of(packed(1), 2)[1][10:18]


def test_logs_have_the_tokens_trained_on_also_across_a_resume(tmp_path: Path) -> None:
    args = arguments(tmp_path, save_strategy="steps", save_steps=3, include_num_input_tokens_seen="non_padding")
    whole = trainer(packed(), args)
    whole.train()
    loader = PackedLoader(packed(), 4)
    stats = [dict(loader.stats) for _, _ in zip(range(8), loader, strict=False)]
    expected = [(one["tokens"], one["loss_tokens"], one["fill"], one["epoch"], one["tokens"]) for one in stats]
    keys = ("num_tokens", "num_loss_tokens", "fill", "epoch", "num_input_tokens_seen")
    resumed = trainer(packed(), args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for history in (whole.state.log_history, resumed.state.log_history):
        assert [tuple(entry[key] for key in keys) for entry in history if "loss" in entry] == expected


@pytest.mark.parametrize("packing", ["none", "by_length"])
def test_examples_that_are_not_packed_are_trained_on_too_and_go_on_exactly(tmp_path: Path, packing: Any) -> None:
    def losses(of: Trainer) -> list[float]:
        return [entry["loss"] for entry in of.state.log_history if "loss" in entry]

    args = arguments(tmp_path, save_strategy="steps", save_steps=3)
    whole, again = (PackedTrainer(tiny_model(), args, train_dataset=packed(packing=packing)) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(losses(whole)) == 8
    assert losses(again) == losses(whole)
    with pytest.raises(ValueError, match="without packing rows have no fixed length"):
        whole.num_tokens(whole.get_train_dataloader(), 3)  # for include_tokens_per_second of transformers 4


def mean_loss(model: Any, dataset: PackedDataset) -> float:
    loss, targets = 0.0, 0
    model.eval()
    for batch in PackedLoader(dataset, 1, layout="rows"):
        count = int((batch["labels"] != -100).sum())
        loss += float(model(**batch).loss.detach()) * count
        targets += count
    return loss / targets


def uneven(epochs: int | None = 1) -> PackedDataset:
    """Lanes of very different lengths: one ends long before the others."""
    rows = examples(100)
    parts = [rows[:70], rows[70:90], rows[90:98], rows[98:]]
    return PackedDataset(Shards(parts), seq_len=SEQ_LEN, lanes=4, buffer_size=8, shuffle=False, epochs=epochs)


def test_the_loss_of_an_evaluation_is_the_mean_over_all_targets_each_time(tmp_path: Path) -> None:
    mine = trainer(
        packed(), arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2), eval_dataset=uneven()
    )
    mine.train()
    expected = mean_loss(mine.model, uneven())
    found = [entry["eval_loss"] for entry in mine.state.log_history if "eval_loss" in entry]
    assert found[-1] == pytest.approx(expected, rel=1e-5)
    rows = rows_of(PackedLoader(uneven(), 1))
    assert mine.evaluated == rows * 2
    sets = {"a": uneven(), "b": PackedLoader(packed(1), 3, layout="rows")}
    metrics = mine.evaluate(eval_dataset=sets)
    assert metrics["eval_a_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["eval_b_loss"] == pytest.approx(mean_loss(mine.model, packed(1)), rel=1e-5)
    assert mine.predict(uneven()).metrics["test_loss"] == pytest.approx(expected, rel=1e-5)


def test_metrics_see_the_predictions_of_every_row(tmp_path: Path) -> None:
    def count(predictions: Any) -> dict[str, int]:
        return {"targets": int((predictions.label_ids != -100).sum()), "rows": len(predictions.predictions)}

    mine = trainer(packed(), arguments(tmp_path), eval_dataset=uneven(), compute_metrics=count)
    metrics = mine.evaluate()
    loader = PackedLoader(uneven(), 1)
    assert metrics["eval_rows"] == len(rows_of(loader))
    assert metrics["eval_targets"] == loader.stats["loss_tokens"]


def test_the_layout_is_the_one_that_the_attention_needs(tmp_path: Path) -> None:
    mine = trainer(packed(), arguments(tmp_path))
    assert mine.get_train_dataloader().loader._collator.layout == "rows"
    mine.model.config._attn_implementation = "flash_attention_2"
    assert mine.get_train_dataloader().loader._collator.layout == "flat"


class Plain(PackedTrainerMixin, Trainer):
    pass


def test_other_datasets_are_left_to_the_trainer(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    args = arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
    mine, theirs = (
        kind(model=tiny_model(), args=args, train_dataset=rows, eval_dataset=rows) for kind in (Plain, Trainer)
    )
    for one in (mine, theirs):
        one.train()
    assert_same_model(mine, theirs)
    assert mine.evaluate()["eval_loss"] == theirs.evaluate()["eval_loss"]
    assert not (tmp_path / "checkpoint-2" / STREAM_FILE).exists()


def test_a_checkpoint_without_a_stream_or_with_another_is_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    trainer(packed(), args).train()
    folder = tmp_path / "checkpoint-1"
    with pytest.raises(StateError, match=r"checkpoint-1.stream.json: cannot resume: .*seed=3, this stream has seed=4"):
        trainer(packed(seed=4), args).train(resume_from_checkpoint=str(folder))
    (folder / STREAM_FILE).unlink()
    with pytest.raises(StateError, match=r"checkpoint-1 has no stream.json.*without PackedTrainerMixin"):
        trainer(packed(), args).train(resume_from_checkpoint=str(folder))


def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PackedLoader has batch_size=3, per_device_train_batch_size is 2: make them"):
        trainer(PackedLoader(packed(), 3), arguments(tmp_path)).train()
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1.*NaN.*endless"):
        trainer(packed(1), arguments(tmp_path, label_smoothing_factor=0.1)).train()
    with pytest.raises(ValueError, match=r"dealt to 2 processes, but the Trainer knows only of this one.*use_cpu=True"):
        trainer(packed(rank=0, world_size=2), arguments(tmp_path)).train()
    with pytest.raises(ValueError, match="the evaluation set is endless"):
        trainer(packed(), arguments(tmp_path), eval_dataset=packed()).evaluate()


# ---- several processes -----------------------------------------------------------------------------------------------


def join_as_torchrun_does() -> None:
    """In a forked rank: the environment that a launcher sets; accelerate must not go on with that of the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")  # not used: the group is there already


def train_on_ranks(dataset: Any, folder: str, changes: dict[str, Any], resume: str | None) -> Any:
    join_as_torchrun_does()
    args = arguments(folder, **changes)
    if args.max_steps < 0:
        args.max_steps = count_steps(dataset, args)
    mine = trainer(dataset, args, eval_dataset=uneven())
    mine.train(resume_from_checkpoint=resume)
    return {
        "steps": mine.steps,
        "losses": mine.losses,
        "rows": mine.rows,
        "history": mine.state.log_history,
        "weights": [parameter.tolist() for parameter in mine.model.parameters()],
    }


def in_turn(reports: list[Any]) -> list[list[list[int]]]:
    """For each step the rows of all ranks as the stream has them, one of each rank in turn."""
    steps = zip(*(report["steps"] for report in reports), strict=True)
    return [[row for turn in zip(*ranks, strict=True) for row in turn] for ranks in steps]


def test_an_endless_training_on_two_processes_is_that_of_one_with_twice_the_batch_and_goes_on_there(
    tmp_path: Path,
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3}
    two = run_ranks(train_on_ranks, 2, tmp_path / "run", str(tmp_path / "two"), saves, None, make=packed)
    # (Transformers 4 cannot load an optimizer in several processes on CPUs, so those of `one` are without.)
    one = trainer(packed(), arguments(tmp_path / "one", per_device_train_batch_size=4, save_only_model=True, **saves))
    one.train()
    assert in_turn(two) == one.steps
    for report in two:
        assert report["losses"] == pytest.approx(one.losses, abs=1e-4)
    assert two[0]["weights"] == two[1]["weights"]

    resumed = trainer(packed(), arguments(tmp_path / "one", per_device_train_batch_size=4))
    resumed.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))  # of two processes
    assert resumed.steps == one.steps[3:]
    assert resumed.losses == pytest.approx(one.losses, abs=1e-4)
    for mine, theirs in zip(resumed.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)

    back = (str(tmp_path / "two"), {}, str(tmp_path / "one" / "checkpoint-3"))  # of one process, on two
    again = run_ranks(train_on_ranks, 2, tmp_path / "again", *back, make=packed)
    assert in_turn(again) == one.steps[3:]


def test_epochs_on_two_processes_have_each_example_once_though_one_of_them_has_more(tmp_path: Path) -> None:
    changes = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    reports = run_ranks(train_on_ranks, 2, tmp_path / "run", str(tmp_path / "out"), changes, None, make=uneven)
    rows = [rows_of(PackedLoader(uneven(), 1)), rows_of(PackedLoader(uneven(), 1))]
    assert Counter(map(tuple, reports[0]["rows"] + reports[1]["rows"])) == Counter(map(tuple, itertools.chain(*rows)))
    assert len(reports[0]["rows"]) > len(reports[1]["rows"]) + 10
    assert len(reports[0]["steps"]) == len(reports[1]["steps"]) == 2 * -(-len(reports[0]["rows"]) // 2 // 6)
    assert reports[0]["weights"] == reports[1]["weights"]
    assert all(entry["loss"] > 1 for report in reports for entry in report["history"] if "loss" in entry)


def save_late_on_rank_1(dataset: Any, folder: str) -> Any:
    """Whether the state of each rank was there when the file was written that makes a checkpoint whole."""
    join_as_torchrun_does()
    found: list[list[str]] = []
    write_rng, write_state = Trainer._save_rng_state, TrainerState.save_to_json

    def late(self: Trainer, output_dir: str) -> None:
        time.sleep(dist.get_rank())
        write_rng(self, output_dir)

    def seen(self: TrainerState, path: str) -> None:
        found.append(sorted(one.name for one in Path(path).parent.glob("rng_state*")))
        write_state(self, path)

    Trainer._save_rng_state, TrainerState.save_to_json = late, seen
    trainer(dataset, arguments(folder, max_steps=2, save_strategy="steps", save_steps=2)).train()
    return found


def test_a_checkpoint_is_whole_only_once_all_processes_have_saved_what_is_theirs(tmp_path: Path) -> None:
    reports = run_ranks(save_late_on_rank_1, 2, tmp_path / "run", str(tmp_path / "out"), make=packed)
    assert reports == [[["rng_state_0.pth", "rng_state_1.pth"]], []]


def evaluate_on_ranks(dataset: Any, folder: str) -> Any:
    join_as_torchrun_does()
    mine = trainer(packed(), arguments(folder), eval_dataset=dataset)
    metrics = [mine.evaluate() for _ in range(2)]
    return [one["eval_loss"] for one in metrics], [row for row in mine.evaluated if any(row)]


def test_an_evaluation_on_two_processes_has_each_example_once_and_the_loss_of_one_process(tmp_path: Path) -> None:
    reports = run_ranks(evaluate_on_ranks, 2, tmp_path / "run", str(tmp_path / "out"), make=uneven)
    expected = mean_loss(tiny_model(), uneven())
    for losses, _ in reports:
        assert losses == pytest.approx([expected] * 2, rel=1e-5)
    rows = rows_of(PackedLoader(uneven(), 1))
    assert sorted(reports[0][1] + reports[1][1]) == sorted(rows * 2)
    assert len(reports[1][1]) < len(reports[0][1])


def train_without_the_mixin(dataset: Any, folder: str, num_workers: int) -> None:
    join_as_torchrun_does()
    args = arguments(folder, dataloader_num_workers=num_workers)
    Trainer(model=tiny_model(), args=args, train_dataset=dataset, data_collator=Collator("rows")).train()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_trainer_that_would_deal_the_rows_a_second_time_is_refused(tmp_path: Path, num_workers: int) -> None:
    """It would train on the rows of the first process only."""
    with pytest.raises(Exception, match=r"to 2 processes, as they are already, and most would be lost.*PackedTrainer"):
        run_ranks(train_without_the_mixin, 2, tmp_path / "run", str(tmp_path / "out"), num_workers, make=packed)


def end_alone(dataset: Any, folder: str) -> Any:
    join_as_torchrun_does()
    try:
        trainer(PackedLoader(dataset, 2, at_end="own"), arguments(folder)).train()
    except ValueError as error:
        return str(error)


def test_processes_that_end_by_themselves_are_refused(tmp_path: Path) -> None:
    told = run_ranks(end_alone, 2, tmp_path / "run", str(tmp_path / "out"), make=uneven)
    assert all("at_end='own': processes that end early would leave the others waiting" in one for one in told)
