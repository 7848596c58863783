"""Real process groups: gloo ranks with real DataLoader workers give the one row sequence and resume on other ranks."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streampack import PackedDataset, PackedLoader, merge_states

from .test_loader import packed, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def endless() -> PackedDataset:
    return packed(epochs=None)


def run_ranks(
    work: Callable[..., Any], world_size: int, folder: Path, *arguments: Any, make: Callable[[], Any] = endless
) -> list[Any]:
    """Run `work(make(), *arguments)` on `world_size` gloo ranks; what each returned, in rank order."""
    folder.mkdir()
    torch.multiprocessing.start_processes(
        _rank, args=(work, world_size, str(folder), arguments, make), nprocs=world_size, start_method=_start_method()
    )
    return [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(world_size)]


def _start_method() -> str:
    """Forked ranks start at once. Where autograd has begun threads of its own in this process (which depends on the
    tests before), it does not work in forked ones: then new ones."""
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return "fork" if os.waitpid(child, 0)[1] == 0 else "spawn"


def _rank(
    rank: int, work: Callable[..., Any], world_size: int, folder: str, arguments: Any, make: Callable[[], Any]
) -> None:
    torch.set_num_threads(1)
    dataset = make()  # built before the process group is there
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    found = work(dataset, *arguments)
    Path(folder, f"rank-{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def read(dataset: PackedDataset, num_workers: int, method: str | None, batches: int, state: Any) -> Any:
    """Some batches of this rank, and the state that all ranks together save after them."""
    loader = PackedLoader(dataset, 2, num_workers=num_workers, multiprocessing_context=method if num_workers else None)
    if state is not None:
        loader.load_state_dict(state)
    rows = rows_of(loader, batches)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    return rows, merge_states(states)


def in_global_order(reports: list[Any]) -> list[list[int]]:
    """The rows of all ranks as the stream has them: one of each rank in turn."""
    return [reports[rank][0][place] for place in range(len(reports[0][0])) for rank in range(len(reports))]


@pytest.mark.parametrize(
    ("world_size", "num_workers", "method"),
    [(2, 2, "fork"), (2, 1, "spawn"), (4, 0, None), (4, 1, "fork"), (4, 4, "fork"), (16, 1, "fork")],
)
def test_gloo_ranks_with_real_workers_give_the_one_row_sequence(
    tmp_path: Path, world_size: int, num_workers: int, method: str | None
) -> None:
    batches = 96 // (2 * world_size)
    reports = run_ranks(read, world_size, tmp_path / "run", num_workers, method, batches, None)
    assert in_global_order(reports) == rows_of(PackedLoader(packed(epochs=None), 1), 96)


def test_a_run_on_four_ranks_goes_on_on_two_then_one_then_eight(tmp_path: Path) -> None:
    rows: list[list[int]] = []
    state = None
    for world_size, num_workers in [(4, 1), (2, 2), (1, 0), (8, 0)]:
        reports = run_ranks(read, world_size, tmp_path / str(world_size), num_workers, "fork", 5, state)
        rows += in_global_order(reports)
        state = reports[0][1]
        assert all(report[1] == state for report in reports)
    assert len(rows) == 2 * 5 * (4 + 2 + 1 + 8)
    assert rows == rows_of(PackedLoader(packed(epochs=None), 1), len(rows))
    assert state["row"] == state["rows"] == len(rows)
