"""Emulated FP8: rounding by each recipe's blocks, gradients as exact as the format allows, in Megatron's own layers."""

from __future__ import annotations

import pytest
import torch
from tiny_trainer import SMALL, build, make_batch
from torch import Tensor

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.algorithms.parity import Excess, Quantiles
from megarl.config.section import Fp8
from megarl.data.packing import plan_microbatches
from megarl.launch.parity import measure_logprobs
from megarl.models.fp8 import fp8_format, with_scales
from megarl.models.shards import slices_of
from megarl.trainer.fp8 import MULTIPLES, RECIPES, _Product
from megarl.trainer.trainer import Trainer
from megarl.weights.fp8 import Fp8Quantizer

# Of rounding to 3 bits of mantissa, the relative error is uniform in +-2^-4 x (1 to 1/2); its root mean square for
# mantissas that are uniform in their logarithm is 0.0255, and of 2 bits twice as much. A product has two operands.
E4M3, E5M2 = 0.0255, 0.051
WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 384, "layers": 3}


def by_blocks(x: Tensor, rows: int, columns: int, *, power_of_2: bool, dtype: torch.dtype) -> Tensor:
    """Rounds block by block, in fp64."""
    rounded, largest = torch.zeros_like(x, dtype=torch.float64), torch.finfo(dtype).max
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            part = x[top : top + rows, left : left + columns].double()
            scale = part.abs().max().float() / largest  # fp32, as kernels have it
            scale = torch.exp2(scale.double().log2().ceil()) if power_of_2 else scale.double()
            quotient = (part.float() / scale.float()).clamp(-largest, largest)
            rounded[top : top + rows, left : left + columns] = quotient.to(dtype).double() * scale
    return rounded


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_operands_rounded_by_blocks(recipe):
    torch.manual_seed(0)
    x, w, dy = (torch.randn(size) * torch.logspace(-3, 2, size[1]) for size in ((70, 200), (150, 200), (70, 150)))
    x.requires_grad_()
    w.requires_grad_()
    y = _Product.apply(x, w, RECIPES[recipe])
    y.backward(dy)
    many, e4m3, e5m2 = 10**6, torch.float8_e4m3fn, torch.float8_e5m2
    row, col, weight, turned, pow2, grad = {
        "blockwise": ((1, 128), (128, 1), (128, 128), (128, 128), True, e4m3),
        "mxfp8": ((1, 32), (32, 1), (1, 32), (32, 1), True, e4m3),
        "tensorwise": ((many, many), (many, many), (many, many), (many, many), False, e5m2),
    }[recipe]

    def rounded(z: Tensor, block: tuple[int, int], dtype: torch.dtype = e4m3) -> Tensor:
        return by_blocks(z.detach(), *block, power_of_2=pow2, dtype=dtype)

    torch.testing.assert_close(y.double(), rounded(x, row) @ rounded(w, weight).T, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(x.grad.double(), rounded(dy, row, grad) @ rounded(w, turned), rtol=1e-5, atol=1e-2)
    expected = rounded(dy, col, grad).T @ rounded(x, col)
    torch.testing.assert_close(w.grad.double(), expected, rtol=1e-5, atol=1e-2)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    batch = make_batch(num_rows=8, seed=3)
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    seen: dict[str, Tensor] = {}

    def before(outputs) -> None:
        seen.update({name: p.main_grad.clone() for name, p in trainer.model[0].module.named_parameters()})

    trainer.step(batch, plan, supervised_loss, loss_weights(batch, plan), before_step=before)
    return seen


def relative_errors(folder, create: dict, fp8: Fp8) -> dict[str, float]:
    plain = build(folder, SMALL | create)
    exact = gradients(plain)
    plain.close()
    trainer = build(folder, SMALL | create, megatron_options={"fp8": fp8})
    rounded = gradients(trainer)
    trainer.close()
    return {name: float((rounded[name] - g).norm() / g.norm()) for name, g in exact.items()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("recipe", "error"), [("blockwise", E4M3), ("mxfp8", E4M3), ("tensorwise", E5M2)])
def test_gradients_are_off_by_what_the_format_allows(tmp_path, recipe, error):
    """Each of a layer's products adds two operands' rounding; errors of all layers between it and the loss add up."""
    errors = relative_errors(tmp_path, WIDE, Fp8(recipe=recipe, emulate=True))
    own = 2**0.5 * error / 1.5  # of this product alone, somewhat less in sum
    for name, found in errors.items():
        products = 4 * 2 * WIDE["layers"]  # four linear layers a block, forward and backward
        assert own * ("linear" in name) < found < 3 * error * products**0.5, (name, found)


@pytest.mark.usefixtures("one_rank")
def test_experts_are_rounded_and_those_without_tokens_have_no_gradient(tmp_path):
    create = WIDE | {"family": "qwen3_moe", "experts": 8, "experts_per_token": 2, "moe_intermediate": 128, "layers": 2}
    errors = relative_errors(tmp_path, create, Fp8(emulate=True))
    experts = {name: found for name, found in errors.items() if ".experts." in name}
    assert experts
    assert all(found > E4M3 or found != found for found in experts.values()), experts  # NaN: no token, no gradient


@pytest.mark.usefixtures("one_rank")
def test_layers_at_both_ends_stay_as_they_are(tmp_path):
    trainer = build(tmp_path, SMALL | WIDE, megatron_options={"fp8": Fp8(emulate=True, first_last_bf16=1)})
    patched = [
        ["_forward_impl" in vars(layer.mlp.linear_fc1), "_forward_impl" in vars(layer.self_attention.linear_qkv)]
        for layer in trainer.model[0].module.decoder.layers
    ]
    trainer.close()
    assert patched == [[False, False], [True, True], [False, False]]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_micro_batches_are_whole_blocks_of_tokens(tmp_path, recipe):
    trainer = build(tmp_path, megatron_options={"fp8": Fp8(recipe=recipe, emulate=True)})
    counts = [microbatch.length for microbatch in trainer.microbatches(make_batch(num_rows=5, seed=1))]
    trainer.close()
    assert all(count % MULTIPLES[recipe] == 0 for count in counts), counts


@pytest.mark.usefixtures("one_rank")
def test_what_quantising_changes_is_part_of_the_policys_floor_only(tmp_path):
    """The probe is judged by rounding, against the quantised weights; what was sampled, also by what these change."""
    trainer = build(tmp_path, SMALL | WIDE, dtype="bf16")
    fmt = fp8_format(trainer.shape, 1)
    slices = slices_of(with_scales(trainer.table, fmt, is_whole=True), trainer.shape, trainer.layout)
    batch = make_batch(num_rows=16, seed=3)
    before = trainer.logprobs(batch)
    measured = measure_logprobs(trainer, batch, Fp8Quantizer(slices, fmt, lambda values, is_expert: None))
    after, gap = trainer.logprobs(batch), Quantiles.of(before[batch.mask] - measured.logprobs_K)
    trainer.close()
    assert torch.equal(before, after), "the trainer has its own weights again"
    assert Excess(gap, measured.of_policy).is_explained
    assert not Excess(gap, measured.floor).is_explained
