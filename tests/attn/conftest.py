"""Triton's kernels run in its interpreter where there is no CUDA device; that must be decided before they are built."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
