"""Which dtype to compute in."""

from __future__ import annotations

import torch


def exact(device: torch.device) -> torch.dtype:
    """For long sums, whose differences matter: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def work(dtype: torch.dtype) -> torch.dtype:
    """For frames, logits and outputs: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
