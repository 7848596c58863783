"""Accelerate: prepare() leaves a PackedLoader as it is, and save_state() saves the stream of all processes in one."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

from streampack import Collator, PackedDataset, PackedLoader, StateError
from streampack.checkpoint import StreamState

from .streams import SEQ_LEN
from .test_loader import rows_of
from .test_ranks import run_ranks
from .test_trainer import assert_same_model, in_turn, join_as_torchrun_does, packed, tiny_model, uneven

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def _new_accelerator() -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Run:
    """A training loop as Accelerate's documentation has it, with gradient accumulation over two batches."""

    def __init__(self, dataset: PackedDataset, batch_size: int) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = tiny_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = PackedLoader(dataset, batch_size, layout="rows")
        self.prepared, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        assert self.loader is loader
        self.accelerator.register_for_checkpointing(StreamState(loader))
        self.steps: list[list[list[int]]] = []

    @property
    def model(self) -> Any:
        return self.accelerator.unwrap_model(self.prepared)

    def train(self, steps: int) -> None:
        batches = iter(self.loader)
        for _ in range(steps):
            self.steps.append([])
            for batch in itertools.islice(batches, 2):
                self.steps[-1] += batch["input_ids"].tolist()
                with self.accelerator.accumulate(self.prepared):
                    loss = self.prepared(**send_to_device(batch, self.accelerator.device)).loss
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()


def test_a_resumed_training_is_the_uninterrupted_one_bit_by_bit(tmp_path: Path) -> None:
    whole = Run(packed(), 2)
    whole.train(3)
    whole.accelerator.save_state(str(tmp_path / "saved"))
    rest = Run(packed(), 2)
    rest.accelerator.load_state(str(tmp_path / "saved"))
    rest.train(4)
    without = Run(packed(), 2)
    without.train(7)
    assert whole.steps + rest.steps == without.steps
    assert_same_model(rest, without)


def train_on_ranks(dataset: PackedDataset, batch_size: int, load: str | None, steps: int, save: str) -> Any:
    join_as_torchrun_does()
    run = Run(dataset, batch_size)
    if load is not None:
        run.accelerator.load_state(load)
    run.train(steps)
    run.accelerator.save_state(save)
    weights = [parameter.tolist() for parameter in run.model.parameters()]
    return {"steps": run.steps, "weights": weights}


def test_two_processes_train_on_the_rows_of_one_and_one_and_two_go_on_with_them(tmp_path: Path) -> None:
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    first = run_ranks(train_on_ranks, 2, tmp_path / "a", 2, None, 3, two, make=packed)
    second = Run(packed(), 4)
    second.accelerator.load_state(two)
    second.train(2)
    second.accelerator.save_state(one)
    third = run_ranks(train_on_ranks, 2, tmp_path / "b", 2, one, 3, str(tmp_path / "again"), make=packed)
    rows = rows_of(PackedLoader(packed(), 1), 8 * 8)
    steps = in_turn(first) + second.steps + in_turn(third)
    assert [row for step in steps for row in step] == rows
    assert first[0]["weights"] == first[1]["weights"]
    assert third[0]["weights"] == third[1]["weights"]


def read_a_pass(dataset: PackedDataset) -> Any:
    join_as_torchrun_does()
    loader = Accelerator(cpu=True).prepare(PackedLoader(dataset, 3, layout="rows"))
    return [batch["input_ids"].tolist() for batch in loader]


def test_a_pass_on_two_processes_has_each_row_once_and_as_many_batches_on_both(tmp_path: Path) -> None:
    reports = run_ranks(read_a_pass, 2, tmp_path / "run", make=uneven)
    assert len(reports[0]) == len(reports[1])
    rows = [tuple(row) for report in reports for batch in report for row in batch if any(row)]
    assert Counter(rows) == Counter(map(tuple, rows_of(PackedLoader(uneven(), 1))))


def register_the_loader_itself(dataset: PackedDataset, folder: str) -> Any:
    join_as_torchrun_does()
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(PackedLoader(dataset, 2))
    accelerator.register_for_checkpointing(loader)
    rows_of(loader, 2)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    try:
        accelerator.load_state(folder)
    except StateError as error:
        return str(error)


def test_the_state_of_the_first_process_alone_is_not_loaded(tmp_path: Path) -> None:
    told = run_ranks(register_the_loader_itself, 2, tmp_path / "run", str(tmp_path / "saved"), make=packed)
    assert all("the state is of rank 0 of 2 alone" in one for one in told)


def prepare_a_dataloader(dataset: PackedDataset, method: str, dispatch: bool) -> None:
    join_as_torchrun_does()
    loader = DataLoader(
        dataset,
        batch_size=2,
        collate_fn=Collator("rows"),
        num_workers=0 if method == "none" else 1,
        multiprocessing_context=None if method == "none" else method,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.dispatch_batches = dispatch
    next(iter(accelerator.prepare(loader)))


@pytest.mark.parametrize(("method", "dispatch"), [("none", True), ("none", False), ("spawn", False)])
def test_a_dataloader_over_a_packed_dataset_is_refused_where_it_would_lose_rows(
    tmp_path: Path, method: str, dispatch: bool
) -> None:
    with pytest.raises(
        Exception, match=r"accelerate would deal the rows of a PackedDataset to 2 processes.*PackedLoad"
    ):
        run_ranks(prepare_a_dataloader, 2, tmp_path / "run", method, dispatch, make=packed)


def test_in_one_process_a_prepared_dataloader_gives_all_rows() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(packed(1), batch_size=2, collate_fn=Collator("rows")))
    assert rows_of(loader) == rows_of(PackedLoader(packed(1), 1))
    assert len(rows_of(loader)[0]) == SEQ_LEN
