"""How long launches take, for tests that say that one way is faster than another."""

from __future__ import annotations

from collections.abc import Callable

import torch


def seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The shortest replay of a CUDA graph of what `run` launches: others may use the device as well."""
    stream, best = torch.cuda.Stream(), float("inf")
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    return best
