"""Replaces megarl.stages.rl, stages.evaluation and run.context in launcher tests: a rank does what `run.name` says, without torch."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import contextmanager
from pathlib import Path

SIGNALS = {"killed": signal.SIGKILL, "segfault": signal.SIGSEGV, "unknown": 40}


class CheckFailed(RuntimeError):
    pass


class Terminated(CheckFailed):
    pass


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 300
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def roll_call(config, env, phase, folder: Path) -> None:
    """Real ranks without a model: the store, gloo and the barrier; rank 0 waits to be stopped before it arrives."""
    from datetime import timedelta

    import torch.distributed as dist

    from megarl.processes.heartbeat import make_store
    from megarl.weights.sync.transports.collective import Collective

    store = make_store(env, timedelta(seconds=config.launch.timeout_s))
    dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size)
    transport = Collective(timeout_s=config.launch.timeout_s)
    transport.barrier("the first roll call")
    (folder / f"met_{env.rank}").write_text(str(os.getpid()))
    if env.rank == 0:
        wait_for(folder / "go")
    phase.name = "sync"
    transport.barrier("the second roll call")


def run(rank) -> None:
    config, env, phase, rank = rank.config, rank.env, rank.phase, rank.env.rank
    folder = Path(config.run.dir) / config.run.name
    name = config.run.name.split("-")[0]
    print(f"hello from rank {rank} of {env.world_size}")
    print(f"noise from rank {rank}", file=sys.stderr)
    os.write(1, b"c++ chatter\n")
    seen = [
        os.environ.get(name, "unset")
        for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS")
    ]
    (folder / f"up_{rank}").write_text(
        " ".join(map(str, (os.getpid(), env.job_id, env.launcher_pid, *seen)))
    )
    for peer in range(env.world_size):
        wait_for(folder / f"up_{peer}")
    if name == "user" and rank == 1:
        from megarl.models.registry import read_model

        read_model("/not/there")
    if name == "refused":
        raise CheckFailed("log-probs differ by 3\nat most")
    if name == "defect" and rank == 1:
        int("what")
    if name == "echo":  # rank 1 is the cause, rank 0 loses its peer
        if rank == 1:
            raise CheckFailed("first")
        time.sleep(0.3)
        raise RuntimeError("connection closed by peer")
    if name == "checkpoint" and rank == 1:  # as torch's CheckpointException, which is no Exception
        raise type("CheckpointException", (BaseException,), {})("size mismatch\nof a tensor")
    if name == "full" and rank == 1:
        (folder / "large").write_bytes(bytes(2 << 20))
    if name == "gil":
        ctypes.PyDLL(None).sleep(9)  # holds the GIL
    if name == "rollcall":
        roll_call(config, env, phase, folder)
    if name in ("saves", "finishes", "hangs"):
        phase.name = "train"
        (folder / f"busy_{rank}").touch()
        while not phase.is_stopping or name == "hangs":
            time.sleep(0.05)
        if name == "saves":
            (folder / f"saved_{rank}").touch()
            raise Terminated("after step 1")
    if name in SIGNALS and rank == 1:
        os.kill(os.getpid(), SIGNALS[name])
    if name == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
        (folder / f"child_{rank}").write_text(str(child.pid))
    if name in ("defect", "user", *SIGNALS, "stubborn", "forever", "checkpoint", "full"):
        (folder / f"busy_{rank}").touch()
        time.sleep(300)


@contextmanager
def open_rank(config, env, phase):
    yield types.SimpleNamespace(config=config, env=env, phase=phase)


for name, functions in {
    "stages.rl": {"run": run},
    "stages.evaluation": {"run": run},
    "run.context": {"open_rank": open_rank},
}.items():
    module = types.ModuleType(f"megarl.{name}")
    vars(module).update(functions)
    sys.modules[module.__name__] = module
