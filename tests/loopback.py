"""A web server in this process that serves ranges of bytes and keeps what it was asked for, and fsspec's way to it."""

import http.client
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractBufferedFile


class Server:
    """Serves `files` (path -> content) on 127.0.0.1 inside of `with`.

    Attributes:
        asked: (path, first byte, byte after the last) of each answer with content, in order.
        broken: paths for which the connection is closed in the middle of an answer.
        short: paths of which only the first half of what is asked for is sent, as if that were all.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.asked: list[tuple[str, int, int]] = []
        self.broken: set[str] = set()
        self.short: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.owner = self  # type: ignore[attr-defined]
        self.address = f"127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Server":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        owner: Server = self.server.owner  # type: ignore[attr-defined]
        path = urlsplit(self.path).path
        content = owner.files.get(path)
        if content is None:
            self.send_error(404)
            return
        first, stop = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            first, stop = int(asked[1]), min(int(asked[2]) + 1, len(content))
        if with_content and path in owner.short:
            stop = (first + stop) // 2
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{len(content)}")
        self.end_headers()
        if with_content:
            owner.asked.append((path, first, stop))
            self.wfile.write(content[first : (first + stop) // 2 if path in owner.broken else stop])

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _File(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.ask("GET", self.path, {"Range": f"bytes={start}-{end - 1}"})[1]


class LoopbackFileSystem(fsspec.AbstractFileSystem):
    """`loopback://127.0.0.1:80/a.jsonl`: web files where aiohttp, which fsspec needs for http://, is not installed."""

    protocol = "loopback"

    def ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        """(length as the server says it, content)."""
        address, _, name = path.partition("/")
        connection = http.client.HTTPConnection(address, timeout=30)
        try:
            connection.request(method, f"/{name}", headers=headers)
            response = connection.getresponse()
            if response.status == 404:
                raise FileNotFoundError(path)
            return int(response.headers["Content-Length"]), response.read()
        finally:
            connection.close()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return {"name": path, "type": "file", "size": self.ask("HEAD", path, {})[0]}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> _File:
        return _File(self, path, mode, **{key: options[key] for key in ("cache_type", "size") if key in options})


fsspec.register_implementation("loopback", LoopbackFileSystem, clobber=True)
