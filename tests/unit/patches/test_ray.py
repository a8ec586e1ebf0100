"""Ray's source still does what each row replaces; a test that fails names a row to delete."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from megarl.patches import ray as patches

SPEC = find_spec("ray")
if SPEC is None:
    pytest.skip("needs Ray", allow_module_level=True)
PRIVATE = Path(next(iter(SPEC.submodule_search_locations or ()))) / "_private"
SERVICES = (PRIVATE / "services.py").read_text(encoding="utf-8")
NODE = (PRIVATE / "node.py").read_text(encoding="utf-8")


def function(text: str, name: str) -> str:
    return text.partition(f"\ndef {name}(")[2].partition("\ndef ")[0]


def test_loopback_is_replaced_where_clusters_are_enabled() -> None:
    assert "return get_node_ip_address()" in function(SERVICES, "resolve_ip_for_localhost")
    address = function(SERVICES, "get_node_ip_address")
    assert "if not ray_constants.ENABLE_RAY_CLUSTER:\n" in address


def test_a_node_has_30_seconds_to_register() -> None:
    assert "raylet_start_wait_time_s = 30\n" in NODE
    assert "ray._private.services.get_node(" in NODE


def test_agents_choose_their_ports_by_default() -> None:
    parameters = function(SERVICES, "start_raylet").partition("->")[0]
    for agent in patches.AGENTS:
        assert f"{agent}_port=ray_params.{agent}_port or 0" in NODE
        assert f"{agent}_port: Optional[int] = None" in parameters


def test_agents_are_minimal_only_without_packages() -> None:
    condition = "if ray._private.utils.get_dashboard_dependency_error() is not None:\n"
    branch = SERVICES.partition(condition)[2]
    assert '.append("--minimal")' in branch[:500]


def test_ports_are_free_and_all_different() -> None:
    ports = patches._start_raylet_with_ports(lambda **ports: ports)
    assert ports.keys() == {f"{agent}_port" for agent in patches.AGENTS}
    assert len(set(ports.values())) == len(ports)
    for port in ports.values():
        socket.create_server(("127.0.0.1", port)).close()


def test_a_node_is_asked_for_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [RuntimeError("not yet"), RuntimeError("not yet"), {"node_manager_port": 1}]

    def original(_address: str, _node: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    assert patches._get_node_patiently(original, "host:1", "node") == {"node_manager_port": 1}
    monkeypatch.setattr(patches, "START_S", -1.0)
    answers = [RuntimeError("never")]
    with pytest.raises(RuntimeError, match="never"):
        patches._get_node_patiently(original, "host:1", "node")
