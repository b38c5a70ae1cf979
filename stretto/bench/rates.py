"""Measures the GPU of this machine, for `stretto plan --hw here`: prints a JSON object on stdout. The rates are of
torch: a reduction of 2 GiB for reading, a 16-bit product of 4096 x 4096 x 14336 on random data for operations."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import torch

REPEATS = 12


def main() -> int:
    if not torch.cuda.is_available():
        print("torch sees no CUDA device; name one of the catalogue, or give --memory, --read-tb-s and --tflops",
              file=sys.stderr)
        return 1
    free, _ = torch.cuda.mem_get_info()
    size = min(2 << 30, free // 4)
    words = torch.ones(size // 4, dtype=torch.int32, device="cuda")
    a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(4096, 14336, dtype=torch.bfloat16, device="cuda")
    found = {
        "name": torch.cuda.get_device_name(), "memory": torch.cuda.mem_get_info()[1], "node": torch.cuda.device_count(),
        "read": words.numel() * 4 / _seconds(lambda: torch.max(words)),
        "multiply": 2 * 4096 * 4096 * 14336 / _seconds(lambda: a @ b)}
    print(json.dumps(found))
    return 0


def _seconds(work: Callable[[], object]) -> float:
    """Of one call, the median of REPEATS."""
    times = []
    for _ in range(3 + REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


if __name__ == "__main__":
    sys.exit(main())
