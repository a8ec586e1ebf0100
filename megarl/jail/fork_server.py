"""Forks a process per job from a warm Python process, which takes milliseconds.

    caller --descriptors (SCM_RIGHTS)--> server --fork--> child: function(spec, *descriptors)
       |  <------- pid, exit status ------- |                ^
       +-- target, spec: on the job's own control socket ----+

The server does not inherit the caller's descriptors or, if it is clean, the caller's environment.
It preloads modules, and never reads data from a child: results travel on the job's descriptors. A
child shares nothing writable with other children and leads a separate session. It is killed when
its control socket is closed, or when the server or the caller dies.
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

START_S = 60.0  # time to preload modules, and to fork on a busy machine
MAX_DESCRIPTORS = 16
NUMBER = struct.Struct("=q")
PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    # forking is unsafe in a process with threads
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class ForkServerError(Exception):
    """Raised if the server cannot start or fork, or ended together with its children."""


@dataclass
class Child:
    """A forked job. Like in subprocess, `returncode` is None while the job runs, and negative if a
    signal ended it.
    """

    pid: int
    control: socket.socket
    returncode: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for the child to end; returns its exit status.

        Raises TimeoutError, or ForkServerError if the server has ended.
        """
        # an earlier call closes the socket if it finds that the server has ended
        if self.returncode is None and self.control.fileno() >= 0:
            self.control.settimeout(timeout_s)
            self.returncode = _receive_number(self.control)
            self.control.close()
        if self.returncode is None:
            raise ForkServerError(f"the fork server ended while process {self.pid} ran")
        return self.returncode

    def kill(self) -> int:
        """Kills the child and its whole session; returns the exit status."""
        if self.returncode is None:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_WR)
        return self.wait(START_S)


@dataclass
class ForkServer:
    """Starts jobs in a server process, which is started on first use and restarted if it died.

    Any thread may call `start`.
    """

    modules: Sequence[str] = ()  # to preload: "module", or "module:function" to call once
    path: Sequence[str] = ()  # added to the server's sys.path
    is_clean: bool = True  # False: keep the caller's environment, folder, output and site-packages
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: subprocess.Popen[Any] | None = None
    requests: socket.socket | None = None

    def start(self, target: str, spec: Any, descriptors: Sequence[int] = ()) -> Child:
        """Runs ``function(spec, *descriptors)`` in a forked child; `target` is "module:function".

        `spec` is pickled. The exit status is the function's result (None: 0), or 1 if it raises.
        Raises ForkServerError if the server cannot start or fork.
        """
        job = pickle.dumps((target, spec))
        for _ in range(2):
            control, server_end = socket.socketpair()
            control.settimeout(START_S)
            pid = 0  # 0: the server has ended
            requests = None
            try:
                with server_end, self.lock, suppress(ConnectionError):  # the server has ended
                    requests = self._running()
                    socket.send_fds(requests, [b"job"], [server_end.fileno(), *descriptors])
                pid = _receive_number(control) or 0
                if pid > 0:
                    with suppress(ConnectionError):  # the child was killed; `wait` reports how
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
        # in a fork of the caller, poll() does not find the child, so a fork starts its own server
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
        """Ends the server and all its children. Must not run while another thread starts a job."""
        if self.requests is not None:
            self.requests.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.requests = self.process = None


def _receive_number(connection: socket.socket) -> int | None:
    """Returns the next number, or None at the end of the stream.

    Raises TimeoutError, but only before the first byte.
    """
    try:
        data = connection.recv(NUMBER.size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    if len(data) < NUMBER.size:
        return None
    return NUMBER.unpack(data)[0]


# --- the server's process -------------------------------------------------------------------------


def _serve(requests: socket.socket, parent: int) -> None:
    """Serves requests until the process of the pidfd `parent` ends or closes its socket."""
    controls = {}  # descriptor of a control socket -> pid of its child
    children = {}  # pidfd of a child -> descriptor of its control socket
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
                with suppress(KeyError):  # already unregistered, because the caller closed it
                    poll.unregister(control)
                poll.unregister(descriptor)
                _send_number(control, status)
                os.close(descriptor)
                os.close(control)
            elif descriptor in controls:
                # the caller closed the control socket: kill the child, which is reaped above
                poll.unregister(descriptor)
                # os.kill too, because a child without its own session is still in the server's
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError):
                        kill(controls[descriptor], signal.SIGKILL)


def _fork(control: int, *descriptors: int) -> int:
    """Forks a child that runs the job. Returns the child's pid, or -errno if the fork fails, and
    sends it to the caller.
    """
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
    """Closes all other descriptors, runs the job that arrives on the control socket, and exits."""
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
            # the pickle is from the caller; no child can write to this socket
            target, spec = pickle.loads(stream.read(size))
        status = resolve_name(target)(spec, *descriptors) or 0
    except BaseException:  # noqa: BLE001 (nothing may return into the server's loop)
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    # ignored and blocked signals are inherited: children would not be reaped, nor CPU time limited
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
    gc.freeze()  # garbage collection in children would copy shared pages
    requests.send(b"ready")
    _serve(requests, parent)


if __name__ == "__main__":
    main()
