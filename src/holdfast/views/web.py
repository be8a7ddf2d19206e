"""Serves the page of a run, live.

    GET /          the page
    GET /events    server-sent events: a snapshot when something changed, at most 4 a second
    GET /metrics   Prometheus

Only on loopback. There is nothing to change here and no account: who can reach the port can
read the run. A page elsewhere cannot: a request must name this server by address or as
localhost, which ends DNS rebinding, and nothing allows other origins to read the answers.
"""

import contextlib
import http.server
import ipaddress
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from holdfast.errors import Mistake
from holdfast.timeouts import DEFAULTS
from holdfast.views.page import page, policy
from holdfast.views.snapshot import prometheus, snapshot
from holdfast.views.tail import Live

__all__ = ["Web"]

MAX_STREAMS = 32
_HOST = "127.0.0.1"


class Web:
    """A server for the page of one run: `start`, then `url`, then `stop`."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.live = Live(folder)
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        self.stopping = threading.Event()
        try:
            self._server = _Server(port, self)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Mistake(f"cannot listen on {_HOST} port {port}: {reason}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="views.web", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where to look."""
        return f"http://{_HOST}:{self.port}/"

    def start(self) -> None:
        """Begin to follow and to serve."""
        self.live.start()
        self._thread.start()

    def stop(self) -> None:
        """Send the last snapshot to whoever looks, and end."""
        self.live.stop()
        self.stopping.set()
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        until = time.monotonic() + DEFAULTS.ending_s
        for _ in range(MAX_STREAMS):
            self.streams.acquire(timeout=max(0.0, until - time.monotonic()))
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, port: int, web: Web) -> None:
        self.web = web
        super().__init__((_HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version = "holdfast"
    sys_version = ""
    protocol_version = "HTTP/1.0"  # one request per connection: nothing to keep or to bound
    _headers: ClassVar[dict[str, str]] = {
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }

    def setup(self) -> None:
        """Bound how long the caller may hang."""
        super().setup()
        self.connection.settimeout(DEFAULTS.page_beat_s)

    def do_GET(self) -> None:
        """Answer."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _is_ours(hosts[0]):
            self._answer(421, "text/plain", b"this server has another name\n")
            return
        live = self.server.web.live
        match self.path.partition("?")[0]:
            case "/":
                self._answer(200, "text/html", page().encode())
            case "/events":
                self._stream()
            case "/metrics":
                with live.lock:
                    text = prometheus(live.picture)
                self._answer(200, "text/plain; version=0.0.4", text)
            case _:
                self._answer(404, "text/plain", b"there is /, /events and /metrics\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- theirs
        """Say nothing: the terminal belongs to the run."""

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", policy(live=True) + "; frame-ancestors 'none'")
        for name, value in self._headers.items():
            self.send_header(name, value)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self._head(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        web = self.server.web
        if not web.streams.acquire(blocking=False):
            self._answer(503, "text/plain", b"too many are looking\n")
            return
        try:
            self._head(200, "text/event-stream")
            self.end_headers()
            self._send_snapshots(web)
        finally:
            web.streams.release()

    def _send_snapshots(self, web: Web) -> None:
        sent = -1
        while True:
            over = web.stopping.is_set()
            fresh = web.live.wait(sent, 0.0 if over else DEFAULTS.page_beat_s)
            if fresh:
                with web.live.lock:
                    data = snapshot(web.live.picture, log_after=max(sent, 0))
                    sent = web.live.picture.serial
                self.wfile.write(b"data: " + msgspec.json.encode(data) + b"\n\n")
            elif over:
                return
            else:
                self.wfile.write(b": still here\n\n")
            if web.live.stopped:
                web.stopping.wait(DEFAULTS.show_s)
            else:
                time.sleep(DEFAULTS.show_s)


def _is_ours(host: str) -> bool:
    """Whether a request may name this server so."""
    if not host or any(letter in host for letter in "/@ ,"):
        return False
    name = host.lower()
    name = name[1:].partition("]")[0] if name[0] == "[" else name.partition(":")[0]
    with contextlib.suppress(ValueError):
        return name == "localhost" or bool(ipaddress.ip_address(name))
    return False
