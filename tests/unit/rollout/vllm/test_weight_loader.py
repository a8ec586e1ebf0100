"""What an engine has beside the weights that a sync moves: scales of its cache, kernels, the model's format."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from megarl.config.schema import Rollout
from megarl.rollout.vllm import weight_loader
from megarl.rollout.vllm.arguments import engine_settings
from megarl.rollout.vllm.weight_loader import reset_cache_scales


def test_scales_of_the_cache_are_those_of_a_model_that_was_loaded() -> None:
    """On a GPU they were random in an engine with FP8 weights: seen by benchmarks.gpu_check."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    set_default_quant_scales(model[1], register_buffer=True)
    for buffer in model.buffers():
        buffer.fill_(0.3)
    model[1]._k_scale_float = 0.3
    reset_cache_scales(model)
    assert all(float(buffer) == 1 for buffer in model.buffers()) and model[1]._k_scale_float == 1


class Experts(QuantizeMethodBase):
    """A method that builds a kernel whenever weights are processed, as vLLM's for experts in FP8."""

    def __init__(self) -> None:
        self.built = 0
        self.process_weights_after_loading(nn.Module())

    def create_weights(self, layer: nn.Module, *args, **options) -> None: ...
    def apply(self, layer: nn.Module, *args, **options) -> None: ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.built += 1
        self.moe_kernel = f"kernel {self.built}"
        self.moe_quant_config = f"config {self.built}"


def test_graphs_and_eager_calls_use_the_same_kernel_of_experts(monkeypatch) -> None:
    """On a GPU the new kernel kept the scales of the open layer: seen by benchmarks.gpu_contract sync."""
    layer, method = nn.Linear(1, 1), Experts()
    layer.quant_method = method  # pyright: ignore[reportArgumentType]
    weight_loader._process(layer, torch.device("cpu"))
    assert (method.moe_kernel, method.moe_quant_config) == ("kernel 2", "config 2")
    monkeypatch.setattr(weight_loader, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    weight_loader._process(layer, torch.device("cpu"))
    assert method.built == 3
    assert (method.moe_kernel, method.moe_quant_config) == ("kernel 2", "config 2")


def test_an_engine_of_a_quantised_folder_forgets_the_format(tmp_path) -> None:
    """vLLM's gpt_oss reads a key that is null: seen by benchmarks.gpu_contract sync."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    settings = engine_settings(tmp_path, Rollout(), torch.bfloat16, trust_remote_code=False)
    config = SimpleNamespace(quantization_config={"quant_method": "mxfp4"}, model_type="gpt_oss")
    assert vars(settings["hf_overrides"](config)) == {"model_type": "gpt_oss"}
    assert vars(settings["hf_overrides"](SimpleNamespace())) == {}
