"""Emulated FP8: rounding by each recipe's blocks, gradients as exact as the format allows, in Megatron's own layers."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tiny_trainer import SMALL, build, make_batch
from torch import Tensor

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.checkpoint.torch_dist import stored_objects
from megarl.config.precision import Fp8
from megarl.config.schema import Lora
from megarl.data.packing import plan_microbatches
from megarl.models.engine import engine_format, with_scales
from megarl.models.shards import slices_of
from megarl.parity.gate import measure_logprobs
from megarl.parity.statistics import Excess, Quantiles
from megarl.trainer.fp8 import GRADIENT, INPUT, MULTIPLES, RECIPES, WEIGHT, Delayed, _Product
from megarl.trainer.trainer import Trainer
from megarl.weights.encode.blocks import BlockEncoder

E4M3 = 0.0255  # root mean square of the relative error, of mantissas that are uniform in their logarithm
WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 384, "layers": 3}


def by_blocks(
    x: Tensor, rows: int, columns: int, *, power_of_2: bool, dtype: torch.dtype
) -> Tensor:
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
    columns, of_dy = torch.logspace(-3, 2, 200), torch.logspace(-3, 2, 150)
    columns[::7] *= 2**-16  # in a block with their neighbours these lose all but a few bits
    x, w, dy = (
        torch.randn(70, 200) * columns,
        torch.randn(150, 200) * columns,
        torch.randn(70, 150) * of_dy,
    )
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

    torch.testing.assert_close(
        y.double(), rounded(x, row) @ rounded(w, weight).T, rtol=1e-5, atol=1e-2
    )
    expected = rounded(dy, row, grad) @ rounded(w, turned)
    torch.testing.assert_close(x.grad.double() / columns, expected / columns, rtol=1e-5, atol=1e-2)
    expected = rounded(dy, col, grad).T @ rounded(x, col)
    torch.testing.assert_close(w.grad.double() / columns, expected / columns, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_a_product_of_no_tokens_has_no_rows_and_no_gradient(recipe, is_frozen):
    rounding = RECIPES.get(recipe) or Delayed()
    x = torch.zeros(3, 0, 200, requires_grad=True)
    w = torch.randn(150, 200, requires_grad=not is_frozen)
    y = _Product.apply(x, w, rounding)
    assert y.shape == (3, 0, 150)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad is None if is_frozen else torch.equal(w.grad, torch.zeros_like(w))


def gradients(trainer: Trainer, rows: int) -> dict[str, Tensor]:
    batch = make_batch(num_rows=rows, seed=3)
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    computed = trainer.backward(batch, plan, supervised_loss, loss_weights(batch, plan))
    seen = {name: p.main_grad.clone() for name, p in trainer.model[0].module.named_parameters()}
    trainer.apply(computed)
    return seen


def relative_errors(
    folder, create: dict, fp8: Fp8, *, draws: int = 0, rows: int = 8
) -> tuple[dict[str, float], ...]:
    """Of each weight's gradient, against that in fp32: as rounded, and under each draw of the format's epsilon."""
    plain = build(folder, SMALL | create)
    exact = gradients(plain, rows)
    plain.close()
    rounding, found = RECIPES[fp8.recipe], []
    for draw in range(-1, draws):
        noise = Epsilon(draw, gradient_bits=2 if rounding.gradients == torch.float8_e5m2 else 3)
        with patch.dict(RECIPES, {fp8.recipe: rounding if draw < 0 else noise}):
            trainer = build(folder, SMALL | create, fp8=fp8)
            rounded = gradients(trainer, rows)
            trainer.close()
        found.append(
            {name: float((rounded[name] - g).norm() / g.norm()) for name, g in exact.items()}
        )
    return tuple(found)


@dataclass
class Epsilon:
    """Instead of rounding to a few bits of mantissa, an error drawn from all that such a rounding could make: it knows
    the format's epsilon, and neither blocks nor scales. A value's error is always the same in a draw, as if rounded."""

    draw: int
    gradient_bits: int

    def round(self, x: Tensor, operand: int, *, transposed: bool = False) -> Tensor:
        return self.apply(x, self.gradient_bits if operand == GRADIENT else 3)

    def apply(self, x: Tensor, bits: int) -> Tensor:
        x = x.float()
        mixed = (x.view(torch.int32).long() ^ (self.draw * 0x9E3779B9)) & 0xFFFFFFFF
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            mixed = ((mixed ^ (mixed >> 16)) * factor) & 0xFFFFFFFF
        # in [1/2, 1): numbers are 2^-bits / 2 apart, half of it is the epsilon
        mantissa, exponent = torch.frexp(x)
        error = (mixed / 2**31 - 1) * 2.0 ** -(bits + 2)
        return torch.ldexp(mantissa + error.where(mantissa != 0, 0), exponent)


def by_layer(errors: dict[str, float]) -> np.ndarray:
    """The median of the linear layers' weights; without experts that have no tokens."""
    layers: dict[str, list[float]] = {}
    for name, error in errors.items():
        if "linear" in name and error == error:
            layers.setdefault(name.split(".")[2], []).append(error)
    return np.array([np.median(layers[layer]) for layer in sorted(layers, key=int)])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_off_by_what_the_formats_epsilon_predicts(tmp_path, recipe):
    """benchmarks/fp8.py does it with experts too, where some tokens go to others."""
    found, *draws = relative_errors(tmp_path, WIDE, Fp8(recipe=recipe, emulate=True), draws=2)
    layers, drawn = by_layer(found), np.mean([by_layer(draw) for draw in draws], axis=0)
    assert np.all(abs(layers / drawn - 1) < 0.1), (layers, drawn)


