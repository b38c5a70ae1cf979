"""Seconds of a step of a shape on devices, and the cost model (host/cost.py) that is fitted to them.

Each part takes the time of its bytes and of its operations, the parts follow each other, and every layer loses a little
at the start and end of its kernels:

    step = layers * (products + exchange + lost) + head + attention over the cells of all rows + attention of chunks

What the engine reaches of the device's rates is measured (`hardware.Engine`). With several devices each has its part
of the weights, heads and cells, and two sums of the hidden states a layer go over the link. The host plans and reads
results while the devices compute, so a step takes the longer of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stretto.host.cost import CostModel, StepWork
from stretto.plan.hardware import Engine, Hardware
from stretto.plan.shapes import Shape

SUM_SECONDS = 4.4e-6  # of one sum of few tokens over the link, measured on two H200
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (64, 1024, 8192)


@dataclass(frozen=True)
class Steps:
    """Steps of `shape` on `ranks` devices that share each layer."""

    shape: Shape
    hardware: Hardware
    engine: Engine
    ranks: int = 1

    def seconds(self, work: StepWork) -> float:
        """`work.pairs`: pairs of a prompt's token and a cell that it attends to."""
        host = self.engine.host_step_s + self.engine.host_row_s * work.rows
        return max(self._device(work), host)

    def _device(self, work: StepWork) -> float:
        shape, engine, ranks = self.shape, self.engine, self.ranks
        tokens, read, multiply = work.tokens, self.hardware.read, self.hardware.multiply
        weights = shape.layer_weights_read(tokens) * shape.weight_bits / 8
        states = engine.passes * tokens * shape.hidden * 2 / read
        layer = self._product(weights / ranks, 2 * shape.layer_weights_used * tokens / ranks)
        layer += states + engine.layer_s + self._exchange(tokens)
        head = self._product(2 * shape.head_weights / ranks, 2 * shape.head_weights * work.rows / ranks)
        cells = work.context * shape.kv_token_bytes + work.rows * shape.window_bytes
        chunks = 4 * shape.layers * shape.heads * shape.head_dim * work.pairs
        return (shape.layers * layer + head + cells * shape.kv_share(ranks) / (read * engine.attention_read)
                + chunks / ranks / (multiply * engine.attention_multiply) + engine.step_s)

    def _product(self, weights: float, operations: float) -> float:
        """Bytes of weights, operations -> seconds."""
        p = self.engine.blend
        loads = weights / (self.hardware.read * self.engine.read)
        computes = operations / (self.hardware.multiply * self.engine.multiply)
        return (loads**p + computes**p) ** (1 / p)

    def _exchange(self, tokens: int) -> float:
        """Two sums of the hidden states of a layer: each device sends and receives all but its own share, twice."""
        if self.ranks == 1:
            return 0.0
        sent = 2 * tokens * self.shape.hidden * 2 * (self.ranks - 1) / self.ranks
        return 2 * (SUM_SECONDS * self.ranks / 2 + sent / self.hardware.link)

    def cost(self, most: int) -> CostModel:
        """The engine's own cost model, fitted to steps of up to `most` tokens."""
        return CostModel([(work, self.seconds(work)) for work in works(most)], most)


def works(most: int) -> Iterator[StepWork]:
    """Steps that span what a server runs: rows that decode, chunks, both, on short and long contexts."""
    rows = [n for n in ROWS if n <= most]
    for context in CONTEXTS:
        yield from (StepWork(n, n, n * context) for n in rows)
        for tokens in (n for n in CHUNKS if n <= most):
            yield StepWork(1, tokens, context + tokens, tokens * context + tokens * tokens // 2)
            yield from (StepWork(n + 1, n + tokens, n * 1024 + context + tokens,
                                 tokens * context + tokens * tokens // 2) for n in (16, 64, 256) if n + tokens <= most)
