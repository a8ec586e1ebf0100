"""Mistakes in LoRA's adapters."""

TABLES = "unit/trainer/test_lora.py::test_merged_weights_are_those_of_each_projection"
LAYOUTS = "dist/test_lora.py::test_updates_are_those_of_plain_torch_in_every_layout[found]"
FORMATS = "unit/trainer/test_lora_formats.py"
PEFT = "unit/trainer/test_lora_peft.py"
ENGINE = "e2e/test_lora.py"

LORA = [
    (
        "models/lora.py",
        "first = rows.offset // rank + part.start[0] - rows.start[0]",
        "first = rows.offset // rank + part.start[0]",
        TABLES,
    ),
    ("models/lora.py", "is_split = not isinstance(rule, Replicated)", "is_split = True", TABLES),
    (
        "trainer/lora.py",
        "numbers[first : first + count] = number",
        "numbers[first : first + count] = 0",
        TABLES,
    ),
    (
        "trainer/lora.py",
        "if name not in self._last:",
        "if not self._last:",
        TABLES,
    ),
    ("trainer/lora.py", "marks.shared = replica > 0", "marks.shared = False", LAYOUTS),
    (
        "trainer/lora.py",
        "marks.sequence_parallel = not is_split and",
        "marks.sequence_parallel = is_split and",
        LAYOUTS,
    ),
    ("trainer/lora.py", "if is_expert and not is_split:", "if is_expert and is_split:", LAYOUTS),
    (
        "trainer/optimizer.py",
        "        if reduced:\n            reduced()\n",
        "",
        LAYOUTS,
    ),
    (
        "trainer/lora.py",
        "hidden.requires_grad_()",
        "hidden",
        "dist/test_lora.py::test_adapters_begin_as_the_base_model_and_equal_in_every_layout",
    ),
    (
        "trainer/lora.py",
        'f"{seed} {part.name}"',
        'f"{seed} {part.name} {part.start}"',
        "dist/test_lora.py::test_adapters_begin_as_the_base_model_and_equal_in_every_layout",
    ),
    (
        "checkpoint/torch_dist.py",
        "replica_id=(0, replica, 0)",
        "replica_id=(0, 1, 0)",
        "dist/test_lora.py::test_training_resumes_bit_for_bit_and_in_other_layouts",
    ),
    (
        "trainer/offload.py",
        "*(buffer.param_data for buffer in self._buffers), *self._frozen",
        "*(buffer.param_data for buffer in self._buffers)",
        f"{PEFT}::test_dropout_is_of_training_only_and_offloaded_weights_come_back",
    ),
    (
        "trainer/reference.py",
        "        return self.adapters.off()",
        "        return contextmanager(lambda: iter((None,)))()",
        f"{PEFT}::test_the_reference_is_the_base_without_a_copy",
    ),
    (
        "trainer/lora.py",
        "if self.trains and self.lora.dropout:",
        "if self.lora.dropout:",
        f"{PEFT}::test_dropout_is_of_training_only_and_offloaded_weights_come_back",
    ),
    (
        "weights/sync/publish.py",
        "            self.base = None\n",
        "",
        f"{ENGINE}::test_a_sync_of_adapters_moves_their_bytes_only",
    ),
    (
        "rollout/vllm/engine.py",
        "lora_request=self.receiver.request",
        "lora_request=None",
        f"{ENGINE}::test_merged_and_adapter_sample_the_same",
    ),
    (
        "checkpoint/state.py",
        'raise ValueError(f"its frozen weights are others: {name}")',
        "pass",
        "dist/test_lora.py::test_training_resumes_bit_for_bit_and_in_other_layouts",
    ),
    (
        "trainer/trainer.py",
        "return parameters if self.adapters is None else Merged(parameters, self.adapters.layers)",
        "return parameters",
        f"{FORMATS}::test_a_quantised_base_is_adapted_as_the_weights_that_it_stands_for[qwen3_moe-fp8]",
    ),
    (
        "trainer/lora.py",
        "return output[0] + product",
        "return output[0].detach() + product",
        LAYOUTS,
    ),
    (
        "config/lora.py",
        'quantization != "none" and has_engine,',
        'quantization != "none" and not has_engine,',
        "unit/config/test_lora_checks.py::test_refusals",
    ),
]
