"""Weights and samples that travel between devices: no operation mixes tensors of the device and of the host."""

from __future__ import annotations

from pathlib import Path

from start_ranks import run_ranks


def test_nothing_mixes_devices(tmp_path):
    """In a rollout exchange, syncs (staged on the device, on the host, not staged) and an export, on two ranks."""
    run_ranks(Path(__file__).with_name("device_ranks.py"), 2, str(tmp_path), timeout_s=300)
