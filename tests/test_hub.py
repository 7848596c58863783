"""Streaming from the Hub as people call it, over a network that misbehaves: real clients, a stand-in on loopback."""

import gzip
import hashlib
import importlib.util
import json
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from streampack import PackedDataset, PackedLoader
from streampack.ranks import resolve_once
from streampack.retry import Retry

from .hub import COMMIT, Client, Hub, Misbehaviour, Request, Trouble, client_process
from .streams import examples, split_evenly, write_jsonl, write_parquet
from .test_ranks import run_ranks

FILES = 8
HAS_ZSTANDARD = importlib.util.find_spec("zstandard") is not None
ZST = pytest.mark.skipif(not HAS_ZSTANDARD, reason="zstandard is not installed")
KINDS = ["parquet", "jsonl", "gz", "zst"]
EACH_KIND = [pytest.param(kind, marks=ZST) if kind == "zst" else kind for kind in KINDS]
"""Repositories org/parquet .. org/zst; org/long has files that take several requests."""
CONFIGS = """---
configs:
- config_name: all
  default: true
  data_files: part-*.jsonl
- config_name: split
  data_files:
  - split: train
    path: part-00[0-5].jsonl
  - split: test
    path: part-00[67].jsonl
---
# A data set with two configurations
"""
SOON = Retry(attempts=8, first_wait=0.01, max_wait=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repositories: each has 8 files of a kind, with the same 400 examples; org/long 4 files of 600."""
    folder = tmp_path_factory.mktemp("repositories")
    parts = split_evenly(examples(400), FILES)
    for kind in [*KINDS, "long"]:
        (folder / kind).mkdir()
    write_jsonl(folder / "long", split_evenly(examples(2400), 4))
    write_parquet(folder / "parquet", parts, row_group_size=20)
    for file in map(Path, write_jsonl(folder / "jsonl", parts)):
        (folder / "gz" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        if HAS_ZSTANDARD:
            import zstandard

            (folder / "zst" / f"{file.name}.zst").write_bytes(zstandard.compress(file.read_bytes()))
    (folder / "jsonl" / "README.md").write_text(CONFIGS)
    return folder


def files_of(folder: Path, kind: str) -> list[Path]:
    return sorted((folder / kind).glob("part-*"))


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        yield hub


@pytest.fixture(scope="module")
def shared_client(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with client_process(hub, tmp_path_factory.mktemp("home")) as client:
        yield client


@pytest.fixture
def client(shared_client: Client, hub: Hub) -> Iterator[Client]:
    """The process that most tests share, and a network that behaves."""
    hub.misbehave(None)
    yield shared_client
    hub.misbehave(None)


# ---- what runs in the client ------------------------------------------------------------------------------------

_loaded: dict[str, Any] = {}


def load(repo: str, config: str | None = None, split: str = "train", data_files: Any = None, **options: Any) -> Any:
    """As people call it; once in a process, so that what a test counts is reading."""
    key = json.dumps([repo, config, split, data_files, options])
    if key not in _loaded:
        _loaded[key] = datasets.load_dataset(
            f"org/{repo}", config, split=split, streaming=True, data_files=data_files, **options
        )
    return _loaded[key]


def load_only(repo: str) -> None:
    load(repo)


def loader_of(stream: Any, *, num_workers: int = 0, method: str = "fork", retry: Retry = SOON) -> PackedLoader:
    settings = {"seq_len": 64, "lanes": 4, "buffer_size": 8, "shuffle_block": 10, "seed": 3, "source_name": "test"}
    dataset = PackedDataset(stream, None, retry=retry, **settings)
    context = method if num_workers else None
    return PackedLoader(dataset, 2, num_workers=num_workers, multiprocessing_context=context)


def rows_of(loader: PackedLoader, batches: int | None = None) -> list[list[int]]:
    rows: list[list[int]] = []
    for number, batch in enumerate(loader, start=1):
        rows += batch["input_ids"].reshape(-1, 64).tolist()
        if number == batches:
            break
    return rows


def digest_of(rows: list[list[int]]) -> str:
    assert len(rows) > 50
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def read(
    repo: str, config: str | None = None, split: str = "train", data_files: Any = None, *, retry: Retry = SOON
) -> str:
    """A hash of all rows of a pass."""
    return digest_of(rows_of(loader_of(load(repo, config, split, data_files), retry=retry)))


def read_with(retry: Retry, repo: str) -> str:
    return read(repo, retry=retry)


def read_in_workers(repo: str, method: str) -> str:
    return digest_of(rows_of(loader_of(load(repo), num_workers=2, method=method)))


def read_and_resume(repo: str, num_workers: int) -> str:
    """The same, cut after 7 batches and resumed from the state."""
    loader = loader_of(load(repo), num_workers=num_workers)
    rows = rows_of(loader, 7)
    again = loader_of(load(repo), num_workers=num_workers)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return digest_of(rows + rows_of(again))


CHUNK = 8_000


@contextmanager
def small_requests() -> Iterator[None]:
    """Files are fetched in requests of about 2 * CHUNK bytes."""
    from huggingface_hub.hf_file_system import HfFileSystemFile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HfFileSystemFile, "DEFAULT_BLOCK_SIZE", CHUNK)
        yield


def load_long() -> None:
    load("long", chunksize=CHUNK)


def read_long() -> str:
    with small_requests():
        return digest_of(rows_of(loader_of(load("long", chunksize=CHUNK))))


@dataclass
class Failed:
    """What a pass came to that could not go on."""

    type: str
    told: str
    seconds: float
    rows: list[list[int]]
    state: str


def read_until_it_fails(num_workers: int) -> Failed:
    retry = Retry(attempts=3, first_wait=0.01)
    loader = loader_of(load("long", chunksize=CHUNK), num_workers=num_workers, retry=retry)
    rows: list[list[int]] = []
    began = time.monotonic()
    kind, told = "", ""
    try:
        with small_requests():
            for batch in loader:
                rows += batch["input_ids"].reshape(-1, 64).tolist()
    except Exception as error:
        kind, told = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return Failed(kind, told, time.monotonic() - began, rows, json.dumps(loader.state_dict()))


def resume_long(rows: list[list[int]], state: str) -> str:
    loader = loader_of(load("long", chunksize=CHUNK))
    loader.load_state_dict(json.loads(state))
    return digest_of(rows + rows_of(loader))


def source_of(repo: str) -> tuple[str, list[list[tuple[str, int | str, int]]]]:
    """(name of the source, provenance of the first batch)"""
    loader = PackedLoader(PackedDataset(load(repo), None, seq_len=64, lanes=4), 2)
    next(iter(loader))
    return loader.packed.stream.parts[0].source.name, loader.provenance


def kill_a_worker(repo: str) -> tuple[str, str]:
    """(message, hash of the rows before it and of those that its state gives)."""
    loader = loader_of(load(repo), num_workers=2)
    rows: list[list[int]] = []
    message = ""
    try:
        for number, batch in enumerate(loader):
            rows += batch["input_ids"].reshape(-1, 64).tolist()
            if number == 3:
                multiprocessing.active_children()[0].kill()
    except RuntimeError as error:
        message = str(error)
    again = loader_of(load(repo))
    again.load_state_dict(loader.state_dict())
    return message, digest_of(rows + rows_of(again))


# ---- the same rows as from the disk -----------------------------------------------------------------------------


def local_rows(files: list[Path]) -> str:
    """What the same files give that are read from the disk."""
    kind, names = "parquet" if files[0].suffix == ".parquet" else "json", list(map(str, files))
    stream = datasets.load_dataset(kind, data_files=names, split="train", streaming=True)
    return digest_of(rows_of(loader_of(stream)))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    return {kind: local_rows(files_of(folder, kind)) for kind in [*KINDS, "long"] if files_of(folder, kind)}


@pytest.mark.parametrize("kind", EACH_KIND)
def test_files_on_the_hub_give_the_rows_of_the_same_files_on_the_disk(
    client: Client, expected: dict[str, str], kind: str
) -> None:
    assert client(read, kind) == expected[kind]


def test_splits_of_a_config_give_the_rows_of_their_files(client: Client, folder: Path) -> None:
    files = files_of(folder, "jsonl")
    assert client(read, "jsonl", "split", "train") == local_rows(files[:6])
    assert client(read, "jsonl", "all") == local_rows(files)


def test_a_glob_of_data_files_gives_the_rows_of_the_files_it_matches(client: Client, folder: Path) -> None:
    files = files_of(folder, "parquet")
    assert client(read, "parquet", None, "train", "part-00[1-7].parquet") == local_rows(files[1:])


def test_source_and_provenance_name_revision_and_file(client: Client) -> None:
    name, provenance = client(source_of, "jsonl")
    assert f"hf://datasets/org/jsonl@{COMMIT}/part-000.jsonl" in name
    shards = {shard for row in provenance for _, shard, _ in row}
    assert shards
    assert shards <= {f"hf://datasets/org/jsonl@{COMMIT}/part-{number:03}.jsonl" for number in range(FILES)}


# ---- how often it asks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "method"), [("parquet", "fork"), pytest.param("gz", "spawn", marks=pytest.mark.slow)])
def test_neither_thread_nor_workers_ask_the_hub_for_anything_but_each_file_once(
    hub: Hub, tmp_path: Path, expected: dict[str, str], kind: str, method: str
) -> None:
    hub.misbehave(None)
    with client_process(hub, tmp_path / "home", timeout=20) as client:
        client(load_only, kind)
        assert sum(hub.count("api").values()) >= 2
        for function, arguments in ((read, ()), (read_in_workers, (method,))):
            hub.misbehave(Misbehaviour("unavailable", kind="api"))  # nor would they get an answer
            assert client(function, kind, *arguments) == expected[kind]
            assert hub.count("api") == hub.count("head") == {}
            assert hub.count("data") == {f"{kind}/{file.name}": 1 for file in files_of(hub.folder, kind)}


def on_each_rank(_: Any, repo: str) -> list[list[int]]:
    load_it = partial(datasets.load_dataset, f"org/{repo}", split="train", streaming=True)
    return [row for row in rows_of(loader_of(resolve_once(load_it))) if any(row)]  # not those of padding at the end


def rows_of_ranks(world_size: int, folder: Path, repo: str) -> list[list[list[int]]]:
    return run_ranks(on_each_rank, world_size, folder / str(world_size), repo)


def test_two_ranks_that_resolve_once_ask_as_much_as_one(hub: Hub, tmp_path: Path) -> None:
    asked, rows = [], []
    with client_process(hub, tmp_path / "home", timeout=20) as client:
        for world_size in (1, 2):  # new processes, which know nothing of each other
            hub.misbehave(None)
            rows.append(client(rows_of_ranks, world_size, tmp_path, "jsonl"))
            asked.append(hub.count("api"))
    assert asked[0] == asked[1]
    assert sum(asked[0].values()) >= 2
    assert sorted(rows[0][0]) == sorted(rows[1][0] + rows[1][1])
    assert min(len(rows[1][0]), len(rows[1][1])) > 20


# ---- a network that misbehaves ----------------------------------------------------------------------------------

TROUBLES: list[Trouble] = ["hang", "cut", "short", "busy", "unavailable"]


@pytest.mark.parametrize("every", [2, pytest.param(3, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("kind", EACH_KIND)
def test_with_every_few_requests_failing_the_rows_are_the_same(
    client: Client, hub: Hub, expected: dict[str, str], kind: str, trouble: Trouble, every: int
) -> None:
    client(load_only, kind)
    hub.misbehave(Misbehaviour(trouble, every=every))
    assert client(read, kind) == expected[kind]
    assert hub.troubles() >= FILES // every


@pytest.mark.parametrize("every", [5, 6])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_failures_in_the_middle_of_files_neither_repeat_nor_lose_examples(
    client: Client, hub: Hub, expected: dict[str, str], trouble: Trouble, every: int
) -> None:
    client(load_long)
    hub.misbehave(None)
    assert client(read_long) == expected["long"]
    assert set(hub.count("data").values()) <= {3, 4}, hub.count("data")  # fewer than `every`, so each file has an end
    hub.misbehave(Misbehaviour(trouble, every=every))
    assert client(read_long) == expected["long"]
    assert hub.troubles() >= 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "trouble"),
    [("parquet", "cut"), ("jsonl", "hang"), ("gz", "short"), pytest.param("zst", "busy", marks=ZST)],
)
def test_a_state_saved_amid_failures_resumes_exactly_amid_failures(
    client: Client, hub: Hub, expected: dict[str, str], kind: str, trouble: Trouble, num_workers: int
) -> None:
    client(load_only, kind)
    hub.misbehave(Misbehaviour(trouble, every=3))
    assert client(read_and_resume, kind, num_workers) == expected[kind]
    assert hub.troubles() >= 4


@pytest.mark.parametrize(("num_workers", "after"), [(0, 0), (0, 2), (2, 0)])
def test_a_file_that_stays_away_is_an_error_with_file_index_and_attempts(
    client: Client, hub: Hub, expected: dict[str, str], num_workers: int, after: int
) -> None:
    client(load_long)
    hub.misbehave(Misbehaviour("unavailable", path="long/part-001.jsonl", after=after))
    failed = client(read_until_it_fails, num_workers)
    place = re.search(r"while reading .*shard (\S+), index (\d+), gave up after 3 attempts in (\S+) s", failed.told)
    assert place, failed.told
    assert place[1] == f"hf://datasets/org/long@{COMMIT}/part-001.jsonl"
    assert (int(place[2]) > 0) == (after > 0)
    assert float(place[3]) <= failed.seconds < 20
    assert failed.type in ("ConnectionError", "HTTPError", "HfHubHTTPError", "RuntimeError")  # as the client's version
    hub.misbehave(None)
    assert client(resume_long, failed.rows, failed.state) == expected["long"]


def gaps_after(requests: list[Request], answer: str) -> list[float]:
    """Seconds by the server's clock from each request that was answered so to the next one."""
    data = [request for request in requests if request.kind == "data"]
    return [later.at - one.at for one, later in pairwise(data) if one.answer == answer]


def test_retry_after_is_honoured_up_to_the_longest_wait(client: Client, hub: Hub, expected: dict[str, str]) -> None:
    for retry_after, max_wait, least, most in (("1", 20, 1, 20), ("30", 0.2, 0.2, 10)):
        client(load_only, "jsonl")
        hub.misbehave(Misbehaviour("busy", times=2, every=3, retry_after=retry_after))
        assert client(read_with, Retry(first_wait=0.01, max_wait=max_wait), "jsonl") == expected["jsonl"]
        gaps = gaps_after(hub.requests, "busy")
        assert len(gaps) == 2
        assert all(least <= gap < most for gap in gaps)


def test_a_killed_worker_is_a_clear_error_and_the_state_it_leaves_resumes(
    client: Client, expected: dict[str, str]
) -> None:
    message, rows = client(kill_a_worker, "parquet")
    assert re.search(r"DataLoader worker .*(killed by signal|exited unexpectedly)", message)
    assert rows == expected["parquet"]


# ---- resolve_once -----------------------------------------------------------------------------------------------


class NotPickled(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _called(folder: str) -> list[int]:
    (Path(folder) / str(torch.distributed.get_rank())).touch()
    return [1, 2, 3]


def _fail(error: BaseException) -> None:
    raise error


def report(_: Any, folder: str) -> list[str]:
    """What resolve_once gives or raises on this rank, for several functions."""
    functions: list[Callable[[], Any]] = [
        partial(_called, folder),
        partial(_fail, FileNotFoundError("no such data set")),
        partial(_fail, NotPickled(1, 2)),
        partial(_fail, KeyboardInterrupt()),
        lambda: lambda: 0,
    ]
    told = []
    for function in functions:
        try:
            told.append(repr(resolve_once(function)))
        except BaseException as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_rank_0_alone_calls_and_every_rank_gets_the_result_or_the_error(tmp_path: Path) -> None:
    (tmp_path / "called").mkdir()
    first, second = run_ranks(report, 2, tmp_path / "ranks", str(tmp_path / "called"))
    assert [path.name for path in (tmp_path / "called").iterdir()] == ["0"]
    assert first[:4] == [
        "[1, 2, 3]",
        "FileNotFoundError: no such data set",
        "NotPickled: 1 and 2",
        "KeyboardInterrupt: ",
    ]
    assert second[:2] == first[:2]
    assert second[2:4] == ["RuntimeError: rank 0: NotPickled: 1 and 2", "KeyboardInterrupt: "]
    assert first[4] == second[4]
    assert re.match(r"TypeError: resolve_once: the result, a function, cannot be pickled .*top of a module", first[4])


def test_without_a_process_group_it_is_a_plain_call() -> None:
    assert resolve_once(lambda: 3) == 3
    with pytest.raises(KeyError):
        resolve_once(lambda: {}["a"])
