"""Forks a process per job from a warm, clean Python, which costs milliseconds where a fresh one costs a start.

    caller --descriptors (SCM_RIGHTS)--> server --fork--> child: function(spec, *descriptors)
       |  <------- pid, exit status ------- |                ^
       +-- target, spec: on the job's own control socket ----+

The server has an empty environment and none of the caller's descriptors. It imports the modules to preload, and never
reads what a child writes: results travel on the job's descriptors. A child shares nothing writable with its siblings
and leads its own session. It is killed when its control socket is closed, or when the server or the caller dies.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

START_S = 60.0  # for the server to preload its modules, and to fork on a busy machine
MAX_DESCRIPTORS = 16
NUMBER = struct.Struct("=q")
PR_SET_PDEATHSIG = 1
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
ENVIRONMENT |= {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}  # threads would make a fork unsafe


class ForkServerError(Exception):
    """The server cannot start, or ended together with its children."""


@dataclass
class Child:
    """A running job. `returncode` is as in subprocess: negative for a signal, None while it runs."""

    pid: int
    control: socket.socket
    returncode: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Returns the exit status. Raises TimeoutError, and ForkServerError if the server ended."""
        if (
            self.returncode is None and self.control.fileno() >= 0
        ):  # closed once the server is known to have ended
            self.control.settimeout(timeout_s)
            self.returncode = _receive_number(self.control)
            self.control.close()
        if self.returncode is None:
            raise ForkServerError(f"the fork server ended while process {self.pid} ran")
        return self.returncode

    def kill(self) -> int:
        """Kills the child with its whole session, and returns its exit status."""
        if self.returncode is None:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
        return self.wait(START_S)


@dataclass
class ForkServer:
    """Starts its server at the first request, and again if it has died. Any thread may call `start`."""

    modules: Sequence[str] = ()  # to preload: "module", or "module:function" to call once
    path: Sequence[str] = ()  # added to the server's sys.path
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: subprocess.Popen[bytes] | None = None
    requests: socket.socket | None = None

    def start(self, target: str, spec: Any, descriptors: Sequence[int] = ()) -> Child:
        """Runs ``function(spec, *descriptors)`` in a forked child; `target` is "module:function", `spec` is pickled.

        The exit status is the function's result (None: 0), or 1 if it raises. Raises ForkServerError.
        """
        assert len(descriptors) < MAX_DESCRIPTORS
        job = pickle.dumps((target, spec))
        for _ in range(2):
            control, server_end = socket.socketpair()
            control.settimeout(START_S)
            pid, requests = None, None
            try:
                with (
                    server_end,
                    self.lock,
                    suppress(BrokenPipeError, ConnectionResetError),
                ):  # the server has ended
                    requests = self._running()
                    socket.send_fds(requests, [b"job"], [server_end.fileno(), *descriptors])
                if (pid := _receive_number(control)) is not None and pid > 0:
                    with suppress(
                        BrokenPipeError, ConnectionResetError
                    ):  # it was killed; `wait` reports how
                        control.sendall(NUMBER.pack(len(job)) + job)
                    return Child(pid, control)
            except TimeoutError:
                raise ForkServerError(
                    f"the fork server did not fork within {START_S:.0f} s"
                ) from None
            finally:
                if pid is None or pid <= 0:
                    control.close()
            if pid is not None:
                raise ForkServerError(f"the fork server cannot fork: {os.strerror(-pid)}")
            with self.lock:
                if self.requests is requests:
                    self._stop()
        raise ForkServerError(
            f"the fork server of {', '.join(self.modules) or 'no modules'} ended twice"
        )

    def close(self) -> None:
        """Ends the server and all its children."""
        with self.lock:
            self._stop()

    def _running(self) -> socket.socket:
        # in a fork of the caller, poll() finds no such child, hence a fork starts its own server
        if self.requests is None or self.process is None or self.process.poll() is not None:
            self._stop()
            self.requests, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.requests.settimeout(START_S)
            with server_end:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-S",
                        "-P",
                        "-s",
                        "-B",
                        __file__,
                        str(server_end.fileno()),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=ENVIRONMENT,
                    pass_fds=(server_end.fileno(),),
                    start_new_session=True,
                )
            self.requests.send(pickle.dumps((list(self.path), list(self.modules))))
            reply = b""
            with suppress(TimeoutError, ConnectionResetError):
                reply = self.requests.recv(1 << 16)
            if reply != b"ready":
                self._stop()
                raise ForkServerError(
                    f"the fork server does not start: {reply.decode() or 'it ended, or is too slow'}"
                )
        return self.requests

    def _stop(self) -> None:
        process, self.process = self.process, None
        if self.requests is not None:
            self.requests.close()
            self.requests = None
        if process is not None:
            process.kill()
            process.wait()


