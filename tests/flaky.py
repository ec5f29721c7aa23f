"""An HTTP proxy on loopback that goes wrong on purpose, request by request, and remembers what went through it.

In front of a server (`upstream`) it stands for it. Without one it is a forward proxy, as HTTP_PROXY and HTTPS_PROXY name one:
absolute addresses and CONNECT, where `hosts` says which port of this machine a made-up name means.
"""

import http.client
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "te", "trailer", "upgrade", "host"}


@dataclass(frozen=True)
class Fate:
    """What becomes of one request."""

    kind: str = "pass"
    """pass; lose: applied, and the answer dropped; cut: applied, and the answer ends in the middle; refuse: not applied,
    the connection is reset; answer: not applied, `status` instead."""
    status: int = 0
    retry_after: str | None = None
    text: str = "the proxy of the tests says no"
    delay_s: float = 0.0


PASS, LOSE, CUT, REFUSE = Fate(), Fate("lose"), Fate("cut"), Fate("refuse")


def answer(status: int, text: str = Fate.text, retry_after: str | None = None) -> Fate:
    return Fate("answer", status, retry_after, text)


@dataclass(frozen=True)
class Seen:
    at_s: float
    method: str
    path: str
    fate: Fate


Plan = Callable[[str, str], Fate]


def scripted(fates: Iterable[Fate], *, only: Callable[[str, str], bool] = lambda *_: True) -> Plan:
    """One fate after another for the requests that `only(method, path)` picks; the rest, and what follows, passes."""
    left, lock = iter(fates), threading.Lock()

    def plan(method: str, path: str) -> Fate:
        if not only(method, path):
            return PASS
        with lock:
            return next(left, PASS)

    return plan


def seeded(seed: int, share: float, fates: tuple[Fate, ...]) -> Plan:
    """That share of all requests meets one of the fates: the same ones for the same seed and order."""
    chance, lock = random.Random(seed), threading.Lock()

    def plan(_method: str, _path: str) -> Fate:
        with lock:
            return chance.choice(fates) if chance.random() < share else PASS

    return plan


class Flaky:
    """Runs from `with` to its end. `plan` may be replaced at any time."""

    def __init__(
        self, upstream: int | None = None, plan: Plan | None = None, hosts: dict[str, int] | None = None
    ) -> None:
        self.upstream, self.hosts = upstream, hosts or {}
        self.plan: Plan = plan or (lambda *_: PASS)
        self.seen: list[Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Request)
        self._server.daemon_threads = True
        self._server.flaky = self  # type: ignore[attr-defined]
        self.port = self._server.server_address[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Flaky":
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def times(self, path_end: str) -> list[float]:
        return [one.at_s for one in self.seen if one.path.split("?")[0].endswith(path_end)]

    def met(self) -> set[tuple[str, int]]:
        """(kind, status) of every fate but a plain pass."""
        return {(one.fate.kind, one.fate.status) for one in self.seen if one.fate != PASS}


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def finish(self) -> None:
        with suppress(ConnectionError):
            super().finish()

    def do_CONNECT(self) -> None:
        flaky = self.server.flaky  # type: ignore[attr-defined]
        fate = flaky.plan("CONNECT", self.path)
        flaky.seen.append(Seen(time.monotonic(), "CONNECT", self.path, fate))
        name, port = self.path.rsplit(":", 1)
        self.close_connection = True
        if fate.kind != "pass":
            self._reply(fate.status or 502, fate.text.encode(), {})
            return
        with socket.create_connection(("127.0.0.1", flaky.hosts.get(name, int(port))), timeout=30) as remote:
            self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=_pump, args=(remote, self.connection), daemon=True)
            back.start()
            _pump(self.connection, remote)
            back.join(5)

    def _serve(self) -> None:
        flaky = self.server.flaky  # type: ignore[attr-defined]
        body = self._body()
        fate = flaky.plan(self.command, self.path)
        flaky.seen.append(Seen(time.monotonic(), self.command, self.path, fate))
        if fate.delay_s:
            time.sleep(fate.delay_s)
        if fate.kind == "refuse":
            self._drop()
        elif fate.kind == "answer":
            self._reply(fate.status, fate.text.encode(), {"Retry-After": fate.retry_after} if fate.retry_after else {})
        else:
            self._forward(body, fate)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - the names that the base class looks for

    def _forward(self, body: bytes, fate: Fate) -> None:
        flaky = self.server.flaky  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        port = flaky.upstream or flaky.hosts.get(parts.hostname or "") or parts.port
        target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        headers = {key: value for key, value in self.headers.items() if key.lower() not in HOP_BY_HOP}
        if body or self.command in {"POST", "PUT", "PATCH"}:
            headers["Content-Length"] = str(len(body))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(self.command, target, body, headers)
            found = connection.getresponse()
            content = found.read()
        except (OSError, http.client.HTTPException):
            self._drop()  # the server is not there, or was killed at it
            return
        finally:
            connection.close()
        if fate.kind == "lose":
            self._drop()
            return
        kept = {key: value for key, value in found.getheaders() if key.lower() not in {*HOP_BY_HOP, "content-length"}}
        self._reply(found.status, content, kept, cut=fate.kind == "cut")

    def _reply(self, status: int, content: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) + (not content and cut)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._drop()

    def _drop(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
