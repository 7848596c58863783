"""A stand-in for the Hugging Face Hub on loopback: folders as dataset repositories, and a network that misbehaves.

It answers what `huggingface_hub` and `datasets` ask for when they stream: the repository's information, its tree,
paths-info, and HEAD and GET of files with ETag, X-Repo-Commit and ranges. Every request is counted. Clients are real
ones, in a process of their own (`client_process`), since they read HF_ENDPOINT when they are imported.
"""

import hashlib
import json
import multiprocessing
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Kind = Literal["api", "head", "data"]
"""What is asked for: metadata of the repository; metadata of a file; (a part of) a file."""
Trouble = Literal["hang", "cut", "short", "busy", "unavailable"]
"""No answer until the client gives up; half of the body, then the connection closes; half of the body as if it were
all; 429 with Retry-After; 503."""


@dataclass(frozen=True)
class Misbehaviour:
    """Each `every`-th request of a kind (for one file, or any) after the first `after` goes wrong, `times` at most."""

    trouble: Trouble
    every: int = 1
    kind: Kind = "data"
    path: str | None = None
    after: int = 0
    times: int | None = None
    retry_after: str = "1"


@dataclass(frozen=True)
class Request:
    """One request as it was answered."""

    kind: Kind
    path: str
    """The file, with the name of its repository before it; of the API the route."""
    at: float
    """Seconds on the server's own clock (time.monotonic), when the request came."""
    answer: str
    """"ok", a trouble, or "missing"."""


