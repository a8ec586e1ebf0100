"""Options passed on to vLLM (`rollout.engine_options`) and to Megatron-Core
(`trainer.megatron_options`).

They must be fields of the library's own dataclasses, which are read from their source. What is not
known to change speed or memory only is refused, with the guarantee that it may break, unless
`unsafe: true` is among the options.
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from megarl.config.section import did_you_mean

# key: package, files that define its dataclasses, what these are; patterns of fields that change
# speed or memory only; patterns of fields and what they may break, of which the first that matches
# counts
LIBRARIES = {
    "rollout.engine_options": (
        "vllm",
        "engine/arg_utils.py",
        "vLLM's EngineArgs",
        "max_num_* block_size enable_prefix_caching prefix_caching_hash_algo "
        "enable_chunked_prefill kernel_config "
        "long_prefill_token_threshold* async_scheduling scheduling_policy compilation_config "
        "*cudagraph_capture_size* "
        "optimization_level performance_mode disable_cascade_attn disable_custom_all_reduce "
        "kv_cache_memory_bytes "
        "num_gpu_blocks_override enable_flashinfer_autotune attention_* disable_log_stats "
        "numa_bind* watermark",
        {
            "*parallel* data_* *nnodes node_rank master_* *expert* *eplb* worker_* distrib*": (
                "the plan of the sync"
            ),
            "max_model_len gpu_memory_utilization enforce_eager trust_remote_code *sleep*": (
                "the config's own key"
            ),
            "*dtype* quantization* hf_* model_impl *tokenizer*": (
                "that the engine computes the trainer's log-probs"
            ),
            "load_format *model* *offload* *revision *lora* weight_* moe_* linear_*": (
                "that every sync is verified"
            ),
            "*logprobs* logits_processors": (
                "that log-probs are those of the distribution that was sampled"
            ),
            # seed, speculative_config, generation_config ...
            "*": "that every layout samples the same tokens",
        },
    ),
    "trainer.megatron_options": (
        "megatron",
        "core/model_parallel_config.py core/transformer/transformer_config.py "
        "core/distributed/distributed_data_parallel_config.py",
        "Megatron-Core's TransformerConfig or DistributedDataParallelConfig",
        "apply_rope_fusion moe_permute_fusion moe_router_fusion moe_shared_expert_overlap "
        "bias_*_fusion "
        "deallocate_pipeline_outputs batch_p2p_sync overlap_grad_reduce bucket_size num_buckets "
        "cpu_offloading* "
        "pad_buckets_for_high_nccl_busbw fine_grained_activation_offloading offload_modules "
        "min_offloaded_tensor_size "
        "deterministic_mode distribute_saved_activations memory_efficient_layer_norm "
        "high_priority_a2a_comm_stream",
        {
            "*_parallel_size *parallel_layout sequence_parallel recompute_* *dispatcher_type": (
                "the config's own key"
            ),
            "*dtype bf16 fp16 fp8* fp4* *in_fp32": (
                "the precision, train.dtype, which the parity gate assumes"
            ),
            "*dropout *jitter* moe_token_drop* *capacity* *force_load*": (
                "that a forward pass repeats"
            ),
            "overlap_param_* align_param_* *fsdp* *distributed_*": (
                "that a sync reads whole weights"
            ),
            "variable_seq_lengths *p2p_comm* tp_comm_*": (
                "that packed micro-batches differ in length"
            ),
            "*": (
                "that the model is that of config.json, and its gradient the same "
                "however tokens are divided"
            ),
        },
    ),
}


def check_library_options(config: Any) -> Iterator[str]:
    """Yields a warning for each option that `unsafe` lets through.

    Raises ValueError for one that is refused.
    """
    for key, (package, files, owner, harmless, breaks) in LIBRARIES.items():
        options = dict(attrgetter(key)(config))
        is_unsafe = options.pop("unsafe", False) is True
        known = _fields(package, files) if options else []
        for name, value in options.items():
            if known and name not in known:
                raise ValueError(
                    f"{key}.{name} is not a field of {owner}; "
                    f"{did_you_mean(name, known, 'remove it')}"
                )
            if not _matches(name, harmless):
                broken = next(what for names, what in breaks.items() if _matches(name, names))
                problem = f"{key}.{name}={value} may break a guarantee: {broken}"
                if not is_unsafe:
                    raise ValueError(f"{problem}; remove it, or set {key}.unsafe=true")
                yield f"{problem}; {key}.unsafe=true accepts that"


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


@cache
def _fields(package: str, files: str) -> list[str]:
    """Returns the fields of its dataclasses; none if the package is not installed, where a job is
    only planned.
    """
    spec = find_spec(package)
    roots = (spec and spec.submodule_search_locations) or ()
    fields = []
    for root, file in product(roots, files.split()):
        path = Path(root, file)
        nodes = ast.parse(path.read_text()).body if path.is_file() else []
        for node in nodes:
            members = node.body if isinstance(node, ast.ClassDef) else []
            for member in members:
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    fields.append(member.target.id)
    return fields
