"""Checks the options passed through to vLLM (`rollout.engine_options`) and Megatron-Core
(`trainer.megatron_options`).

Options must be fields of the library's dataclasses, which are parsed from its source. An option
that may break a guarantee is refused, and the error names the guarantee, unless `unsafe: true` is
among the options.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from megarl.config.section import did_you_mean

# key of the config -> (package, files that define its dataclasses, their name in messages,
# {guarantee: fields that may break it})
LIBRARIES = {
    "rollout.engine_options": (
        "vllm",
        "engine/arg_utils.py",
        "vLLM's EngineArgs",
        {
            "the plan of the sync": """
                prefill_context_parallel_size decode_context_parallel_size
                distributed_executor_backend nnodes node_rank worker_cls worker_extension_cls
                enable_return_routed_experts
            """,
            "that an expert is where the sync wrote it, as EPLB moves experts": """
                enable_eplb expert_placement_strategy
            """,
            "that an engine starts, as vLLM on a GPU has no pipeline in a trainer's process": """
                pipeline_parallel_size
            """,
            "the config's own key": """
                tensor_parallel_size data_parallel_size enable_expert_parallel max_model_len
                gpu_memory_utilization enforce_eager trust_remote_code enable_sleep_mode
                sleep_mode_offload_cudagraph
            """,
            "that the engine computes the trainer's log-probs": """
                dtype kv_cache_dtype kv_cache_dtype_skip_layers lora_dtype quantization
                quantization_config hf_overrides hf_config_path model_impl tokenizer
                tokenizer_mode skip_tokenizer_init disable_sliding_window mamba_cache_dtype
                mamba_ssm_cache_dtype
            """,
            "that every sync is verified": """
                model revision load_format model_loader_extra_config model_weights enable_lora
                moe_backend linear_backend weight_transfer_config cpu_offload_gb offload_backend
            """,
            "that log-probs are those of the distribution that was sampled": """
                logprobs_mode max_logprobs logits_processors
            """,
            "that every layout samples the same tokens": """
                seed speculative_config generation_config override_generation_config scheduler_cls
                runner convert use_fp64_gumbel kv_transfer_config kv_sharing_fast_prefill
                structured_outputs_config additional_config
            """,
        },
    ),
    "trainer.megatron_options": (
        "megatron",
        "core/model_parallel_config.py core/transformer/transformer_config.py "
        "core/distributed/distributed_data_parallel_config.py",
        "Megatron-Core's TransformerConfig or DistributedDataParallelConfig",
        {
            "the config's own key": """
                tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
                virtual_pipeline_model_parallel_size expert_model_parallel_size
                expert_tensor_parallel_size pipeline_model_parallel_layout sequence_parallel
                recompute_granularity recompute_method recompute_num_layers recompute_modules
                moe_token_dispatcher_type moe_aux_loss_coeff moe_z_loss_coeff
                moe_router_bias_update_rate moe_router_load_balancing_type
            """,
            "the precision, train.dtype, which the parity gate assumes": """
                fp16 bf16 fp8 fp8_recipe fp8_param fp4 fp4_recipe fp4_param params_dtype
                pipeline_dtype autocast_dtype enable_autocast moe_router_dtype grad_reduce_in_fp32
                attention_softmax_in_fp32 fp32_residual_connection
            """,
            "that a forward pass repeats": """
                hidden_dropout attention_dropout moe_router_force_load_balancing
                moe_input_jitter_eps moe_token_dropping moe_expert_capacity_factor
                moe_pad_expert_input_to_capacity
            """,
            "that a sync reads whole weights": """
                overlap_param_gather align_param_gather use_distributed_optimizer
                use_megatron_fsdp use_custom_fsdp num_distributed_optimizer_instances
            """,
            "that packed micro-batches differ in length": """
                variable_seq_lengths overlap_p2p_comm batch_p2p_comm tp_comm_overlap
            """,
            "that the model is that of config.json, and its gradient the same "
            "however tokens are divided": """
                num_layers hidden_size num_attention_heads num_query_groups kv_channels
                ffn_hidden_size normalization layernorm_epsilon layernorm_zero_centered_gamma
                qk_layernorm qk_l2_norm qk_clip gated_linear_unit activation_func
                glu_linear_offset activation_func_clamp_value add_bias_linear add_qkv_bias
                softmax_scale softmax_type window_size window_attn_skip_freq rotary_interleaved
                multi_latent_attention mtp_num_layers init_method output_layer_init_method
                embedding_init_method perform_initialization num_moe_experts moe_layer_freq
                moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk
                moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor
                moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias
                moe_grouped_gemm q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
                v_head_dim rope_type rotary_base rotary_percent rotary_scaling_factor
                original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
                calculate_per_token_loss average_in_collective gradient_accumulation_fusion
                masked_softmax_fusion persist_layer_norm transformer_impl
            """,
        },
    ),
}


def check_library_options(config: Any) -> Iterator[str]:
    """Yields a warning for each option that only `unsafe` allows.

    Raises ValueError for an unknown option, and for one that may break a guarantee.
    """
    for key, (package, files, owner, breaks) in LIBRARIES.items():
        options = dict(attrgetter(key)(config))
        is_unsafe = options.pop("unsafe", False) is True
        known = _fields(package, files) if options else []
        for name, value in options.items():
            if known and name not in known:
                raise ValueError(
                    f"{key}.{name} is not a field of {owner}; "
                    f"{did_you_mean(name, known, 'remove it')}"
                )
            broken = next((what for what, names in breaks.items() if name in names.split()), None)
            if broken:
                problem = f"{key}.{name}={value} may break a guarantee: {broken}"
                if not is_unsafe:
                    raise ValueError(f"{problem}; remove it, or set {key}.unsafe=true")
                yield f"{problem}; {key}.unsafe=true accepts that"


@cache
def _fields(package: str, files: str) -> list[str]:
    """Returns the names of the fields of all classes in these files of a package.

    Empty if the package is not installed, as on a machine that only plans jobs.
    """
    spec = find_spec(package)
    roots = (spec and spec.submodule_search_locations) or ()
    fields = []
    for root, file in product(roots, files.split()):
        path = Path(root, file)
        tree = ast.parse(path.read_text() if path.is_file() else "")
        for node in ast.walk(tree):
            members = node.body if isinstance(node, ast.ClassDef) else []
            fields += [ast.unparse(x.target) for x in members if isinstance(x, ast.AnnAssign)]
    return fields
