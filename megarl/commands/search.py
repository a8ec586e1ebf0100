"""Searches layouts of trainer and engine for a number of GPUs. No torch.

Config, number of GPUs, gpu --search_layouts--> Candidates that fit, the fastest first
published runs of others --predict_peers--> their step time beside a prediction

A step is predicted from the sizes of the model and the rates below, not measured:

    generate          the longest response's tokens x a decode step, which reads weights and cache
                      once and waits for kernels and collectives of each layer
    logprobs, update  FLOPs over what the GPUs achieve, with the bubble of the pipeline
    sync              the weights of an engine rank, over the network

It orders layouts; published steps are within a factor of about two (docs/guides/memory_plan.md).
"""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from megarl.config.launch import fleet_of
from megarl.config.load import changed, flat, parse_config
from megarl.config.model import check_model
from megarl.config.rollout import check_engine_layout
from megarl.config.schema import Config
from megarl.config.validate import check_config, model_shape
from megarl.models.flops import forward_flops
from megarl.models.registry import hf_shapes
from megarl.models.shape import ModelShape
from megarl.platform.env import Env
from megarl.weights.plan.cost import LINKS
from megarl.weights.plan.memory_phases import MemoryPlan, memory_by_phase
from megarl.weights.plan.memory_sizes import GPUS, Gpu, engine_sizes

