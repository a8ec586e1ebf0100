"""Forks a process per job from a warm, clean Python, which takes milliseconds.

    caller --descriptors (SCM_RIGHTS)--> server --fork--> child: function(spec, *descriptors)
       |  <------- pid, exit status ------- |                ^
       +-- target, spec: on the job's own control socket ----+

The server has none of the caller's descriptors and, if it is clean, an empty environment. It
imports the modules to preload, and never reads what a child writes: results travel on the job's
descriptors. A child shares nothing writable with its siblings and leads its own session. It is
killed when its control socket is closed, or when the server or the caller dies.
"""

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
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    # threads would make a fork unsafe
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ForkServerError(Exception):
    """The server cannot start, or ended together with its children."""


@dataclass
class Child:
    """A running job. `returncode` is as in subprocess: minus a signal, None while the job runs."""

    pid: int
    control: socket.socket
    returncode: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Returns the exit status. Raises TimeoutError, and ForkServerError if the server ended."""
        # the socket is closed once the server is known to have ended
        if self.returncode is None and self.control.fileno() >= 0:
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
    """Starts its server at the first request, and again if it died. Any thread may call `start`."""

    modules: Sequence[str] = ()  # to preload: "module", or "module:function" to call once
    path: Sequence[str] = ()  # added to the server's sys.path
    is_clean: bool = True  # False: with the caller's environment, folder, output and site-packages
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: subprocess.Popen[Any] | None = None
    requests: socket.socket | None = None

    def start(self, target: str, spec: Any, descriptors: Sequence[int] = ()) -> Child:
        """Runs ``function(spec, *descriptors)`` in a forked child; `target` is "module:function".

        `spec` is pickled. The exit status is the function's result (None: 0), or 1 if it raises.
        Raises ForkServerError.
        """
        job = pickle.dumps((target, spec))
        for _ in range(2):
            control, server_end = socket.socketpair()
            control.settimeout(START_S)
            pid = 0  # the server ended
            requests = None
            try:
                with server_end, self.lock, suppress(ConnectionError):  # the server ended
                    requests = self._running()
                    socket.send_fds(requests, [b"job"], [server_end.fileno(), *descriptors])
                pid = _receive_number(control) or 0
                if pid > 0:
                    with suppress(ConnectionError):  # it was killed; `wait` reports how
                        control.sendall(NUMBER.pack(len(job)) + job)
                    return Child(pid, control)
            except TimeoutError:
                raise ForkServerError(
                    f"the fork server did not fork within {START_S:.0f} s"
                ) from None
            finally:
                if pid <= 0:
                    control.close()
            if pid < 0:
                raise ForkServerError(f"the fork server cannot fork: {os.strerror(-pid)}")
            with self.lock:
                if self.requests is requests:
                    self.stop()
        raise ForkServerError(
            f"the fork server of {', '.join(self.modules) or 'no modules'} ended twice"
        )

    def _running(self) -> socket.socket:
        # in a fork of the caller, poll() finds no such child, hence a fork starts its own server
        if self.requests is None or self.process is None or self.process.poll() is not None:
            self.stop()
            self.requests, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.requests.settimeout(START_S)
            null = subprocess.DEVNULL
            options = "-SPsB"
            settings: dict[str, Any] = {"stdout": null, "stderr": null, "cwd": "/"}
            if not self.is_clean:
                options = "-uP"
                settings = {"stdout": sys.stdout}
            with server_end:
                descriptor = server_end.fileno()
                self.process = subprocess.Popen(
                    [sys.executable, options, __file__, str(descriptor), str(os.getpid())],
                    stdin=null,
                    env=ENVIRONMENT if self.is_clean else None,
                    pass_fds=(descriptor,),
                    start_new_session=True,
                    **settings,
                )
            self.requests.send(pickle.dumps((list(self.path), list(self.modules))))
            reply = b""
            with suppress(TimeoutError, ConnectionError):
                reply = self.requests.recv(1 << 16)
            if reply != b"ready":
                self.stop()
                raise ForkServerError(
                    "the fork server does not start: "
                    f"{reply.decode() or 'it ended, or is too slow'}"
                )
        return self.requests

    def stop(self) -> None:
        """Ends the server and all its children; not while another thread starts one."""
        if self.requests is not None:
            self.requests.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.requests = self.process = None


def _receive_number(connection: socket.socket) -> int | None:
    """Returns None at the end of the stream. Raises TimeoutError only before the first byte."""
    try:
        data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    if len(data) < NUMBER.size:
        return None
    return NUMBER.unpack(data)[0]


# --- the server's process -------------------------------------------------------------------------


def _serve(requests: socket.socket, parent: int) -> None:
    """Returns when the process behind the descriptor `parent` ends or closes its socket."""
    controls = {}  # {descriptor of a control socket: pid of its child}
    children = {}  # {descriptor of a child: descriptor of its control socket}
    poll = select.poll()
    for descriptor in (parent, requests.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == parent:
                return
            if descriptor == requests.fileno():
                message, descriptors, _, _ = socket.recv_fds(requests, 16, MAX_DESCRIPTORS)
                if not message:
                    return
                control = descriptors[0]
                pid = _fork(*descriptors)
                if pid > 0:
                    child = os.pidfd_open(pid)
                    controls[control] = pid
                    children[child] = control
                    poll.register(child, select.POLLIN)
                    poll.register(control, select.POLLRDHUP)
            elif descriptor in children:
                control = children.pop(descriptor)
                pid = controls.pop(control)
                with suppress(ProcessLookupError):
                    # whatever it left behind; its own id is not reused before waitpid
                    os.killpg(pid, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(KeyError):  # the caller closed it
                    poll.unregister(control)
                poll.unregister(descriptor)
                _send_number(control, status)
                os.close(descriptor)
                os.close(control)
            elif descriptor in controls:
                # the caller closed the control socket: the child is killed, and reaped as any other
                poll.unregister(descriptor)
                # os.kill, because a child that has not yet made its session is in the server's
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError):
                        kill(controls[descriptor], signal.SIGKILL)


def _fork(control: int, *descriptors: int) -> int:
    """Returns the pid of a child that runs the job, or minus an errno; the caller gets it too."""
    server = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _run_child(server, control, descriptors)
    except OSError as error:
        pid = -(error.errno or 1)
    for descriptor in descriptors:
        os.close(descriptor)
    _send_number(control, pid)
    if pid < 0:
        os.close(control)
    return pid


def _send_number(descriptor: int, number: int) -> None:
    with suppress(ConnectionError):
        os.write(descriptor, NUMBER.pack(number))


def _run_child(server: int, control: int, descriptors: Sequence[int]) -> None:
    """Runs the job that arrives on the control socket, with no other descriptors, and exits."""
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            return
        kept = [2, *sorted((control, *descriptors)), os.sysconf("SC_OPEN_MAX")]
        for below, above in pairwise(kept):
            os.closerange(below + 1, above)
        with open(control, "rb") as stream:
            size = NUMBER.unpack(stream.read(NUMBER.size))[0]
            # from the caller; the child cannot write to it
            target, spec = pickle.loads(stream.read(size))
        status = resolve_name(target)(spec, *descriptors) or 0
    except BaseException:  # noqa: BLE001 (nothing may return into the server's loop)
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    # what the caller ignores or blocks is inherited: children would not be reaped, nor time limited
    for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    requests = socket.socket(fileno=int(sys.argv[1]))
    parent_pid = int(sys.argv[2])
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
    _serve(requests, parent)


if __name__ == "__main__":
    main()
