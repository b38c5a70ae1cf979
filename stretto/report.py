"""The start-up report as plain data: what runs, with which sizes, and the reason for every value. No torch here.

The same object is printed at start-up and by `stretto explain --json`, and served at GET /server_info. It holds no
secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stretto.config import Facts, Resolved
from stretto.wire import STATE


def start_report(resolved: Resolved, facts: Facts, version: str, timings: Mapping[str, float] | None = None,
                 attention: str | None = None) -> dict[str, Any]:
    """JSON-ready. Memory in bytes, lengths in tokens, `timings` (phase of the start to seconds) in seconds."""
    device = next(device for device in facts.devices if device.kind == resolved.device)
    memory = asdict(resolved.memory) | {"budget": resolved.memory.budget, "free_at_start": device.memory_free}
    serve = resolved.config.serve
    report = {
        "version": version,
        "model": {"name": resolved.model_name, "architecture": facts.model.architecture, "layers": facts.model.n_layers,
                  "parameters": facts.model.parameters, "stored_as": facts.model.dtype, "dtype": resolved.dtype,
                  "context": facts.model.context, "vocab_size": facts.model.vocab_size},
        "device": {"kind": device.kind, "name": device.name, "cores": device.cores, "memory": device.memory_total},
        "memory": memory,
        "kv": {"tokens": resolved.kv_tokens, "page_size": resolved.page_size, "pages": list(resolved.pages),
               "windows": ["state" if window == STATE else window for window in resolved.windows]},
        "limits": {"max_model_len": resolved.max_model_len, "max_num_seqs": resolved.max_num_seqs,
                   "max_num_batched_tokens": resolved.max_num_batched_tokens, "chunk_size": resolved.chunk_size,
                   "full_length_requests_at_once": max(resolved.kv_tokens // resolved.max_model_len, 1)},
        "features": [asdict(decision) for decision in resolved.decisions],
        "server": {"host": serve.host, "port": serve.port, "api_keys": len(serve.api_key),
                   "generation_config": serve.generation_config, "strict_requests": serve.strict_requests},
        "start": {phase: round(seconds, 3) for phase, seconds in (timings or {}).items()},
    }
    if attention is not None:
        report["attention"] = attention
    return report
