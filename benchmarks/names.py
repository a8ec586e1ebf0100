"""The benchmarks: name, what is compared, module."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module

from benchmarks.frame import Case

__all__ = ["BENCHES", "Bench", "cases"]


@dataclass(frozen=True, slots=True)
class Bench:
    about: str
    module: str  # that defines CASES


BENCHES: dict[str, Bench] = {
    "advantages": Bench(
        "reinforce_pp, grpo and reinforce_pp_baseline against verl's", "benchmarks.advantages"
    ),
    "losses": Bench(
        "ppo_clip with its gradient against verl's, time and peak memory", "benchmarks.losses"
    ),
    "packing": Bench(
        "rows into bins against MFFD, bins to ranks against verl's partition", "benchmarks.packing"
    ),
    "logprobs": Bench(
        "log-probs from hidden states and their gradients against verl, TRL, Megatron-Core",
        "benchmarks.logprobs",
    ),
    "convert": Bench(
        "a 2 GB model converted by a fresh process against a plain copy", "benchmarks.convert"
    ),
    "end_to_end": Bench(
        "GRPO steps of fixed length against TRL's, whole jobs in fresh processes",
        "benchmarks.end_to_end",
    ),
    "sync": Bench(
        "weights shard to shard against full tensors on every rank, 4 and 8 gloo ranks",
        "benchmarks.sync",
    ),
}


def cases(name: str) -> tuple[Case, ...]:
    """The cases of a benchmark. Raises ValueError for an unknown name."""
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        raise ValueError(
            f"no benchmark {name!r}; {f'did you mean {near[0]}?' if near else 'there are ' + ', '.join(BENCHES)}"
        )
    return import_module(BENCHES[name].module).CASES
