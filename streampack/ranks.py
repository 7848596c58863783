"""Which rank and which DataLoader worker this process is."""

import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed
from torch.utils.data import get_worker_info

T = TypeVar("T")

_TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def worker_of_process() -> tuple[int, int]:
    """(worker, number of workers); (0, 1) outside DataLoader workers."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)


def rank_of_group() -> tuple[int, int] | None:
    """(rank, world size) of the default process group, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None


def rank_of_environment() -> tuple[int, int]:
    """(rank, world size) as the launcher says: RANK and WORLD_SIZE (torchrun and others), else (0, 1).

    Raises:
        ValueError: where only one of them says something.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and (world_size is None or world_size == "1"):
        for name in _TASKS:
            if int(os.environ.get(name) or 1) > 1:
                warnings.warn(
                    f"{name}={os.environ[name]}, but there is no process group and no RANK and WORLD_SIZE: every task "
                    "reads the whole stream. Call torch.distributed.init_process_group before iterating, or pass "
                    "rank= and world_size=",
                    stacklevel=2,
                )
        return 0, 1
    if rank is None or world_size is None:
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={world_size} in the environment: set both, or pass rank=, world_size="
        )
    return int(rank), int(world_size)


def check_rank(rank: int, world_size: int, *, lanes: int) -> None:
    """Refuse a rank outside the world, and a world that does not divide the lanes.

    Raises:
        ValueError: naming both numbers, and lanes that would do.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in 0 .. {world_size - 1} (world_size={world_size})")
    if lanes % world_size:
        below, above = lanes - lanes % world_size, -(-lanes // world_size) * world_size
        near = " or ".join(str(value) for value in (below, above) if value)
        raise ValueError(
            f"lanes={lanes} cannot be dealt evenly to world_size={world_size} ranks; use lanes={near}, a multiple of "
            "every number of ranks you may use (lanes are part of the stream's identity, so choose before you start)"
        )


def resolve_once(function: Callable[[], T]) -> T:
    """What a function gives, called on rank 0 alone and sent to the other ranks; all ranks must call this.

    `source = streampack.resolve_once(lambda: load_dataset(..., streaming=True))` asks the Hub for the files once, not
    once for each rank, and every rank gets the same list. Without a process group it just calls the function.
    (A pickled stream brings along what its file system knows of the repository, so opening files asks nothing either.)

    Args:
        function: its result must be picklable, as what `load_dataset(streaming=True)` gives is.

    Raises:
        TypeError: on every rank, if the result cannot be pickled.
        Exception: what the function raised, on every rank (as a RuntimeError where it cannot be pickled).
    """
    rank, world_size = rank_of_group() or (0, 1)
    if world_size == 1:
        return function()
    # With NCCL alone, torch sends it through the current GPU: set the device before, as always with NCCL.
    sent: list[Any] = [None]
    if rank:
        torch.distributed.broadcast_object_list(sent, src=0)
        result, error = pickle.loads(sent[0])
    else:
        result, error = _try(function)
        sent[0], error = _pickled(result, error)
        torch.distributed.broadcast_object_list(sent, src=0)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _try(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # also a Ctrl-C: the other ranks wait for an answer
        return None, error


def _pickled(result: Any, error: BaseException | None) -> tuple[bytes, BaseException | None]:
    """(what is sent, the error of rank 0)."""
    try:
        if error is None:
            return pickle.dumps((result, None)), None
    except Exception as reason:
        error = TypeError(
            f"resolve_once: the result, a {type(result).__name__}, cannot be pickled ({reason}), so that rank 0 cannot "
            "send it; define functions that it uses at the top of a module"
        )
    try:
        sent = pickle.dumps((None, error))
        pickle.loads(sent)  # errors with arguments of their own often cannot be loaded
    except Exception:
        sent = pickle.dumps((None, RuntimeError(f"rank 0: {type(error).__name__}: {error}")))
    return sent, error


def limit_tokenizer_threads() -> None:
    """In a worker process: its tokenizer must not start a thread for each core, once for each worker."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
