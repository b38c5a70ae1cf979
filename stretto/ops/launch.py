"""What a device can do at a launch."""

from __future__ import annotations

import functools

import torch


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Programmatic dependent launch (sm_90 and up): a kernel may start before the one before it has ended, and waits
    for it where it first reads what others wrote. Every kernel launched so waits, so that order holds along a chain."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that waits by itself."""
    return {"launch_pdl": True} if overlaps(device) else {}
