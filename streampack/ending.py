"""The end of a finite pass on several ranks, which have not all the same number of rows: they end together.

Each rank looks one batch ahead and tells the others whether it has one: one number for each step, exchanged over a CPU
group while the step before is trained on. So no rank waits for a batch of another that has ended.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from streampack.hosting import Given

AtEnd = Literal["own", "fill", "cut"]


class CpuGroup:
    """All ranks, for exchanging numbers on the CPU beside the group that trains. Made when it is first used."""

    def __init__(self) -> None:
        self._group: Any = None

    def all_of(self, has: bool, *, any_is_enough: bool) -> Callable[[], bool]:
        """Tell all ranks, without waiting; the result waits, and says whether all have (or any has)."""
        if self._group is None:
            # A group of its own: a training step may have collectives under way in the other one.
            self._group = dist.new_group(backend="gloo")
        number = torch.tensor([int(has)])
        operation = dist.ReduceOp.MAX if any_is_enough else dist.ReduceOp.MIN
        work = dist.all_reduce(number, op=operation, group=self._group, async_op=True)

        def result() -> bool:
            work.wait()
            return bool(number.item())

        return result

    def __getstate__(self) -> dict[str, Any]:
        return {"_group": None}


def check_at_end(at_end: Any) -> None:
    """Refuse what is no way to end."""
    if at_end is not None and at_end not in get_args(AtEnd):
        raise ValueError(f"at_end={at_end!r}: pass 'own', 'fill' or 'cut', or None")


def resolve(at_end: AtEnd | None, *, endless: bool, world_size: int) -> AtEnd:
    """What happens at the end of a pass. Ranks without a process group cannot agree; endless streams need not."""
    has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if endless or not has_group or world_size == 1:
        if at_end in ("fill", "cut") and world_size > 1 and not endless:
            raise ValueError(
                f"at_end={at_end!r} needs torch.distributed.init_process_group, by which {world_size} ranks agree when "
                "to end; call it before iterating, or pass at_end='own'"
            )
        return "own"
    return at_end or "fill"


def together(
    batches: Iterable[list[Given]],
    *,
    at_end: AtEnd,
    batch_size: int,
    group: CpuGroup,
    leave: Callable[[list[Given]], None],
) -> Iterator[list[Given]]:
    """The batches of this rank, and then empty ones until all ranks are out ("fill"); or those before the first one
    that is not full on some rank ("cut"). `leave` is called with each that is left then."""
    source = iter(batches)

    def ask(batch: list[Given]) -> Callable[[], bool]:
        rows = sum(one.row is not None for one in batch)
        return group.all_of(rows > 0 if at_end == "fill" else rows == batch_size, any_is_enough=at_end == "fill")

    ahead = next(source, [])
    go_on = ask(ahead)
    while go_on():
        batch, ahead = ahead, next(source, [])
        go_on = ask(ahead)
        yield batch
    for batch in itertools.chain([ahead], source):
        leave(batch)
