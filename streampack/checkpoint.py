"""Checkpoints: the state of all ranks in one, for torch.distributed.checkpoint (a key for each lane) or a JSON file.

    dcp.save({"model": ..., "stream": StreamState(loader)}, checkpoint_id=folder)   # with the model
    save_json(loader, "stream.json")                                               # alone, from rank 0

Both load on any number of ranks. Every function here that touches a loader is called by all ranks together.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from streampack.loader import PackedLoader
from streampack.ranks import resolve_once
from streampack.state import StateError, check_is_state, merge_states

_STREAM = "stream"
"""Under which key `save_stream` and `load_stream` have the stream in a checkpoint."""
_HEADER = "header"
STREAM_FILE = "stream.json"
"""In each checkpoint folder of PackedTrainer: where the stream is after the steps that were trained, of all processes
together."""
_ZIP = b"PK\x03\x04"  # how files of torch.save begin


class StreamState:
    """Where a loader's stream is, as an object for torch.distributed.checkpoint and others that save by state_dict().

    `state_dict()` is that of all ranks together, the same on each: the key "header" and one for each lane,
    "lane.0000" ..., all of bytes. All ranks must call it, as `dcp.save`, `dcp.async_save`, `dcp.load` and accelerate's
    `save_state` do. It is a snapshot: training may go on while it is written.

    Args:
        loader: the PackedLoader.
        batches: save the state after so many batches of this pass, see `PackedLoader.state_dict`.
        change_weights: when loading, see `PackedLoader.load_state_dict`.
    """

    def __init__(self, loader: PackedLoader, *, batches: int | None = None, change_weights: bool = False) -> None:
        self.loader = loader
        self.batches = batches
        self.change_weights = change_weights

    def state_dict(self) -> dict[str, Any]:
        """{"header": ..., "lane.0000": ..., ...}, JSON as bytes; b"" for a lane that has not begun.

        Raises:
            StateError: on all ranks, see `merged_state`.
        """
        state = merged_state(self.loader, batches=self.batches)
        lanes = state.pop("lanes")
        texts = {_key(lane): lanes.get(str(lane), "").encode() for lane in range(state["stream"]["lanes"])}
        return {_HEADER: json.dumps(state).encode(), **texts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict()` returned, on any number of ranks; used by the next pass.

        Raises:
            StateError: if something is missing or damaged, or it is of another stream, naming both values.
        """
        self.loader.load_state_dict(_with_lanes(state_dict), change_weights=self.change_weights)


def merged_state(loader: PackedLoader, *, batches: int | None = None) -> dict[str, Any]:
    """The state of all ranks in one, the same on each: what `load_state_dict` takes on any number of ranks.

    All ranks must call it. Of ranks that read the same rows (of a mesh), one counts.

    Args:
        loader: the PackedLoader.
        batches: the state after so many batches of this pass, see `PackedLoader.state_dict`.

    Raises:
        StateError: on all ranks, if one cannot give its state, or they are after different steps, or there is no
            process group to ask the others.
    """
    rank, world_size = loader.packed.resolve_rank()
    if world_size > 1 and not _has_group():
        raise StateError(
            f"this is rank {rank} of {world_size}, and there is no process group to ask the others for their states; "
            "call torch.distributed.init_process_group, or merge_states() what each rank's state_dict() returned"
        )
    mine: Any
    try:
        mine = loader.state_of_rank(batches=batches)
    except Exception as error:
        mine = error
    everyone = gather_objects(mine)
    for process, state in enumerate(everyone):
        if isinstance(state, Exception):
            raise StateError(f"process {process} has no state to save: {state}") from state
    by_rank: dict[int, Any] = {}
    for state in everyone:
        if by_rank.setdefault(state["rank"], state) != state:
            raise StateError(
                f"processes that read the same rows (rank {state['rank']} of {state['world_size']}) are at different "
                f"places, after row {by_rank[state['rank']]['rows']} and {state['rows']}; pass rank= and world_size= "
                "of data parallelism to PackedDataset, and save all after the same step"
            )
    return merge_states(list(by_rank.values()))


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def save_stream(loader: PackedLoader, folder: str | os.PathLike[str], *, batches: int | None = None) -> None:
    """Save where the stream is with torch.distributed.checkpoint, to a new folder, which appears whole or not at all.

    All ranks must call it. (To save it with a model, give `StreamState(loader)` to `dcp.save`, under "stream".)

    Raises:
        StateError: on all ranks, see `merged_state`.
        FileExistsError: if there is such a folder.
    """
    folder = Path(folder)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    values = StreamState(loader, batches=batches).state_dict()

    def prepare() -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} is there already; save each checkpoint to a folder of its own")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        os.replace(unfinished, folder)
        _sync_folder(folder.parent)

    resolve_once(prepare)
    with _quiet_alone():
        save({_STREAM: values}, checkpoint_id=unfinished)
    resolve_once(finish)


def load_stream(loader: PackedLoader, folder: str | os.PathLike[str], *, change_weights: bool = False) -> None:
    """Continue from a folder of `save_stream`, or of `dcp.save({"stream": StreamState(loader), ...})`, on any number of
    ranks. All ranks must call it.

    Raises:
        StateError: with the folder's name, if it is no whole checkpoint with a stream, or one of another stream.
    """
    values = _read_stream(folder)
    with _named(folder):
        StreamState(loader, change_weights=change_weights).load_state_dict(values)


