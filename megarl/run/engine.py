"""Starts a rank's vLLM engine: its share of GPU memory, LoRA adapters, and the SIGTERM hook."""

import math
from functools import partial

import torch.distributed as dist

from megarl.config.launch import fleet_of
from megarl.config.schema import Rollout
from megarl.data.tokenizer import stop_token_ids
from megarl.models.engine import engine_table
from megarl.models.lora import AdapterFormat, adapter_table
from megarl.models.registry import hf_shapes, megatron_table
from megarl.models.shards import shapes_of, slices_of
from megarl.platform.device import device_bytes
from megarl.platform.env import set_env
from megarl.rollout.vllm.engine import Engine
from megarl.run.context import RankContext
from megarl.types import Terminated
from megarl.weights.sync.from_config import engine_weights

LAST_STEPS = 50  # engine steps after SIGTERM, until the ranks of a replica stop together


def make_engine(rank: RankContext) -> Engine:
    """Starts vLLM on this rank, with dummy weights. Every rank must call it."""
    engine = Engine.start(
        rank.model_folder,
        _engine_share(rank),
        rank.env,
        stop_token_ids=stop_token_ids(rank.tokenizer, rank.config.rollout.stop),
        weights=engine_weights(rank.config, rank.shape),
        trust_remote_code=rank.config.model.trust_remote_code,
        adapters=engine_adapters(rank),
    )
    set_env(RANK=rank.env.rank)  # vLLM wanted that within the replica; a user's task may read it
    engine.before_step = partial(_before_engine_step, rank)
    return engine


def _engine_share(rank: RankContext) -> Rollout:
    """Returns the `rollout` section with gpu_memory_utilization adjusted for the trainer's memory.

    GPU memory in use now (what the trainer does not offload, the maximum over ranks) is subtracted
    from the configured share. Raises ValueError if the rest cannot hold vLLM's weights.
    """
    train = rank.config.train
    rollout = rank.config.rollout
    memory = device_bytes(rank.device)
    if memory is None:  # a CPU's engine cannot sleep
        return rollout.model_copy(update={"sleep_level": 0})
    free, total = memory
    used = max(rank.transport.gather(total - free))
    share = rollout.gpu_memory_utilization
    needed = _weight_bytes(rank)
    left = share * total - used
    if left <= needed:
        raise ValueError(
            f"rollout.gpu_memory_utilization={share:g} of {total / 1e9:.1f} GB, less "
            f"{used / 1e9:.1f} that train.offload={list(train.offload)} leaves in use, has no room "
            f"for vLLM's weights of {needed / 1e9:.1f}; offload more, or raise it or rollout.tensor"
        )
    return rollout.model_copy(update={"gpu_memory_utilization": left / total})


def _weight_bytes(rank: RankContext) -> float:
    """Returns the size of an engine rank's weights, in the format that vLLM stores."""
    shape = rank.shape
    weights = engine_weights(rank.config, shape)
    if shape.bridge:
        elements = sum(map(math.prod, hf_shapes(shape).values()))
        return elements * weights.dtype.itemsize / rank.config.rollout.ranks_per_replica
    fleet = fleet_of(rank.config, rank.env.world_size)
    fmt = weights.storage.block_format
    table = engine_table(shape, fmt, tensor=fleet.tensor, expert=fleet.expert)
    layout = fleet.engine_layout(0)
    moved = weights.moved_slices(slices_of(table, shape, layout))
    return sum(part.numel for part in moved) * weights.unit.itemsize


def _before_engine_step(rank: RankContext) -> None:
    """Counts engine steps; after SIGTERM, raises Terminated during a rollout.

    A resumed run repeats the rollout. All ranks of a replica must stop before the same step: the
    first rank that sees the signal chooses a step LAST_STEPS later, by which the other ranks have
    received the signal too.
    """
    phase = rank.phase
    size = rank.config.rollout.ranks_per_replica
    phase.engine_steps += 1
    if not phase.is_stopping or phase.name != "rollout":
        return
    store = dist.distributed_c10d._get_default_store()
    last = str(phase.engine_steps + LAST_STEPS * (size > 1))
    chosen = int(store.compare_set(f"megarl/stop/{rank.env.rank // size}", "", last))
    if phase.engine_steps >= chosen:
        raise Terminated("stopped by SIGTERM")


def engine_adapters(rank: RankContext) -> AdapterFormat | None:
    """Returns the format of the adapters to sync; None if every sync sends full weights."""
    lora = rank.config.lora
    if lora is None or lora.sync == "merged":
        return None
    table = adapter_table(megatron_table(rank.shape), lora.targets, lora.rank)
    return AdapterFormat(shapes_of(table, rank.shape), lora.rank, lora.alpha)
