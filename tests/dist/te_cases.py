"""Transformer Engine's layers and Megatron's local ones, from one checkpoint, on one batch. Used by te_ranks.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import te_standin
import torch
import torch.distributed as dist
from lora_cases import ALPHA, RANK, random_adapter, tensors_by_name
from torch import Tensor
from torch.nn import functional as F
from trainer_cases import _SIZES, MODELS, VOCAB, Policy, random_batch
from trainer_ranks import CLIPPED, config_of

from megarl.algorithms.objective import loss_weights, supervised_loss
from megarl.config.precision import Fp8, Precision
from megarl.config.schema import Config, Lora
from megarl.data.collate import token_batch
from megarl.data.packing import plan_microbatches
from megarl.layout import Layout
from megarl.layout import Parallel as Sizes
from megarl.models.registry import read_model
from megarl.parity.sublayers import record_outputs, trainer_sublayers
from megarl.platform.env import set_env
from megarl.trainer.fp8 import RECIPES, _Product, megatron_settings
from megarl.trainer.parallel_groups import destroy_parallel
from megarl.trainer.trainer import Trainer
from megarl.types import TrainBatch, UpdateReport

WORLD = 2
FUSED = {"transformer_impl": "transformer_engine"}
TE = {**FUSED, "moe_permute_fusion": False}  # its kernels take a minute in Triton's interpreter
REPLAYING = {**TE, "moe_router_fusion": False}
_WIDE = {  # FP8 blocks are 128 wide
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "initializer_range": 0.05,
}
MODELS |= {
    "qwen3_wide": ("Qwen3Config", {**_SIZES, **_WIDE}),
    "qwen3_moe_wide": ("Qwen3MoeConfig", {**_SIZES, **_WIDE, "num_experts": 8}),
}
Parallel = dict[str, int]


@dataclass(frozen=True)
class Seen:
    """What one trainer computed from one batch."""

    logprobs_T: Tensor
    sublayers: dict[str, Tensor]  # projected outputs [T, 8]
    gradients: dict[str, Tensor]  # of each slice of a Hugging Face tensor, summed over all ranks
    step: UpdateReport

    def norm(self) -> float:
        """Returns the norm of the whole model's gradient, from one copy of each slice."""
        squares = {name: float(x.double().square().sum()) for name, x in self.gradients.items()}
        everywhere: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, squares)
        return math.sqrt(sum({name: x for rank in everywhere for name, x in rank.items()}.values()))


@dataclass(frozen=True)
class Bench:
    folder: Path  # of the models
    number: int  # of the process, also while it is alone in its process group

    def policy(self, model: str, config: Config, **options: Any) -> Policy:
        """Builds a policy; `options` are Megatron's."""
        trainer = config.trainer.model_copy(update={"megatron_options": options})
        config = config.model_copy(update={"trainer": trainer})
        layout = Layout.of(config.parallel.sizes, dist.get_world_size(), dist.get_rank())
        return Policy.build(config, self.folder / model, layout)

    def trainer(self, model: str, config: Config, **options: Any) -> Trainer:
        return self.policy(model, config, **options).trainer


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    """Returns whole gradients; a backward pass leaves each rank the sums of its shard of a bucket."""
    for chunk in trainer.model:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                shards = list(bucket.grad_data.view(ranks.size(), -1).unbind())
                dist.all_gather(shards, shards[ranks.rank()].clone(), ranks)
    parameters = trainer.parameters_by_name()
    gradients = {name: x.main_grad for name, x in parameters.items() if hasattr(x, "main_grad")}
    slices = [part for part in trainer.tensors.slices if part.param in gradients]
    return tensors_by_name(slices, gradients)


