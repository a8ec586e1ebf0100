"""Mistakes that only a GPU, or another version of its packages, would show."""

from __future__ import annotations

SIGNATURES = "contract/test_signatures.py::test_every_call_fits"
DEVICES = "dist/test_devices.py"
SYNCS = "unit/trainer/test_host_syncs.py::test_no_microbatch_waits_for_the_device"
FUSIONS, LIBRARY = "unit/trainer/test_fusions.py", "unit/config/test_library_options.py"
SINKS = "unit/trainer/test_layers.py::test_gradient_norms_count_the_sinks_of_all_tensor_ranks"
ENGINE = (
    "unit/commands/test_preflight.py::test_transformer_engine_built_for_another_torch_is_refused"
)
LAYERS = "unit/trainer/test_fusions.py::test_the_device_chooses_the_layers"

GPU = [
    ("trainer/optimizer.py", "use_gloo_process_groups=False", "use_gloo_groups=False", SIGNATURES),
    (
        "rollout/vllm/engine.py",
        "self._llm.wake_up(tags=[part])",
        "self._llm.wake(tags=[part])",
        SIGNATURES,
    ),
    (
        "trainer/megatron_config.py",
        '"moe_grouped_gemm": use_te',
        '"grouped_gemm": use_te',
        "contract/test_signatures.py::test_settings_of_every_family_are_fields",
    ),
    ("trainer/model.py", "parameter.tensor_model_parallel = True", "pass", SINKS),
    ("commands/preflight.py", "    if done.returncode:\n", "    if done.returncode > 0:\n", ENGINE),
    ("commands/preflight.py", "uses_te and env.local_rank == 0", "uses_te", ENGINE),
    ("commands/preflight.py", "if job.gpus and uses_te", "if job.gpus", ENGINE),
    ("trainer/megatron_config.py", '"transformer_impl": default, **options', "**options", LAYERS),
    (
        "weights/sync/publish.py",
        "write(message, flat.to(self._device, non_blocking=True))",
        "write(message, flat)",
        DEVICES,
    ),
    (
        "weights/sync/publish.py",
        "torch.tensor(int(flag), device=self._device)",
        "torch.tensor(int(flag))",
        DEVICES,
    ),
    (
        "weights/sync/placement.py",
        "    index = torch.tensor(\n"
        "        [number[part.name] for part in slices], dtype=torch.int64, device=checksums.device\n"
        "    )\n",
        "    index = torch.tensor([number[part.name] for part in slices], dtype=torch.int64)\n",
        DEVICES,
    ),
    (
        "weights/sync/placement.py",
        "counts.new_tensor([prod(shape) for shape in shapes.values()])",
        "torch.tensor([prod(shape) for shape in shapes.values()])",
        DEVICES,
    ),
    ("weights/sync/checksum.py", "    return x.to(device)\n", "    return x\n", DEVICES),
    (
        "trainer/forward.py",
        "max(microbatch.length for",
        "max(int(microbatch.packed.cu_seqlens_q[-1]) for",
        SYNCS,
    ),
    (
        "trainer/trainer.py",
        "to_device(rows.index, self.device)",
        "rows.index.to(self.device)",
        SYNCS,
    ),
    (
        "algorithms/corrections.py",
        "is_known_T = tokens.mask_T &",
        "tokens.rows.mean(rollout_logprobs_T)\n    is_known_T = tokens.mask_T &",
        SYNCS,
    ),
    (
        "trainer/megatron_config.py",
        '        "apply_rope_fusion": is_rope\n'
        "        and not config.multi_latent_attention\n"
        "        and not config.rotary_interleaved,\n",
        '        "apply_rope_fusion": is_rope and not config.rotary_interleaved,\n',
        f"{FUSIONS}::test_fusions_by_model_and_kernels",
    ),
    (
        "trainer/megatron_config.py",
        "name in kernels and bool(is_suitable)",
        "bool(is_suitable)",
        f"{FUSIONS}::test_fusions_by_model_and_kernels",
    ),
    (
        "trainer/logprobs.py",
        "torch.zeros_like(weight_VH) if ctx.must_have_grad else None",
        "None",
        f"{FUSIONS}::test_options_reach_megatron_and_entropy_is_measured_every_n_steps",
    ),
    (
        "trainer/trainer.py",
        "every > 0 and self.scheduler.step % every == 0",
        "every > 0",
        f"{FUSIONS}::test_options_reach_megatron_and_entropy_is_measured_every_n_steps",
    ),
    (
        "config/library_options.py",
        "if not is_unsafe:",
        "if False:",
        f"{LIBRARY}::test_what_would_break_a_guarantee_names_it",
    ),
    (
        "config/library_options.py",
        "if known and name not in known:",
        "if False:",
        f"{LIBRARY}::test_a_misspelt_option_is_an_error_even_if_unsafe",
    ),
    (
        "models/formats.py",
        'replace(FORMATS["fp8_block"], power_of_2=True)\n# rollout',
        'FORMATS["fp8_block"]\n# rollout',
        "unit/weights/test_quantize.py::test_the_engines_scales_are_powers_of_two",
    ),
    (
        "rollout/vllm/weight_loader.py",
        "if kernel and not current_platform.is_cpu():",
        "if kernel and current_platform.is_cpu():",
        "unit/rollout/vllm/test_weight_loader.py::test_graphs_and_eager_calls_use_the_same_kernel_of_experts",
    ),
    (
        "rollout/vllm/arguments.py",
        "overrides = without_quantization",
        "overrides[CONFIG_KEY] = None",
        "unit/rollout/vllm/test_weight_loader.py::test_an_engine_of_a_quantised_folder_forgets_the_format",
    ),
    (
        "rollout/vllm/weight_loader.py",
        "            set_default_quant_scales(module)",
        "            continue",
        "unit/rollout/vllm/test_weight_loader.py::test_scales_of_the_cache_are_those_of_a_model_that_was_loaded",
    ),
]
