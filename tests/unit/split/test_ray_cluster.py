"""The folder of a local Ray: private, and gone with its job. Nodes that are gone. tests/e2e has Ray itself."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.load import parse_config
from megarl.processes.exit_codes import REFUSED, CurrentPhase, classify
from megarl.split import entry as run_split
from megarl.split import ray_cluster as cluster


def test_folders_of_jobs_that_were_killed_go_and_those_of_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, starting, foreign = (
        tmp_path / f"{cluster.FOLDER}{name}" for name in ("killed", "starting", "foreign")
    )
    for folder in (killed, starting):
        (folder / "ray").mkdir(parents=True)
    foreign.symlink_to(tmp_path)
    os.utime(killed, (0, 0))
    with cluster._private_folder() as own:
        assert own.stat().st_mode & 0o777 == 0o700
        os.utime(own, (0, 0))
        with cluster._private_folder() as second:
            assert sorted(tmp_path.iterdir()) == sorted([own, second, starting, foreign])
    assert sorted(tmp_path.iterdir()) == sorted([starting, foreign])


class Ray:
    """An actor is placed at its time; the placement group is whole until `gone_s`, and from `back_s` on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gone_s: float, back_s: float) -> None:
        self.now = 0.0
        monkeypatch.setitem(sys.modules, "ray", self)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.gone_s, self.back_s = gone_s, back_s
        self.cluster = cluster.Cluster(SimpleNamespace(wait=self.is_whole), "", False, False)

    def is_whole(self, timeout_s: int) -> bool:
        assert isinstance(timeout_s, int) and timeout_s, (
            "Ray takes whole seconds, and answers nothing within 0"
        )
        whole = not self.gone_s <= self.now < self.back_s
        self.now += timeout_s * (not whole)
        return whole

    def actor(self, placed_s: float) -> Any:
        return SimpleNamespace(place=SimpleNamespace(remote=lambda: placed_s))

    def wait(
        self, refs: list[float], *, num_returns: int, timeout: float
    ) -> tuple[list[float], list[float]]:
        self.now += timeout
        return [ref for ref in refs if ref <= self.now], [ref for ref in refs if ref > self.now]

    def get(self, refs: list[float]) -> list[float]:
        return refs

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}


def test_a_node_is_waited_for_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for gone_s, back_s, placed_s in (
        (5, 5, 500),
        (5, 60, 70),
    ):  # only slow; gone for less than a minute
        ray = Ray(monkeypatch, gone_s, back_s)
        assert ray.cluster.placed([ray.actor(3), ray.actor(placed_s)]) == [3, placed_s]
    ray = Ray(monkeypatch, 5, 999)
    with pytest.raises(
        cluster.NodeGone, match="a node is gone; the Ray cluster has 3 CPUs and 0 GPUs left"
    ) as gone:
        ray.cluster.placed([ray.actor(3), ray.actor(1000)])
    assert 60 < ray.now < 70 and classify(gone.value) == REFUSED
    assert classify(cluster.NoRoom("small")) != REFUSED


def test_the_first_layout_with_room_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    layouts = [
        parse_config({"launch": {"processes": count, "timeout_s": 900}}) for count in (8, 4, 2)
    ]
    room, ran = 2, list[tuple[int | None, float]]()

    def run(config: Any, _phase: CurrentPhase, room_s: float) -> None:
        ran.append((config.launch.processes, room_s))
        if config.launch.processes > room:
            raise (cluster.NoRoom if len(ran) > 1 else cluster.NodeGone)(
                f"no room for {config.launch.processes}"
            )

    monkeypatch.setattr(run_split, "_run", run)
    assert run_split._first_with_room(layouts, CurrentPhase()) is layouts[2]
    assert ran == [(8, 900), (4, cluster.ROOM_S), (2, cluster.ROOM_S)]
    assert capsys.readouterr().err.splitlines() == [
        "megarl: no room for 8; goes on in launch.fallback_layouts[0]",
        "megarl: no room for 4; goes on in launch.fallback_layouts[1]",
    ]
    room = 1
    ran.clear()
    with pytest.raises(
        cluster.NodeGone, match="no room for 8"
    ):  # the cause, not what was tried after it
        run_split._first_with_room(layouts, CurrentPhase())


def test_a_fallback_replaces_the_whole_layout() -> None:
    launch = {
        "topology": "split",
        "processes": 4,
        "fallback_layouts": [{"processes": 2, "parallel": {"pipeline": 2}}],
    }
    config = parse_config({"launch": launch, "parallel": {"tensor": 2}})
    (fallback,) = run_split.fallbacks(config)
    assert (fallback.parallel.tensor, fallback.parallel.pipeline, fallback.launch.processes) == (
        1,
        2,
        2,
    )
    assert fallback.rollout == config.rollout and not fallback.launch.fallback_layouts
