"""Patches that Ray needs while a local cluster starts: PATCHES and `applied`."""

import socket
import time
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from megarl.patches.patch import Patch, replaced

START_S = 240.0  # time for Ray's processes to start on a busy machine
AGENTS = ("metrics_agent", "metrics_export", "runtime_env_agent", "dashboard_agent_listen")
_row = partial(Patch, versions="2.60")
_TESTS = "unit/patches/test_ray.py"


def _get_node_patiently(original: Any, gcs_address: str, node_id: str) -> Any:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return original(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _start_raylet_with_ports(original: Any, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for agent in AGENTS:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            kwargs[f"{agent}_port"] = listener.getsockname()[1]
    return original(*args, **kwargs)


NO_DASHBOARD = _row(
    "ray._private.utils.get_dashboard_dependency_error",
    lambda: ImportError("there is no dashboard"),
    "starts HTTP servers of the dashboard's agents wherever their packages are installed; a "
    "run without launch.dashboard has no use for their ports",
    delete_when="include_dashboard=False leaves the HTTP servers out",
    test=f"{_TESTS}::test_agents_are_minimal_only_without_packages",
)
PATCHES = (
    _row(
        "ray._private.ray_constants.ENABLE_RAY_CLUSTER",
        False,
        "replaces 127.0.0.1 by the host's address, except where clusters are disabled; every port"
        " of a local cluster would be reachable from other hosts",
        delete_when="_node_ip_address='127.0.0.1' is kept on Linux",
        test=f"{_TESTS}::test_loopback_is_replaced_where_clusters_are_enabled",
    ),
    _row(
        "ray._private.services.get_node",
        _get_node_patiently,
        "gives the raylet 30 s to register, whatever the settings; its processes take longer to "
        "start on a busy machine",
        calls_original=True,
        delete_when="the time is a setting",
        test=f"{_TESTS}::test_a_node_has_30_seconds_to_register",
    ),
    _row(
        "ray._private.services.start_raylet",
        _start_raylet_with_ports,
        "the raylet waits 30 s for its agents to choose ports, whatever the settings; agents take"
        " longer on a busy machine; for given ports the raylet does not wait",
        calls_original=True,
        delete_when="the time is a setting",
        test=f"{_TESTS}::test_agents_choose_their_ports_by_default",
    ),
    NO_DASHBOARD,
)


def applied(has_dashboard: bool) -> AbstractContextManager[None]:
    """Patches Ray within the context. Without a dashboard, its agents do not serve HTTP."""
    return replaced(x for x in PATCHES if x is not NO_DASHBOARD or not has_dashboard)