def _receive_number(connection: socket.socket) -> int | None:
    """Returns None at the end of the stream. Raises TimeoutError only before the first byte."""
    try:
        data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    except ConnectionResetError:
        return None
    return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None


# --- the server's process -----------------------------------------------------------------------------------------


@dataclass
class _Server:
    requests: socket.socket
    poll: select.poll = field(default_factory=select.poll)
    controls: dict[int, int] = field(
        default_factory=dict
    )  # descriptor of a control socket -> child
    children: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # descriptor of a child -> (its pid, control)

    def serve(self, parent: int) -> None:
        """Returns when the process behind the descriptor `parent` ends or closes its socket."""
        for descriptor in (parent, self.requests.fileno()):
            self.poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == parent:
                    return
                if descriptor == self.requests.fileno():
                    message, descriptors, _, _ = socket.recv_fds(self.requests, 16, MAX_DESCRIPTORS)
                    if not message:
                        return
                    self._start(*descriptors)
                elif descriptor in self.children:
                    self._reap(descriptor)
                elif descriptor in self.controls:
                    self._kill(descriptor)

    def _start(self, control: int, *descriptors: int) -> None:
        server = os.getpid()
        try:
            if (pid := os.fork()) == 0:
                _run_child(server, control, descriptors)
        except OSError as error:
            pid = -(error.errno or 1)
        for descriptor in descriptors:
            os.close(descriptor)
        _send_number(control, pid)
        if pid < 0:
            os.close(control)
            return
        child = os.pidfd_open(pid)
        self.controls[control], self.children[child] = pid, (pid, control)
        self.poll.register(child, select.POLLIN)
        self.poll.register(control, select.POLLRDHUP)

    def _kill(self, control: int) -> None:
        """The caller closed the control socket. The child is reaped as any other."""
        self.poll.unregister(control)
        pid = self.controls.pop(control)
        for kill in (
            os.killpg,
            os.kill,
        ):  # a child that has not yet made its session is in the server's
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _reap(self, child: int) -> None:
        pid, control = self.children.pop(child)
        with suppress(ProcessLookupError):
            os.killpg(
                pid, signal.SIGKILL
            )  # whatever it left behind; its own id is not reused before waitpid
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if self.controls.pop(control, None) is not None:
            self.poll.unregister(control)
        self.poll.unregister(child)
        _send_number(control, status)
        os.close(child)
        os.close(control)


def _send_number(descriptor: int, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        os.write(descriptor, NUMBER.pack(number))


def _run_child(server: int, control: int, descriptors: Sequence[int]) -> None:
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            return
        for below, above in pairwise(
            [2, *sorted((control, *descriptors)), os.sysconf("SC_OPEN_MAX")]
        ):
            os.closerange(below + 1, above)
        with open(control, "rb") as stream:
            size = NUMBER.unpack(stream.read(NUMBER.size))[0]
            target, spec = pickle.loads(
                stream.read(size)
            )  # from the caller; the child cannot write to it
        status = resolve_name(target)(spec, *descriptors) or 0
    except BaseException:  # noqa: BLE001 (nothing may return into the server's loop)
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    requests, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        return
    sys.argv = sys.orig_argv = [""]
    path, modules = pickle.loads(requests.recv(1 << 16))
    sys.path += path
    try:
        for name in modules:
            if ":" in name:
                resolve_name(name)()
            else:
                importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 (a module may raise anything)
        requests.send(f"{type(error).__name__}: {error}"[:1000].encode())
        return
    gc.freeze()  # children do not copy pages by collecting garbage
    requests.send(b"ready")
    _Server(requests).serve(parent)


if __name__ == "__main__":
    main()
