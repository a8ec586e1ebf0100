"""The split topology, on the real Ray, Megatron-Core and vLLM: the numbers of the colocated one, whatever is killed.

One run serves many checks, as starting Ray, ranks and engines is what takes the time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from split_runs import Belongings, Node, Run, compare, open_to_others, output
from test_rewards import start_server

from megarl.platform.env import child_env
from megarl.processes.children import descendants

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
SPLIT = ("launch.topology=split",)
SMALL = ("train.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.cpu_kv_cache_gb=0.1")
PYNVML = """
import os
class NVMLError(Exception): ...
def nvmlInit(): ...
def nvmlShutdown(): ...
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPowerUsage(index): return 1000 * (int(os.environ["NODE_POWER_W"]) + index)
def unsupported(*_): raise NVMLError
def __getattr__(name): return unsupported if name.startswith("nvmlDevice") else 1
"""
WATCHED = """
import json, sys
from pathlib import Path
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from megarl.split.ray_actors import RankActor
from megarl.split.stopped_processes import Watch
logs = Path(sys.argv[1]) / "logs"
logs.mkdir()
ray.init(log_to_driver=False)
own = ray.get_runtime_context().get_node_id()
watch = Watch(60.0, own)
nodes = sorted((node["NodeID"] for node in ray.nodes()), key=lambda node: node != own)
for number, node in enumerate(nodes):
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    kind = RankActor.options(num_cpus=1, num_gpus=1 + number, scheduling_strategy=strategy)
    actor = kind.remote(number, logs / f"rank_{number}.log", {})
    watch.add(f"rank {number}", actor, ray.get(actor.place.remote()))
    assert "failure" in ray.get(actor.call.remote("score")), "it has no trainer"
