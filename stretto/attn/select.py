"""Which attention backend serves a model on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stretto.attn.api import AttentionBackend, LayerSpec
from stretto.attn.torch_fixed import TorchFixed
from stretto.attn.torch_ragged import TorchRagged
from stretto.compat import ConfigError, attention_component, attention_features, check


def choose_backend(layers: Sequence[LayerSpec], page_size: int, device: torch.device, dtype: torch.dtype,
                   fixed: bool = False, kv_dtype: str | None = None) -> AttentionBackend:
    """Torch on a CPU, Triton on CUDA. `fixed`: what a token sees is summed in one order, whatever the batch.
    `kv_dtype`: of the cache, as the configuration names it; None: `dtype`.

    Raises compat.ConfigError, naming both sides, where the layers, the page size or the device need what the backend
    does not have."""
    backend: AttentionBackend
    if device.type == "cuda":
        from stretto.attn.triton_ragged import TritonRagged  # imports triton, which CPU installations may lack

        name, backend = "triton", TritonRagged(device, dtype, fixed=fixed)
    else:
        name, backend = "torch", TorchFixed() if fixed else TorchRagged()
    other = None if kv_dtype == str(dtype).removeprefix("torch.") else kv_dtype
    refusals = check(attention_features(layers, page_size, device.type, graphs=False, kv_dtype=other),
                     [attention_component(name, backend.caps)])
    if refusals:
        raise ConfigError(refusals)
    return backend