PEERS = Path(__file__).with_name("peers.yaml")
MAX_ROWS = 10
PARTS = ("generate", "logprobs", "update", "sync")
ENGINE = ("rollout.tensor", "rollout.data", "rollout.expert")
SIZES = (1, 2, 4, 8, 16, 32, 64)
# FLOP/s in bf16 and bytes per second of memory, of the data sheets
PEAKS = {"h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12), "b200": (2250e12, 8e12)}
# shares that are achieved: of FLOP/s by dense layers and by experts, and of memory's bandwidth
DENSE = 0.4
EXPERTS = 0.2
MEMORY = 0.7
RESPONSE = 0.6  # mean length of a response, as a share of rollout.max_tokens
HOST = 50e9  # bytes per second between a GPU and its host
BYTES_MOVED = 14  # of an element: weights and optimizer state
SYNC = 1.2  # of a plan, over the bytes that an engine rank receives
KERNELS_S = 1.5e-4  # of a layer in a decode step
# a collective of few tokens within a node, and over nodes
NEAR_S = 2e-5
FAR_S = 6e-5
TENSOR = 0.9  # of what is achieved, for each doubling of parallel.tensor


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with the predicted seconds of each part of a step."""

    overrides: Sequence[str]
    parts: Mapping[str, float]
    peak_bytes: int
    kv_sequences: int

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def why(self) -> str:
        slowest = max(self.parts, key=lambda part: self.parts[part])
        return f"{slowest} takes {100 * self.parts[slowest] / self.step_seconds:.0f}% of the step"

    def as_json(self) -> dict[str, Any]:
        values = {"overrides": list(self.overrides), "step_seconds": self.step_seconds}
        return {
            **values,
            "parts": dict(self.parts),
            "peak_bytes": self.peak_bytes,
            "kv_sequences": self.kv_sequences,
            "why": self.why,
        }


def search_layouts(config: Config, *, gpus: int, gpu: str = "h100") -> list[Candidate]:
    """Returns up to MAX_ROWS layouts that are legal and fit, the fastest first.

    Searched are the trainer's tensor, pipeline and expert sizes, recomputation, and the layout of
    the engines; all other settings are the config's. A split topology divides the GPUs in halves
    or quarters. Raises ValueError if nothing fits.
    """
    device = GPUS[gpu]
    shape = model_shape(config)
    predicted = []
    rollouts = {}
    model = _model_sizes(shape, _length(config))
    for changes in _layouts(config, shape, gpus, gpu):
        candidate = _with(config, changes)
        try:
            check_model(candidate, shape)
            check_engine_layout(candidate, shape)
            # most layouts share their engine with others
            key = (changes["launch.processes"], *map(changes.get, ENGINE))
            if key not in rollouts:
                rollouts[key] = _rollout_s(candidate, shape, device)
            training = _training_s(candidate, shape, device, model)
            parts = _in_order(training, rollouts[key])
        except ValueError:
            continue
        predicted.append((sum(parts.values()), len(predicted), changes, parts))
    found = []
    for _, _, changes, parts in sorted(predicted, key=lambda each: each[:2]):
        candidate = _with(config, changes)
        plan = memory_by_phase(candidate, device)
        if not plan.problems and _is_legal(candidate):
            new = {k: v for k, v in changes.items() if attrgetter(k)(config) != v}
            found.append(_candidate(new, parts, plan))
        if len(found) == MAX_ROWS:
            break
    if not found:
        raise ValueError(
            f"no layout of {shape.family} fits {gpus} {gpu.upper()}: use more GPUs, "
            "rollout.quantization=fp8, or fewer tokens"
        )
    return found


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        config = changed(config, section, **{name: value})
    return config


def _is_legal(config: Config) -> bool:
    try:
        check_config(config, Env(), is_dry=True)
    except ValueError:
        return False
    return True


def _candidate(
    changes: Mapping[str, Any], parts: Mapping[str, float], plan: MemoryPlan
) -> Candidate:
    overrides = [f"{key}={_text(value)}" for key, value in changes.items()]
    peak = plan.largest[2].peak_bytes
    return Candidate(overrides, parts, peak, plan.kv.get("sequences", 0))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return "null" if value is None else str(value)


def _layouts(config: Config, shape: ModelShape, gpus: int, gpu: str) -> Iterator[dict[str, Any]]:
    """Yields the changes of each layout: of the topology, the trainer and the engines."""
    fixed = {"launch.gpu": gpu, "parallel.layers": None, "parallel.virtual_pipeline": 1}
    offload = ("gradients", "optimizer", "weights")
    if config.train.optimizer_cpu_offload:  # it is on the host already
        offload = ("gradients", "weights")
    shared = {"train.offload": offload, "rollout.sleep_level": 2, "rollout.replicas": None}
    for trainers in (gpus // 4, gpus // 2, 3 * gpus // 4) if config.launch.is_split else (gpus,):
        world = {**fixed, "launch.processes": trainers}
        if not config.launch.is_split:
            world |= shared
        for trainer in _trainers(shape, trainers):
            for engine in _engines(shape):
                ranks = engine["rollout.tensor"] * engine["rollout.data"]
                engines = gpus - trainers if config.launch.is_split else gpus
                if engines % ranks:
                    continue
                if config.launch.is_split:
                    engine = {**engine, "rollout.replicas": engines // ranks}
                yield {**world, **trainer, **engine}


def _trainers(shape: ModelShape, world: int) -> Iterator[dict[str, Any]]:
    experts = [size for size in SIZES if size == 1 or (shape.is_moe and shape.experts % size == 0)]
    for tensor in SIZES[:4]:
        for pipeline in SIZES[:5]:
            for expert in experts:
                if world % (tensor * pipeline) or world % (pipeline * expert):
                    continue
                for recompute in ("none", "full"):
                    yield {
                        "parallel.tensor": tensor,
                        "parallel.pipeline": pipeline,
                        "parallel.expert": expert,
                        "train.recompute": recompute,
                    }


def _engines(shape: ModelShape) -> Iterator[dict[str, Any]]:
    for tensor in SIZES[:6]:
        yield {"rollout.tensor": tensor, "rollout.data": 1, "rollout.expert": 1}
        for ranks in SIZES[1:] if shape.is_moe else ():
            if ranks % tensor == 0 and shape.experts % ranks == 0:
                data = ranks // tensor
                yield {"rollout.tensor": tensor, "rollout.data": data, "rollout.expert": ranks}


def predict_step(config: Config, shape: ModelShape, gpu: Gpu) -> dict[str, float]:
    """Returns the seconds of the parts of a step: generate, logprobs, update and sync."""
    sizes = _model_sizes(shape, _length(config))
    return _in_order(_training_s(config, shape, gpu, sizes), _rollout_s(config, shape, gpu))


def _in_order(*parts: dict[str, float]) -> dict[str, float]:
    """Returns the parts of a step, as they come."""
    seconds = dict(ChainMap(*parts))
    return {name: seconds[name] for name in PARTS}


def _length(config: Config) -> int:
    """Returns the mean tokens of a row."""
    rollout = config.rollout
    return int(rollout.max_prompt_tokens / 2 + RESPONSE * rollout.max_tokens)


def _model_sizes(shape: ModelShape, length: int) -> tuple[int, int]:
    """Returns (FLOPs of a forward pass over a row, elements of the model)."""
    elements = sum(map(math.prod, hf_shapes(shape).values()))
    return forward_flops(shape, [length], outputs=shape.vocab), elements


def _training_s(
    config: Config, shape: ModelShape, gpu: Gpu, model: tuple[int, int]
) -> dict[str, float]:
    fleet = fleet_of(config)
    train = config.train
    sizes = fleet.parallel
    length = _length(config)
    rows = train.prompts_per_step * config.rollout.samples_per_prompt
    achieved = PEAKS[gpu.name][0] * fleet.trainers * (EXPERTS if shape.is_moe else DENSE)
    achieved *= TENSOR ** math.log2(sizes.tensor * sizes.context)
    if sizes.expert * sizes.expert_tensor > fleet.ranks_per_node:
        achieved *= TENSOR
    data = fleet.trainer_layout(0).dp.size * train.updates_per_step
    batches = max(1, rows * length // (data * train.max_tokens_per_microbatch))
    flops, elements = model
    pass_s = rows * flops / achieved * (1 + (sizes.pipeline - 1) / batches)
    moved = 2 * BYTES_MOVED * elements / fleet.trainers if train.offload else 0
    return {
        "logprobs": (1 + config.algorithm.needs_reference) * pass_s,
        "update": (4 if train.recompute == "full" else 3) * pass_s + moved / HOST,
    }


def _rollout_s(config: Config, shape: ModelShape, gpu: Gpu) -> dict[str, float]:
    """Raises ValueError if the cache has no room for a sequence."""
    fleet = fleet_of(config)
    rollout = config.rollout
    length = _length(config)
    engine = engine_sizes(config, shape, fleet, gpu)
    data_ranks = fleet.receivers // rollout.ranks_per_sampler
    rows = config.train.prompts_per_step * rollout.samples_per_prompt / data_ranks
    batch = min(rows, max(0, engine.kv_cache) // (engine.per_token * length))
    if not batch:
        raise ValueError("the KV cache has no room for a sequence")
    weights = engine.weights * _share_read(shape, batch * rollout.data)
    read = weights + batch * length * engine.per_token
    layer_s = KERNELS_S
    for ranks in (rollout.ranks_per_sampler, rollout.data * rollout.ranks_per_sampler):
        if ranks > 1:
            layer_s += 2 * (NEAR_S if ranks <= fleet.ranks_per_node else FAR_S)
    step_s = read / (MEMORY * PEAKS[gpu.name][1]) + shape.layers * layer_s
    return {
        "generate": math.ceil(rows / batch) * rollout.max_tokens * step_s,
        "sync": SYNC * engine.weights / LINKS[gpu.name].network,
    }


def _share_read(shape: ModelShape, tokens: float) -> float:
    """Returns the share of an engine's weights that a decode step of so many tokens reads: of the
    experts, those that a token chooses."""
    if not shape.is_moe:
        return 1.0
    chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
    return 0.1 + 0.9 * chosen


def predict_peers(config: Config, *, gpu: str) -> list[dict[str, Any]]:
    """Returns published steps of others, of a model with as many layers and experts on GPUs of this
    type, each with a prediction of its layout."""
    shape = model_shape(config)
    rows = []
    for peer in yaml.safe_load(PEERS.read_text(encoding="utf-8")):
        values = peer["config"]
        if (*peer["model"], values["launch"]["gpu"]) != (shape.layers, shape.experts, gpu):
            continue
        model = {"path": config.model.path, "revision": config.model.revision}
        like = parse_config({**values, "model": model})
        parts = predict_step(like, shape, GPUS[gpu])
        changes = {}
        for key, value in flat(values):
            changes[key] = tuple(value) if isinstance(value, list) else value
        row = _candidate(changes, parts, memory_by_phase(like, GPUS[gpu]))
        published = {"source": peer["source"], "published_step_seconds": peer["step_seconds"]}
        rows.append({**row.as_json(), **published})
    return rows


def describe_search(found: Sequence[Candidate], peers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the layouts as text for the terminal."""
    lines = [f"{'step s':>8}{''.join(f'{part:>10}' for part in PARTS)}     GB  at once   layout"]
    for row in found:
        seconds = "".join(f"{row.parts[part]:10.1f}" for part in PARTS)
        sizes = f"{row.peak_bytes / 1e9:7.1f}{row.kv_sequences:9}"
        lines.append(f"{row.step_seconds:8.1f}{seconds}{sizes}   {' '.join(row.overrides)}")
    for peer in peers:
        lines.append(
            f"published: {peer['published_step_seconds']} s, predicted {peer['step_seconds']:.0f} "
            f"({peer['source']})"
        )
    return "\n".join(lines)
