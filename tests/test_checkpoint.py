"""Checkpoints of all ranks in one: torch.distributed.checkpoint by lane, a JSON file; whole or not at all."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful

from streampack import FunctionSource, PackedDataset, PackedLoader, StateError, ahead
from streampack.checkpoint import StreamState, load_json, load_stream, merged_state, save_json, save_stream

from .streams import examples
from .test_loader import packed, rows_of
from .test_ranks import in_global_order, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.timeout(180),
]


def endless() -> PackedDataset:
    return packed(epochs=None, lanes=12)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return rows_of(PackedLoader(endless(), 1), 120)


def loader_after(batches: int, dataset: PackedDataset | None = None) -> PackedLoader:
    loader = PackedLoader(dataset or endless(), 2)
    rows_of(loader, batches)
    return loader


def next_rows(load: Callable[[PackedLoader], Any], count: int, dataset: PackedDataset | None = None) -> list[list[int]]:
    """The rows with which a new loader goes on once `load(it)` has set its state."""
    loader = PackedLoader(dataset or endless(), 1)
    load(loader)
    return rows_of(loader, count)


# ---- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def test_loaders_and_datasets_are_stateful() -> None:
    assert isinstance(PackedLoader(packed()), Stateful)
    assert isinstance(packed(), Stateful)
    assert isinstance(StreamState(PackedLoader(packed())), Stateful)


def test_a_stream_is_saved_as_bytes_under_a_key_for_each_lane() -> None:
    values = StreamState(loader_after(3)).state_dict()
    assert list(values) == ["header", *(f"lane.{lane:04d}" for lane in range(12))]
    assert {type(value) for value in values.values()} == {bytes}
    assert [key for key, value in values.items() if not value] == [f"lane.{lane:04d}" for lane in range(6, 12)]
    assert json.loads(values["header"])["row"] == 6


def save_with_model(dataset: PackedDataset, folder: str, load: str | None, batches: int) -> Any:
    loader = PackedLoader(dataset, 2)
    model = torch.nn.Linear(2, 2)
    if load is not None:
        dcp.load({"model": model.state_dict(), "stream": StreamState(loader)}, checkpoint_id=load)
    rows = rows_of(loader, batches)
    dcp.save({"model": model.state_dict(), "stream": StreamState(loader)}, checkpoint_id=folder)
    return [rows, merged_state(loader)]


def test_dcp_saves_on_four_ranks_and_goes_on_on_three_two_and_one(tmp_path: Path, expected: list[list[int]]) -> None:
    rows: list[list[int]] = []
    last = None
    for world_size in (4, 3, 2, 1, 6):
        folder = str(tmp_path / f"step-{world_size}")
        reports = run_ranks(save_with_model, world_size, tmp_path / str(world_size), folder, last, 3, make=endless)
        rows += in_global_order(reports)
        last = folder
    assert len(rows) == 2 * 3 * (4 + 3 + 2 + 1 + 6)
    assert rows == expected[: len(rows)]


def save_and_train_on(dataset: PackedDataset, folder: str) -> Any:
    loader = PackedLoader(dataset, 2)
    iterator = iter(loader)
    rows = rows_of(next(iterator) for _ in range(3))
    saving = dcp.async_save({"stream": StreamState(loader)}, checkpoint_id=folder)
    rows += rows_of(next(iterator) for _ in range(4))  # while it is written
    saving.result()
    return [rows]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_async_save_writes_the_state_as_of_the_call_while_training_goes_on(
    tmp_path: Path, expected: list[list[int]]
) -> None:
    folder = str(tmp_path / "saved")
    reports = run_ranks(save_and_train_on, 2, tmp_path / "run", folder, make=endless)
    assert in_global_order(reports) == expected[:28]
    assert next_rows(lambda loader: load_stream(loader, folder), 20) == expected[12:32]


def save_stream_as_trained(dataset: PackedDataset, folder: str) -> Any:
    loader = PackedLoader(dataset, 2)
    rows_of(loader, 5)
    save_stream(loader, folder, batches=4)  # the fifth batch is fetched, not trained
    again = PackedLoader(dataset, 2)
    load_stream(again, folder)
    return [rows_of(again, 3)]


def test_save_stream_covers_the_batches_that_were_trained(tmp_path: Path, expected: list[list[int]]) -> None:
    reports = run_ranks(save_stream_as_trained, 2, tmp_path / "run", str(tmp_path / "saved"), make=endless)
    assert in_global_order(reports) == expected[16:28]


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    save_stream(loader_after(1), tmp_path / "saved")
    with pytest.raises(FileExistsError, match="saved is there already; save each checkpoint to a folder of its own"):
        save_stream(loader_after(2), tmp_path / "saved")


class AppState:
    """The pattern of torch's tutorials: one object that holds all there is to save."""

    def __init__(self, loader: PackedLoader) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict["stream"])


