"""The Ray cluster of the split topology: an existing cluster (RAY_ADDRESS), or a local one that
ends with the run.

    open_cluster --> Cluster: placement group, address of the rendezvous store
                     local: listens on loopback only; a token generated for the job
                     existing: the cluster's token (scripts/ray_cluster.sh)

Ray executes code that it receives, so anyone who can reach a port without a token has a shell.
"""

import fcntl
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.layout import Fleet
from megarl.patches import ray as ray_patches
from megarl.platform.env import LOOPBACK, get_env, set_env

STORE_BYTES = 256 << 20  # size of a local object store, which holds the batches of a step
ROOM_S = 60.0  # time for a lost node to come back or be replaced
TOKEN_BYTES = 32
FOLDER = "megarl-ray-"
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


class NoRoom(ValueError):
    """Raised if the cluster is too small for the job."""


class NodeGone(NoRoom):
    """Raised if a node was lost during the run and not replaced."""


@dataclass(frozen=True)
class Cluster:
    placement: Any  # one bundle for each trainer rank, then those of each engine replica
    store: str  # address of the rendezvous store (transports.collective.open_store)
    is_local: bool  # True: one machine, all ports are on loopback
    has_gpus: bool
    parts: int = 1  # bundles of an engine replica: of the nodes that it spans

    def resources(self) -> str:
        import ray

        has = ray.cluster_resources()
        return f"the Ray cluster has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs"

    def placed(self, actors: Sequence[Any]) -> list[tuple[str, list[int], int]]:
        """Waits until the actors run; returns (node id, GPU ids, process id) of each.

        Raises NodeGone if a node is lost, RayError if an actor has died.
        """
        import ray

        pending = places = [actor.place.remote() for actor in actors]
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=1.0)
            self.expect_nodes()
        return ray.get(places)

    def expect_nodes(self) -> None:
        """Raises NodeGone if a node is lost and not replaced within ROOM_S."""
        deadline = None
        while not self.placement.wait(1):  # seconds; Ray only accepts an int
            deadline = deadline or time.monotonic() + ROOM_S
            if time.monotonic() > deadline:
                raise NodeGone(
                    f"a node is gone; {self.resources()} left; add nodes and run the same command "
                    "to resume"
                )


@contextmanager
def open_cluster(config: Config, fleet: Fleet, *, gpus: int, room_s: float) -> Iterator[Cluster]:
    """Connects to the Ray cluster, or starts a local one, and yields it with a placement group.

    Raises NoRoom if the job does not fit within `room_s` seconds, ValueError if the existing
    cluster cannot be joined or no token is set.
    """
    address = get_env("RAY_ADDRESS")
    store = ""
    with ExitStack() as stack:
        set_env(RAY_AUTH_MODE="token", RAY_USAGE_STATS_ENABLED=0)
        if address:
            ray = _connect(address)
        else:
            folder = stack.enter_context(_private_folder())
            ray = _start(folder / "ray", config, fleet, gpus)  # Ray makes this one world-accessible
            store = f"file:{folder / 'store'}"
        stack.callback(ray.shutdown)
        has_gpus = gpus > 0 if not address else ray.cluster_resources().get("GPU", 0) > 0
        parts = fleet.nodes_per_replica if address else 1
        rank = {"CPU": 1, "GPU": int(has_gpus)}
        engine = {"CPU": 1, "GPU": fleet.ranks_per_replica // parts * has_gpus}
        placement = ray.util.placement_group(
            [rank] * fleet.trainers + [engine] * fleet.replicas * parts, strategy="PACK"
        )
        stack.callback(ray.util.remove_placement_group, placement)
        cluster = Cluster(placement, store or _listen(stack), not address, has_gpus, parts)
        if not placement.wait(room_s):
            nodes = f" on {parts} nodes each" if parts > 1 else ""
            raise NoRoom(
                f"{cluster.resources()}, but no room for {fleet.trainers} trainer ranks and "
                f"{fleet.replicas} engines of {fleet.ranks_per_replica}{nodes}; start more nodes"
            )
        yield cluster


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Yields a temporary folder that only this user can read, and removes it on exit.

    Also removes the folders that killed processes left behind.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with suppress(OSError), _locked(old):  # fails if its process lives or another user owns it
            if time.time() - old.stat().st_mtime > 10:
                shutil.rmtree(old)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER, ignore_cleanup_errors=True) as folder,
        _locked(Path(folder)),
    ):
        yield Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _connect(address: str) -> Any:
    if not (get_env("RAY_AUTH_TOKEN") or get_env("RAY_AUTH_TOKEN_PATH")):
        raise ValueError(
            f"RAY_ADDRESS={address}, but neither RAY_AUTH_TOKEN nor RAY_AUTH_TOKEN_PATH is set: "
            "without a token, anyone who reaches the cluster's ports runs code in it; use "
            "scripts/ray_cluster.sh, or set its token"
        )
    import ray

    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(
            f"RAY_ADDRESS={address} cannot be joined ({' '.join(str(error).split())[:300]})"
        ) from None
    return ray


def _start(folder: Path, config: Config, fleet: Fleet, gpus: int) -> Any:
    set_env(
        RAY_AUTH_TOKEN=secrets.token_hex(TOKEN_BYTES),
        RAY_AUTH_TOKEN_PATH=None,
        RAY_agent_register_timeout_ms=int(ray_patches.START_S * 1000),
        RAY_DISABLE_IMPORT_WARNING=1,
        **LOOPBACK,
    )
    import ray

    with ray_patches.applied(config.launch.dashboard):
        ray.init(
            num_cpus=fleet.trainers + fleet.replicas,
            num_gpus=gpus,
            include_dashboard=config.launch.dashboard,
            object_store_memory=STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
            **QUIET,
        )
    return ray


def _listen(stack: ExitStack) -> str:
    """Serves a TCPStore on this node's cluster address only; returns "HOST:PORT"."""
    import ray
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host = ray.util.get_node_ip_address()
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    stack.callback(lambda: store)  # keeps the store alive until the stack closes
    return f"{host}:{port}"