def _read_stream(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What `StreamState.state_dict()` gave when it was saved."""
    header = _read(folder, {_HEADER: None})
    with _named(folder):
        lanes = int(_header(header)["stream"].get("lanes", 0))
    return _read(folder, {**header, **{_key(lane): None for lane in range(lanes)}})


def _read(folder: str | os.PathLike[str], template: dict[str, Any]) -> dict[str, Any]:
    """The values of these keys. (Of keys that a template lacks, nothing is loaded, silently.)"""
    try:
        with _quiet_alone():
            load({_STREAM: template}, checkpoint_id=folder)
    except CheckpointException as error:  # a BaseException, so that few would catch it
        reasons = "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
        raise StateError(
            f"{folder} is not a whole checkpoint that has a stream under {_STREAM!r}: {reasons}; load an older one"
        ) from error
    return template


def _key(lane: int) -> str:
    return f"lane.{lane:04d}"


def _header(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(values[_HEADER])
        check_is_state({**state, "lanes": {}})
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"the {_HEADER!r} of the state is missing or damaged; load what StreamState saved") from error
    return state


def _with_lanes(values: Mapping[str, Any]) -> dict[str, Any]:
    """A state as `state_dict()` of a loader gives it, from what is saved by key."""
    state = _header(values)
    keys = {str(lane): _key(lane) for lane in range(int(state["stream"].get("lanes", 0)))}
    missing = [key for key in keys.values() if not isinstance(values.get(key), bytes)]
    if missing:
        raise StateError(f"the state has no {missing[0]!r}: it is damaged; load what StreamState saved")
    return {**state, "lanes": {lane: values[key].decode(errors="replace") for lane, key in keys.items() if values[key]}}


# ---- one JSON file ---------------------------------------------------------------------------------------------------


def save_json(loader: PackedLoader, path: str | os.PathLike[str], *, batches: int | None = None) -> None:
    """Save where the stream is to one file, written by rank 0, which appears whole or not at all.

    All ranks must call it; all return once the file is there, or raise. It replaces an older one, and holds what
    `merged_state` returns.

    Args:
        loader: the PackedLoader.
        path: of the file; missing folders are made.
        batches: the state after so many batches of this pass, see `PackedLoader.state_dict`.

    Raises:
        StateError: on all ranks, see `merged_state`.
        OSError: on all ranks, if rank 0 cannot write it.
    """
    state = merged_state(loader, batches=batches)
    resolve_once(lambda: _write_whole(Path(path), json.dumps(state)))


def load_json(loader: PackedLoader, path: str | os.PathLike[str], *, change_weights: bool = False) -> None:
    """Continue from a file of `save_json`, on any number of ranks. All ranks must call it; only rank 0 reads the file.

    Raises:
        StateError: with the file's name, if it is damaged, of another version, or of another stream.
        OSError: on all ranks, if rank 0 cannot read it.
    """
    state = _from_json(resolve_once(lambda: Path(path).read_text(errors="replace")), path)
    with _named(path):
        loader.load_state_dict(state, change_weights=change_weights)


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file of `save_json` or `torch.save(loader.state_dict(), ...)`, perhaps under "stream" in a dict of
    other things; in a folder of `save_stream` or `dcp.save({"stream": StreamState(loader), ...})`; or in a checkpoint
    folder of PackedTrainer.

    Raises:
        StateError: with the path, if there is no state in it, or one of another version.
        OSError: if it cannot be read.
    """
    path = Path(path)
    file = path / STREAM_FILE if (path / STREAM_FILE).is_file() else path
    if file.is_dir():
        if not (file / ".metadata").is_file():  # what torch.distributed.checkpoint writes last
            raise StateError(
                f"{file} is a folder without {STREAM_FILE} or a checkpoint of torch.distributed.checkpoint"
            )
        state: Any = _with_lanes(_read_stream(file))
    elif file.read_bytes()[:4] == _ZIP:
        state = _load_torch(file)
    else:
        state = _from_json(file.read_text(errors="replace"), file)
    if isinstance(state, Mapping) and "version" not in state and isinstance(state.get("stream"), Mapping):
        state = state["stream"]  # a checkpoint of a training loop, with the model beside it
    with _named(file):
        check_is_state(state)
    return dict(state)


def _load_torch(file: Path) -> Any:
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise StateError(f"{file} is no state that torch.save wrote: {type(error).__name__}") from error


def _from_json(text: str, file: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise StateError(f"{file} is damaged, no whole JSON: {error}; load an older one") from error


def _write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with open(unfinished, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """So that a rename outlives a loss of power."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _named(place: str | os.PathLike[str]) -> Iterator[None]:
    """Errors of a state say where it lies."""
    try:
        yield
    except StateError as error:
        raise StateError(f"{place}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{place} is damaged: {type(error).__name__} {error}; load an older one") from error


# ---- all ranks together ----------------------------------------------------------------------------------------------


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def gather_objects(mine: Any) -> list[Any]:
    """What each process passes, in their order."""
    everyone = [mine]
    if _has_group():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return everyone


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Without the warning of torch.distributed.checkpoint that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        yield
