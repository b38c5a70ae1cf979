"""Triton's kernels run in its interpreter where there is no CUDA device; that must be decided before Triton's own
functions are built, that is before anything imports Triton."""

import os
import sys

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError("Triton was imported before its interpreter was switched on: set TRITON_INTERPRET=1 in the"
                           " environment, or collect tests/attn first")
    os.environ["TRITON_INTERPRET"] = "1"
