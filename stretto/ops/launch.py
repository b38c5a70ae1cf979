"""What a device can do at a launch."""

from __future__ import annotations

import functools

import torch


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Programmatic dependent launch (sm_90 and up): a kernel may start before the one before it has ended, and waits
    for it where it first reads what others wrote. Every kernel launched so waits, so that order holds along a chain."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have, by compute capability ("Maximum amount of shared memory per
    thread block" of the CUDA C++ Programming Guide); 99 KiB, the least, for those that are not listed."""
    kib = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
    return kib.get(torch.cuda.get_device_capability(device), 99) * 1024


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def dependent(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that waits by itself."""
    return {"launch_pdl": True} if overlaps(device) else {}
