"""A rank's coordinates along each axis of parallelism. Pure arithmetic, no torch.

Ranks are numbered in Megatron-Core's default order ``tp-cp-ep-dp-pp``: tensor fastest, pipeline
slowest. Dense parameters are distributed over the grid [pp, dp, cp, tp], expert parameters over
[pp, edp, ep, etp] of the same ranks.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import lcm, prod

AXES = {  # field of Layout -> field of Parallel
    "tp": "tensor",
    "pp": "pipeline",
    "vpp": "virtual_pipeline",
    "cp": "context",
    "ep": "expert",
    "etp": "expert_tensor",
}


@dataclass(frozen=True)
class Parallel:
    """Sizes of the parallel axes as configured; data parallelism follows from the world size."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    layers: tuple[int, ...] = ()  # of each pipeline chunk, in model order; (): evenly distributed

    @property
    def dense(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def sparse(self) -> int:
        return self.expert_tensor * self.expert * self.pipeline

    @property
    def divisors(self) -> dict[str, int]:
        """Names of axes -> the product of their sizes, which must divide the world size."""
        return {
            "tensor x pipeline x context": self.dense,
            "expert_tensor x expert x pipeline": self.sparse,
        }


@dataclass(frozen=True)
class Axis:
    size: int
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} outside an axis of {self.size}"

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Layout:
    """The coordinates of one rank. ``edp`` is the data-parallel axis of expert parameters."""

    rank: int
    world: int
    tp: Axis
    pp: Axis
    vpp: Axis
    cp: Axis
    ep: Axis
    etp: Axis
    dp: Axis
    edp: Axis
    layers: tuple[int, ...] = ()  # as in Parallel

    @classmethod
    def of(cls, parallel: Parallel, world: int, rank: int) -> "Layout":
        """Returns the coordinates of `rank`.

        Raises ValueError if the sizes do not divide `world`.
        """
        for names, product in parallel.divisors.items():
            if world % product:
                raise ValueError(
                    f"world size {world} is not divisible by {names} = {product}; use a multiple "
                    f"of {product} processes"
                )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside a world of {world}")

        def digits(*sizes: int) -> list[Axis]:
            return [
                Axis(size, rank // prod(sizes[:index]) % size) for index, size in enumerate(sizes)
            ]

        tp, cp, dp, pp = digits(
            parallel.tensor, parallel.context, world // parallel.dense, parallel.pipeline
        )
        etp, ep, edp, _ = digits(
            parallel.expert_tensor, parallel.expert, world // parallel.sparse, parallel.pipeline
        )
        vpp = Axis(parallel.virtual_pipeline)
        return cls(rank, world, tp, pp, vpp, cp, ep, etp, dp, edp, parallel.layers)

    @property
    def sizes(self) -> Parallel:
        sizes = {name: getattr(self, axis).size for axis, name in AXES.items()}
        return Parallel(**sizes, layers=self.layers)

    def __str__(self) -> str:
        sizes = {name: getattr(self, name).size for name in (*AXES, "dp")}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1"


def smallest_world(parallel: Parallel, ranks_per_replica: int) -> int:
    """Returns the smallest world size that is divisible by every product of axis sizes and by the
    size of an engine replica."""
    return lcm(parallel.dense, parallel.sparse, ranks_per_replica)


@cache
def stage_layers(num_layers: int, layout: Layout) -> tuple[range, ...]:
    """Returns the global indices of the layers on this pipeline rank, one range per virtual chunk:
    chunk v of rank p is number v * pipeline + p. Without `layout.layers`, earlier chunks have one
    layer more if the layers do not divide evenly. Raises ValueError if there are fewer layers than
    chunks, or if `layout.layers` are not those of the model.
    """
    size = layout.pp.size
    virtual = layout.vpp.size
    count = size * virtual
    if num_layers < count:
        raise ValueError(
            f"layers={num_layers} cannot fill pipeline x virtual_pipeline = {size} x {virtual} "
            "chunks; lower one"
        )
    per_chunk, rest = divmod(num_layers, count)
    sizes = layout.layers or (per_chunk + 1,) * rest + (per_chunk,) * (count - rest)
    if (len(sizes), sum(sizes)) != (count, num_layers):
        raise ValueError(
            f"parallel.layers={list(sizes)} has {len(sizes)} numbers that add up to {sum(sizes)}; "
            f"pipeline x virtual_pipeline = {size} x {virtual} and the model's {num_layers} layers "
            f"need {count} numbers that add up to {num_layers}"
        )
    starts = (0, *accumulate(sizes))
    return tuple(
        range(starts[chunk], starts[chunk + 1]) for chunk in range(layout.pp.rank, count, size)
    )


@dataclass(frozen=True)
class Fleet:
    """The ranks of trainer and engines, numbered node by node. In a split fleet, the engines' ranks
    follow the trainer's."""

    parallel: Parallel
    trainers: int
    tensor: int  # ranks of an engine replica along its tensor axis
    ranks_per_replica: int
    replicas: int
    expert: int = 1  # expert parallelism of an engine replica, over all its ranks
    ranks_per_node: int = 8
    is_split: bool = True  # False: rank r of the engines is rank r of the trainer

    @property
    def receivers(self) -> int:
        return self.replicas * self.ranks_per_replica

    @property
    def nodes_per_replica(self) -> int:
        return -(-self.ranks_per_replica // self.ranks_per_node)

    @property
    def first_receiver(self) -> int:
        return self.trainers if self.is_split else 0

    @property
    def world(self) -> int:
        return max(self.trainers, self.first_receiver + self.receivers)

    def trainer_layout(self, rank: int) -> Layout:
        """Returns the layout of trainer rank `rank`. Raises ValueError if the number of trainer
        ranks does not fit the parallel sizes."""
        return Layout.of(self.parallel, self.trainers, rank)

    def engine_layout(self, rank: int) -> Layout:
        """Returns the layout, within its replica, of global rank `rank`."""
        expert_tensor = 1 if self.expert > 1 else self.tensor
        sizes = Parallel(tensor=self.tensor, expert=self.expert, expert_tensor=expert_tensor)
        size = self.ranks_per_replica
        return Layout.of(sizes, size, (rank - self.first_receiver) % size)