@pytest.mark.parametrize("wrap", [lambda loader: loader, AppState, lambda loader: loader.packed])
def test_states_with_the_same_keys_on_all_ranks_are_refused_in_dcp(tmp_path: Path, wrap: Any) -> None:
    loader = loader_after(1)
    with pytest.raises(StateError, match=r"cannot take the state of a Packed.*give it streampack\.StreamState\(loader"):
        dcp.save({"stream": wrap(loader)}, checkpoint_id=tmp_path / "saved")
    save_stream(loader, tmp_path / "right")
    with pytest.raises(StateError, match="cannot take the state of a Packed"):
        dcp.load({"stream": wrap(loader)}, checkpoint_id=tmp_path / "right")


def test_a_checkpoint_of_another_stream_or_without_one_is_refused_by_name(tmp_path: Path) -> None:
    save_stream(loader_after(3), tmp_path / "saved")
    with pytest.raises(StateError, match=r"saved: cannot resume: .* lanes=12, this stream has lanes=16"):
        load_stream(PackedLoader(packed(epochs=None)), tmp_path / "saved")
    dcp.save({"model": {"weight": torch.zeros(1)}}, checkpoint_id=tmp_path / "model")
    for name in ("model", "nothing"):
        with pytest.raises(StateError, match=f"{name} is not a whole checkpoint that has a stream under 'stream'"):
            load_stream(PackedLoader(endless()), tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop("header"), "the 'header' of the state is missing or damaged"),
        (lambda values: values.update(header=b"{"), "the 'header' of the state is missing or damaged"),
        (lambda values: values.pop("lane.0003"), "the state has no 'lane.0003': it is damaged"),
        (lambda values: values.update({"lane.0003": b"[1"}), r"the state of lane '3' \(of 12\) is damaged"),
        (lambda values: values.update({"lane.0003": b""}), "the state after row 6 lacks lane 3"),
    ],
)
def test_damaged_values_are_refused(change: Any, message: str) -> None:
    values = StreamState(loader_after(3)).state_dict()
    change(values)
    with pytest.raises(StateError, match=message):
        StreamState(PackedLoader(endless())).load_state_dict(values)


# ---- one JSON file ---------------------------------------------------------------------------------------------------


def go_on(dataset: PackedDataset, path: str, load: bool, batches: int) -> Any:
    loader = PackedLoader(dataset, 2)
    if load:
        load_json(loader, path)
    rows = rows_of(loader, batches)
    save_json(loader, path)
    return [rows, json.loads(Path(path).read_text())]


def test_one_json_file_goes_on_on_any_number_of_ranks(tmp_path: Path, expected: list[list[int]]) -> None:
    path = str(tmp_path / "new" / "folder" / "stream.json")
    rows: list[list[int]] = []
    for number, world_size in enumerate((4, 1, 3)):
        reports = run_ranks(go_on, world_size, tmp_path / str(world_size), path, number > 0, 4, make=endless)
        rows += in_global_order(reports)
        assert all(report[1] == reports[0][1] for report in reports)  # it was there when save_json returned
    assert rows == expected[: 2 * 4 * (4 + 1 + 3)]
    assert os.listdir(Path(path).parent) == ["stream.json"]
    assert json.loads(Path(path).read_text())["rows"] == len(rows)


