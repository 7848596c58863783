"""The checkpoint folders of Transformers' Trainer: which is the newest whole one, and the stream in it."""

import json
import os
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from streampack.checkpoint import STREAM_FILE, load_json
from streampack.loader import PackedLoader
from streampack.state import StateError


def newest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The folder of the newest checkpoint of a Trainer that is whole, or None: "runs/a/checkpoint-500".

    A process that is killed while it saves leaves part of a checkpoint, which `get_last_checkpoint` of Transformers
    takes for the newest one. The Trainer writes trainer_state.json last: where that can be read, the rest is there.
    """
    names = (re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", folder.name) for folder in Path(output_dir).glob("*"))
    steps = sorted((int(name[1]) for name in names if name), reverse=True)
    folders = (checkpoint_folder(os.fspath(output_dir), step) for step in steps)
    return next(filter(_is_whole, folders), None)


def checkpoint_folder(output_dir: str, step: int) -> str:
    """Where the Trainer saves a step."""
    return os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{step}")


def not_whole(folder: str) -> None:
    """Make a checkpoint, if there is one, count as not whole until the Trainer has written it again."""
    Path(folder, TRAINER_STATE_NAME).unlink(missing_ok=True)


def load_stream_of(folder: str, loader: PackedLoader) -> None:
    """Make a loader go on where the stream was when the Trainer saved a checkpoint.

    Raises:
        StateError: if the checkpoint has no stream, or one of another stream.
    """
    path = Path(folder, STREAM_FILE)
    try:
        load_json(loader, path)
    except FileNotFoundError as error:
        raise StateError(
            f"cannot resume: {folder} has no {STREAM_FILE}, so it was saved by a Trainer without PackedTrainerMixin; "
            "train without resume_from_checkpoint to begin the stream anew, with the model of that folder if you like"
        ) from error


def _is_whole(folder: str) -> bool:
    try:
        json.loads(Path(folder, TRAINER_STATE_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # not written yet; no checkpoint; not to its end
        return False
    return True
