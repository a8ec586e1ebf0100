"""Mistakes in what a run reports about itself: its speed, its profile, its nodes and its page."""

FLOPS = "unit/models/test_flops.py"
TELEMETRY = "unit/telemetry/test_telemetry.py"
REPORT = "unit/telemetry/test_report.py"

WATCHING = [
    (
        "models/flops.py",
        "full * (full + 1) // 2",
        "full * full // 2",
        f"{FLOPS}::test_a_dense_model_by_hand",
    ),
    (
        "models/flops.py",
        "shape.experts_per_token * shape.moe_intermediate",
        "shape.experts * shape.moe_intermediate",
        f"{FLOPS}::test_experts_by_hand",
    ),
    (
        "models/flops.py",
        "keys = shape.hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)",
        "keys = shape.hidden * latent.kv_lora_rank",
        f"{FLOPS}::test_latent_attention_by_hand",
    ),
    (
        "models/flops.py",
        "    H200 NVL     835.5    1670.5   60\n    H200         989.5    1979     67\n",
        "    H200         989.5    1979     67\n    H200 NVL     835.5    1670.5   60\n",
        f"{FLOPS}::test_no_row_of_the_table_hides_another",
    ),
    (
        "telemetry/metrics.py",
        'tokens / metrics["time/step"] / metrics["world_size"]',
        'tokens / metrics["time/step"]',
        f"{TELEMETRY}::test_speed_per_gpu_and_share_of_the_peak",
    ),
    (
        "telemetry/profile.py",
        "step == last:",
        "step > last:",
        f"{TELEMETRY}::test_a_profile_of_some_steps",
    ),
    (
        "telemetry/gpus.py",
        'max(values) if key.endswith("/max") else fmean(values)',
        "fmean(values)",
        f"{TELEMETRY}::test_every_node_has_a_timeline_and_its_gpus_are_counted",
    ),
    (  # a quantity that no GPU reports would have a list without readings
        "telemetry/gpus.py",
        "                        value = read(device)\n"
        "                        self._readings[name].append(value)\n",
        "                        self._readings[name].append(read(device))\n",
        "unit/telemetry/test_gpus.py::test_what_no_gpu_reports_is_left_out",
    ),
    (
        "telemetry/curves.py",
        "if index + 3 >= len(others):",
        "if index + 3 > len(others):",
        f"{REPORT}::test_the_step_axis_is_named_under_each_column",
    ),
    (
        "telemetry/curves.py",
        "abs(value) < MIN_KL",
        "abs(value) < 0",
        f"{REPORT}::test_no_curve_of_a_term_that_the_run_does_not_have",
    ),
    (
        "stages/evaluation.py",
        "forget_steps(file, start + 1)",
        "forget_steps(file, start)",
        "unit/stages/test_evaluation.py::test_a_line_stays_until_its_replacement",
    ),
    (
        "stages/evaluation.py",
        'score = "reward"',
        'score = "accuracy"',
        "unit/stages/test_evaluation.py::test_a_weighted_sum_of_rewards_is_not_called_accuracy",
    ),
    (
        "config/run_dir.py",
        'config.checkpoint.resume == "auto" and not found',
        "not found",
        "unit/config/test_run_dir.py::test_a_complete_run_is_told_from_one_that_resumes",
    ),
    (
        "telemetry/report.py",
        "if len(text) > MAX_BYTES:",
        "if False:",
        f"{REPORT}::test_a_page_has_at_most_20_mb",
    ),
    (
        "telemetry/page.html",
        "; img-src data:",
        "",
        f"{REPORT}::test_a_page_loads_nothing",
    ),
]