class Hub:
    """Serves each folder in `folder` as a dataset repository org/..., at COMMIT, while it is entered as a context."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[Request] = []
        self.let_go = threading.Event()
        """Set: connections that hang are dropped."""
        self._misbehaviour: Misbehaviour | None = None
        self._seen = self._gone_wrong = 0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()

    def misbehave(self, misbehaviour: Misbehaviour | None) -> None:
        """From now on; None: behave. The log begins anew."""
        with self._lock:
            self._misbehaviour, self._seen, self._gone_wrong = misbehaviour, 0, 0
            self.requests = []

    def count(self, kind: Kind) -> Counter[str]:
        """How many requests of a kind came for each path."""
        with self._lock:
            return Counter(request.path for request in self.requests if request.kind == kind)

    def troubles(self) -> int:
        """How many requests went wrong."""
        with self._lock:
            return sum(request.answer not in ("ok", "missing") for request in self.requests)

    def decide(self, kind: Kind, path: str, *, exists: bool) -> Misbehaviour | None:
        """Log a request, and say whether it goes wrong."""
        at = time.monotonic()
        with self._lock:
            wrong = self._goes_wrong(kind, path) if exists else None
            answer = wrong.trouble if wrong else "ok" if exists else "missing"
            self.requests.append(Request(kind, path, at, answer))
        return wrong

    def _goes_wrong(self, kind: Kind, path: str) -> Misbehaviour | None:
        rule = self._misbehaviour
        if rule is None or rule.kind != kind or rule.path not in (None, path):
            return None
        if rule.times is not None and self._gone_wrong >= rule.times:
            return None
        self._seen += 1
        if self._seen <= rule.after or (self._seen - rule.after) % rule.every:
            return None
        self._gone_wrong += 1
        return rule


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if file := re.fullmatch(rf"/datasets/org/([^/]+)/resolve/(?:main|{COMMIT})/(.+)", path):
            self._file(f"{file[1]}/{file[2]}")
        elif (api := re.fullmatch(r"/api/datasets/org/([^/]+)(.*)", path)) and (self.hub.folder / api[1]).is_dir():
            self._api(path, self._metadata(api[1], api[2].strip("/")))
        else:
            self.hub.decide("api", path, exists=False)
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _api(self, path: str, answer: Any) -> None:
        wrong = self.hub.decide("api", path, exists=answer is not None)
        if answer is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            body = json.dumps(answer).encode()
            self._send(200, body, {"Content-Type": "application/json"}, wrong=wrong)

    def _metadata(self, repo: str, route: str) -> Any:
        root = self.hub.folder / repo
        if route in ("", "revision/main", f"revision/{COMMIT}"):
            names = [{"rfilename": entry["path"]} for entry in _tree(root, "", recursive=True) if entry["size"]]
            state = {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
            return {"_id": "0" * 24, "id": f"org/{repo}", "author": "org", "sha": COMMIT, "siblings": names, **state}
        if tree := re.fullmatch(rf"tree/(?:main|{COMMIT})/?(.*)", route):
            query = parse_qs(urlsplit(self.path).query)
            recursive = query["recursive"][0].lower() == "true"
            return _tree(root, tree[1], recursive=recursive) if (root / tree[1]).is_dir() else None
        if re.fullmatch(rf"paths-info/(main|{COMMIT})", route):
            return [_entry(root, path) for name in self._form["paths"] if (path := root / name).exists()]
        return None

    def _file(self, name: str) -> None:
        path = self.hub.folder / name
        wrong = self.hub.decide("head" if self.command == "HEAD" else "data", name, exists=path.is_file())
        if not path.is_file():
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        body, status = path.read_bytes(), 200
        headers = {"ETag": f'"{_digest(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            if first > last:
                return self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            body, status = body[first : last + 1], 206
        self._send(status, body, headers, wrong=wrong)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, wrong: Misbehaviour | None = None) -> None:
        trouble = wrong.trouble if wrong else None
        if trouble == "hang":
            return self._hang()
        if wrong and trouble in ("busy", "unavailable"):
            status, body = (429 if trouble == "busy" else 503), b"{}"
            headers = {"Retry-After": wrong.retry_after} if trouble == "busy" else {}
        sent = body[: len(body) // 2] if trouble in ("cut", "short") else body
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(sent if trouble == "short" else body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        if trouble == "cut":
            self.close_connection = True

    def _hang(self) -> None:
        """Until the client gives up, or the test lets go."""
        self.close_connection = True
        while not self.hub.let_go.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.02)
            if readable and not self.connection.recv(1):
                return


def _tree(root: Path, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
    inside = root / folder
    return [_entry(root, path) for path in sorted(inside.rglob("*") if recursive else inside.iterdir())]


def _entry(root: Path, path: Path) -> dict[str, Any]:
    name = path.relative_to(root).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": _digest(name.encode()), "size": 0}
    return {"type": "file", "path": name, "oid": _digest(path.read_bytes()), "size": path.stat().st_size}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


# ---- clients ----------------------------------------------------------------------------------------------------


class Client:
    """A process in which `HF_ENDPOINT` is the stand-in."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60) -> Any:
        """What a function of a test module gives there; its errors are raised here."""
        return self._pool.submit(function, *arguments).result(timeout)


@contextmanager
def client_process(hub: Hub, home: Path, *, timeout: float = 0.3) -> Iterator[Client]:
    """A new process with an empty HF_HOME. The clients' own retries are off, so that what is tested are ours.

    timeout: seconds until a client gives up a request that hangs.
    """
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_settle, initargs=(timeout,)) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN"):
                patch.delenv(name, raising=False)
            for name, value in settings.items():
                patch.setenv(name, value)
            pool.submit(os.getpid).result(60)  # it has started, with this environment
        yield Client(pool)


def _settle(timeout: float) -> None:
    """One attempt at everything, without waits."""
    from functools import partial

    import datasets.config
    import huggingface_hub.constants
    import huggingface_hub.hf_file_system as hub_files

    huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT = timeout  # from the environment it takes whole seconds
    for name in ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES"):
        setattr(datasets.config, name, 1)
    for name in vars(datasets.config):
        if name.startswith("STREAMING_") and name.endswith("_RETRY_INTERVAL"):
            setattr(datasets.config, name, 0)
    for name in ("http_backoff", "http_stream_backoff"):
        if hasattr(hub_files, name):
            setattr(hub_files, name, partial(getattr(hub_files, name), max_retries=0))
