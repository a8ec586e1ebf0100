"""Mistakes that only a GPU, or another version of its packages, would show."""

from __future__ import annotations

SIGNATURES = "contract/test_signatures.py::test_every_call_fits"
DEVICES = "dist/test_devices.py"

GPU = [
    ("trainer/optimizer.py", "use_gloo_process_groups=False", "use_gloo_groups=False", SIGNATURES),
    ("rollout/engine.py", "self._llm.wake_up(tags=[part])", "self._llm.wake(tags=[part])", SIGNATURES),
    (
        "trainer/megatron_config.py",
        '"moe_grouped_gemm": use_te',
        '"grouped_gemm": use_te',
        "contract/test_signatures.py::test_settings_of_every_family_are_fields",
    ),
    (
        "rollout/exchange.py",
        "torch.tensor([part.numel()], device=self.device)",
        "torch.tensor([part.numel()])",
        DEVICES,
    ),
    (
        "rollout/exchange.py",
        "gathered.cpu().view(world, longest)",
        "gathered.view(world, longest)",
        DEVICES,
    ),
    (
        "weights/publish.py",
        "write(message, flat.to(self._device, non_blocking=True))",
        "write(message, flat)",
        DEVICES,
    ),
    (
        "weights/publish.py",
        "torch.tensor(int(flag), device=self._device)",
        "torch.tensor(int(flag))",
        DEVICES,
    ),
    (
        "weights/publish.py",
        "torch.tensor([number[part.name] for part in slices], dtype=torch.int64, device=checksums.device)",
        "torch.tensor([number[part.name] for part in slices], dtype=torch.int64)",
        DEVICES,
    ),
    (
        "weights/placement_check.py",
        "counts.new_tensor([prod(shape) for shape in self.shapes.values()])",
        "torch.tensor([prod(shape) for shape in self.shapes.values()])",
        DEVICES,
    ),
    ("weights/checksum.py", "    return x.to(device)\n", "    return x\n", DEVICES),
]
