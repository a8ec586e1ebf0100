"""The capture of routes around a stand-in for vLLM's model runner; tests/dist/test_routes.py has the engine itself."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.rollout.vllm.routes import RouteCapture
from megarl.types import Routes

BLOCK, LAYERS, TOPK = 4, 2, 2


class Router:
    global_num_experts, top_k = 8, TOPK
    capture_fn: Any = None

    def set_capture_fn(self, function: Any) -> None:
        self.capture_fn = function


class FullAttention:
    block_size = BLOCK


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its blocks of a sliding window, which come first, are none of the slots that are read."""
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=["window"]),
        SimpleNamespace(kv_cache_spec=FullAttention(), layer_names=["full"]),
    ]
    cache = SimpleNamespace(kv_cache_groups=groups, num_blocks=8)
    runner = SimpleNamespace(
        kv_cache_config=cache, requests={}, context=SimpleNamespace(slot_mapping={})
    )
    stubs = {
        "vllm.v1.kv_cache_interface": SimpleNamespace(FullAttentionSpec=FullAttention),
        "vllm.forward_context": SimpleNamespace(get_forward_context=lambda: runner.context),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    return runner


def started(runner: SimpleNamespace, **options: bool) -> tuple[RouteCapture, list[Router]]:
    routers = [Router() for _ in range(LAYERS)]
    llm: Any = SimpleNamespace(
        collective_rpc=lambda function: [function(SimpleNamespace(model_runner=runner))],
        reset_prefix_cache=lambda: True,
    )
    capture = RouteCapture(llm, routers, **{"is_returned": False, **options})
    capture.start()
    return capture, routers


def compute(
    runner: SimpleNamespace, routers: list[Router], slots: list[int], ids: torch.Tensor
) -> None:
    """One forward pass; `ids` [layers, tokens, K]."""
    runner.context.slot_mapping = {
        "window": torch.full((len(slots),), 99),
        "full": torch.tensor(slots),
    }
    for router, chosen in zip(routers, ids, strict=True):
        router.capture_fn(chosen)


def finished(name: str, prompt: int, response: int, routed: np.ndarray | None = None) -> Any:
    answer = SimpleNamespace(token_ids=[0] * response, routed_experts=routed)
    return SimpleNamespace(request_id=name, prompt_token_ids=[0] * prompt, outputs=[answer])


def ids_of(tokens: int, seed: int) -> torch.Tensor:
    return (
        torch.rand(LAYERS, tokens, 8, generator=torch.Generator().manual_seed(seed))
        .argsort(-1)[..., :TOPK]
        .int()
    )


def experts(routes: Routes) -> torch.Tensor:
    assert routes.experts is not None
    return routes.experts.int()


def test_routes_are_read_through_the_blocks_of_a_request(runner: SimpleNamespace) -> None:
    """Also those of a block that another request has filled; padding, at slot -1, is none of anybody's."""
    capture, routers = started(runner)
    prompt, rest, other = ids_of(6, 0), ids_of(2, 1), ids_of(3, 2)
    compute(runner, routers, [12, 13, 14, 15, 4, 5], prompt)  # blocks 3 and 1
    compute(runner, routers, [6, 7, -1], torch.cat([rest, ids_of(1, 3)], 1))
    # after block 3, found in the prefix cache: block 7
    compute(runner, routers, [28, 29, 30], other)
    runner.requests = {
        "0-a": SimpleNamespace(block_ids=([9], [3, 1])),
        "1-b": SimpleNamespace(block_ids=([9], [3, 7])),
    }
    routes = capture.of(finished("0-a", 6, 3), 9)
    assert (
        experts(routes)[:, :8].equal(torch.cat([prompt, rest], 1))
        and not experts(routes)[:, 8].any()
    )
    assert routes.owners == (5, 5) and len(set(routes.checksums)) == 2
    cached = capture.of(finished("1-b", 5, 3), 8)
    assert (
        experts(cached)[:, :7].equal(torch.cat([prompt[:, :4], other], 1))
        and not experts(cached)[:, 7].any()
    )


def test_routes_go_with_the_cache(runner: SimpleNamespace) -> None:
    capture, routers = started(runner)
    compute(runner, routers, list(range(8)), ids_of(8, 0))
    capture.reset_cache()
    runner.requests = {"0-a": SimpleNamespace(block_ids=([], [0, 1]))}
    assert not experts(capture.of(finished("0-a", 8, 1), 8)).any(), "unknown"


def test_capturing_ends(runner: SimpleNamespace) -> None:
    capture, routers = started(runner)
    for router in routers:
        router.set_capture_fn(None)
    with capture.capturing():
        assert all(router.capture_fn for router in routers)
    assert not any(router.capture_fn for router in routers)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_that_vllm_returns(runner: SimpleNamespace, dtype: str) -> None:
    """[tokens, layers, K], with the dense layers first; all unknown if some are missing."""
    capture, _ = started(runner, is_returned=True)
    chosen = ids_of(4, 0)
    dense = torch.zeros(4, 1, TOPK)
    returned = torch.cat([dense, chosen.transpose(0, 1)], 1).numpy().astype(dtype)
    routes = capture.of(finished("0-a", 2, 3, returned), 5)
    assert experts(routes)[:, :4].equal(chosen) and not experts(routes)[:, 4].any()
    for less in (returned[1:], None):
        assert not experts(capture.of(finished("0-a", 2, 3, less), 5)).any()
