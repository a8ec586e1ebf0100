"""World arithmetic: every coordinate is used once, and sizes that do not fit are refused with their values."""

import pytest

from megarl.layout import Layout, Parallel, smallest_world, stage_layers

PARALLELS = [
    (Parallel(), 1),
    (Parallel(tensor=2), 4),
    (Parallel(tensor=2, pipeline=2), 8),
    (Parallel(tensor=2, expert=2, expert_tensor=1), 4),
    (Parallel(tensor=2, pipeline=2, expert=2, expert_tensor=2), 16),
    (Parallel(context=2, tensor=2), 8),
]


@pytest.mark.parametrize(("parallel", "world"), PARALLELS)
def test_coordinates_number_the_ranks(parallel, world):
    layouts = [Layout.of(parallel, world, rank) for rank in range(world)]
    dense = {(x.tp.rank, x.cp.rank, x.dp.rank, x.pp.rank) for x in layouts}
    sparse = {(x.etp.rank, x.ep.rank, x.edp.rank, x.pp.rank) for x in layouts}
    assert len(dense) == len(sparse) == world
    assert layouts[0].dp.size == world // parallel.dense
    assert layouts[0].edp.size == world // parallel.sparse


def test_tensor_is_fastest_and_pipeline_slowest():
    layouts = [Layout.of(Parallel(tensor=2, pipeline=2), 8, rank) for rank in range(8)]
    assert [x.tp.rank for x in layouts] == [0, 1] * 4
    assert [x.dp.rank for x in layouts] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [x.pp.rank for x in layouts] == [0] * 4 + [1] * 4


def test_a_world_that_does_not_fit_is_refused_with_its_values():
    with pytest.raises(ValueError, match="world size 6 is not divisible by tensor x pipeline x context = 4"):
        Layout.of(Parallel(tensor=2, pipeline=2), 6, 0)
    with pytest.raises(ValueError, match="expert_tensor x expert x pipeline = 4"):
        Layout.of(Parallel(expert=4), 2, 0)


def test_smallest_world_holds_trainer_experts_and_replica():
    assert smallest_world(Parallel(), 1) == 1
    assert smallest_world(Parallel(tensor=2, expert=3), 4) == 12


def test_stages_share_the_layers():
    stages = [stage_layers(6, Layout.of(Parallel(pipeline=3), 3, rank)) for rank in range(3)]
    assert [list(stage) for stage in stages] == [[0, 1], [2, 3], [4, 5]]
