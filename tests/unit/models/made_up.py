"""A made-up family: Qwen3 with gate and up in one tensor, a transposed down projection, and a setting to refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megarl.layout import Axis
from megarl.models import blocks
from megarl.models.config_json import ConfigReader, read_decoder
from megarl.models.shape import DENSE, Family, ModelShape
from megarl.models.shards import (
    HF,
    MC,
    LayerSpec,
    Replicated,
    ShardSlice,
    Stack,
    Table,
    Transposed,
)

__all__ = ["FAMILIES"]


@dataclass(frozen=True, slots=True)
class FusedGateUp:
    """[2 x rows, hidden], all of gate above all of up; a rank has its part of each."""

    hf: str
    param: str
    rows: int
    hidden: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.hf: (2 * self.rows, self.hidden)}

    def slices(self, tp: Axis) -> Iterator[ShardSlice]:
        for part in Stack(
            ("gate", "up"), self.param, (self.rows, self.rows), (self.hidden,)
        ).slices(tp):
            first = self.rows if part.name == "up" else 0
            yield replace(part, name=self.hf, start=(first + part.start[0], 0))


def read(config: ConfigReader) -> ModelShape:
    config.only(attention_bias=False, residual_multiplier=1.0)
    return read_decoder(config, head_dim=128, qk_norm=True)


def table(shape: ModelShape, spec: LayerSpec, padded_vocab: int) -> Table:
    norm = "mlp.linear_fc1.layer_norm_weight" if spec == "te" else "pre_mlp_layernorm.weight"
    mlp = (
        Replicated(HF + "post_attention_layernorm.weight", MC + norm, (shape.hidden,)),
        FusedGateUp(
            HF + "mlp.gate_up_proj.weight",
            MC + "mlp.linear_fc1.weight",
            shape.intermediate,
            shape.hidden,
        ),
        Transposed(
            HF + "mlp.down_proj.weight",
            MC + "mlp.linear_fc2.weight",
            (shape.intermediate, shape.hidden),
        ),
    )
    rules = (*blocks.attention(shape, spec), *mlp)
    return blocks.decoder_table(shape, padded_vocab, layers={DENSE: rules})


FAMILIES = {"made_up": Family(architecture="MadeUpForCausalLM", read=read, table=table)}
