"""LoRA adapters as a table: which tensors of a PEFT folder each adapted linear layer of Megatron has. No torch.

    family's table, targets  --adapter_table-->  table of the adapters  --slices_of-->  this rank's slices

PEFT has an A [rank, in], split like the layer's input, and a B [out, rank], split like its output, for each projection.
Where Megatron fuses projections, they are stacked in two parameters beside the weight: `lora_A` and `lora_B`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.models.shards import (
    Qkv,
    Replicated,
    Rule,
    ShardDim0,
    ShardDim1,
    ShardSlice,
    Stack,
    Table,
)

PREFIX = "base_model.model."  # of PEFT's names
ALL_LINEAR = "all-linear"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class AdapterFormat:
    """All adapters of a model, as an engine must know them when it starts."""

    shapes: Mapping[str, tuple[int, ...]]  # of every A and B, by PEFT's names
    rank: int
    alpha: float

    @property
    def targets(self) -> list[str]:
        return sorted({module_name(name.removesuffix(".weight")) for name in self.shapes})


def adapter_table(table: Table, targets: Sequence[str], rank: int) -> Table:
    """Returns the adapters' table. Raises ValueError naming targets that no linear layer of the model has."""
    groups = {name: getattr(table, name) for name in ("dense", "layer", "expert")}
    known = sorted(
        {
            module_name(name)
            for rules in groups.values()
            for rule in rules
            for name in _linears(rule)
        }
    )
    if unbound := [name for name in targets if name not in known and name != ALL_LINEAR]:
        names, choice = ", ".join(unbound), ", ".join(known)
        raise ValueError(
            f"lora.targets: {names} is no linear layer that can be adapted; choose from {choice}"
        )
    chosen = known if ALL_LINEAR in targets else targets
    adapters: dict[str, Any] = {
        name: tuple(part for rule in rules for part in _adapters(rule, chosen, rank))
        for name, rules in groups.items()
    }
    return Table(embedding=(), head=(), **adapters)


def module_name(tensor: str) -> str:
    """The last name of the module of a tensor: q_proj."""
    return tensor.split(".")[-2]


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of A and B beside a weight: PEFT's of an HF tensor, or the parameters of a layer or a grouped expert."""
    module, _, leaf = weight.rpartition(".")
    suffix = leaf.removeprefix("weight")
    return f"{module}.lora_A{suffix}", f"{module}.lora_B{suffix}"


def is_adapter(param: str) -> bool:
    return param.rpartition(".")[2].startswith("lora_")


def _linears(rule: Rule) -> list[str]:
    """The HF tensors of a rule that are weights of linear layers other than a router."""
    is_known = (
        isinstance(rule, Qkv | Stack | ShardDim0 | ShardDim1 | Replicated)
        and ".router." not in rule.param
    )
    return [
        name
        for name, size in rule.shapes().items()
        if is_known and name.endswith(".weight") and len(size) == 2
    ]


def _adapters(rule: Rule, targets: Sequence[str], rank: int) -> Iterator[Rule]:
    names = [name for name in _linears(rule) if module_name(name) in targets]
    if not names:
        return
    sizes, (a, b) = rule.shapes(), adapter_names(rule.param)
    hf = [[f"{PREFIX}{part}.weight" for part in adapter_names(name)] for name in names]
    (rows, inputs), count = sizes[names[0]], len(names)
    if isinstance(rule, ShardDim1):
        yield ShardDim1(hf[0][0], a, (rank, inputs))
        yield Replicated(hf[0][1], b, (rows, rank))
        return
    is_split = not isinstance(rule, Replicated)
    yield Stack(
        tuple(name for name, _ in hf), a, (rank,) * count, (inputs,), max_shards=(1,) * count
    )
    outputs = tuple(sizes[name][0] for name in names)
    yield Stack(
        tuple(name for _, name in hf),
        b,
        outputs,
        (rank,),
        max_shards=(0 if is_split else 1,) * count,
    )


def rows_of_outputs(
    weight: Sequence[ShardSlice], a: Sequence[ShardSlice], b: Sequence[ShardSlice], rank: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yields where Bs lie in a weight, of this rank's slices: (row of the weight, row of B, rows, number of the A)."""
    numbers = {part.name.replace(".lora_A.", ".lora_B."): number for number, part in enumerate(a)}
    stacked = {part.name: part for part in b}
    for part in weight:
        name = f"{PREFIX}{adapter_names(part.name)[1]}.weight"
        if (rows := stacked.get(name)) is not None:
            first = rows.offset // rank + part.start[0] - rows.start[0]
            yield part.offset // part.strides[0], first, part.shape[0], numbers[name]


def targets_of(rules: Iterable[Rule]) -> list[str]:
    """The names of the adapted modules."""
    return sorted(
        {module_name(name.removesuffix(".weight")) for rule in rules for name in rule.shapes()}
    )


def peft_config(
    base: str, table: Table, *, rank: int, alpha: float, dropout: float
) -> dict[str, Any]:
    """Returns the adapter_config.json of the adapters in `table`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": targets_of((*table.dense, *table.layer, *table.expert)),
        "bias": "none",
        "inference_mode": True,
    }
