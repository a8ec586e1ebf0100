"""Mistakes in FP8 rollouts and training."""

WEIGHTS = "unit/weights/test_blocks.py"
SENT = f"{WEIGHTS}::test_every_engine_has_the_quantised_checkpoint"
ODD = f"{WEIGHTS}::test_elements_that_do_not_fill_bytes_are_refused_by_name"
SEEN = f"{WEIGHTS}::test_a_trainer_seen_through_the_encoder_has_the_engines_weights_and_gets_its_own_back"
TRAINED = "unit/trainer/test_fp8.py"
DELAYED = f"{TRAINED}::test_delayed_scales_change_with_updates_only_and_are_saved"
PRODUCTS = f"{TRAINED}::test_products_are_those_of_operands_rounded_by_blocks"

FP8 = [
    ("weights/encode/blocks.py", "            self._reduce_max(flat, is_expert)\n", "", SENT),
    (
        "weights/encode/blocks.py",
        "pad(values, (left, 0, top, 0)) if top or left else values",
        "values",
        SENT,
    ),
    (
        "weights/encode/blocks.py",
        "encode_blocks(values, scales, self._fmt, self._first(part.start))",
        "encode_blocks(values, scales, self._fmt)",
        SENT,
    ),
    ("weights/encode/blocks.py", '(".experts." in part.param) == is_expert', "not is_expert", SENT),
    ("weights/encode/blocks.py", "tensor.detach().copy_(saved[param])", "pass", SEEN),
    (
        "weights/plan/tables.py",
        "            if rank == 0:\n",
        "            if rank >= 0:\n",
        SENT,
    ),
    ("weights/sync/execute.py", " and not transfer.is_relay", " and transfer.is_relay", SENT),
    (
        "models/shards.py",
        "any(count * bits % unit for count in (first, size, part.offset, *strides))",
        "False",
        ODD,
    ),
    (
        "models/lora.py",
        'not in ("gate", "router")',
        'not in ("router",)',
        f"{WEIGHTS}::test_modules_that_stay_as_they_are_are_listed",
    ),
    (
        "models/engine.py",
        "rows % fmt.block[0] and not is_last",
        "False",
        f"{WEIGHTS}::test_blocks_that_a_rank_would_cut_are_refused",
    ),
    ("trainer/fp8.py", "(columns, rows) if transposed", "(rows, columns) if transposed", PRODUCTS),
    (
        "trainer/fp8.py",
        "dy_TN = rounding.round(dy_TN, GRADIENT, transposed=True)",
        "pass",
        PRODUCTS,
    ),
    (
        "trainer/fp8.py",
        "rounding.round(x.flatten(0, -2), INPUT, transposed=True)",
        "rounding.round(x.flatten(0, -2), INPUT)",
        PRODUCTS,
    ),
    ("trainer/fp8.py", "gradients=E5M2", "gradients=E4M3", PRODUCTS),
    (
        "config/precision.py",
        "fp8.first_last_bf16 <= layer",
        "0 <= layer",
        f"{TRAINED}::test_layers_at_both_ends_stay_as_they_are",
    ),
    (
        "trainer/trainer.py",
        "MULTIPLES[self.precision.recipe]",
        "1",
        f"{TRAINED}::test_micro_batches_are_whole_blocks_of_tokens",
    ),
    (
        "trainer/fp8.py",
        "largest = self.history[:, operand].amax()",
        "largest = self.history[0, operand]",
        f"{TRAINED}::test_delayed_scales_are_of_earlier_updates",
    ),
    ("trainer/fp8.py", "and torch.is_grad_enabled()", "", DELAYED),
    (
        "trainer/fp8.py",
        "        module.get_extra_state = lambda: rounding.history\n",
        "        module.get_extra_state = lambda: None\n",
        DELAYED,
    ),
    ("trainer/fp8.py", "            self.observe(operand, x)\n", "", DELAYED),
    (
        "trainer/fp8.py",
        "            weight.copy_(rounding.round(weight, WEIGHT))\n",
        "            pass\n",
        f"{TRAINED}::test_parameters_in_fp8_are_those_that_an_fp8_engine_gets",
    ),
]