def errors_of_a_rank(dataset: PackedDataset, folder: str) -> Any:
    """What each rank is told where one rank fails."""
    loader = PackedLoader(dataset, 2)
    rows_of(loader, 3 + dist.get_rank())
    told = []
    for call in (
        lambda: save_json(loader, f"{folder}/a.json"),
        lambda: save_json(loader, f"{folder}/a.json", batches=4 - dist.get_rank()),
        lambda: save_json(loader, folder, batches=3),
        lambda: load_json(loader, f"{folder}/none.json"),
    ):
        try:
            call()
        except (StateError, OSError) as error:
            told.append([type(error).__name__, str(error)])
    return told


def test_all_ranks_learn_of_the_error_of_one(tmp_path: Path) -> None:
    first, second = run_ranks(errors_of_a_rank, 2, tmp_path / "run", str(tmp_path), make=endless)
    assert first == second
    kinds, texts = zip(*first, strict=True)
    assert kinds == ("StateError", "StateError", "IsADirectoryError", "FileNotFoundError")
    assert "rank 0 was after row 12, rank 1 after row 16; save all ranks after the same step" in texts[0]
    assert "process 0 has no state to save: state_dict(batches=4): this pass has handed out 3 batches" in texts[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def mesh_of_two_by_two(dataset: PackedDataset, folder: str) -> Any:
    rank = dist.get_rank()
    mine = packed(epochs=None, lanes=12, rank=rank // 2, world_size=2)
    loader = PackedLoader(mine, 2)
    rows_of(loader, 3)
    save_json(loader, f"{folder}/stream.json")
    alone = PackedLoader(packed(epochs=None, lanes=12, rank=0, world_size=1), 2)
    rows_of(alone, 1 + rank)
    try:
        save_json(alone, f"{folder}/alone.json")
    except StateError as error:
        return str(error)


def test_ranks_that_read_the_same_rows_count_once(tmp_path: Path, expected: list[list[int]]) -> None:
    told = run_ranks(mesh_of_two_by_two, 4, tmp_path / "run", str(tmp_path), make=endless)
    assert next_rows(lambda loader: load_json(loader, tmp_path / "stream.json"), 9) == expected[12:21]
    assert "processes that read the same rows (rank 0 of 1) are at different places, after row 2 and 4" in told[0]


def test_ranks_without_a_process_group_cannot_save_together(tmp_path: Path) -> None:
    loader = loader_after(1, packed(rank=1, world_size=2))
    with pytest.raises(StateError, match=r"this is rank 1 of 2, and there is no process group.*merge_states"):
        save_json(loader, tmp_path / "stream.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-100], "is damaged, no whole JSON"),
        (lambda text: "", "is damaged, no whole JSON"),
        (lambda text: "[1, 2]", "not a streampack state: list"),
        (lambda text: text.replace('"lanes": {"0": "', '"lanes": {"0": "x'), r"the state of lane '0' \(of 12\)"),
        (lambda text: text.replace('"rows": 6', '"row s": 6'), "has no 'rows': it is damaged"),
        (lambda text: text.replace('"pass": [0, null]', '"pass": 0'), "pass=0 of the state is damaged"),
        (lambda text: text.replace('"version": ', '"version": 9'), r"has format version 9\d, this streampack reads"),
        (lambda text: text.replace('"seq_len": 64', '"seq_len": 32'), "seq_len=32, this stream has seq_len=64"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "stream.json"
    save_json(loader_after(3), path)
    text = change(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    with pytest.raises(StateError, match=f"stream.json.*{message}"):
        load_json(PackedLoader(endless()), path)


# ---- killed, and asked to stop ---------------------------------------------------------------------------------------


def forked(work: Callable[..., Any], *arguments: Any) -> Any:
    """A started process that runs `work`; quicker than one that imports everything anew."""
    process = torch.multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def ends_with(work: Callable[[], Any]) -> int:
    """The exit code of a process that runs `work`: -9 if it was killed."""
    process = forked(work)
    process.join(60)
    return int(process.exitcode)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_while_dcp_writes_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """DCP writes .metadata last, so without it there is no checkpoint."""
    loader = loader_after(3)
    writer = dcp.FileSystemWriter(tmp_path / "saved")
    writer.finish = die  # the data are written, the metadata are not
    assert ends_with(lambda: dcp.save({"stream": StreamState(loader)}, storage_writer=writer)) == -signal.SIGKILL
    assert list((tmp_path / "saved").glob("*.distcp"))
    with pytest.raises(StateError, match="saved is not a whole checkpoint"):
        load_stream(PackedLoader(endless()), tmp_path / "saved")


def test_a_kill_before_save_stream_is_done_leaves_no_folder_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = loader_after(3)
    with monkeypatch.context() as context:
        context.setattr(os, "replace", die)
        assert ends_with(lambda: save_stream(loader, tmp_path / "saved")) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["saved.unfinished"]
    save_stream(loader_after(4), tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_kill_before_save_json_is_done_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    save_json(loader_after(2), tmp_path / "stream.json")
    loader = loader_after(3)
    with monkeypatch.context() as context:
        context.setattr(os, "replace", die)
        assert ends_with(lambda: save_json(loader, tmp_path / "stream.json")) == -signal.SIGKILL
    assert next_rows(lambda loader: load_json(loader, tmp_path / "stream.json"), 4) == expected[4:8]
    save_json(loader_after(3), tmp_path / "stream.json")
    assert [path.name for path in tmp_path.iterdir()] == ["stream.json"]


def slow(blocks: Callable[[], Any]) -> PackedDataset:
    """300 examples; the source gives 150 before it calls `blocks`."""

    def read(shard: int) -> Any:
        for number, example in enumerate(examples(300)):
            if number == 150:
                blocks()
            yield example

    source = FunctionSource(read, num_shards=1, name="slow")
    return PackedDataset(source, seq_len=64, lanes=1, buffer_size=8, shuffle=False, epochs=None)


class Stop(Exception):
    """What a signal handler raises."""


def train_until_sigterm(path: Path, num_workers: int, raises: bool, blocked: Any, trained: Any) -> None:
    stopping = threading.Event()

    def stop(*_: Any) -> None:
        if raises:
            raise Stop
        stopping.set()

    def block() -> None:
        blocked.set()
        if raises:
            threading.Event().wait()  # for ever

    signal.signal(signal.SIGTERM, stop)
    loader = PackedLoader(slow(block), 2, num_workers=num_workers)
    try:
        for _ in loader:
            trained.value += 1  # the step
            if stopping.is_set():
                break
    except Stop:
        pass
    save_json(loader, path, batches=trained.value)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("raises", [False, True])
def test_after_sigterm_the_last_state_is_saved_also_where_the_source_hangs(
    tmp_path: Path, num_workers: int, raises: bool
) -> None:
    context = torch.multiprocessing.get_context("fork")
    blocked, trained = context.Event(), context.Value("i", 0)
    process = forked(train_until_sigterm, tmp_path / "stream.json", num_workers, raises, blocked, trained)
    assert blocked.wait(60)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 0
    done = 2 * trained.value
    alone = rows_of(PackedLoader(slow(bool), 1), done + 20)
    assert next_rows(lambda loader: load_json(loader, tmp_path / "stream.json"), 20, slow(bool)) == alone[done:]


def test_a_thread_that_hangs_in_the_source_does_not_keep_the_end_of_a_pass_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ahead, "STOP_SECONDS", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()

    def source() -> Any:
        yield 1
        hangs.set()
        goes_on.wait()

    work = ahead.WorkAhead(source(), depth=4, stopped=threading.Event())
    assert next(work) == 1
    work.away()
    assert hangs.wait(60)
    work.close()
    assert work._thread.is_alive()
    goes_on.set()
    work._thread.join(60)
    assert not work._thread.is_alive()


def test_an_interrupt_while_a_batch_is_taken_loses_no_rows(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """A signal handler may raise anywhere: here between the rows of a batch that is being put together."""
    loader = PackedLoader(endless(), 4)
    batches = iter(loader)
    rows = rows_of(next(batches) for _ in range(3))
    assert loader._progress is not None
    take, taken = loader._progress.take, []

    def interrupted(given: Any) -> None:
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(given)
        take(given)

    monkeypatch.setattr(loader._progress, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    for state in (loader.state_dict(), loader.state_dict(batches=3)):
        assert rows + next_rows(lambda again, state=state: again.load_state_dict(state), 8) == expected[:20]
