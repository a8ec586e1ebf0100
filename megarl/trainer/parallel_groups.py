"""Creates Megatron-Core's process groups for a layout. The only reader of `megatron.core.parallel_state`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from megarl.layout import Layout

AXES = {  # of a Layout -> Megatron's
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
}


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The ranks that share this rank's work along one axis."""

    tensor: ProcessGroup
    expert_tensor: ProcessGroup
    context: ProcessGroup
    stage: ProcessGroup  # all ranks of a pipeline stage


def megatron_sizes(layout: Layout) -> dict[str, Any]:
    """Returns the sizes that Megatron's settings and its groups share."""
    return {f"{name}_size": getattr(layout, axis).size for axis, name in AXES.items()}


def init_parallel(layout: Layout, *, seed: int = 0) -> ProcessGroups:
    """Creates Megatron's process groups for this layout, after destroying a previous set. Call it on every rank."""
    destroy_parallel()
    parallel_state.initialize_model_parallel(
        **megatron_sizes(layout),
        virtual_pipeline_model_parallel_size=layout.vpp.size if layout.vpp.size > 1 else None,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    _assert_agrees(layout)
    # Megatron's layers enter a named random state even if they draw no random number.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    names = {"tensor": AXES["tp"], "expert_tensor": AXES["etp"], "context": AXES["cp"]}
    groups: dict[str, Any] = {
        name: getattr(parallel_state, f"get_{of}_group")() for name, of in names.items()
    }
    groups["stage"] = parallel_state.get_amax_reduction_group(with_context_parallel=True)
    return ProcessGroups(**groups)


def destroy_parallel() -> None:
    """Closes Megatron's process groups, so that another layout can be built in this process. Call it on every rank.
    Megatron only drops its references: the groups' threads (about fifty per layout with gloo) would keep polling."""
    if not parallel_state.model_parallel_is_initialized():
        return
    dist.barrier()  # no rank closes a connection that a peer still reads from
    known = (
        dist.distributed_c10d._world.pg_map
    )  # closing the default group has closed its subgroups too
    groups = [group for group in parallel_state._global_process_group_list or () if group in known]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)


def _assert_agrees(layout: Layout) -> None:
    """Asserts that Megatron gives this rank the coordinates of `layout`."""
    for name, megatron_name in {
        **AXES,
        "dp": "data_parallel",
        "edp": "expert_data_parallel",
    }.items():
        size, rank = (
            getattr(parallel_state, f"get_{megatron_name}_{what}")()
            for what in ("world_size", "rank")
        )
        axis = getattr(layout, name)
        assert (size, rank) == (axis.size, axis.rank), (
            f"{name}: Megatron has rank {rank} of {size}, the layout {axis}"
        )
