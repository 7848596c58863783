"""Who calls: engines that would take a packed stream apart without a word are refused, with what to use instead."""

import sys
import warnings

from streampack.state import StateError


def refuse_checkpointing_by_key(what: str) -> None:
    """Refuse to give a state_dict() to torch.distributed.checkpoint: it would write the states of all ranks under the
    same keys, of which one is kept, and read no lanes into a fresh loader.

    Raises:
        StateError: naming what to give it instead.
    """
    if _is_called_by("torch.distributed.checkpoint"):
        raise StateError(
            f"torch.distributed.checkpoint cannot take the state of a {what} as it is, since those of all ranks have "
            "the same keys; give it streampack.StreamState(loader), which has a key for each lane"
        )


def refuse_dealing(world_size: int) -> None:
    """Refuse to be read by accelerate (and so by a Trainer) on several ranks: it would deal the rows of this rank to
    all ranks, or those of each rank once more, and most rows would be lost.

    Raises:
        ValueError: naming what to give it instead.
    """
    if world_size > 1 and _is_called_by("accelerate.data_loader"):
        raise ValueError(
            f"accelerate would deal the rows of a PackedDataset to {world_size} processes, as they are already, and "
            "most would be lost. Prepare a PackedLoader (which prepare() gives back as it is) instead of a DataLoader; "
            "with Transformers' Trainer use streampack.trainer.PackedTrainer"
        )


def warn_of_fetched_batch() -> None:
    """Say that Lightning saves a state_dict() as of a batch that is not trained yet."""
    if _is_called_by("lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader"):
        warnings.warn(
            "Lightning saves the stream as of the batch that it has fetched ahead, and of rank 0 alone: a resume would "
            "skip a batch, or be refused; add streampack.lightning.StreamCheckpoint() to the callbacks",
            stacklevel=3,
        )


def _is_called_by(*modules: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith(modules):
            return True
    return False
