"""The ranks of trainer and engines, and their nodes."""

from dataclasses import dataclass

from megarl.layout import Layout, Parallel


@dataclass(frozen=True)
class Fleet:
    """Ranks of trainer and engines, numbered node by node. In a split fleet the engines' ranks
    follow the trainer's."""

    parallel: Parallel
    trainers: int
    tensor: int  # ranks of an engine replica along its tensor axis
    replicas: int
    expert: int = 1  # expert parallelism of an engine replica, over its data x tensor ranks
    ranks_per_node: int = 8
    is_split: bool = True  # False: rank r of the engines is rank r of the trainer

    @property
    def ranks_per_replica(self) -> int:
        return max(self.tensor, self.expert)

    @property
    def receivers(self) -> int:
        return self.replicas * self.ranks_per_replica

    @property
    def first_receiver(self) -> int:
        return self.trainers if self.is_split else 0

    @property
    def world(self) -> int:
        return max(self.trainers, self.first_receiver + self.receivers)

    def trainer_layout(self, rank: int) -> Layout:
        """Raises ValueError if the number of trainer ranks does not fit the parallel sizes."""
        return Layout.of(self.parallel, self.trainers, rank)

    def engine_layout(self, rank: int) -> Layout:
        """Returns the layout, within its replica, of global rank `rank`."""
        expert_tensor = 1 if self.expert > 1 else self.tensor
        sizes = Parallel(tensor=self.tensor, expert=self.expert, expert_tensor=expert_tensor)
        size = self.ranks_per_replica
        return Layout.of(sizes, size, (rank - self.first_receiver) % size)
