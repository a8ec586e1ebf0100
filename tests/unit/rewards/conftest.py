"""A real HTTP server that misbehaves in as many ways as there are paths, for rewards that ask one."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl.rewards.interface import ScoreRequest


class Served:
    """`answers[path]` is called with the handler and the request's JSON; `seen` is what came in."""

    def __init__(self, server: ThreadingHTTPServer, scheme: str) -> None:
        self.base = f"{scheme}://127.0.0.1:{server.server_port}"
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
    with serve() as found:
        yield found


@pytest.fixture
def other() -> Iterator[Served]:
    """A second server, which nobody asked."""
    with serve() as found:
        yield found


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a self-signed certificate of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=scorer -addext"
    files = [
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        folder / "key.pem",
        "-out",
        folder / "certificate.pem",
    ]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text("".join((folder / name).read_text() for name in ("key.pem", "certificate.pem")))
    return both


@pytest.fixture
def impostor(certificate: Path) -> Iterator[Served]:
    """An https server whose certificate nobody has signed."""
    with serve(certificate) as found:
        yield found


@contextmanager
def serve(certificate: Path | None = None) -> Iterator[Served]:
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
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        server.handle_error = lambda request, client_address: None  # refused handshakes
    found = Served(server, "https" if certificate else "http")
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    yield found
    found.over.set()
    server.shutdown()
    server.server_close()


def reply(
    handler: BaseHTTPRequestHandler, body: object, *, status: int = 200, **headers: str
) -> None:
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
            ScoreRequest(
                f"{row}/0", f"what is {row}?", f"it is {row}", str(row), extra={"level": row}
            )
            for row in range(count)
        ]

    return make
