"""A task whose module, once imported by a rank, makes one rank stall: in the operation, and the way, that STALL names.

STALL=p2p:stop:1      rank 1 stops itself (SIGSTOP) in a pipeline message
STALL=reduce:hang:1   rank 1 sleeps for ever       STALL=reward:slow:0     rank 0's reward takes 20 s
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from megarl.data.tasks import random_tokens  # noqa: F401 (the task itself)
from megarl.rewards.rules import even_fraction

WHERE, HOW, RANK = os.environ.get("STALL", "nowhere:never:0").split(":")
AFTER = 3  # calls, in a rank
SLOW = range(AFTER, AFTER + 4)  # calls of 5 s each; a call of a reward may take 10


def stall() -> None:
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(20 / len(SLOW) if HOW == "slow" else 10_000)


def planted(
    call: Callable[..., Any], counts: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    """`call`, that stalls when it is called for the AFTER-th time, or is slow a few times."""
    calls = 0

    @wraps(call)  # a reward gets only the arguments that it names
    def stalling(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += counts()
        if calls == AFTER or (HOW == "slow" and calls in SLOW):
            calls += HOW != "slow"
            stall()
        return call(*args, **options)

    return stalling


def caller_is(name: str) -> Callable[[], bool]:
    return lambda: any(name in sys._getframe(depth).f_code.co_filename for depth in range(2, 6))


def plant() -> None:
    import torch.distributed as dist

    from megarl.weights.sync.transports.collective import Collective

    if WHERE == "p2p":
        dist.batch_isend_irecv = planted(dist.batch_isend_irecv, caller_is("p2p_communication"))
    if WHERE == "alltoall":
        dist.all_to_all_single = planted(dist.all_to_all_single)
    if WHERE == "reduce":
        from megatron.core.distributed import param_and_grad_buffer

        group = param_and_grad_buffer._ParamAndGradBucketGroup
        group.start_grad_sync = planted(group.start_grad_sync)
    if WHERE == "sync":
        Collective.start = planted(Collective.start)  # type: ignore[method-assign]
    if WHERE == "engine":
        from megarl.run import engine

        before = engine._before_engine_step
        engine._before_engine_step = planted(before)


def reward(*, tokens: Sequence[int]) -> float:
    return even_fraction(tokens=tokens)


def sums(split: str) -> list[dict[str, str]]:
    return [
        {"prompt": f"Calculate {a} + {b}.", "answer": str(a + b)}
        for a in range(10, 30)
        for b in range(10, 30)
    ]


if os.environ.get("RANK") == RANK and HOW != "never":
    if WHERE == "reward":
        reward = planted(reward)
    else:
        plant()
