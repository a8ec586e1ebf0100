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
    with pytest.raises(
        ValueError, match="world size 6 is not divisible by tensor x pipeline x context = 4"
    ):
        Layout.of(Parallel(tensor=2, pipeline=2), 6, 0)
    with pytest.raises(ValueError, match="expert_tensor x expert x pipeline = 4"):
        Layout.of(Parallel(expert=4), 2, 0)


def test_smallest_world_holds_trainer_experts_and_replica():
    assert smallest_world(Parallel(), 1) == 1
    assert smallest_world(Parallel(tensor=2, expert=3), 4) == 12


def stages(num_layers: int, **sizes: int) -> list[list[list[int]]]:
    """[pipeline rank][chunk] -> layers"""
    world = sizes["pipeline"]
    layouts = [Layout.of(Parallel(**sizes), world, rank) for rank in range(world)]
    return [[list(chunk) for chunk in stage_layers(num_layers, layout)] for layout in layouts]


def test_stages_share_the_layers():
    assert stages(6, pipeline=3) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_earlier_stages_have_one_more():
    assert stages(5, pipeline=3) == [[[0, 1]], [[2, 3]], [[4]]]


def test_virtual_chunks_go_round_the_ranks():
    assert stages(4, pipeline=2, virtual_pipeline=2) == [[[0], [2]], [[1], [3]]]
    assert stages(6, pipeline=2, virtual_pipeline=2) == [[[0, 1], [4]], [[2, 3], [5]]]


def test_a_chunk_without_layers_is_refused():
    with pytest.raises(
        ValueError, match="layers=3 cannot fill pipeline x virtual_pipeline = 2 x 2 chunks"
    ):
        stages(3, pipeline=2, virtual_pipeline=2)


def test_stages_have_the_layers_that_are_set():
    assert stages(5, pipeline=2, layers=(1, 4)) == [[[0]], [[1, 2, 3, 4]]]
    interleaved = stages(5, pipeline=2, virtual_pipeline=2, layers=(1, 2, 1, 1))
    assert interleaved == [[[0], [3]], [[1, 2], [4]]]


@pytest.mark.parametrize("layers", [(1, 1, 3), (2, 2), (5,)])
def test_layers_that_are_not_those_of_the_model_are_refused(layers):
    with pytest.raises(
        ValueError, match=r"parallel.layers=.*5 layers need 2 numbers that add up to 5"
    ):
        stages(5, pipeline=2, layers=layers)


def test_a_layout_keeps_its_layers():
    layout = Layout.of(Parallel(pipeline=2, layers=(1, 2)), 4, 3)
    assert Layout.of(layout.sizes, 4, 3) == layout