@pytest.mark.usefixtures("one_rank")
def test_experts_are_rounded_and_those_without_tokens_have_no_gradient(tmp_path):
    create = WIDE | {
        "family": "qwen3_moe",
        "experts": 8,
        "experts_per_token": 2,
        "moe_intermediate": 128,
        "layers": 2,
    }
    (errors,) = relative_errors(tmp_path, create, Fp8(emulate=True))
    experts = {name: found for name, found in errors.items() if ".experts." in name}
    assert experts
    # NaN: no token, no gradient
    assert all(found > E4M3 or found != found for found in experts.values()), experts


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (None, {"dtype": "bf16"}),
        (None, {"lora": Lora(rank=4, alpha=8.0)}),
        ("blockwise", {"dtype": "bf16"}),
        ("mxfp8", {"recompute": "full"}),
        ("tensorwise", {"lora": Lora(rank=4, alpha=8.0)}),
        ("delayed", {"recompute": "selective", "recompute_modules": ("mlp",)}),
    ],
)
def test_micro_batches_of_fewer_tokens_than_experts(tmp_path, recipe, settings):
    """Experts without a token have a gradient of exactly 0; the step is made."""
    create = {"family": "qwen3_moe", "experts": 16, "experts_per_token": 2, "moe_intermediate": 16}
    fp8 = Fp8(recipe=recipe, emulate=True) if recipe else None
    trainer = build(tmp_path, create, fp8=fp8, max_tokens_per_microbatch=24, **settings)
    counts: list[int] = []
    for name, module in trainer.model[0].module.named_modules():
        if name.endswith("linear_fc1") and "experts" in name:
            module.register_forward_hook(lambda _m, inputs, _y: counts.append(len(inputs[0])))
    batch = make_batch(num_rows=1, seed=3)
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    report = trainer.step(batch, plan, supervised_loss, loss_weights(batch, plan))
    trainer.close()
    assert 0 in counts and max(counts) > 0
    assert not report.skipped and 0 < report.grad_norm < torch.inf


@pytest.mark.usefixtures("one_rank")
def test_layers_at_both_ends_stay_as_they_are(tmp_path):
    trainer = build(tmp_path, SMALL | WIDE, fp8=Fp8(emulate=True, first_last_bf16=1))
    patched = [
        [
            "_forward_impl" in vars(layer.mlp.linear_fc1),
            "_forward_impl" in vars(layer.self_attention.linear_qkv),
        ]
        for layer in trainer.model[0].module.decoder.layers
    ]
    trainer.close()
    assert patched == [[False, False], [True, True], [False, False]]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_micro_batches_are_whole_blocks_of_tokens(tmp_path, recipe):
    trainer = build(tmp_path, fp8=Fp8(recipe=recipe, emulate=True))
    counts = [
        microbatch.length for microbatch in trainer.microbatches(make_batch(num_rows=5, seed=1))
    ]
    trainer.close()
    assert all(count % MULTIPLES[recipe] == 0 for count in counts), counts


def test_delayed_scales_are_of_earlier_updates():
    rounding, x = Delayed(), torch.tensor([[3.0, 40.0, -500.0]])
    first = rounding.round(x, INPUT)
    rounding.observe(INPUT, x)
    assert first.equal(by_blocks(x, 1, 3, power_of_2=False, dtype=torch.float8_e4m3fn).float()), (
        "its own"
    )
    rounding.history[1, 0] = 50.0
    assert rounding.round(x, INPUT)[0, 2] == -50.0, "clamped to the largest that is known"
    assert rounding.round(x, INPUT)[0, 1] == 50 * 352 / 448, (
        "40 / 50 x 448 = 358.4 is rounded to 352"
    )


