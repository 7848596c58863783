"""Lightning: a callback that saves the stream of all ranks, as of the batches that were trained.

    Trainer(callbacks=[StreamCheckpoint()], ...).fit(model, PackedLoader(...), ckpt_path="last.ckpt")

Lightning itself saves stateful loaders as of the batch that it has fetched ahead, so that a resume would skip one, and
of rank 0 alone.
"""

import importlib
import importlib.util
from typing import Any

from streampack.checkpoint import merged_state
from streampack.loader import PackedLoader


def _callback_class() -> Any:
    for package, module in (("lightning", "lightning.pytorch"), ("pytorch_lightning", "pytorch_lightning")):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(module).Callback
    raise ImportError("streampack.lightning needs Lightning: pip install lightning")


Callback = _callback_class()


class StreamCheckpoint(Callback):  # type: ignore[misc, valid-type]
    """Puts the right state of the train loader, which is a PackedLoader, into each checkpoint. Lightning loads it.

    A run resumes with the next row, on any number of devices and with any batch size.

    Raises:
        TypeError: when training begins on something else, or on several loaders.
    """

    def __init__(self) -> None:
        self._trained = 0  # batches of the loader's present pass

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """A fit, also one that resumes, begins a pass of the loader."""
        self._trained = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loader is there."""
        if not isinstance(trainer.train_dataloader, PackedLoader):
            raise TypeError(
                f"StreamCheckpoint saves the stream of one PackedLoader; the Trainer trains on "
                f"{type(trainer.train_dataloader).__name__}"
            )
        trainer.train_dataloader.saved_by_callback = True

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch of Lightning is a pass of the loader."""
        self._trained = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A batch was trained."""
        self._trained += 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """In place of what Lightning put there."""
        state = merged_state(trainer.train_dataloader, batches=self._trained)
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [state]
