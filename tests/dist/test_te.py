"""Transformer Engine's layer spec against Megatron's local one, and what moves its weights, without a GPU.

The real Python layers of the pinned transformer-engine run with torch in place of its compiled part (te_standin/), from
one import, in one job (te_ranks.py). Both specs start from the same checkpoint and train the same batch in fp32:

    log-probs      relative to magnitudes above 1, the largest of any token
    gradients      relative, the worst of any Hugging Face tensor, summed over all ranks
    sublayers      projected outputs of each attention and MLP, which name the layer that differs

Both specs use Transformer Engine's router product and FusedAdam as soon as it can be imported. So the optimizer is also
compared with fp64, and syncs and checkpoints with transformers.

Not seen here, only on a GPU: the rounding of kernels (attention, norms, products and the router are torch's), streams
and the order that they leave undefined, NCCL and its overlap, userbuffers, CUDA graphs, memory; Triton's compiler and the
choice of a config for its kernels, which run in its interpreter; the FP8 recipes `delayed` and `mxfp8`, FP8 attention, and
parameters kept in FP8; the point-to-point exchange of keys and values of context parallelism, which an all-gather
replaces because it hangs on gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# the Python files of the pinned version, which .ci/run installs: in the environment they would change what
# transformers, vLLM and Megatron-Core do in all other tests
FILES = ROOT / ".venv-te"
FP32 = 3e-6
Found = dict[str, list[Any]]  # {check: what it found on each rank}
Case = dict[str, Any]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not FILES.is_dir(), reason="Transformer Engine's files are not installed"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the stand-in would hide the real Transformer Engine"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    results = tmp_path_factory.mktemp("te") / "results.json"
    paths = [ROOT, ROOT / "tests", HERE, FILES]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", HERE / "te_ranks.py", results]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    by_rank = json.loads(results.read_text())
    return {check: [rank[check] for rank in by_rank] for check in by_rank[0]}


def both(cases: list[list[Case]]) -> list[tuple[str, Case]]:
    return [(f"{case['model']} {case['parallel']}", case) for rank in cases for case in rank]


def agree(name: str, case: Case) -> None:
    assert case["logprobs"] <= FP32, (name, case["logprobs"])
    difference, tensor = case["gradients"]
    # attention is indifferent to a bias of all keys, but for its sink: the terms of these gradients cancel, and what is
    # left depends on the processor's order of sums (3.7e-6 for sinks without AVX-512)
    cancels = "k_proj.bias" in tensor or "self_attn.sinks" in tensor
    assert difference <= (2 * FP32 if cancels else FP32), (name, case["gradients"])
    assert max(case["sublayers"].values()) <= FP32, (name, case["sublayers"])
    (loss, norm), (local_loss, local_norm) = case["steps"]
    assert local_norm > 1, f"{name}: nothing to compare"
    assert [loss, norm] == pytest.approx([local_loss, local_norm], rel=FP32), name
    assert norm == pytest.approx(case["norm"], rel=FP32), f"{name}: a parameter is not counted once"
    for function in ("generic_gemm", "rmsnorm_bwd", "fused_attn_bwd", "multi_tensor_adam"):
        assert case["calls"][function] > 0, (name, case["calls"])


def test_every_family_is_that_of_the_local_layers(found: Found) -> None:
    cases = both(found["families"])
    assert len(cases) == 8
    for name, case in cases:
        agree(name, case)


def test_every_layout_is_that_of_the_local_layers(found: Found) -> None:
    cases = both(found["layouts"])
    assert len(cases) == 2 * 37
    for name, case in cases:
        agree(name, case)


def test_experts_without_tokens(found: Found) -> None:
    ((name, case),) = both(found["empty_experts"])
    agree(name, case)
    assert case["calls"]["grouped product of an expert without tokens"] > 100


def test_tokens_are_permuted_by_triton(found: Found) -> None:
    ((name, case),) = both(found["permutation"])
    agree(name, case)


def test_bf16_is_as_exact_as_the_local_layers(found: Found) -> None:
    """Errors against fp32, with the same routes.

    Without them a token of gpt_oss that rounding routes to another expert makes differences ten times as large.
    """
    cases = [case for rank in found["bf16"] for case in rank]
    assert len(cases) == 8
    for case in cases:
        te, local = case["logprobs"]
        assert 0 < te < 1.5 * local, case
        (te, _), (local, _) = case["gradients"]
        assert 0 < te < 1.5 * local, case
        assert case["calls"]["product added to a gradient of another dtype"] > 0, case["calls"]
    assert any(case["routed otherwise"] > 0 for case in cases)


def test_single_layers_in_fp8_are_those_of_the_emulation(found: Found) -> None:
    """In blocks to the bit: outputs and gradients, except that of a norm's input, which rounds otherwise.

    With one scale for a tensor, which is no power of two, up to the rounding of fp32; in bf16 it was not compared.
    """
    layers = found["fp8_layers"][1]
    assert len(layers) == 9
    for name, tensors in layers.items():
        for tensor, difference in tensors.items():
            is_norms_input = "LayerNorm" in name and tensor == "x"
            blockwise = 1e-4 if is_norms_input else 0
            assert difference <= (1e-6 if "tensorwise" in name else blockwise), (name, tensors)


def test_models_in_fp8_blocks_follow_the_emulation(found: Found) -> None:
    """Full micro-batches and padded ones, alone and with the gather of tensor parallelism.

    Attention rounds otherwise by a unit in the last place, which moves a value across a boundary of FP8 here and there.
    So a few tokens of the first layer differ, and what follows from them; padding plays no part. Rounded or not, all
    tokens would differ.
    """
    cases = [
        case for check in ("fp8_models", "fp8_layouts") for rank in found[check] for case in rank
    ]
    assert len(cases) == 7
    for case in cases:
        assert case["changed"]["layers.0.attention"] < 0.05, case
        assert case["changed"]["layers.0.mlp"] < 0.05, case
        assert min(case["changed without FP8"].values()) > 0.9, case
        te, rounding = case["gradients"]
        assert te < 0.7 * rounding, case


def test_the_optimizer_is_adam(found: Found) -> None:
    """Three clipped steps with weight decay. Weights of about 1 are stored with 1e-7, updates are 2e-3 or more."""
    adam = found["adam"][0]
    assert adam["smallest"] > 1e-3 and min(adam["norms"]) > 1, "clipped"
    assert adam["worst"][0] < 2e-4, adam
    assert adam["calls"]["multi_tensor_adam"] == 3 * 2, "dense parameters and experts"


def test_recomputation_and_offload_change_nothing(found: Found) -> None:
    features: dict[str, Any] = found["features"][0] | found["features"][1]
    assert features["bytes on the device"] == 0
    cases = {
        name: case for name, case in features.items() if name.startswith(("recompute", "offload"))
    }
    assert len(cases) == 4
    for name, case in cases.items():
        agree(name, case)
    plain = dict(both(found["families"]))["qwen3_moe {}"]["calls"]
    assert features["recompute full"]["calls"]["rmsnorm_fwd"] > plain["rmsnorm_fwd"]
    attention = "fused_attn_fwd"
    assert features["recompute selective"]["calls"][attention] > plain[attention]


def test_deterministic_mode_builds(found: Found) -> None:
    """Transformer Engine demands a variable with it, which the trainer sets."""
    agree("deterministic", found["features"][0]["deterministic"])


def test_lora_is_that_of_the_local_layers(found: Found) -> None:
    cases = {name: case for name, case in found["features"][1].items() if name.startswith("lora")}
    assert len(cases) == 3
    for name, case in cases.items():
        assert case["logprobs"] <= FP32 and case["gradients"][0] <= FP32, (name, case)


def test_synced_weights_are_those_of_the_trainer(found: Found) -> None:
    """Transformers scores with what an engine received, before and after an update."""
    for rank in found["sync"]:
        assert len(rank) == 3
        for case in rank:
            assert max(case["errors"]) < 1e-5 < 1e-2 < min(case["stale"]), case


def test_exports_are_the_checkpoint(found: Found) -> None:
    assert found["exports"] == [{"glm4_moe": [], "gpt_oss": []}] * 2


def test_checkpoints_are_resharded(found: Found) -> None:
    """Also the optimizer's state: the step after the next log-probs is the same."""
    for rank in found["checkpoints"]:
        assert len(rank) == 2
        for case in rank:
            assert case["logprobs"] < 1e-5 and case["after"] < 1e-5 < 1e-2 < case["moved"], case
            resumed, saved = case["grad_norm"]
            assert resumed == pytest.approx(saved, rel=1e-5)


def test_tables_have_the_layers_of_multi_token_prediction(found: Found) -> None:
    prediction = found["prediction"][1]
    assert len(prediction["built"]) > 20
    assert prediction["expected"] == prediction["built"]


def test_a_parameter_under_another_name_is_refused_by_name(found: Found) -> None:
    error = found["faults"][0]["renamed"]
    for name in ("layer_norm_weight", "norm_weight"):
        assert f"decoder.layers.0.self_attention.linear_qkv.{name}" in error, error


def test_another_epsilon_is_seen_in_its_layer(found: Found) -> None:
    """1e-5 for 1e-6 in the norm of the first layer's attention."""
    sublayers = found["faults"][1]["eps"]["sublayers"]
    assert sublayers["embedding"] == 0
    assert next(name for name, value in sublayers.items() if value > FP32) == "layers.0.attention"
