"""Creates Megatron-Core's process groups; the only reader of `megatron.core.parallel_state`."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from megarl.layout import Axis, Layout

AXES = {  # axis of a Layout -> Megatron's name
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
}


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's process groups, one per axis."""

    tensor: ProcessGroup
    expert_tensor: ProcessGroup
    context: ProcessGroup
    stage: ProcessGroup  # all ranks of a pipeline stage


def megatron_sizes(layout: Layout) -> dict[str, Any]:
    """Returns the parallel sizes by the names that Megatron's config and groups share."""
    return {f"{name}_size": getattr(layout, axis).size for axis, name in AXES.items()}


def init_parallel(
    layout: Layout, *, seed: int = 0, device: torch.device | None = None
) -> ProcessGroups:
    """Creates Megatron's process groups for this layout, after destroying a previous set.

    With `device`, also connects them (see `_connect`). Call it on every rank.
    """
    destroy_parallel()
    parallel_state.initialize_model_parallel(
        **megatron_sizes(layout),
        virtual_pipeline_model_parallel_size=layout.vpp.size if layout.vpp.size > 1 else None,
        create_gloo_process_groups=False,
    )
    axes = AXES | {"dp": "data_parallel", "edp": "expert_data_parallel"}
    for name, megatron_name in axes.items():
        size = getattr(parallel_state, f"get_{megatron_name}_world_size")()
        rank = getattr(parallel_state, f"get_{megatron_name}_rank")()
        axis = getattr(layout, name)
        assert axis == Axis(size, rank), (
            f"{name}: Megatron has rank {rank} of {size}, the layout {axis}"
        )
    # Megatron's layers enter a named random state even if they draw no random number.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    if device is not None:
        _connect(device)
    state: Any = parallel_state
    return ProcessGroups(
        state.get_tensor_model_parallel_group(),
        state.get_expert_tensor_parallel_group(),
        state.get_context_parallel_group(),
        stage=state.get_amax_reduction_group(with_context_parallel=True),
    )


def _connect(device: torch.device) -> None:
    """Creates the communicators of the groups that a forward and a backward pass use.

    NCCL creates them at a group's first collective otherwise: in the middle of a forward pass,
    after the engine has taken its share of the memory.
    """
    names = "tensor_model pipeline_model context expert_model expert_tensor expert_data"
    groups = [getattr(parallel_state, f"get_{name}_parallel_group")() for name in names.split()]
    state: Any = parallel_state
    groups += [
        dist.group.WORLD,
        state.get_data_parallel_group(with_context_parallel=True),
        state.get_expert_tensor_and_model_parallel_group(),
    ]
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def destroy_parallel() -> None:
    """Closes Megatron's process groups, so that another layout can be built in this process.

    Call it on every rank. Megatron only drops its references: the groups' threads (about fifty per
    layout with gloo) would keep polling.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    dist.barrier()  # no rank closes a connection that a peer still reads from
    # subgroups are closed already if the default group is
    known = dist.distributed_c10d._world.pg_map
    groups = [group for group in parallel_state._global_process_group_list or () if group in known]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)
