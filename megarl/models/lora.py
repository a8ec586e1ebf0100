"""LoRA adapters as a table, which maps tensors of a PEFT folder to the adapted linear layers of
Megatron. No torch.

    family's table, targets --adapter_table--> table of the adapters --slices_of--> rank's slices

PEFT has an A [rank, in], split like the layer's input, and a B [out, rank], split like its output,
for each projection. Where Megatron fuses projections, these are stacked in two parameters next to
the weight: `lora_A` and `lora_B`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megarl.models.shape import Settings, Shape
from megarl.models.shards import (
    Replicated,
    Rule,
    Rules,
    ShardDim1,
    Slices,
    Stack,
    Table,
)

PREFIX = "base_model.model."  # prefix of PEFT's tensor names
ALL_LINEAR = "all-linear"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdapterFormat:
    """The properties of a model's adapters that an engine needs when it starts."""

    shapes: Mapping[str, Shape]  # PEFT name -> shape, for every A and B
    rank: int
    alpha: float

    @property
    def targets(self) -> list[str]:
        return _modules(self.shapes)


def adapter_table(table: Table, targets: Sequence[str], rank: int) -> Table:
    """Returns the table of the adapters. Raises ValueError naming the `targets` that are not linear
    layers of the model."""
    known = sorted(set(map(module_name, chain.from_iterable(map(linears, table.layer_rules)))))
    unbound = [name for name in targets if name not in known and name != ALL_LINEAR]
    if unbound:
        raise ValueError(
            f"lora.targets: {', '.join(unbound)} is no linear layer that can be adapted; "
            f"choose from {', '.join(known)}"
        )
    if ALL_LINEAR in targets:
        targets = known

    def adapters(rules: Rules) -> Iterator[Rule]:
        return chain.from_iterable(_adapters(rule, targets, rank) for rule in rules)

    return Table(embedding=(), layers=table.map_layers(adapters).layers, head=())


def module_name(tensor: str) -> str:
    """Returns the last part of the name of a tensor's module, for example q_proj."""
    return tensor.split(".")[-2]


def adapter_names(weight: str) -> tuple[str, str]:
    """Returns the names of A and B for a weight of a layer or of a grouped expert."""
    module, _, leaf = weight.rpartition(".")
    suffix = leaf.removeprefix("weight")
    return f"{module}.lora_A{suffix}", f"{module}.lora_B{suffix}"


def peft_names(weight: str) -> tuple[str, str]:
    """Returns the names of A and B in a PEFT folder for an HF weight."""
    a, b = adapter_names(weight)
    return f"{PREFIX}{a}.weight", f"{PREFIX}{b}.weight"


def is_adapter(param: str) -> bool:
    return param.rpartition(".")[2].startswith("lora_")


def linears(rule: Rule) -> list[str]:
    """Returns the HF tensors of a rule that are weights of linear layers. Excludes routers, whose
    near-ties need precision."""
    shapes = rule.shapes().items()
    weights = [name for name, size in shapes if name.endswith(".weight") and len(size) == 2]
    return [name for name in weights if module_name(name) not in ("gate", "router")]


def _adapters(rule: Rule, targets: Sequence[str], rank: int) -> Iterator[Rule]:
    names = [name for name in linears(rule) if module_name(name) in targets]
    if not names:
        return
    a, b = adapter_names(rule.param)
    hf_a, hf_b = zip(*map(peft_names, names), strict=True)
    sizes = rule.shapes()
    rows, inputs = sizes[names[0]]
    if isinstance(rule, ShardDim1):
        yield ShardDim1(hf_a[0], a, (rank, inputs))
        yield Replicated(hf_b[0], b, (rows, rank))
        return
    outputs = tuple(sizes[name][0] for name in names)
    once = (1,) * len(names)
    yield Stack(hf_a, a, (rank,) * len(names), (inputs,), once)
    is_split = not isinstance(rule, Replicated)
    yield Stack(hf_b, b, outputs, (rank,), () if is_split else once)


def rows_of_outputs(
    weight: Slices,
    a: Slices,
    b: Slices,
    rank: int,
) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first row in the weight, first row in the stacked B, number of rows, index of the A)
    for every adapted slice of a weight, from this rank's slices of weight, A and B."""
    numbers = {part.name.replace(".lora_A.", ".lora_B."): number for number, part in enumerate(a)}
    stacked = {part.name: part for part in b}
    for part in weight:
        _, name = peft_names(part.name)
        rows = stacked.get(name)
        if rows is not None:
            first = rows.offset // rank + part.start[0] - rows.start[0]
            yield part.offset // part.strides[0], first, part.shape[0], numbers[name]


def targets_of(rules: Iterable[Rule]) -> list[str]:
    """Returns the names of the modules that `rules` adapt."""
    return _modules(chain.from_iterable(rule.shapes() for rule in rules))


def _modules(weights: Iterable[str]) -> list[str]:
    return sorted({module_name(name.removesuffix(".weight")) for name in weights})


def peft_config(
    base: str,
    table: Table,
    *,
    rank: int,
    alpha: float,
    dropout: float,
) -> Settings:
    """Returns the adapter_config.json of the adapters in `table`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": targets_of(table.layer_rules),
        "bias": "none",
        "inference_mode": True,
    }
