"""How far apart two log-probabilities may lie for rounding to decide between them, by the type of the activations.

The same sums in another order (other chunks, batches, kernels) differ by about a unit in the last place for each layer;
on logits of usual size that is what stands here, with room."""

from __future__ import annotations

TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
