"""Reading over a bad network: a shard that fails is read again from the example it had reached.

Nothing is repeated and nothing is passed over: after examples 0 .. 41 the next attempt is `read(shard, 42)`. Attempts
count anew once an example has come. Waits double, from `first_wait` to `max_wait` seconds, each shortened at random by
up to a half so that many processes do not come back together: 0.5 to 1, 1 to 2, 2 to 4 ...
"""

import http.client
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from errno import EACCES, EISDIR, ELOOP, EMFILE, ENAMETOOLONG, ENOENT, ENOSPC, ENOTDIR, EPERM
from gzip import BadGzipFile
from json import JSONDecodeError
from typing import Any, Literal

import pyarrow as pa

from streampack.arguments import packages_of
from streampack.sources import Example, Fault, Source, parser_of, where

CHECK_SECONDS = 0.1
"""While it waits, a reader looks this often whether its pass was closed."""
DOUBTFUL_RETRIES = 2
"""Bytes that cannot be parsed may have been cut short on their way, which the next attempt repairs; but where the file
itself is bad, each attempt reads the same bytes. The same with a refusal (401, 403): an expired link, or no right."""

_LOCAL = {ENOENT, EACCES, EPERM, EISDIR, ENOTDIR, ENAMETOOLONG, ELOOP, EMFILE, ENOSPC}
_REFUSED = {400, 401, 403, 405, 410, 416, 451}
_NETWORK = {
    *("requests", "urllib3", "httpx", "httpx2", "httpcore", "aiohttp", "fsspec", "huggingface_hub"),
    *("botocore", "aiobotocore", "s3fs", "google", "gcsfs", "azure", "adlfs", "ossfs"),
}
"""Packages whose errors are of the network, by name: none of them is imported here."""
_CODECS = {"zlib", "bz2", "lzma", "_lzma", "zstd", "_zstd", "zstandard", "compression", "lz4"}
_BAD_BYTES = re.compile(r"thrift|corrupt|decompress|page header|end of stream|magic bytes|zstd|lz4", re.IGNORECASE)
"""In the OSErrors by which Arrow says that a file cannot be parsed."""
_RATE_LIMIT = re.compile(r"\br=0\s*;\s*t=(\d+)")
"""The Hub's RateLimit header: nothing remains for t seconds."""
_END = object()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How reading goes on after a transient error. Not part of the stream's identity.

    Args:
        attempts: most attempts at one place, the first one included; 1: no retries.
        first_wait: seconds before the second attempt; doubled for each further one.
        max_wait: longest wait in seconds, also where the server asks for more (Retry-After).
        max_seconds: seconds after the first failure at one place within which the last attempt begins.

    Raises:
        ValueError: for numbers that cannot be used.
    """

    attempts: int = 8
    first_wait: float = 1.0
    max_wait: float = 60.0
    max_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("first_wait", 0), ("max_wait", 0), ("max_seconds", 0)):
            value = getattr(self, name)
            if not isinstance(value, int if name == "attempts" else int | float) or not value >= least:
                raise ValueError(f"Retry({name}={value!r}): pass a number of at least {least}")

    @classmethod
    def of(cls, retry: "Retry | None") -> "Retry":
        """What was given, or the default.

        Raises:
            TypeError: for anything but a Retry or None.
        """
        if retry is not None and not isinstance(retry, Retry):
            raise TypeError(f"retry={retry!r} is {type(retry).__name__}; pass streampack.Retry(attempts=...) or None")
        return retry or cls()


@dataclass
class ReadStats:
    """What reading cost in one process; those of several are `merged`."""

    retries: int = 0
    """Attempts after the first one."""
    seconds_waited: float = 0.0
    """Seconds between attempts."""
    longest_wait: float = 0.0
    """Most seconds from asking a source for an item until it came (or the shard ended), with retries."""
    slowest_shard: int | None = None
    """The shard of that item; None where nothing was read."""

    def came(self, seconds: float, shard: int) -> None:
        """An item came after so many seconds."""
        if self.slowest_shard is None or seconds > self.longest_wait:
            self.longest_wait, self.slowest_shard = seconds, shard

    def merged(self, other: "ReadStats") -> "ReadStats":
        """Of two processes together: sums, and the longer of the longest waits."""
        slower = max(self, other, key=lambda one: (one.slowest_shard is not None, one.longest_wait))
        return ReadStats(
            retries=self.retries + other.retries,
            seconds_waited=self.seconds_waited + other.seconds_waited,
            longest_wait=slower.longest_wait,
            slowest_shard=slower.slowest_shard,
        )


def read_with_retries(
    source: Source,
    shard: int,
    start: int,
    *,
    retry: Retry,
    stats: ReadStats,
    closed: Callable[[], bool] | None = None,
) -> Iterator[Example | Fault | pa.Table | list[bytes]]:
    """`source.read(shard, start)`, begun again after transient errors where it had come to; of a source with a
    `parser_of` its `read_unparsed`.

    Args:
        stats: counts retries and waits.
        closed: asked while waiting; once it says True, the error is raised instead of waiting on.

    Raises:
        Exception: the source's last error, with its own type, and a note of place, attempts and seconds.
    """
    is_raw = parser_of(source) is not None
    read: Any = source.read_unparsed if is_raw else source.read  # type: ignore[attr-defined]
    index, failures = start, _Failures(retry)
    items: Iterator[Any] | None = None
    asked = time.monotonic()
    while True:
        try:
            if items is None:
                items = iter(read(shard, index))
            item = next(items, _END)
        # (A StopIteration of `read` itself lands here too, and leaves this generator as a RuntimeError: no silent end.)
        except Exception as error:
            place, items = f"while reading {where(source, shard, index, may_read=False)}", None
            wait = failures.wait_after(error)
            if wait is not None:
                _log.warning("%s: %r; attempt %d in %.1f s", place, error, failures.count + 1, wait)
            if wait is None or not _sleep(wait, stats, closed):
                add_place(error, place + failures.told(error))
                raise
            continue
        stats.came(time.monotonic() - asked, shard)
        if item is _END:
            return
        index += len(item) if isinstance(item, pa.Table) or (is_raw and isinstance(item, list)) else 1
        failures.count = 0
        yield item
        asked = time.monotonic()


def add_place(error: Exception, place: str) -> None:
    """Say where an error of a source happened, keeping its type: as a note, or before Python 3.11 in its message."""
    if hasattr(error, "add_note"):
        error.add_note(place)
    elif isinstance(error, OSError) and error.strerror:
        error.strerror = f"{error.strerror} ({place})"  # what str() of such an error is made from
    else:
        error.args = (f"{error} ({place})",)


def kind_of(error: BaseException) -> Literal["transient", "doubtful", "lasting"]:
    """Is another attempt worth it? "doubtful": DOUBTFUL_RETRIES times. Libraries wrap errors, so causes count too."""
    for one in _causes(error):
        if isinstance(one, OSError) and (type(one).__name__ == "OfflineModeIsEnabled" or _is_local(one)):
            return "lasting"
        if _status(one) in _REFUSED or _is_of_bad_bytes(one):
            return "doubtful"
        if _is_of_network(one):
            return "transient"
    return "lasting"


class _Failures:
    """The failures in a row at one place, and how long to wait after each."""

    def __init__(self, retry: Retry) -> None:
        self.retry = retry
        self.count = 0
        self._doubtful = 0
        self._first = 0.0
        # A generator of its own: the global random state is neither read nor set. Seeding costs, so only if needed.
        self._random: random.Random | None = None

    def wait_after(self, error: Exception) -> float | None:
        """Seconds to wait before the next attempt; None: give up."""
        now = time.monotonic()
        if not self.count:
            self._doubtful, self._first = 0, now
        self.count += 1
        kind = kind_of(error)
        self._doubtful += kind == "doubtful"
        if kind == "lasting" or self.count >= self.retry.attempts or self._doubtful > DOUBTFUL_RETRIES:
            return None
        wait = self._wait(_seconds_asked_for(error))
        return wait if now + wait - self._first <= self.retry.max_seconds else None

    def _wait(self, asked_for: float | None) -> float:
        self._random = self._random or random.Random()
        retry, share = self.retry, self._random.random()
        doubled = min(retry.max_wait, retry.first_wait * 2.0 ** min(self.count - 1, 60))
        wait = doubled * (1 - share / 2)
        if asked_for is not None:  # never less, and spread out, since others were told the same
            wait = max(wait, min(retry.max_wait, asked_for + share * retry.first_wait))
        return wait

    def told(self, error: Exception) -> str:
        """For the message of the last error; empty where it is not one to try again."""
        kind = kind_of(error)
        if kind == "lasting":
            return ""
        advice = {
            "transient": f"a saved state resumes; to go on for longer than {self.retry}, pass another retry=",
            "doubtful": "another attempt will hardly help: is the file whole, and is reading it allowed?",
        }
        seconds = time.monotonic() - self._first
        return f", gave up after {self.count} attempts in {seconds:.1f} s; {advice[kind]}"


def _sleep(seconds: float, stats: ReadStats, closed: Callable[[], bool] | None) -> bool:
    """Wait, and count it as a retry; False: the pass was closed meanwhile."""
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        if closed is not None and closed():
            return False
        time.sleep(min(left, CHECK_SECONDS))
    stats.retries += 1
    stats.seconds_waited += time.monotonic() - began
    return True


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on. (What was only being handled meanwhile says nothing about it.)"""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        yield one
        seen.append(one)
        one = one.__cause__


