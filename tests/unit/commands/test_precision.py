"""`megarl check --precision` names every kind of module once per run of layers that are alike."""

from __future__ import annotations

from megarl.commands.precision import describe_precision
from megarl.config.schema import Config
from megarl.config.validate import model_shape

MOE = {
    "family": "deepseek_v3", "layers": 5, "hidden": 256, "heads": 4, "vocab": 67, "experts": 4, "moe_intermediate": 128,
    "tied": False, "tokenizer": "none",
}  # fmt: skip


def rows_of(**values) -> dict[tuple[str, str], tuple[str, ...]]:
    config = Config.model_validate({"model": {"create": MOE}, **values})
    lines = describe_precision(config, model_shape(config)).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {(module, layers): tuple(formats) for module, layers, *formats in cells[1:]}


def test_both_sides_of_every_module_are_named():
    fp8 = {"recipe": "blockwise", "emulate": True, "first_last_bf16": 1}
    rows = rows_of(precision={"fp8": fp8}, rollout={"quantization": "fp8"})
    trained, kept = "FP8 blockwise, emulated, weights bf16", "FP8, a scale per 128 x 128"
    assert rows["embed_tokens.weight", "-"] == rows["lm_head.weight", "-"] == ("bf16", "bf16")
    assert rows["layers.*.self_attn.q_b_proj.weight", "1-3"] == (trained, kept)
    assert rows["layers.*.self_attn.q_b_proj.weight", "0, 4"] == ("bf16", kept)
    assert rows["layers.*.mlp.gate_proj.weight", "0"] == ("bf16", kept), "of the dense layer"
    assert rows["layers.*.mlp.experts.*.up_proj.weight", "1-3"] == (trained, kept)
    assert rows["layers.*.mlp.gate.weight", "1-4"] == ("fp32 products", "bf16")
    assert rows["layers.*.mlp.gate.e_score_correction_bias", "1-4"] == ("fp32", "fp32")


def test_a_stage_without_an_engine_has_one_side():
    assert rows_of(stage="sft")["norm.weight", "-"] == ("bf16",)
