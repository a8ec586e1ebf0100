"""Decides from sizes where the optimizer state is between the updates of a step."""

from collections.abc import Sequence

from megarl.config.device_memory import FRAGMENTATION, OVERHEADS, activation_bytes
from megarl.platform.device import device_bytes, free_host_bytes
from megarl.run.context import RankContext
from megarl.trainer.trainer import Trainer


def place_optimizer_state(rank: RankContext, trainers: Sequence[Trainer]) -> None:
    """Keeps offloaded optimizer state on the device between a step's updates if it fits there.

    Otherwise it moves to the host and back in every update. Results are the same, bit for bit. A
    collective; call it before the first step, while an engine sleeps: what is on the device then,
    without gradients and optimizer state, counts as used. Rank 0 prints the decision.
    """
    train = rank.config.train
    if "optimizer" not in train.offload or train.updates_per_step * train.epochs_per_batch == 1:
        return
    activations = activation_bytes(rank.config, rank.shape)
    tensors = activations
    for trainer in trainers:
        trainer.memory.offload_training_state()
        tensors += trainer.memory.bytes_off_device()
    needed = (1 + FRAGMENTATION) * tensors + OVERHEADS["workspaces"].high * 1e9
    memory = device_bytes(rank.device)
    free = memory[0] if memory else free_host_bytes()
    _, needed, free = min(rank.transport.gather((free - needed, needed, free)))
    often = "in every update"
    if needed <= free:
        often = "once a step"
        for trainer in trainers:
            trainer.memory.keeps_optimizer = True
    if rank.env.is_main:
        print(
            f"optimizer state moves {often}: with it, backward needs {needed / 1e9:.1f} GB "
            f"({activations / 1e9:.1f} of activations) of {free / 1e9:.1f} free",
            flush=True,
        )