def _is_local(error: OSError) -> bool:
    """A file, a right or a place that is missing here. Hubs and fsspec raise the same types without a number (or with
    a URL) for outages."""
    return error.errno in _LOCAL and "://" not in str(error)


def _is_of_bad_bytes(error: BaseException) -> bool:
    if isinstance(error, pa.ArrowInvalid | JSONDecodeError | UnicodeDecodeError | BadGzipFile):
        return True
    return bool(packages_of(error) & _CODECS) or (type(error) is OSError and bool(_BAD_BYTES.search(str(error))))


def _is_of_network(error: BaseException) -> bool:
    # Some network libraries also raise ValueErrors of theirs, for addresses and settings that are wrong.
    if isinstance(error, ValueError | TypeError | LookupError) and not isinstance(error, OSError):
        return False
    if isinstance(error, OSError | EOFError | http.client.HTTPException):
        return True
    # Before Python 3.11 the TimeoutErrors of asyncio and of futures are no OSErrors.
    return type(error).__name__ == "TimeoutError" or bool(packages_of(error) & _NETWORK)


def _status(error: BaseException) -> int | None:
    """The HTTP status, where an error carries one."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        owner = error if response is None else response
        found = (getattr(owner, name, None) for name in ("status_code", "status", "code"))
        status = next((one for one in found if isinstance(one, int)), None)
    return status if isinstance(status, int) else None


def _seconds_asked_for(error: BaseException) -> float | None:
    """What a server asks to wait, by Retry-After (seconds or a date) or the Hub's RateLimit."""
    for one in _causes(error):
        response = getattr(one, "response", None)
        headers: Any = getattr(one if response is None else response, "headers", None)
        if isinstance(response, dict):  # botocore
            headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
        if not hasattr(headers, "get"):
            continue
        after = str(headers.get("Retry-After") or headers.get("retry-after") or "").strip()
        if limit := _RATE_LIMIT.search(str(headers.get("RateLimit") or headers.get("ratelimit") or "")):
            after = after or limit[1]
        if after:
            return _seconds(after)
    return None


def _seconds(after: str) -> float | None:
    if re.fullmatch(r"\d+(\.\d+)?", after):
        return float(after)
    try:
        return max(0.0, (parsedate_to_datetime(after) - datetime.now(timezone.utc)).total_seconds())
    except (TypeError, ValueError):  # no date, or one without a time zone: as if it were not there
        return None
