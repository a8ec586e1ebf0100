"""What a sync moves between 4 gloo ranks: no byte twice, in one order; and what it says when a rank is gone.

The checks that are worth having, each traced to a bug of another system, and where each is tested (a GPU's: marked):

 1 two syncs in a row with changed weights         dist/test_sync.py check_model ("again", "stale")
 2 sleep, then generate without a sync             dist/test_sync.py check_model ("before"); gpu/test_gpu_roles.py
 3 names expected are names loaded                 dist/test_sync.py test_faults, unit/weights/test_publish.py
 4 tied embeddings over the pipeline               dist/test_sync.py (qwen3, pp2), test_convert.py (qwen3)
 5 gate and up, virtual and uneven stages, padding dist/test_sync.py test_layouts_covered, unit/models/test_shards.py
 6 grad norm with context parallelism, empty ranks dist/test_context.py, dist/test_trainer.py
 7 one batch in every layout                       dist/test_trainer.py
 8 temperature, top-p                              dist/test_sync.py (0.7 and greedy), unit/config/test_validate.py
 9 saved twice, resumed                            e2e/test_resume.py
10 HF -> Megatron -> HF bit for bit                unit/checkpoint/test_convert.py, dist/test_convert.py
11 an engine killed in a sync                      here: test_a_dead_rank_is_named, dist/test_sync.py (dies)
12 a tensor larger than a round, a round full      here: test_no_rank_moves_more_than_a_round_may_hold, test_plan.py
13 the order of transfers on all ranks             here: test_ranks_agree_on_the_order
14 padding of packed rows, for FP8 too             unit/trainer/test_microbatch.py; gpu/test_gpu_roles.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from start_ranks import start_ranks
from transport_ranks import FLEETS, NODES, ROUND

from megarl.platform.env import child_env

# half a minute: starting ranks, and waiting for those that do not come
pytestmark = pytest.mark.long

RANKS = Path(__file__).with_name("transport_ranks.py")
WORLD = 4
ON_NODES = [f"{NODES} atomic={atomic}" for atomic in (True, False)]
EVERY = [*FLEETS, *ON_NODES]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("transports")
    processes = start_ranks(RANKS, WORLD, str(folder))
    output = [process.communicate(timeout=400)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0, 0, 0, 9], "\n".join(text[-2000:] for text in output)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("pair", EVERY)
def test_a_rank_receives_what_it_keeps_and_nothing_else(ranks, pair):
    total = 0
    for rank, seen in enumerate(ranks):
        report = seen["pairs"][pair]
        received = sum(size for round_ in report["trace"] for _, to, size in round_ if to == rank)
        assert received + report["local"] == report["kept"], "1.00: no byte twice, none too many"
        assert report["version"] == (7 if report["kept"] else None)
        total += received
    assert {seen["pairs"][pair]["received"] for seen in ranks} == {total}, (
        "the report says the same"
    )


@pytest.mark.parametrize("pair", EVERY)
def test_ranks_agree_on_the_order(ranks, pair):
    """Each rank's own record is the plan's, without the transfers of others: so a send meets its receive."""
    plan = ranks[0]["pairs"][pair]["plan"]
    for rank, seen in enumerate(ranks):
        report = seen["pairs"][pair]
        assert report["plan"] == plan
        for round_, mine in zip(plan, report["trace"], strict=True):
            expected = [transfer for transfer in round_ if transfer[0] == rank]
            expected += [transfer for transfer in round_ if transfer[1] == rank]
            assert mine == expected


@pytest.mark.parametrize("pair", EVERY)
def test_no_rank_moves_more_than_a_round_may_hold(ranks, pair):
    report = ranks[0]["pairs"][pair]
    assert report["largest"] <= ROUND, "a tensor larger than a round is cut"
    per_rank: dict[int, int] = {}
    for round_ in report["plan"]:
        for direction in (0, 1):
            for rank in range(WORLD):
                size = sum(transfer[2] for transfer in round_ if transfer[direction] == rank)
                per_rank[rank] = max(per_rank.get(rank, 0), size)
    assert max(per_rank.values()) <= ROUND


def test_a_slice_in_the_wrong_place_is_seen_though_every_message_arrived(ranks):
    for seen in ranks:
        assert "are in the wrong place" in seen["misrouted"] and "model." in seen["misrouted"], (
            seen["misrouted"]
        )
        assert "in the engine on rank " in seen["misrouted"]
        assert seen["after misrouted"] is None
        assert seen["proven"] == 1, "the second sync is not proven again"


@pytest.mark.parametrize("pair", ON_NODES)
def test_what_a_node_shares_crosses_the_network_once(ranks, pair):
    """Each of four ranks holds a stage and keeps all: each node lacks half the model."""
    report, flat = ranks[0]["pairs"][pair], ranks[0]["pairs"]["pp4 -> tp1"]
    assert report["received"] == flat["received"] and flat["over the network"] == 0
    assert report["over the network"] == report["kept"], "two nodes take half of it each, once"


def test_a_fault_of_a_relay_is_named(ranks):
    for seen in ranks:
        report = seen["torn relay"]
        assert "rank 2 -> rank 3 (relayed): model." in report["message"]
        assert (
            "arrived corrupted: message " in report["error"]
            and report["message"] in report["error"]
        ), report
        assert report["version"] == 1 and report["old"], "not a byte of the engine has changed"
        assert report["healed"]


def test_a_late_rank_is_named_and_the_engine_keeps_its_version(ranks):
    for seen in ranks:  # the late one too, when it comes
        assert "rank 2 of 4 did not reach the weight sync of version 2" in seen["late"], seen[
            "late"
        ]
        assert seen["after late"] == 1


def test_staging_without_the_memory_for_it_is_refused_with_the_remedy(ranks):
    for seen in ranks:
        assert "rank 1: the 4 ranks of a node need" in seen["no room"], seen["no room"]
        assert "sync.atomic=false" in seen["no room"] and seen["after no room"] == 1


def test_a_sender_without_a_parameter_is_named_where_engines_have_ranks_of_their_own(ranks):
    for rank, seen in enumerate(ranks):
        assert (
            "rank 0: the trainer has no parameter decoder.final_layernorm.weight"
            in seen["missing in split"]
        )
        assert seen["after missing in split"] == (1 if rank >= 2 else None)


def test_a_dead_rank_is_named(ranks):
    """Its peers say so at once; the others wait no longer than the time-out. The engines keep what they had."""
    assert any("rank 3 did not" in seen["dead"] for seen in ranks[:3])
    assert any(
        re.search(r"rank 3 did not .*; in flight: message .*: model\.", seen["dead"])
        for seen in ranks[:3]
    )
    for seen in ranks[:3]:
        assert "The engine keeps its previous version" in seen["dead"]
        assert seen["after dead"] == 1 and seen["holds after dead"]
        output = seen["barrier after dead"]
        assert re.match(
            r"ranks? [\d, ]*3 of 4 did not reach the weight sync of version 3", output
        ), output


def test_processes_of_different_worlds_share_a_group_leave_it_and_join_again(tmp_path):
    """And a barrier that one of them will not reach can be ended from outside."""
    command = [
        sys.executable,
        str(Path(__file__).parent / "group_ranks.py"),
        f"file:{tmp_path / 'store'}",
    ]
    environment = child_env(GLOO_SOCKET_IFNAME="lo")
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "3"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["passed\n"] * 3
