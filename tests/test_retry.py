"""Retries around reading: what is tried again and what is not, how long it waits, and that nothing comes twice."""

import gzip
import http.client
import importlib.util
import io
import json
import logging
import pickle
import random
import re
import ssl
import threading
import time
import urllib.error
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.message import Message
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import torch
import urllib3

from streampack import PackedLoader, StateError
from streampack.retry import DOUBTFUL_RETRIES, ReadStats, Retry, kind_of, read_with_retries

from .streams import Shards, examples, make_stream, split_evenly
from .test_loader import packed, rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:source .* processes read all of them"),
]

FAST = Retry(attempts=4, first_wait=0.001, max_wait=0.002)


class Scripted:
    """Numbers 0 .. 9 of shard 0. `faults` says for an index which errors come there, one after the other, before it."""

    name, num_shards = "scripted", 1

    def __init__(self, faults: dict[int, list[Exception]], *, in_tables: bool = False) -> None:
        self.faults = faults
        self.in_tables = in_tables
        self.starts: list[int] = []

    def read(self, shard: int, start: int) -> Iterator[Any]:
        self.starts.append(start)
        for index in range(start, 10):
            if self.faults.get(index):
                raise self.faults[index].pop(0)
            if not self.in_tables:
                yield {"n": index}
            elif index % 3 == 0 or index == start:
                yield pa.table({"n": list(range(index, min(10, index // 3 * 3 + 3)))})


def read(source: Any, *, retry: Retry = FAST, **options: Any) -> tuple[list[int], ReadStats]:
    """(the numbers that come, what it cost)."""
    stats, numbers = ReadStats(), []
    for item in read_with_retries(source, 0, 0, retry=retry, stats=stats, **options):
        numbers += item["n"].to_pylist() if isinstance(item, pa.Table) else [item["n"]]
    return numbers, stats


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# ---- nothing twice, nothing left out ----------------------------------------------------------------------------


def test_after_an_outage_reading_goes_on_where_it_was() -> None:
    outage = [TimeoutError("slow"), OSError("503"), FileNotFoundError("org/name is not there just now")]
    source = Scripted({5: outage})
    numbers, stats = read(source)
    assert numbers == list(range(10))
    assert source.starts == [0, 5, 5, 5]
    assert stats.retries == 3


def test_tables_count_as_the_examples_that_they_hold() -> None:
    source = Scripted({6: [EOFError()], 9: [EOFError()]}, in_tables=True)
    numbers, stats = read(source)
    assert numbers == list(range(10))
    assert source.starts == [0, 6, 9]
    assert stats.retries == 2


def test_lists_of_what_is_not_parsed_yet_count_as_the_examples_that_they_hold() -> None:
    class Raw(Scripted):
        def read(self, shard: int, start: int) -> Iterator[Any]:
            raise AssertionError("read_unparsed is there")

        def read_unparsed(self, shard: int, start: int) -> Iterator[list[bytes]]:
            for table in super().read(shard, start):
                yield [str(n).encode() for n in table["n"].to_pylist()]

        def parse_one(self, raw: bytes) -> Any:
            raise AssertionError("not asked for here")

    source, stats = Raw({6: [EOFError()], 9: [EOFError()]}, in_tables=True), ReadStats()
    lists: Any = list(read_with_retries(source, 0, 0, retry=FAST, stats=stats))
    assert lists == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], [b"6", b"7", b"8"], [b"9"]]
    assert source.starts == [0, 6, 9]


def test_attempts_count_anew_once_an_example_has_come() -> None:
    source = Scripted({index: [TimeoutError()] * 3 for index in range(10)})
    numbers, stats = read(source, retry=FAST)
    assert numbers == list(range(10))
    assert stats.retries == 30


@pytest.mark.parametrize("every", [2, 3, 7])
def test_the_rows_of_a_disturbed_source_are_those_of_a_calm_one(every: int) -> None:
    class Disturbed(Shards):
        asked = failed = 0

        def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
            for example in self.parts[shard][start:]:
                self.asked += 1
                if self.asked % every == 0:
                    self.failed += 1
                    raise ConnectionResetError("the line is down")
                yield example

    parts = split_evenly(examples(300), 5)  # of 3 lanes: one shard each, and two that are dealt among them
    calm, disturbed = Shards(parts), Disturbed(parts)
    retry = Retry(first_wait=0.0)
    rows = [
        given.row.ids.tolist()
        for source in (calm, disturbed)
        for given in _all_rows(make_stream(source, lanes=3, epochs=2, retry=retry))
    ]
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]
    assert disturbed.failed > 200 // every


def _all_rows(stream: Any) -> list[Any]:
    from streampack.hosting import Host

    return [given for given in stream.rows(Host(lanes=3, first_row=0, rank=0, world_size=1)) if given.row is not None]


# ---- giving up --------------------------------------------------------------------------------------------------


def test_the_last_error_keeps_its_type_and_says_place_attempts_and_seconds() -> None:
    source = Scripted({7: [requests.ConnectionError("refused")] * 9})
    with pytest.raises(requests.ConnectionError, match="refused") as raised:
        read(source)
    assert source.starts == [0, 7, 7, 7]
    told = text_of(raised.value)
    assert re.search(r"while reading source 'scripted', shard 0, index 7, gave up after 4 attempts in \d\.\d s; ", told)
    assert "Retry(attempts=4, " in told


def test_it_gives_up_before_max_seconds_are_over() -> None:
    source = Scripted({0: [TimeoutError()] * 100})
    began = time.monotonic()
    with pytest.raises(TimeoutError) as raised:
        read(source, retry=Retry(attempts=100, first_wait=0.1, max_wait=0.1, max_seconds=0.5))
    assert time.monotonic() - began < 5
    assert 2 <= len(source.starts) <= 11  # waits of 0.05 to 0.1 s
    assert f"gave up after {len(source.starts)} attempts" in text_of(raised.value)


@pytest.mark.parametrize(
    "error", [KeyError("text"), ValueError("no"), TypeError("no"), RuntimeError("no"), MemoryError()]
)
def test_an_error_of_a_function_is_raised_at_once(error: Exception) -> None:
    source = Scripted({4: [error]})
    with pytest.raises(type(error)) as raised:
        read(source)
    assert raised.value is error
    assert source.starts == [0]
    assert text_of(error).endswith("while reading source 'scripted', shard 0, index 4")


def test_ctrl_c_is_not_an_error_to_try_again() -> None:
    source = Scripted({4: [KeyboardInterrupt()]})  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        read(source)
    assert source.starts == [0]


def test_a_stop_iteration_inside_is_no_silent_end() -> None:
    class Plain(Scripted):
        def read(self, shard: int, start: int) -> Iterator[Any]:
            return next(iter([]))  # not a generator

    for source in (Plain({}), Scripted({4: [StopIteration()]})):
        with pytest.raises(RuntimeError, match="StopIteration"):
            read(source)


def test_bytes_that_cannot_be_parsed_are_asked_for_twice_more_and_not_for_minutes() -> None:
    cut_on_the_way = Scripted({3: [pa.ArrowInvalid("JSON parse error"), EOFError()]})
    assert read(cut_on_the_way)[0] == list(range(10))
    bad = Scripted({3: [pa.ArrowInvalid("JSON parse error")] * 9})
    with pytest.raises(pa.ArrowInvalid) as raised:
        read(bad, retry=Retry(attempts=50, first_wait=0.0))
    assert bad.starts == [0] + [3] * DOUBTFUL_RETRIES
    assert "gave up after 3 attempts" in text_of(raised.value)
    assert "is the file whole" in text_of(raised.value)


# ---- what is worth another attempt ------------------------------------------------------------------------------


def raised_by(action: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the errors are what is collected
        action()
    return raised.value


def from_(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def while_handling(error: Exception, handled: Exception) -> Exception:
    error.__context__ = handled
    return error


def http_error(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(f"{status}", response=response)


def of_module(module: str, name: str, **values: Any) -> Exception:
    """An error of a library that may not be installed here: the class is known by the name of its module."""
    error: Exception = type(name, (Exception,), {"__module__": module})("no")
    vars(error).update(values)
    return error


TRANSIENT = {
    "TimeoutError": TimeoutError(),
    "ConnectionResetError": ConnectionResetError(104, "reset by peer"),
    "FileNotFoundError of a hub": FileNotFoundError("datasets/org/name@main/a.parquet"),
    "FileNotFoundError with a URL": FileNotFoundError(2, "No such file", "abfs://bucket/a.parquet"),
    "EOFError": EOFError(),
    "IncompleteRead": http.client.IncompleteRead(b""),
    "ssl": ssl.SSLError("handshake"),
    "requests": requests.exceptions.ChunkedEncodingError(),
    "urllib3": urllib3.exceptions.ProtocolError(),
    "429": http_error(429),
    "404": http_error(404),
    "503": http_error(503),
    "urllib 503": urllib.error.HTTPError("http://localhost", 503, "busy", Message(), None),
    "fsspec": fsspec.exceptions.FSTimeoutError(),
    "httpx": of_module("httpx", "ReadTimeout"),
    "aiohttp": of_module("aiohttp.client_exceptions", "ClientPayloadError"),
    "google": of_module("google.api_core.exceptions", "ServiceUnavailable", code=503),
    "azure": of_module("azure.core.exceptions", "ServiceResponseError"),
    "botocore": of_module("botocore.exceptions", "ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
    "old asyncio": of_module("asyncio.exceptions", "TimeoutError"),
    "wrapped": from_(RuntimeError("cannot read"), from_(ValueError(), TimeoutError())),
}
DOUBTFUL = {
    "ArrowInvalid": pa.ArrowInvalid("JSON parse error"),
    "JSON": raised_by(lambda: json.loads('{"text": "a')),
    "UTF-8": raised_by(lambda: "ä".encode()[:1].decode()),
    "not gzip": raised_by(lambda: gzip.decompress(b"no gzip")),
    "deflate": raised_by(lambda: zlib.decompress(b"no deflate")),
    "zstd": of_module("zstandard.backend_c", "ZstdError"),
    "cut Parquet": raised_by(lambda: pq.read_table(pa.BufferReader(b"PAR1" + b"x" * 50))),
    "401": http_error(401),
    "403": http_error(403),
    "azure 403": of_module("azure.core.exceptions", "ClientAuthenticationError", status_code=403),
}
LASTING = {
    "a missing file": raised_by(Path("/not/there").read_bytes),
    "a missing file, by Arrow": raised_by(lambda: pa.OSFile("/not/there")),
    "a folder": raised_by(Path("/").read_bytes),
    "no permission": PermissionError(13, "Permission denied", "/data/a"),
    "KeyError": KeyError("text"),
    "TypeError": TypeError(),
    "ValueError": ValueError(),
    "MemoryError": MemoryError(),
    "KeyError while handling an outage": while_handling(KeyError(), TimeoutError()),
    "offline": type("OfflineModeIsEnabled", (ConnectionError,), {"__module__": "huggingface_hub.errors"})("offline"),
    "a wrong address": urllib3.exceptions.LocationParseError("x"),
    "cause is a missing file": from_(RuntimeError(), FileNotFoundError(2, "No such file", "/not/there")),
}


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        pytest.param(kind, error, id=name)
        for kind, errors in (("transient", TRANSIENT), ("doubtful", DOUBTFUL), ("lasting", LASTING))
        for name, error in errors.items()
    ],
)
def test_errors_are_told_apart(kind: str, error: Exception) -> None:
    assert kind_of(error) == kind


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("httpx", "ReadTimeout", ["slow"]),
        ("httpx", "RemoteProtocolError", ["cut"]),
        ("httpx2", "ReadTimeout", ["slow"]),
        ("aiohttp", "ServerDisconnectedError", []),
        ("aiohttp", "ClientPayloadError", []),
        ("botocore.exceptions", "IncompleteReadError", []),
    ],
)
def test_errors_of_libraries_that_are_here_are_known_by_their_module(
    module: str, name: str, arguments: list[Any]
) -> None:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    kind = getattr(importlib.import_module(module), name)
    error = kind(*arguments) if "botocore" not in module else kind(actual_bytes=1, expected_bytes=2)
    assert kind_of(error) == "transient"


def test_a_parquet_file_that_is_corrupt_inside_is_not_taken_for_an_outage(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[100:200] = b"\xff" * 100
    error = raised_by(lambda: pq.read_table(io.BytesIO(content)))
    assert type(error) is OSError
    assert kind_of(error) == "doubtful"


# ---- waits ------------------------------------------------------------------------------------------------------


def waits_of(errors: list[Exception], retry: Retry, caplog: pytest.LogCaptureFixture) -> list[float]:
    """The waits it decides on, as it logs them; they are not waited for."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="streampack.retry"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("streampack.retry._sleep", lambda *_: True)
        read(Scripted({5: errors}), retry=retry)
    return [record.args[-1] for record in caplog.records]  # type: ignore[index, misc]


def test_waits_double_up_to_the_longest_and_each_is_shortened_by_at_most_a_half(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits = waits_of([TimeoutError() for _ in range(7)], Retry(first_wait=1, max_wait=20, max_seconds=1e9), caplog)
    whole = [1, 2, 4, 8, 16, 20, 20]
    assert len(waits) == 7
    assert all(full / 2 <= wait <= full for wait, full in zip(waits, whole, strict=True))


def test_jitter_neither_reads_nor_sets_the_global_random_state(caplog: pytest.LogCaptureFixture) -> None:
    retry = Retry(first_wait=1, max_seconds=1e9)
    drawn = []
    for _ in range(2):
        random.seed(0)
        torch.manual_seed(0)
        before = random.getstate()
        drawn.append(waits_of([TimeoutError() for _ in range(5)], retry, caplog))
        assert random.getstate() == before
    assert drawn[0] != drawn[1]  # ranks with the same seed do not come back together


def with_headers(headers: dict[str, str]) -> Exception:
    response = requests.Response()
    response.status_code = 429
    response.headers.update(headers)
    return requests.HTTPError("busy", response=response)


@pytest.mark.parametrize(
    "error",
    [
        with_headers({"Retry-After": "30"}),
        with_headers({"retry-after": "30.0"}),
        with_headers({"Retry-After": format_datetime(datetime.now(timezone.utc) + timedelta(seconds=3600))}),
        with_headers({"RateLimit": '"api";r=0;t=30'}),
        from_(ConnectionError("Server Disconnected"), with_headers({"Retry-After": "30"})),
        of_module(
            "botocore.exceptions", "ClientError", response={"ResponseMetadata": {"HTTPHeaders": {"retry-after": "30"}}}
        ),
        of_module("aiohttp", "ClientResponseError", headers={"Retry-After": "30"}),
    ],
    ids=["seconds", "lower case", "a date", "RateLimit", "of the cause", "botocore", "aiohttp"],
)
def test_the_wait_is_at_least_what_the_server_asks_for_but_never_above_the_longest(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    (wait,) = waits_of([error], Retry(first_wait=0.5), caplog)
    assert 30 <= wait <= 60
    (capped,) = waits_of([error], Retry(first_wait=0.5, max_wait=10), caplog)
    assert capped == 10


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "soon"}, {"RateLimit": '"api";r=17;t=30'}])
def test_what_a_server_does_not_say_or_says_badly_is_passed_over(
    headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    (wait,) = waits_of([with_headers(headers)], Retry(first_wait=0.5), caplog)
    assert 0.25 <= wait <= 0.5


# ---- a pass that is closed --------------------------------------------------------------------------------------


def test_a_reader_that_waits_gives_up_when_its_pass_is_closed() -> None:
    closed = threading.Event()
    began = time.monotonic()
    threading.Timer(0.2, closed.set).start()
    source = Scripted({4: [ConnectionError("down")] * 9})
    with pytest.raises(ConnectionError, match="down"):
        read(source, retry=Retry(first_wait=60), closed=closed.is_set)
    assert time.monotonic() - began < 5
    assert source.starts == [0]


class GoesDown:
    """After some examples the line is down, and stays down; a file says that it is."""

    name, num_shards = "goes down", 1

    def __init__(self, down: Path, *, count: int = 30) -> None:
        self.down = down
        self.count = count

    def read(self, shard: int, start: int) -> Iterator[pa.Table]:
        if start < self.count:
            yield pa.Table.from_pylist(examples(self.count)[start:])
        self.down.touch()
        raise ConnectionError("down")


@pytest.mark.parametrize(
    ("num_workers", "persistent"), [(0, False), (2, False), (2, True)], ids=["thread", "workers", "persistent"]
)
def test_a_break_does_not_wait_for_a_retry(tmp_path: Path, num_workers: int, persistent: bool) -> None:
    source = GoesDown(tmp_path / "down")
    dataset = packed(source, source_name=None, retry=Retry(first_wait=60), lanes=1)
    loader = PackedLoader(dataset, 1, num_workers=num_workers, persistent_workers=persistent, prefetch_factor=2)
    batches = iter(loader)
    next(batches)
    deadline = time.monotonic() + 30
    while not source.down.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    batches.close()  # type: ignore[attr-defined]
    del loader, batches
    assert time.monotonic() - began < 4.5  # torch waits 5 s for a worker that does not end, and then kills it


def test_a_break_does_not_wait_for_a_read_that_hangs(tmp_path: Path) -> None:
    class Hangs(GoesDown):
        let_go = threading.Event()

        def read(self, shard: int, start: int) -> Iterator[pa.Table]:
            yield pa.Table.from_pylist(examples(self.count))
            self.down.touch()
            self.let_go.wait(60)  # as a socket whose other end is silent

    source = Hangs(tmp_path / "down")
    batches = iter(PackedLoader(packed(source, source_name=None, lanes=1), 1, prefetch_factor=2))
    next(batches)
    began = time.monotonic()
    batches.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 5
    source.let_go.set()


def test_batches_made_before_an_outage_are_handed_out_while_it_lasts(tmp_path: Path) -> None:
    source = GoesDown(tmp_path / "down", count=40)
    whole = rows_of(PackedLoader(packed(examples(40), lanes=1, shuffle=False), 1))
    dataset = packed(source, source_name=None, lanes=1, shuffle=False, retry=Retry(first_wait=60))
    batches = iter(PackedLoader(dataset, 1, prefetch_factor=8))  # it hands over 4 at a time
    began = time.monotonic()
    rows = [next(batches)["input_ids"].tolist() for _ in range(3)]
    assert time.monotonic() - began < 20
    assert [row for (row,) in rows] == whole[:3]
    batches.close()  # type: ignore[attr-defined]


def test_batches_made_before_an_error_come_before_it(tmp_path: Path) -> None:
    source = GoesDown(tmp_path / "down", count=40)
    whole = rows_of(PackedLoader(packed(examples(40), lanes=1, shuffle=False), 1))
    dataset = packed(source, source_name=None, lanes=1, shuffle=False, retry=Retry(attempts=1))
    rows: list[list[int]] = []
    with pytest.raises(ConnectionError, match="down"):
        rows.extend(batch["input_ids"].tolist()[0] for batch in PackedLoader(dataset, 1, prefetch_factor=8))
    assert len(rows) == 3
    assert rows == whole[:3]


# ---- settings and statistics ------------------------------------------------------------------------------------


def test_retry_is_no_part_of_the_stream_s_identity() -> None:
    loader = PackedLoader(packed(retry=Retry(attempts=3)), 2)
    rows = rows_of(loader, 3)
    again = PackedLoader(packed(), 2)
    again.load_state_dict(loader.state_dict())
    assert rows + rows_of(again) == rows_of(PackedLoader(packed(), 2))
    with pytest.raises(StateError):  # other things are
        PackedLoader(packed(seed=4), 2).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attempts": 0}, r"Retry\(attempts=0\): pass a number of at least 1"),
        ({"attempts": 2.5}, r"attempts=2\.5"),
        ({"first_wait": -1}, r"first_wait=-1"),
        ({"max_seconds": "60"}, r"max_seconds='60'"),
        ({"max_wait": float("nan")}, r"max_wait=nan"),
    ],
)
def test_numbers_that_cannot_be_used_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retry(**values)


def test_anything_but_a_retry_is_refused() -> None:
    with pytest.raises(TypeError, match=r"retry=3 is int; pass streampack\.Retry\(attempts=\.\.\.\)"):
        packed(retry=3)


def test_statistics_know_the_longest_wait_and_its_shard() -> None:
    class Slow(Shards):
        def read(self, shard: int, start: int) -> Iterator[dict[str, Any]]:
            for index, example in enumerate(self.parts[shard][start:]):
                if (shard, index) == (1, 2):
                    time.sleep(0.05)
                yield example

    stats, source = ReadStats(), Slow(split_evenly(examples(30), 3))
    for shard in range(3):
        list(read_with_retries(source, shard, 0, retry=FAST, stats=stats))
    assert stats.slowest_shard == 1
    assert 0.05 <= stats.longest_wait < 5
    assert (stats.retries, stats.seconds_waited) == (0, 0.0)


def test_waits_between_attempts_count_and_are_part_of_the_wait_for_the_item() -> None:
    _, stats = read(Scripted({5: [TimeoutError(), TimeoutError()]}), retry=Retry(first_wait=0.02, max_wait=0.02))
    assert stats.retries == 2
    assert 0.02 <= stats.seconds_waited <= stats.longest_wait < 5


def test_statistics_of_processes_are_pickled_and_merged() -> None:
    one = ReadStats(retries=2, seconds_waited=1.5, longest_wait=0.5, slowest_shard=7)
    other = ReadStats(retries=1, seconds_waited=0.25, longest_wait=0.75, slowest_shard=3)
    both = ReadStats(retries=3, seconds_waited=1.75, longest_wait=0.75, slowest_shard=3)
    assert pickle.loads(pickle.dumps(one)).merged(other) == other.merged(one) == both
    assert ReadStats().merged(one) == one.merged(ReadStats()) == one
