"""A real HTTP server that misbehaves in as many ways as there are paths, for rewards that ask one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarl.rewards.interface import ScoreRequest


class Served:
    """`answers[path]` is called with the handler and the request's JSON; `seen` is what came in."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.base = f"http://127.0.0.1:{server.server_port}"
        self.answers: dict[str, Callable] = {}
        self.seen: list[tuple[str, dict, dict]] = []  # path, headers, body
        self.over = threading.Event()  # the test is: whoever sleeps wakes up

    def on(self, answer: Callable) -> str:
        """The URL at which `answer` is served."""
        path = f"/{len(self.answers)}/score"
        self.answers[path] = answer
        return self.base + path


@pytest.fixture
def served() -> Iterator[Served]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.seen.append((self.path, dict(self.headers), body))
            try:
                found.answers[self.path](self, body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Served(server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield found
    found.over.set()
    server.shutdown()
    server.server_close()


def reply(handler: BaseHTTPRequestHandler, body: object, *, status: int = 200, **headers: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)


def drip(handler: BaseHTTPRequestHandler, data: bytes, over: threading.Event) -> None:
    """A byte now and then, so that no single read is slow."""
    for place in range(len(data)):
        if over.is_set():
            return
        handler.wfile.write(data[place : place + 1])
        handler.wfile.flush()
        time.sleep(0.05)


@pytest.fixture
def answering() -> Callable[..., None]:
    return reply


@pytest.fixture
def dripping() -> Callable[..., None]:
    return drip


@pytest.fixture
def cases() -> Callable[[int], list[ScoreRequest]]:
    def make(count: int) -> list[ScoreRequest]:
        return [
            ScoreRequest(f"{row}/0", f"what is {row}?", f"it is {row}", str(row), extra={"level": row})
            for row in range(count)
        ]

    return make
