"""Native kernels in a process of little memory: prints what became of each call. For test_native.py."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import torch

from stretto.attn.api import LayerSpec
from stretto.attn.native_ragged import NativeRagged
from stretto.ops.native.packed import Arranged
from stretto.ops.packed import Layout, Packed
from tests.attn.oracle import Case, make_case

MIB = 2**20


def attend(case: Case) -> None:
    backend = NativeRagged()
    backend.attend(case.layer, case.q, case.k_cache, case.v_cache, case.step, 0,
                   backend.metadata(case.step, 0, case.layer))


def case_of(q: list[int], kv: list[int], dim: int) -> Case:
    return make_case(LayerSpec(1, 1, dim, dim**-0.5), q, kv, page_size=1)


def limit(more: int) -> None:
    """Bytes beyond what there are."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))


def report(what: str, call: Callable[[], object]) -> None:
    try:
        call()
        print(what, "done")
    except MemoryError as e:
        print(what, "refused:", e)


def main() -> None:
    torch.set_num_threads(2)
    long, wide = case_of([72], [50_000], 256), case_of([1] * 9, [1] * 9, 2**18)
    weight = Packed.empty(Layout("int8", 64), 16, 2**15, torch.float32, torch.device("cpu"))
    matrix = Arranged(weight)
    x, out = torch.randn(128, 2**15), torch.empty(128, 16)
    attend(case_of([1, 1], [600, 600], 16))  # threads and their memory
    limit(8 * MIB)
    report("long rows", lambda: attend(long))
    limit(12 * MIB)  # a thread keeps 64 MiB of addresses of its own: it asks for 90
    report("wide heads", lambda: attend(wide))
    limit(4 * MIB)
    report("products", lambda: matrix.multiply(x, out))


if __name__ == "__main__":
    main()
