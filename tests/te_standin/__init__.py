"""Transformer Engine's own Python layers on a CPU; torch stands in for its compiled part.

    te_standin.install()    before megatron.core and transformer_engine are imported
    te_standin.CALLS        {compiled function: number of calls}: a test checks that the layers really ran

The finder is that of megarl.patches.megatron: modules of transformer_engine see the same patched torch. Further, "cuda"
in their source reads "cpu", `x.is_cuda` reads True, torch.cuda describes an H100, and the fused attention accepts fp32,
so that it can be compared exactly. Nothing else in the process is changed.

Real: the autograd functions of TELinear, LayerNormLinear and GroupedLinear, fusion into main_grad, the choice of an
attention back end, FusedAttnFunc, context parallelism (AttnFuncWithCPAndKVP2P), the autograd of rotary embeddings,
Fp8Padding, tensors in FP8 blocks and their all-gather, FusedAdam, and Megatron-Core around them. Triton's kernels, which
permute tokens for their experts, run in its interpreter.
"""

from te_standin import attention, dense, fp8, router  # noqa: F401
from te_standin.compiled import CALLS
from te_standin.loading import install, is_available

__all__ = ["CALLS", "install", "is_available"]
