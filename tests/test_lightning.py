"""Lightning with StreamCheckpoint: a resumed fit is the uninterrupted one, in one process and in two."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streampack import PackedLoader

from .test_loader import rows_of
from .test_ranks import run_ranks
from .test_trainer import in_turn, packed, tiny_model, uneven

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from streampack.lightning import StreamCheckpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec."),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.timeout(180),
]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model().train()
        self.steps: list[list[list[int]]] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.steps.append(batch["input_ids"].tolist())
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    loader: PackedLoader, folder: Path | str, *, resume: Any = None, callback: bool = True, **settings: Any
) -> Model:
    """Train, with a checkpoint after every step."""
    model = Model()
    saves = ModelCheckpoint(str(folder), filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves, *([StreamCheckpoint()] if callback else [])],
        **settings,
    )
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False if resume else None)
    return model


def loader(epochs: int | None = None, batch_size: int = 2) -> PackedLoader:
    return PackedLoader(packed(epochs, count=60), batch_size, layout="rows")


def assert_same_weights(one: Model, other: Model) -> None:
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_resumed_fit_on_an_endless_stream_is_the_uninterrupted_one_bit_by_bit(tmp_path: Path) -> None:
    whole = fit(loader(), tmp_path, max_steps=8)
    assert [row for step in whole.steps for row in step] == rows_of(loader(), 8)
    for step in (1, 5):
        resumed = fit(loader(), tmp_path / "again", resume=tmp_path / f"step={step}.ckpt", max_steps=8)
        assert resumed.steps == whole.steps[step:]
        assert_same_weights(resumed, whole)


def test_epochs_of_a_finite_stream_resume_in_their_midst_and_at_their_end(tmp_path: Path) -> None:
    whole = fit(loader(1), tmp_path, max_epochs=3)
    source = loader(1)
    passes = [rows_of(source) for _ in range(3)]
    assert [row for step in whole.steps for row in step] == list(itertools.chain(*passes))
    ends = [-(-len(rows) // 2) for rows in passes]
    for step in (ends[0] - 1, ends[0], ends[0] + 3, ends[0] + ends[1]):
        resumed = fit(loader(1), tmp_path / "again", resume=tmp_path / f"step={step}.ckpt", max_epochs=3)
        assert resumed.steps == whole.steps[step:]
        assert_same_weights(resumed, whole)


def test_with_gradient_accumulation_the_state_is_that_of_the_last_step(tmp_path: Path) -> None:
    whole = fit(loader(), tmp_path, max_steps=6, accumulate_grad_batches=3)
    resumed = fit(loader(), tmp_path / "again", resume=tmp_path / "step=4.ckpt", max_steps=6, accumulate_grad_batches=3)
    assert resumed.steps == whole.steps[12:]
    assert_same_weights(resumed, whole)


def test_without_the_callback_lightning_would_skip_a_batch_and_it_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"as of the batch that it has fetched ahead.*StreamCheckpoint\(\)"):
        whole = fit(loader(), tmp_path, callback=False, max_steps=4)
    with pytest.warns(UserWarning, match="fetched ahead"):
        resumed = fit(loader(), tmp_path / "again", resume=tmp_path / "step=2.ckpt", callback=False, max_steps=4)
    assert resumed.steps[0] == whole.steps[3]


def test_other_loaders_are_refused() -> None:
    other = torch.utils.data.DataLoader(packed(), batch_size=2)
    with pytest.raises(TypeError, match=r"StreamCheckpoint saves the stream of one PackedLoader; .* on DataLoader"):
        fit(other, "unused", max_steps=1)


def fit_on_ranks(dataset: Any, folder: str, resume: str | None, settings: dict[str, Any]) -> Any:
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, GROUP_RANK="0", LOCAL_WORLD_SIZE=world_size)
    os.environ.update(TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="29400")
    settings = {**settings, "strategy": "ddp", "devices": 2, "plugins": [TorchElasticEnvironment()]}
    mine = fit(PackedLoader(dataset, 1, layout="rows"), folder, resume=resume, **settings)
    return {"steps": mine.steps, "weights": [parameter.tolist() for parameter in mine.parameters()]}


def endless() -> Any:
    return packed(count=60)


def test_two_processes_go_on_with_the_run_of_one_and_back(tmp_path: Path) -> None:
    whole = fit(loader(), tmp_path / "whole", max_steps=8)
    two = run_ranks(
        fit_on_ranks, 2, tmp_path / "run", str(tmp_path / "two"), str(tmp_path / "whole" / "step=2.ckpt"),
        {"max_steps": 5}, make=endless,
    )  # fmt: skip
    assert in_turn(two) == whole.steps[2:5]
    assert two[0]["weights"] == two[1]["weights"]
    resumed = fit(loader(), tmp_path / "again", resume=tmp_path / "two" / "step=4.ckpt", max_steps=8)
    assert resumed.steps == whole.steps[4:]


def test_an_epoch_on_two_processes_has_each_row_once(tmp_path: Path) -> None:
    reports = run_ranks(fit_on_ranks, 2, tmp_path / "run", str(tmp_path / "two"), None, {"max_epochs": 1}, make=uneven)
    rows = [row for report in reports for step in report["steps"] for row in step if any(row)]
    assert sorted(rows) == sorted(rows_of(PackedLoader(uneven(), 1)))
    assert len(reports[0]["steps"]) == len(reports[1]["steps"])