def run(trainer: Trainer, batch: TrainBatch) -> Seen:
    """Scores a batch, and trains on it once with the supervised loss."""
    numbers = range(trainer.shape.layers)
    names = [f"layers.{number}.{part}" for number in numbers for part in ("attention", "mlp")]
    names = ["embedding", *names, "final_norm"]
    with record_outputs(trainer, batch, trainer_sublayers(trainer), names) as outputs_NT8:
        logprobs_T = trainer.logprobs(batch)
    plan = plan_microbatches(batch, trainer.layout, trainer.train)
    (update,) = plan.updates()
    pending = trainer.backward(batch, update, supervised_loss, loss_weights(batch, plan))
    gradients = gradients_of(trainer)
    sublayers = dict(zip(names, outputs_NT8, strict=True))
    return Seen(logprobs_T, sublayers, gradients, trainer.apply(pending))


def run_closed(trainer: Trainer, batch: TrainBatch) -> Seen:
    seen = run(trainer, batch)
    trainer.close()
    return seen


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-12))


def worst(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the largest relative difference, and the name of the tensor that has it."""
    assert one.keys() == other.keys() and other
    return max((distance(one[name], x), name) for name, x in other.items())


def relative(one_T: Tensor, other_T: Tensor) -> float:
    """Returns the largest difference of log-probs, relative to magnitudes above 1."""
    return float(((one_T - other_T).abs() / other_T.abs().clamp_min(1)).max())


def differences(one: Seen, other: Seen) -> dict[str, Any]:
    sublayers = {name: distance(one.sublayers[name], x) for name, x in other.sublayers.items()}
    return {
        "logprobs": relative(one.logprobs_T, other.logprobs_T),
        "gradients": worst(one.gradients, other.gradients),
        "sublayers": sublayers,
        "steps": [[each.step.loss, each.step.grad_norm] for each in (one, other)],
    }


def compare(
    bench: Bench,
    model: str,
    parallel: Parallel,
    batch: TrainBatch | None = None,
    plant: Callable[[Trainer], None] = lambda _: None,
    te_train: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] = TE,
) -> dict[str, Any]:
    """Compares one batch in fp32.

    The trainer with Transformer Engine's layers has the settings `te_train` as well, and is changed by `plant`.
    """
    batch = batch or random_batch(num_rows=8)
    local = run_closed(bench.trainer(model, config_of(parallel)), batch)
    te_standin.CALLS.clear()
    trainer = bench.trainer(model, config_of(parallel, **te_train or {}), **options)
    plant(trainer)
    te = run_closed(trainer, batch)
    case = {
        "model": model,
        "parallel": parallel,
        "calls": dict(te_standin.CALLS),
        "norm": te.norm(),
    }
    return case | differences(te, local)


def check_bf16(bench: Bench, models: Sequence[str]) -> list[dict[str, Any]]:
    """The error of each in bf16 against the local layers in fp32, from weights that bf16 represents.

    All follow the same routes: a rounding error that changes a token's experts would hide all others.
    """
    return [_bf16(bench, model) for model in models[bench.number :: WORLD]]


def _bf16(bench: Bench, model: str) -> dict[str, Any]:
    batch = random_batch(num_rows=8)
    exact = bench.trainer(model, config_of({}))
    for parameter in exact.parameters_by_name().values():
        parameter.data.copy_(parameter.data.bfloat16())
    free = exact.forward(batch, record=exact.follows_choices)
    if exact.follows_choices:
        batch = replace(batch, choices=free.choices)
    seen = run_closed(exact, batch)
    config = config_of({}, dtype="bf16")
    local = run_closed(bench.trainer(model, config), batch)
    trainer = bench.trainer(model, config, **REPLAYING)
    te_standin.CALLS.clear()
    differs = trainer.forward(batch).metrics.get("routing/differs", 0.0)
    te = run_closed(trainer, batch)
    return {
        "model": model,
        "routed otherwise": differs,
        "logprobs": [
            float((x.logprobs_T - seen.logprobs_T).square().mean().sqrt()) for x in (te, local)
        ],
        "gradients": [worst(x.gradients, seen.gradients) for x in (te, local)],
        "calls": dict(te_standin.CALLS),
    }


# --- FP8 ---


def check_fp8_layers(bench: Bench) -> dict[str, dict[str, float]]:
    """Single layers against the emulation's products: 0 means to the bit."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

    found: dict[str, dict[str, float]] = {}
    blocks = ("blockwise", Float8BlockScaling())
    cases = [
        (torch.float32, *blocks),
        (torch.bfloat16, *blocks),
        (torch.float32, "tensorwise", Float8CurrentScaling()),
    ]
    for dtype, recipe, theirs in cases if bench.number else ():
        torch.manual_seed(0)
        x_TK = torch.randn(256, 256, dtype=dtype)
        dy_TN = torch.randn(256, 384, dtype=dtype)
        options = {"bias": False, "params_dtype": dtype}
        fused = te.LayerNormLinear(256, 384, normalization="RMSNorm", eps=1e-6, **options)
        experts = te.GroupedLinear(3, 256, 384, **options)
        splits = [128, 0, 128]

        def product(x: Tensor, *weights: Tensor) -> Tensor:
            sizes = splits if len(weights) > 1 else [len(x)]  # noqa: B023
            parts = zip(x.split(sizes), weights, strict=True)
            return torch.cat([_Product.apply(part, w, RECIPES[recipe]) for part, w in parts])  # noqa: B023

        def normed(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
            y = F.rms_norm(x.float(), (256,), gain.float(), 1e-6)
            return product(y.to(x.dtype), weight)

        layers = {
            "Linear": (te.Linear(256, 384, **options), product, ()),
            "LayerNormLinear": (fused, normed, ()),
            "GroupedLinear": (experts, product, (splits,)),
        }
        for name, (layer, reference, arguments) in layers.items():
            parameters = dict(layer.named_parameters())
            copies = [x.detach().clone().requires_grad_() for x in (x_TK, *parameters.values())]
            x = x_TK.clone().requires_grad_()
            with te.autocast(enabled=True, recipe=theirs):
                y = layer(x, *arguments)
            expected = reference(*copies)
            y.backward(dy_TN)
            expected.backward(dy_TN)
            pairs = {"y": (y, expected), "x": (x.grad, copies[0].grad)}
            for key, copied in zip(parameters, copies[1:], strict=True):
                pairs[key] = (parameters[key].grad, copied.grad)
            found[f"{name} {recipe} {dtype}"] = {
                key: distance(*map(_fp32, pair)) for key, pair in pairs.items()
            }
    return found


def _fp32(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.detach().float()


def fp8_settings(recipe: str) -> dict[str, Any]:
    """Returns Megatron's settings on a B200, which has kernels for each recipe."""
    precision = Precision(fp8=Fp8(recipe=recipe))  # type: ignore[arg-type]
    with patch("torch.cuda.get_device_capability", lambda _device: (10, 0)):
        return megatron_settings(precision, torch.device("cuda"))


def check_fp8_models(bench: Bench) -> list[dict[str, Any]]:
    """A full micro-batch, and one with padding."""
    cases = [("qwen3_wide", 128), ("qwen3_wide", 90), ("qwen3_moe_wide", 90)]
    return [_fp8(bench, model, {}, longest) for model, longest in cases[bench.number :: WORLD]]


def check_fp8_layouts(bench: Bench) -> list[dict[str, Any]]:
    """Sequence parallelism gathers activations in FP8."""
    return [_fp8(bench, model, {"tensor": 2}, 90) for model in ("qwen3_wide", "qwen3_moe_wide")]


def _fp8(bench: Bench, model: str, parallel: Parallel, length: int) -> dict[str, Any]:
    """Compares Transformer Engine's FP8 blocks with the emulation, and both with fp32."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (2, length), generator=generator)
    batch: Any = token_batch([(row, torch.arange(length) >= 8) for row in tokens], temperature=1.0)
    config = config_of(parallel, max_tokens_per_microbatch=256)
    seen = []
    for fp8, options in (
        (Fp8(), TE | fp8_settings("blockwise")),
        (Fp8(emulate=True), {}),
        (None, {}),
    ):
        precise = config.model_copy(update={"precision": Precision(fp8=fp8)})
        seen.append(run_closed(bench.trainer(model, precise, **options), batch))
    te, emulated, plain = seen
    return {
        "model": model,
        "parallel": parallel,
        "changed": changed_tokens(te, emulated),
        "changed without FP8": changed_tokens(plain, emulated),
        "gradients": [total(x.gradients, emulated.gradients) for x in (te, plain)],
        "logprobs": relative(te.logprobs_T, emulated.logprobs_T),
    }


def changed_tokens(one: Seen, other: Seen) -> dict[str, float]:
    """Returns the share of tokens whose outputs differ, in each sublayer of the first layer."""
    names = ("layers.0.attention", "layers.0.mlp")
    differs = {name: one.sublayers[name] - other.sublayers[name] for name in names}
    return {name: float((x.abs().amax(1) > 1e-5).double().mean()) for name, x in differs.items()}


def total(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Returns the relative difference of all tensors together."""
    return distance(*(torch.cat([x[name].flatten() for name in other]) for x in (one, other)))


# --- the optimizer ---


class Adam:
    """Decoupled weight decay and bias correction in fp64, from the paper (arXiv 1711.05101)."""

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        self.train = config.train
        self.weights = {name: x.double() for name, x in weights.items()}
        self.means = {name: torch.zeros_like(x) for name, x in self.weights.items()}
        self.squares = {name: torch.zeros_like(x) for name, x in self.weights.items()}
        self.steps = 0

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        train = self.train
        beta1, beta2 = train.betas
        self.steps += 1
        norm = torch.stack([x.double().norm() for x in gradients.values()]).norm()
        clip = min(1.0, train.clip_grad / float(norm))
        for name, weight in self.weights.items():
            g = gradients[name].double() * clip
            self.means[name] = beta1 * self.means[name] + (1 - beta1) * g
            self.squares[name] = beta2 * self.squares[name] + (1 - beta2) * g**2
            mean = self.means[name] / (1 - beta1**self.steps)
            square = self.squares[name] / (1 - beta2**self.steps)
            decay = train.weight_decay if weight.dim() > 1 else 0.0
            weight -= train.lr * (mean / (square.sqrt() + train.eps) + decay * weight)


def check_adam(bench: Bench) -> dict[str, Any]:
    """The updates of three steps, clipped and decayed, against fp64 from the same gradients."""
    if bench.number:
        return {}
    config = config_of({}, **CLIPPED)
    trainer = bench.trainer("qwen3_moe", config, **TE)

    def weights() -> dict[str, Tensor]:
        return tensors_by_name(trainer.tensors.slices, trainer.parameters_by_name())

    first = weights()
    adam = Adam(config, first)
    norms = []
    te_standin.CALLS.clear()
    for seed in range(3):
        seen = run(trainer, random_batch(num_rows=8, seed=seed))
        norms.append(seen.step.grad_norm)
        adam.step(seen.gradients)
    updates = {name: x.double() - first[name] for name, x in weights().items()}
    expected = {name: x - first[name] for name, x in adam.weights.items()}
    trainer.close()
    smallest = min(float(x.abs().max()) for x in expected.values())
    return {
        "worst": worst(updates, expected),
        "smallest": smallest,
        "norms": norms,
        "calls": dict(te_standin.CALLS),
    }


# --- settings of the trainer ---

RECOMPUTED = {
    "full": ("qwen3_moe", {"recompute": "full"}),
    "selective": (
        "qwen3_moe",
        {"recompute": "selective", "recompute_modules": ("core_attn", "moe")},
    ),
    "outputs": (  # dropped and computed again by Transformer Engine's layers only
        "deepseek_v3",
        {"recompute": "selective", "recompute_modules": ("layernorm", "moe_act", "mla_up_proj")},
    ),
}
OFFLOAD = ("gradients", "optimizer", "weights")


def check_features(bench: Bench) -> dict[str, Any]:
    """Recomputation, deterministic mode, offload and LoRA with Transformer Engine's layers, against plain local ones."""
    found: dict[str, Any] = {}
    if bench.number == 0:
        for name, (model, train) in RECOMPUTED.items():
            found[f"recompute {name}"] = compare(bench, model, {}, te_train=train)
        options = TE | {"deterministic_mode": True}
        found["deterministic"] = compare(bench, "qwen3", {}, options=options)
        set_env(NVTE_ALLOW_NONDETERMINISTIC_ALGO=None)  # other cases run in this process
        return found

    def offload(trainer: Trainer) -> None:
        trainer.memory.offload_all()
        weights = trainer.parameters_by_name().values()
        found["bytes on the device"] = sum(x.untyped_storage().nbytes() for x in weights)
        trainer.memory.onload_weights()

    found["offload"] = compare(bench, "qwen3_moe", {}, plant=offload, te_train={"offload": OFFLOAD})
    for model in ("qwen3", "qwen3_moe", "deepseek_v3"):
        found[f"lora {model}"] = _lora(bench, model)
    return found


def _lora(bench: Bench, model: str) -> dict[str, Any]:
    """Differences of log-probs and of the adapters' gradients."""
    folder = bench.folder / model
    adapter = bench.folder / f"{model}-adapter"
    random_adapter(folder, adapter)
    batch = random_batch(num_rows=8)
    seen = []
    for options in ({}, TE):
        trainer = Trainer.build(
            read_model(folder),
            Layout.of(Sizes(), 1, 0),
            train=config_of({}).train,
            folder=folder,
            device=torch.device("cpu"),
            lora=Lora(rank=RANK, alpha=ALPHA, path=str(adapter)),
            megatron_options=options,
        )
        adapters = trainer.adapters
        assert adapters is not None
        logprobs_T = trainer.logprobs(batch)
        plan = plan_microbatches(batch, trainer.layout, trainer.train)
        trainer.backward(batch, plan, supervised_loss, loss_weights(batch, plan))
        gradients: Any = {name: x.main_grad for name, x in adapters.parameters.items()}
        seen.append((logprobs_T, tensors_by_name(adapters.tensors.slices, gradients)))
        trainer.close()
    (local, local_gradients), (te, te_gradients) = seen
    return {"logprobs": relative(te, local), "gradients": worst(te_gradients, local_gradients)}


# --- planted faults ---


def check_faults(bench: Bench) -> dict[str, Any]:
    if bench.number == 0:
        return {"renamed": _renamed(bench)}

    def plant(trainer: Trainer) -> None:
        trainer.model[0].get_submodule(
            "module.decoder.layers.0.self_attention.linear_qkv"
        ).eps = 1e-5  # type: ignore[assignment]

    return {"eps": compare(bench, "qwen3", {}, plant=plant)}


def _renamed(bench: Bench) -> str:
    """The error of a build whose fused norms have their weight under another name."""
    from transformer_engine.pytorch import LayerNormLinear

    made = LayerNormLinear.__init__

    def rename(layer: Any, *args: Any, **kwargs: Any) -> None:
        made(layer, *args, **kwargs)
        layer.norm_weight = layer._parameters.pop("layer_norm_weight")

    with patch.object(LayerNormLinear, "__init__", rename):
        try:
            bench.trainer("qwen3", config_of({}), **TE)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        finally:
            destroy_parallel()
    return ""


MODELS_HERE = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_moe_16_experts",
    "qwen3_wide", "qwen3_moe_wide",
)  # fmt: skip
