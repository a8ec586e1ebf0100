"""The experts that vLLM chooses for each token.

    CPU  routers --ids--> [slots of the KV cache, layers, K] --a finished request's slots--> routes
    GPU  vLLM returns routed_experts itself (enable_return_routed_experts)

A request's blocks name the slots of all its tokens, including tokens found in the prefix cache: a
token's routes lie where its keys and values do, until another token is computed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Rollout
from megarl.types import Routes, route_dtype
from megarl.weights.sync.checksum import row_checksums

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


class RouteCapture:
    """`of` returns the routes of a finished request, within `capturing` or after `start`."""

    def __init__(self, llm: LLM, routers: list[Any], *, is_returned: bool) -> None:
        """Finds the cache; `routers`: vLLM's, by layer; `is_returned`: vLLM shows routes itself."""
        self._llm = llm
        self._routers = routers
        self._table = None  # [slots, layers, K]; None: vLLM returns them
        self._dtype = route_dtype(routers[0].global_num_experts)
        if is_returned:
            return
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self._runner: Any = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        cache = self._runner.kv_cache_config
        full = [
            number
            for number, group in enumerate(cache.kv_cache_groups)
            if isinstance(group.kv_cache_spec, FullAttentionSpec)
        ]
        # blocks of a sliding window are freed before the request ends
        assert full, "no layer attends to all tokens"
        self._group = full[0]
        group = cache.kv_cache_groups[self._group]
        self._layer = group.layer_names[0]
        self._block = group.kv_cache_spec.block_size
        # pages that no token reached use no memory; slot -1 is for padding
        slots = cache.num_blocks * self._block + 1
        self._table = torch.zeros(slots, len(routers), routers[0].top_k, dtype=self._dtype)

    def start(self) -> None:
        if self._table is not None:
            for layer, router in enumerate(self._routers):
                router.set_capture_fn(partial(self._write, layer))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        before = [router.capture_fn for router in self._routers]
        self.start()
        yield
        for router, function in zip(self._routers, before, strict=True):
            router.set_capture_fn(function)

    def reset_cache(self) -> None:
        """Drops the prefix cache; a slot has no route until a token is computed there."""
        self._llm.reset_prefix_cache()
        if self._table is not None:
            self._table.zero_()

    def of(self, output: RequestOutput, length: int) -> Routes:
        """Returns the routes of the first `length` tokens, owned by this rank.

        Call it before the engine's next step. Tokens after those that the engine computed are
        unknown; all are if vLLM returned less than these.
        """
        answer = output.outputs[0]
        computed = len(output.prompt_token_ids or ()) + len(answer.token_ids) - 1
        layers = len(self._routers)
        if self._table is not None:
            blocks = torch.tensor(self._runner.requests[output.request_id].block_ids[self._group])
            slots = blocks[:, None] * self._block + torch.arange(self._block)
            chosen = self._table[slots.flatten()[:computed]]
        elif answer.routed_experts is not None:
            chosen = torch.from_numpy(answer.routed_experts).to(self._dtype)
            chosen = chosen[:, -layers:]  # dense layers come first
        else:
            chosen = torch.zeros(0, layers, self._routers[0].top_k)
        experts = torch.zeros(layers, length, chosen.shape[2], dtype=self._dtype)
        if len(chosen) >= min(computed, length):
            experts[:, : min(computed, length)] = chosen[:length].transpose(0, 1)[:, :computed]
        owners = (dist.get_rank(),) * layers
        return Routes(owners, tuple(row_checksums(experts).tolist()), experts)

    def _write(self, layer: int, ids: Tensor) -> None:
        from vllm.distributed.parallel_state import get_dp_group
        from vllm.forward_context import get_forward_context

        assert self._table is not None
        context: Any = get_forward_context()
        slots = context.slot_mapping[self._layer]
        if len(ids) > len(slots):  # the tokens of all data ranks
            counts = context.dp_metadata.num_tokens_across_dp_cpu.tolist()
            ids = ids.split(counts)[get_dp_group().rank_in_group]
        self._table[slots, layer] = ids.to(self._dtype)


def capture_of(
    llm: LLM, model: torch.nn.Module, rollout: Rollout, *, eager: bool
) -> RouteCapture | None:
    """Returns None if vLLM's `model` is dense, or its routes cannot be seen.

    Starts the capture if routes are to be replayed.
    """
    is_replayed = rollout.router_replay == "engine"
    on_gpu = torch.cuda.is_available()
    is_visible = is_replayed if on_gpu else eager
    if not is_visible:
        return None
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    routers = [runner.router for runner in sorted(runners, key=lambda runner: runner.layer_id)]
    if not routers:
        return None
    capture = RouteCapture(llm, routers, is_returned=on_gpu)
    if is_replayed:
        capture.start()
    return capture
