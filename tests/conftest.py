"""Where there is no CUDA device, Triton's kernels run in its interpreter. That is decided when Triton is imported, so
it must be said before any test module can import it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["tests.proofs"]
