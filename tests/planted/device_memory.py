"""Mistakes about what lies on the device when: probes, offload, communicators."""

from __future__ import annotations

OFFLOAD = "unit/trainer/test_offload.py"
PROBE = f"{OFFLOAD}::test_the_engine_and_the_trainer_take_turns_in_a_probe"
MOVES = f"{OFFLOAD}::test_the_optimizer_state_moves_once_a_step_or_in_every_update"
ENGINE = "unit/rollout/vllm/test_engine.py"
CACHE = f"{ENGINE}::test_the_cache_is_freed_alone_and_what_is_left_can_fall_asleep"
PLACED = "unit/run/test_memory.py::test_the_state_stays_if_it_fits_beside_activations"

DEVICE_MEMORY = [
    ("run/phases.py", "            self.engine.turn = self.engine_turn\n", "            pass\n", PROBE),
    (
        "run/phases.py",
        "        for trainer in self.trainers:\n            trainer.memory.offload_all()\n        self._settle()\n",
        "        self._settle()\n",
        PROBE,
    ),
    ("run/phases.py", "            self.engine.free_cache()\n", "            pass\n", PROBE),
    ("run/phases.py", "        self.trainers[0].memory.onload_weights()\n", "", PROBE),
    ("trainer/offload.py", "        if not self.keeps_optimizer:\n            self._store", "        self._store", MOVES),
    ("trainer/offload.py", " + part.config.bf16", "", PLACED),
    ("run/memory.py", "(1 + FRAGMENTATION) * tensors", "tensors", PLACED),
    ("rollout/vllm/engine.py", '"weights" not in self._asleep', "not self._asleep", CACHE),
    (
        "trainer/parallel_groups.py",
        " expert_tensor expert_data",
        " expert_tensor",
        "dist/test_trainer.py::test_groups_are_connected_before_the_engine_measures_memory",
    ),
]  # fmt: skip
