"""A web server of files that counts what it sends and misbehaves on request."""

import hashlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

#: What happens to one request instead of an answer; returns True when it answered.
Fault = Callable[["Handler"], bool]


@dataclass
class Log:
    """What the server did."""

    requests: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bytes_sent: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


@dataclass
class Site:
    """Files by URL path, and how they are served."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    answers: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    latency_s: float = 0.0
    has_ranges: bool = True
    has_etags: bool = True
    log: Log = field(default_factory=Log)
    lock: Any = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def add_folder(self, folder: Path, at: str = "") -> None:
        for path in filter(Path.is_file, folder.iterdir()):
            self.files[f"{at}/{path.name}"] = path.read_bytes()

    def etag(self, path: str) -> str:
        return f'"{hashlib.md5(self.files[path]).hexdigest()}"'

    def count(self, name: str) -> int:
        """Requests whose path ends so."""
        return sum(path.endswith(name) for path in self.log.requests)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    site: Site

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # a client that gives up on an answer closes without a word
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        site = self.site
        path = unquote(urlsplit(self.path).path)
        with site.lock:
            site.log.requests.append(self.path)
            site.log.headers.append(dict(self.headers))
            site.log.in_flight += 1
            self.is_in_flight = True
            site.log.most_in_flight = max(site.log.most_in_flight, site.log.in_flight)
            fault = site.faults[path].pop(0) if site.faults.get(path) else None
        try:
            if site.latency_s:
                time.sleep(site.latency_s)
            if fault is None or not fault(self):
                self.answer(path)
        except ConnectionError:
            self.close_connection = True
        finally:
            vars(self).pop("send", None)  # a fault lasts for one request
            self.leave()

    def leave(self) -> None:
        """The request is answered: whoever has the answer may send the next one."""
        with self.site.lock:
            self.site.log.in_flight -= self.is_in_flight
            self.is_in_flight = False

    def answer(self, path: str) -> None:
        site = self.site
        if path in site.answers:
            self.send(*site.answers[path])
            return
        if path not in site.files:
            self.send(404, {}, b"no such file")
            return
        whole = site.files[path]
        headers = {"ETag": site.etag(path)} if site.has_etags else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or not site.has_ranges:
            self.send(200, headers, whole)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(whole) - 1)
        if first >= len(whole):
            self.send(416, headers | {"Content-Range": f"bytes */{len(whole)}"}, b"")
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(whole)}"
        self.send(206, headers, whole[first : last + 1])

    def send(
        self, status: int, headers: dict[str, str], body: bytes, claimed: int | None = None
    ) -> None:
        """An answer; one that claims more bytes than it sends ends the connection."""
        self.leave()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        self.end_headers()
        for start in range(0, len(body), 1 << 16):
            part = body[start : start + (1 << 16)]
            with self.site.lock:  # before they leave: who has the last byte may look at once
                self.site.log.bytes_sent += len(part)
            self.wfile.write(part)
        self.close_connection = self.close_connection or claimed is not None


def status(code: int, **headers: str) -> Fault:
    """Answer with a status and headers (``Retry_After="3"``)."""

    def fault(handler: Handler) -> bool:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.send(code, named, b"try again")
        return True

    return fault


def _by(send: Callable[[Handler, int, dict[str, str], bytes], None]) -> Fault:
    """The right answer, sent in this way."""

    def fault(handler: Handler) -> bool:
        handler.send = partial(send, handler)  # pyright: ignore[reportAttributeAccessIssue]
        return False

    return fault


def truncated(num_bytes: int) -> Fault:
    """The right headers, and only the first bytes of the body."""
    return _by(
        lambda handler, code, headers, body: Handler.send(
            handler, code, headers, body[:num_bytes], claimed=len(body)
        )
    )


def together(num_requests: int) -> Fault:
    """Wait until so many requests are under way, and then answer all of them; else fail."""
    barrier = threading.Barrier(num_requests)

    def fault(handler: Handler) -> bool:
        try:
            barrier.wait(20)
        except threading.BrokenBarrierError:
            return status(418)(handler)
        return False

    return fault


@_by
def chunked(handler: Handler, code: int, headers: dict[str, str], body: bytes) -> None:
    """The whole file, without saying how long it is."""
    del code, headers
    whole = handler.site.files.get(unquote(urlsplit(handler.path).path), body)
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for start in range(0, len(whole), 1000):
        part = whole[start : start + 1000]
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
    handler.wfile.write(b"0\r\n\r\n")


def dripping(pause_s: float) -> Fault:
    """The right headers, and one byte of the body after each pause."""

    def drip(handler: Handler, code: int, headers: dict[str, str], body: bytes) -> None:
        Handler.send(handler, code, headers, b"", claimed=len(body))
        for byte in body:
            handler.wfile.write(bytes([byte]))
            handler.site.stopped.wait(pause_s)

    return _by(drip)


def stalled(handler: Handler) -> bool:
    """Take the request and say nothing until the server stops."""
    handler.site.stopped.wait(30)
    handler.close_connection = True
    return True


def dropped(handler: Handler) -> bool:
    """Close the connection without a word."""
    handler.close_connection = True
    return True


@contextmanager
def serve() -> Iterator[Site]:
    """A site on a port of its own."""
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Of", (Handler,), {"site": site}))
    server.daemon_threads = True
    server.request_queue_size = 64
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        site.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()
