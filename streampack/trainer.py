"""Transformers' Trainer on a packed stream: PackedTrainer, and the mixin that makes any Trainer one.

    trainer = PackedTrainer(model=model, args=args, train_dataset=PackedDataset(...), eval_dataset=PackedDataset(...))
    trainer.train(resume_from_checkpoint=True)   # on any number of processes; also after kill -9

The Trainer would deal the stream to processes a second time, skip batches that a resumed stream is past already, drop
or carry over the gradient of an epoch's last batches, and average losses of batches with unequal numbers of targets.
"""

import math
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from streampack.checkpoint import STREAM_FILE, gather_objects, save_json
from streampack.collate import LayoutName
from streampack.dataset import PackedDataset
from streampack.loader import PackedLoader
from streampack.passes import TrainPasses, count_batches, totals
from streampack.rows import IGNORE
from streampack.trainer_checkpoints import checkpoint_folder, load_stream_of, newest_checkpoint, not_whole

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object  # at run time it is whatever Trainer comes after the mixin


class PackedTrainerMixin(_Base):  # type: ignore[misc]
    """Trains and evaluates on packed streams: `class MyTrainer(PackedTrainerMixin, Trainer)`, of any Trainer.

    `train_dataset` is a PackedDataset (batch size, workers and so on come from the arguments; layout="flat" where the
    model's attention is a flash attention, else "rows"), or a PackedLoader. An endless stream (`epochs=None`) trains
    for `max_steps`. So does a finite one, in as many passes as that takes; `count_steps` says how many steps
    `num_train_epochs` are. Batches that are missing to the last step of a pass, with gradient accumulation, are filled
    up with padding, so that its examples count in that step, and with their full weight.

    Each checkpoint folder gets a `stream.json`, as of the steps that were trained; `resume_from_checkpoint=` goes on
    with the next row, on any number of processes and with any batch size; True stands for the newest checkpoint that
    is whole, see `newest_checkpoint`. Logs hold the totals of all processes since the stream began: num_tokens (without
    padding), num_loss_tokens (targets), fill (tokens / cells); and as epoch that of the data.
    `include_num_input_tokens_seen="non_padding"` counts the same tokens.

    `eval_dataset` is a finite PackedDataset or PackedLoader (or a dict of them): each example counts once whatever the
    number of processes, and the loss is the mean over all targets. Other datasets are left to the Trainer.
    """

    _passes: TrainPasses | None = None
    _resume_from: str | None = None
    _group: tuple[int, int, int] = 0, 0, 0
    """The steps done when the last group of batches was fetched, and the batches of the pass before and after it."""
    _eval_sums: list[float] | None = None
    """[sum of losses over targets, targets] of a running evaluation, in this process."""

    # ---- loaders -------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The training batches; where a checkpoint is resumed, those after it.

        Raises:
            StateError: if the checkpoint has no stream, or one of another stream, naming both values.
            ValueError: for arguments that cannot be used with it.
        """
        data = self.train_dataset
        if not isinstance(data, PackedDataset | PackedLoader):
            self._passes = None
            return super().get_train_dataloader()
        # The Trainer keeps the batch size of a checkpoint; that of the arguments may have changed with the processes.
        size = self._train_batch_size if self.args.auto_find_batch_size else self.args.train_batch_size
        loader = self._loader(data, size, argument="per_device_train_batch_size")
        self._check_loss(loader)
        self.args.ignore_data_skip = True
        if self._resume_from is not None:
            load_stream_of(self._resume_from, loader)
        elif loader._loaded is None and loader.packed.loaded is None:
            loader.set_epoch(0)  # as each training does, whatever was read of the dataset before
        self._passes = TrainPasses(loader)
        return self._passes

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of an evaluation set, the same each time."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        data = self.eval_dataset[data] if isinstance(data, str) else data
        if isinstance(data, PackedDataset | PackedLoader):
            return self._eval_loader(data)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for `predict`."""
        if isinstance(test_dataset, PackedDataset | PackedLoader):
            return self._eval_loader(test_dataset)
        return super().get_test_dataloader(test_dataset)

    @cached_property
    def _eval_loaders(self) -> dict[int, PackedLoader]:
        return {}  # kept, since each has a process group of its own to end with the others

    def _eval_loader(self, data: PackedDataset | PackedLoader) -> PackedLoader:
        loader = self._eval_loaders.get(id(data))
        if loader is None:
            loader = self._loader(data, self.args.eval_batch_size, argument="per_device_eval_batch_size")
            if loader.packed.stream.epochs is None:
                raise ValueError(
                    "the evaluation set is endless (epochs=None): evaluating would never end; pass epochs=1"
                )
            self._eval_loaders[id(data)] = loader
        loader.set_epoch(0)
        return loader

    def _loader(self, data: PackedDataset | PackedLoader, batch_size: int, *, argument: str) -> PackedLoader:
        if self.args.n_gpu > 1:
            raise ValueError(
                f"one process drives {self.args.n_gpu} GPUs, which would cut packed batches apart; start one process "
                "for each GPU (torchrun), or show it only one (CUDA_VISIBLE_DEVICES)"
            )
        if isinstance(data, PackedDataset):
            loader = PackedLoader(
                data,
                batch_size,
                layout=self._layout(),
                num_workers=self.args.dataloader_num_workers,
                prefetch_factor=self.args.dataloader_prefetch_factor,
                pin_memory=self.args.dataloader_pin_memory,
                persistent_workers=self.args.dataloader_persistent_workers,
            )
        else:
            loader = data
        if loader.batch_size != batch_size:
            raise ValueError(
                f"the PackedLoader has batch_size={loader.batch_size}, {argument} is {batch_size}: make them equal"
            )
        _, world_size = loader.packed.resolve_rank()
        if self.args.world_size == 1 < world_size:
            raise ValueError(
                f"the rows are dealt to {world_size} processes, but the Trainer knows only of this one, so that each "
                "would train a model of its own; pass use_cpu=True on CPUs, and start all with torchrun"
            )
        if loader.at_end == "own" and loader.packed.stream.epochs is not None and self.args.world_size > 1:
            raise ValueError(
                "at_end='own': processes that end early would leave the others waiting; use 'fill' or 'cut'"
            )
        return loader

    def _layout(self) -> LayoutName:
        attention = str(getattr(self.model.config, "_attn_implementation", None))
        return "flat" if "flash" in attention else "rows"

    def _check_loss(self, loader: PackedLoader) -> None:
        may_fill = self.args.gradient_accumulation_steps > 1 or self.args.world_size > 1
        if self.args.label_smoothing_factor and may_fill and loader.packed.stream.epochs is not None:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor}: the Trainer's smoothed loss is a mean "
                "over the targets of a batch, NaN for the batches of padding that end a finite stream; train on an "
                "endless one (epochs=None)"
            )

    # ---- training ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **others: Any) -> Any:
        """Train, see `Trainer.train`; with `resume_from_checkpoint=True` from the newest checkpoint that is whole.

        Raises:
            ValueError: if there is none.
        """
        if resume_from_checkpoint is True and isinstance(self.train_dataset, PackedDataset | PackedLoader):
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"resume_from_checkpoint=True: {self.args.output_dir} has no checkpoint that is whole; leave it "
                    "out to begin"
                )
        return super().train(resume_from_checkpoint, *args, **others)

    def _inner_training_loop(
        self,
        batch_size: Any = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        self._resume_from = resume_from_checkpoint
        try:
            return super()._inner_training_loop(
                batch_size=batch_size,
                args=args,
                resume_from_checkpoint=resume_from_checkpoint,
                trial=trial,
                ignore_keys_for_eval=ignore_keys_for_eval,
            )
        finally:
            self._resume_from = None

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of the next step, and their number of targets over all processes."""
        passes = self._passes
        if passes is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        before = passes.batches
        batches, num_targets = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._group = self.state.global_step, before, passes.batches
        if batches:  # a group that is not whole would make no step: its gradient would go into the next epoch's first
            batches += [passes.loader.filler_batch() for _ in range(num_batches - len(batches))]
        return batches, num_targets

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """The targets in some batches: at least 1, so that the loss of nothing but padding is 0 / 1, not 0 / 0."""
        found = super()._get_num_items_in_batch(batch_samples, device)
        return found.clamp(min=1) if hasattr(found, "clamp") else found

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._passes is not None:
            step, before, after = self._group
            trained = after if self.state.global_step > step else before  # a group may be broken off before its step
            folder = checkpoint_folder(self._get_output_dir(trial=trial), self.state.global_step)
            if self.args.should_save:
                not_whole(folder)  # where a run before saved this step
            # First of all, so that a checkpoint which is whole for the Trainer has it.
            save_json(self._passes.loader, os.path.join(folder, STREAM_FILE), batches=trained)
            self.state.epoch = self._passes.loader.stats["epoch"]
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        """In all processes before the Trainer's state is written, which says that the checkpoint is whole."""
        super()._save_rng_state(output_dir)
        if self._passes is not None:
            gather_objects(None)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any,
        start_time: Any,
        learning_rate: Any = None,
    ) -> None:
        if self._passes is not None and self.control.should_log:  # in all processes, unlike `log`
            self._totals = totals(self._passes.loader)
            if self.args.include_num_input_tokens_seen == "non_padding":
                self.state.num_input_tokens_seen = self._totals["num_tokens"]
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log some numbers; with a training loss also those of the stream."""
        if self._passes is not None:
            self.state.epoch = self._passes.loader.stats["epoch"]
            if "loss" in logs:
                logs.update(self._totals)
        super().log(logs, start_time)

    @staticmethod
    def num_tokens(train_dl: Any, max_steps: int | None = None) -> int:
        """Cells of so many batches, for `include_tokens_per_second`; the Trainer itself would begin a pass to see."""
        if not isinstance(train_dl, TrainPasses):
            return int(Trainer.num_tokens(train_dl, max_steps))
        row_len = train_dl.loader.packed.row_len
        if row_len is None:
            raise ValueError(
                "without packing rows have no fixed length, so how many tokens a run takes is not known before; leave "
                "include_tokens_per_second out (include_num_input_tokens_seen counts them)"
            )
        return train_dl.loader.batch_size * row_len * (max_steps or 0)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate or predict. The loss of a packed set is the mean over its targets, not over batches."""
        if not isinstance(dataloader, PackedLoader):
            return super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
        across = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False  # so that each loss is the mean over its own batch
        sums = self._eval_sums = [0.0, 0.0]
        try:
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
        finally:
            self.args.average_tokens_across_devices = across
            self._eval_sums = None
        loss, targets = map(sum, zip(*gather_objects(sums), strict=True))
        if f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = loss / targets if targets else math.nan
        return output

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The loss, logits and labels of a batch."""
        labels = inputs.get("labels") if self._eval_sums is not None else None
        targets = 0 if labels is None else int((labels != IGNORE).sum())
        found = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        if self._eval_sums is not None and targets and found[0] is not None:
            self._eval_sums[0] += float(found[0]) * targets
            self._eval_sums[1] += targets
        return found


class PackedTrainer(PackedTrainerMixin, Trainer):  # type: ignore[misc]
    """Transformers' Trainer for packed streams, see `PackedTrainerMixin`."""


def count_steps(data: PackedDataset | PackedLoader, args: Any) -> int:
    """The steps that `args.num_train_epochs` passes over a finite stream take, for `max_steps`. `args` are
    TrainingArguments. It costs as much as the loader alone for these passes, see `streampack.passes.count_batches`.

    Raises:
        ValueError: for an endless stream.
    """
    args.device  # noqa: B018 # reading it joins the other processes
    loader = data if isinstance(data, PackedLoader) else PackedLoader(data, args.train_batch_size)
    steps = [
        math.ceil(batches / args.gradient_accumulation_steps)
        for batches in count_batches(loader, passes=math.ceil(args.num_train_epochs))
    ]
    part_of_last = args.num_train_epochs - len(steps) + 1
    return int(sum(steps[:-1]) + math.ceil(part_of_last * steps[-1]))