@pytest.mark.usefixtures("one_rank")
def test_delayed_scales_change_with_updates_only_and_are_saved(tmp_path):
    trainer = build(
        tmp_path,
        SMALL | WIDE,
        fp8=Fp8(recipe="delayed", emulate=True),
        dtype="bf16",
    )
    batch, delayed = make_batch(num_rows=8, seed=3), trainer.emulation._delayed
    trainer.logprobs(batch)
    trainer.emulation.after_update()
    assert not any(each.history.any() for each in delayed), "a pass without gradient is no update"
    seen = [gradients(trainer, 8) for _ in range(2)]
    assert all(
        each.history[:2].all() and not each.history[2:].any() and not each.largest.any()
        for each in delayed
    )
    name = "decoder.layers.2.mlp.linear_fc2.weight"
    assert not seen[0][name].equal(seen[1][name])
    saved = stored_objects(trainer.model[0].module)
    kept = [entry.data for entry in saved.values() if isinstance(entry.data, Tensor)]
    assert len(kept) == len(delayed) == 4 * WIDE["layers"]
    before = trainer.logprobs(batch)
    for each in delayed:
        each.history.mul_(0.5)
    assert not trainer.logprobs(batch).equal(before)
    for each in kept:
        each.mul_(2)
    trainer.model[0].module.load_state_dict(
        {**saved, **{key: entry.data for key, entry in saved.items()}}, strict=False
    )
    assert trainer.logprobs(batch).equal(before)
    histories = [each.history.clone() for each in delayed]
    for each in delayed:  # an update that is skipped, for its gradient is not finite
        each.largest.copy_(torch.tensor([float("inf"), 0.0, float("nan")]))
    trainer.emulation.after_update()
    assert not any(each.largest.any() for each in delayed)
    assert all(map(torch.equal, histories, [each.history for each in delayed]))
    trainer.close()


@pytest.mark.usefixtures("one_rank")
def test_parameters_in_fp8_are_those_that_an_fp8_engine_gets(tmp_path):
    """Rounding them again changes nothing, and main weights keep what a small step adds."""
    fp8, rounding = Fp8(params=True, emulate=True), RECIPES["blockwise"]
    trainer = build(tmp_path, SMALL | WIDE, fp8=fp8, dtype="bf16", lr=1e-5)
    names = [
        name
        for name in trainer.parameters_by_name()
        if "linear" in name and name.endswith("weight")
    ]
    assert len(names) == 4 * WIDE["layers"]

    def are_rounded() -> bool:
        weights = [trainer.parameters_by_name()[name] for name in names]
        return all(
            rounding.round(w, WEIGHT, transposed=t).equal(w.float())
            for w in weights
            for t in (False, True)
        )

    assert are_rounded()
    before = {name: trainer.parameters_by_name()[name].clone() for name in names}
    for _ in range(40):
        gradients(trainer, 8)
    after = trainer.parameters_by_name()
    trainer.close()
    changed = sum(int((after[name] != before[name]).sum()) for name in names) / sum(
        w.numel() for w in before.values()
    )
    assert 0.01 < changed < 0.9, "40 steps of 1e-5 carry some weights of 0.02 to the next number"


@pytest.mark.usefixtures("one_rank")
def test_what_quantising_changes_is_part_of_the_policys_floor_only(tmp_path):
    """The probe is judged by rounding, against the quantised weights; what was sampled, also by what these change."""
    trainer = build(tmp_path, SMALL | WIDE, dtype="bf16")
    fmt = engine_format("fp8", trainer.shape, 1)
    slices = slices_of(
        with_scales(trainer.table, fmt, is_whole=True), trainer.shape, trainer.layout
    )
    batch = make_batch(num_rows=16, seed=3)
    before = trainer.logprobs(batch)
    measured = measure_logprobs(
        trainer, batch, BlockEncoder(slices, fmt, lambda values, is_expert: None)
    )
    after, gap = trainer.logprobs(batch), Quantiles.of(before[batch.mask] - measured.logprobs_K)
    trainer.close()
    assert torch.equal(before, after), "the trainer has its own weights again"
    assert Excess(gap, measured.of_policy).is_explained
    assert not Excess(gap, measured.floor).is_explained