watch.gather_gpus({})
print(json.dumps([metrics.get("gpu/power_w/mean") for metrics in watch.gather_gpus({})]))
watch.end()
"""
STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"  # ray.init takes minutes


@pytest.fixture
def own() -> Iterator[Belongings]:
    """A process, a segment of shared memory or a folder that a run leaves behind is a fault."""
    with Belongings() as belongings:
        yield belongings
        assert not (left := belongings.left()), left


def check_strangers(run: Run) -> None:
    """Its ports are open to this machine only, and Ray's refuse who has no token."""
    os.kill(run.process.pid, signal.SIGSTOP)  # Ray's processes stay as long as the controller
    try:
        listeners = run.listeners()
        assert {address for address, _ in listeners} <= LOOPBACK, listeners
        assert 8265 not in {port for _, port in listeners}, "Ray's dashboard"
        (gcs,) = {
            part for pid in run.family("raylet/raylet") for part in arguments(pid, "--gcs-address=")
        }
        environment = child_env(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
        refused = subprocess.run(
            [sys.executable, "-c", STRANGER, gcs], env=environment, capture_output=True, text=True
        )
        reached = open_to_others({port for _, port in listeners})
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    print(f"{len(listeners)} listeners; from another network namespace reached: {reached}")
    assert not reached
    assert refused.returncode != 0 and "AuthenticationError" in refused.stderr, refused.stderr[
        -800:
    ]


def arguments(pid: int, option: str) -> list[str]:
    """Values that this process was started with."""
    values = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return [value.removeprefix(option) for value in values if value.startswith(option)]


KILLED = ("EngineCore rollout", "EngineActor sync", "RankActor train", "controller")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_is_killed_is_replaced_and_the_numbers_stay(tmp_path: Path, own: Belongings) -> None:
    """An engine's core that generates, its actor in a sync, a rank of the trainer, the controller."""
    common = (
        f"train.steps={2 * len(KILLED) + 2}",
        "checkpoint.every=1",
        "launch.processes=1",
        *SMALL,
    )
    colocated = Run.start(tmp_path, "whole", "tiny_dense", *common)
    run = Run.start(
        tmp_path, "killed", "tiny_dense", *SPLIT, *common, tmp=own.folder, is_watched=True
    )
    run.until(0)
    check_strangers(run)
    for number, (victim, *phase) in enumerate(map(str.split, KILLED)):
        run.until(2 * number)
        if (noticed_s := run.kill(victim, "".join(phase))) is None:
            run.audit()
            run = run.again()
        else:
            print(
                f"{victim} killed after step {run.step()} in {phase[0]}: noticed after {noticed_s:.1f} s"
            )
            assert noticed_s < 10
        run.audit()
    compare(run.finish(), colocated.finish())
    run.audit()


KILLS = {  # layout, victims, kills
    "two ranks, two engines": (
        ("launch.processes=2", "rollout.replicas=2"),
        ("EngineCore", "EngineActor", "RankActor", "controller", "rewards", "slow"),
        12,
    ),
    "an engine of two workers": (
        ("launch.processes=2", "rollout.tensor=2"),
        ("Worker", "EngineCore", "RankActor", "slow"),
        4,
    ),
    "a version behind": (
        ("launch.processes=1", "rollout.replicas=2", "rollout.max_staleness=1"),
        ("EngineCore", "EngineActor", "RankActor", "controller"),
        4,
    ),
}


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", KILLS)
def test_twenty_kills(case: str, tmp_path: Path, own: Belongings) -> None:
    """At random moments of random phases; the run ends with the numbers of a colocated one that was left alone."""
    layout, victims, kills = KILLS[case]
    draw, (server, port) = random.Random(5), start_server()
    rewards = f"rewards=[{{name: 'http://127.0.0.1:{port}/score', options: {{retries: 9, backoff_s: 0.2}}}}]"
    common = (rewards, f"train.steps={3 * kills + 4}", "checkpoint.every=1", *SMALL)
    trained = [value for value in layout if "replicas" not in value and "staleness" not in value]
    whole = Run.start(tmp_path, "whole", "tiny_dense", *trained, *common).finish()
    values = (*SPLIT, *layout, "launch.max_restarts=99", *common)
    run, order = (
        Run.start(tmp_path, "killed", "tiny_dense", *values, tmp=own.folder, is_watched=True),
        list[str](),
    )
    for number in range(kills):
        order = order or draw.sample(victims, len(victims))
        victim, phase, delay_s = (
            order.pop(),
            draw.choice(("rollout", "train", "sync")),
            0.2 * draw.random(),
        )
        run.until(3 * number)
        step = run.step() + 1
        if victim == "rewards":
            server.kill()
            server.wait()
            time.sleep(delay_s)
            server, _ = start_server(port)
            effect = "started again"
        elif victim == "slow":
            run.pause("EngineCore", phase, delay_s, seconds=3.0)
            effect = "stopped for 3 s"
        elif (noticed_s := run.kill(victim, phase, delay_s)) is None:
            run, effect = run.again(), "started again"
        else:
            assert noticed_s < 10
            effect = f"noticed after {noticed_s:.1f} s"
        print(
            f"kill {number + 1}: {victim} in step {step}, {delay_s:.2f} s after {phase} began: {effect}"
        )
        print(f"  {run.audit()}", flush=True)
    rows = run.finish()
    print(f"{case}: {len(rows)} steps; {run.audit()}")
    if "rollout.max_staleness=1" not in layout:
        print(
            f"  largest relative difference {compare(rows, whole, 1e-5 * ('rollout.tensor=2' in layout)):.1e}"
        )
    server.kill()
    server.wait()


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_what_is_stopped_is_named_killed_and_replaced(tmp_path: Path, own: Belongings) -> None:
    common = ("train.steps=8", "checkpoint.every=1", "launch.processes=2", *SMALL)
    whole = Run.start(tmp_path, "whole", "tiny_dense", *common).finish()
    values = (*SPLIT, *common, "launch.timeout_s=40")
    run = Run.start(tmp_path, "stopped", "tiny_dense", *values, tmp=own.folder, is_watched=True)
    for number, (victim, phase) in enumerate((("EngineCore", "rollout"), ("RankActor", "train"))):
        run.until(2 * number)
        pid = run._victim(victim, phase, 0.0)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        run.wait_for(lambda pid=pid: f"(process {pid}) is stopped" in run.errors(), timeout_s=60)
        named_s = time.monotonic() - began
        run.wait_for(lambda number=number: run.errors().count("; restart ") > number, timeout_s=120)
        print(
            f"{victim} stopped in {phase}: named after {named_s:.1f} s, lost after {time.monotonic() - began:.1f} s"
        )
        assert named_s < 10 and time.monotonic() - began < 40
    compare(run.finish(), whole)
    print(run.audit(), [line for line in run.errors().splitlines() if line.startswith("megarl: ")])


@contextmanager
def two_nodes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int] = (3, 2)
) -> Iterator[list[Node]]:
    """Two Ray nodes of so many CPUs and as many GPUs, which are numbers to Ray, and of which the stand-in for pynvml
    says that they take 100, 101 and 102 W, and 300 and 301 W."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / "pynvml.py").write_text(PYNVML)
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{os.environ.get('PYTHONPATH', '')}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first, second = sizes
    head = ("--head", "--port", str(port), "--include-dashboard=false", f"--num-gpus={first}")
    monkeypatch.setenv("NODE_POWER_W", "100")
    nodes = [Node.start(folder, "head", first, *head)]
    try:
        monkeypatch.setenv("NODE_POWER_W", "300")
        joined = ("--address", f"127.0.0.1:{port}", f"--num-gpus={second}")
        nodes.append(Node.start(folder, "node", second, *joined))
        for key, value in {**Node.access(folder), "RAY_ADDRESS": f"127.0.0.1:{port}"}.items():
            monkeypatch.setenv(key, str(value))
        yield nodes
    finally:
        for node in nodes:
            node.kill()


@pytest.mark.long
def test_gpus_and_calls_of_two_nodes_are_recorded(
    tmp_path: Path, own: Belongings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_nodes(own.folder, monkeypatch):
        command = [sys.executable, "-c", WATCHED, str(tmp_path)]
        done = subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [None, 100, 300.5, 300.5]
    spans = json.loads((tmp_path / "timeline_node1.json").read_text())
    assert [(span["name"], span["pid"]) for span in spans] == [("score", 1)]
    assert len(list(tmp_path.glob("timeline*"))) == 1, "the controller records that of its node"


OVER_NODES = {  # model, the engine's layout, of a rank on each node; versions that its samples may be behind
    "experts": ("tiny_moe", ("rollout.data=2", "rollout.expert=2"), 0),
    "tensor": ("tiny_dense", ("rollout.tensor=2",), 0),
    "experts, stale": ("tiny_moe", ("rollout.data=2", "rollout.expert=2"), 1),
}


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "case",
    [
        "experts",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(OVER_NODES)[1:]),
    ],
)
def test_an_engine_over_two_nodes_is_one_engine(
    case: str, tmp_path: Path, own: Belongings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It samples what a colocated engine of one rank does, and is replaced as a whole if its second half is killed."""
    model, layout, staleness = OVER_NODES[case]
    common = ("train.steps=4", "launch.processes=1", "checkpoint.every=1", *SMALL)
    whole = []
    if not staleness:
        whole = Run.start(tmp_path, "whole", model, *common).finish()
    layout = (*layout, "launch.processes_per_node=1", f"rollout.max_staleness={staleness}")
    with two_nodes(own.folder, monkeypatch, (2, 1)) as nodes:
        run = Run.start(tmp_path, "split", model, *SPLIT, *layout, *common, tmp=own.folder)
        run.until(1)
        half = [pid for pid in descendants(nodes[1].process.pid) if "_part_1" in output(pid)]
        os.kill(half[-1], signal.SIGKILL)
        began = time.monotonic()
        run.wait_for(lambda: "; restart 1 of 3" in run.errors(), timeout_s=60)
        noticed_s = time.monotonic() - began
        rows = run.finish()
    print(f"noticed after {noticed_s:.1f} s", run.audit())
    print([line for line in run.errors().splitlines() if line.startswith("megarl: ")])
    assert "engine 0 is lost" in run.errors() and noticed_s < 20
    assert len(rows) == 4 and all(row["weights/verified"] for row in rows)
    # a step whose tokens are all of older weights has no row of its own version
    differences = [row["logprob_diff/max"] for row in rows if "logprob_diff/max" in row]
    assert differences and max(differences) < 1e-5
    if whole:
        assert len(differences) == 4
        # the advantages of a group cancel in the loss
        print(f"largest relative difference {compare(rows, whole, 1e-5, least=1e-2):.1e}")


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_when_a_node_is_gone_the_run_goes_on_in_a_fallback_layout(
    tmp_path: Path, own: Belongings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on two nodes; then two."""
    common = (
        "train.steps=8",
        "parallel.tensor=2",
        "checkpoint.every=1",
        "launch.processes=4",
        *SMALL,
    )
    whole = Run.start(tmp_path, "whole", "tiny_dense", *common).finish()
    with two_nodes(own.folder, monkeypatch) as nodes:
        fallbacks = "launch.fallback_layouts=[{processes: 4, parallel: {pipeline: 2}}, {processes: 2, parallel: {tensor: 2}}]"
        run = Run.start(
            tmp_path, "killed", "tiny_dense", *SPLIT, *common, fallbacks, tmp=own.folder
        )
        run.until(2)
        nodes.pop().kill()
        rows = run.finish()
    print(run.audit(), [line for line in run.errors().splitlines() if line.startswith("megarl: ")])
    assert (
        "a node is gone" in run.errors()
        and rows[0]["world_size"] == 5
        and rows[-1]["world_size"] == 3
    )
    print(f"largest relative difference {compare(rows, whole, 1e-5):.1e}")
    powers = [(row["gpu/power_w/mean"], row["gpu/power_w/max"]) for row in (rows[0], rows[-1])]
    assert powers == [(pytest.approx((100 + 101 + 102 + 300 + 301) / 5), 301), (101, 102)]
    spans = json.loads((tmp_path / "killed" / "timeline_node1.json").read_text())
    assert {"score", "update", "transfer"} <= {span["name"] for span in spans}
    assert {span["pid"] for span in spans} == {1}


STALE = {
    "in flight": (1, "rollout.replicas=1"),
    "in flight, two versions, two replicas": (2, "rollout.replicas=2"),
    "between requests": (2, "rollout.update_in_flight=false"),
}


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", STALE)
def test_tokens_are_at_most_so_stale_and_each_span_is_of_the_weights_it_names(
    case: str, tmp_path: Path, own: Belongings
) -> None:
    staleness, *values = STALE[case]
    values += [
        "train.steps=6",
        "train.lr=1e-2",
        "checkpoint.export_hf=1",
        "rollout.max_tokens=64",
        "launch.processes=1",
    ]
    values += [f"rollout.max_staleness={staleness}", "telemetry.rollouts.max_samples=1000", *SMALL]
    run = Run.start(
        tmp_path, "stale", "tiny_dense", *SPLIT, *values, tmp=own.folder, is_watched=True
    )
    rows = run.finish()
    print(run.audit())
    behind, mixed, worst = spans(run, staleness)
    print(
        f"staleness {staleness}, {case}: tokens by versions behind {behind}; rows of several versions {mixed}; "
        f"largest difference of log-probs {worst:.1e}"
    )
    assert len(rows) == 6 and max(behind) == staleness and behind[staleness] > 0
    assert (mixed > 0) == case.startswith("in flight")
    assert worst < 1e-4


def spans(run: Run, staleness: int) -> tuple[dict[int, int], int, float]:
    """Trained tokens by how many versions they are behind, rows sampled by several versions, and by how much log-probs
    of a version's tokens differ from those of its exported weights in transformers."""
    from transformers import AutoModelForCausalLM

    behind, mixed, worst, models = dict[int, int](), 0, 0.0, dict[int, Any]()
    (first,) = (run.folder / ".models").iterdir()
    for step, file in enumerate(sorted(run.watched.glob("batch_*.pt"))):
        batch = torch.load(file, weights_only=False)
        for start, end in zip(
            batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
        ):
            mask_T, versions_T = batch.mask[start:end], batch.versions[start:end]
            mixed += versions_T[mask_T].unique().numel() > 1
            for version in versions_T[mask_T].unique().tolist():
                assert step - staleness <= version <= step
                if version not in models:
                    folder = run.folder / run.name / f"hf_step_{version}" if version else first
                    models[version] = AutoModelForCausalLM.from_pretrained(
                        folder, dtype=torch.float32
                    ).eval()
                with torch.no_grad():
                    logits_TV = models[version](batch.tokens[None, start:end]).logits[0]
                logprobs_T = logits_TV.log_softmax(-1).gather(1, batch.labels[start:end, None])[
                    :, 0
                ]
                of_version = mask_T & (versions_T == version)
                worst = max(
                    worst,
                    float((logprobs_T - batch.rollout_logprobs[start:end])[of_version].abs().max()),
                )
                behind[step - version] = behind.get(step - version, 0) + int(of_version.sum())
    return behind, mixed, worst


CASES = {
    "tensor 1, two replicas": (0.0, "launch.processes=2", "rollout.replicas=2"),
    "tensor 2": (1e-5, "launch.processes=2", "rollout.tensor=2"),
    "tensor 2, two replicas": (
        1e-5,
        "launch.processes=4",
        "parallel.tensor=2",
        "rollout.tensor=2",
        "rollout.replicas=2",
    ),
}


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_moe"])
@pytest.mark.parametrize("case", CASES)
def test_twenty_steps(model: str, case: str, tmp_path: Path, own: Belongings) -> None:
    rel, *layout = CASES[case]
    common = ("train.steps=20", *SMALL)
    trained = [value for value in layout if "replicas" not in value]
    colocated = Run.start(tmp_path, "whole", model, *trained, *common).finish()
    split = Run.start(tmp_path, "split", model, *SPLIT, *layout, *common, tmp=own.folder).finish()
    print(f"{model}, {case}: largest relative difference {compare(split, colocated, rel):.1e}")
