"""DSPARK: DFLASH's block, then a light head that walks it from left to right (DeepSpec).

    base logits of position k  +  W2 (f (W1 of the id before it, hidden state k))        ids one after another
    confidence of position k = sigmoid(linear [hidden state k | W1 of the id before it])  how many of them to offer

f is the identity (vanilla), a gate of hidden state and embedding (gated), or one step of a recurrent cell (rnn).
Checkpoints of DeepSpec (`Qwen3DSparkModel`) and of vLLM's speculators. A row is offered its ids up to the first whose
confidence lies below the setting `confidence` (0, the default: none does), or whose chance to be reached and right, the
product of the confidences up to it, lies below what the step's plan asks for (`SlotView.least`).
"""

from __future__ import annotations

import torch

from stretto.model.layers import Linear
from stretto.model.source import WeightSource
from stretto.model.weights import Weights
from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.block import Backbone, BlockDrafter, Layout, block_caps, read_layout, tensor_name
from stretto.spec.context import DrafterContext, DrafterError, DrafterSizes, Target
from stretto.spec.layers import kv_groups
from stretto.spec.repos import DraftRepo, open_repo
from stretto.spec.vocabulary import count_head_drafter

KINDS = ("vanilla", "gated", "rnn")
SETTINGS = ("confidence",)


class MarkovHead:
    """Logit biases from the id before, over the ids that can be drafted."""

    def __init__(self, repo: DraftRepo, w: Weights, hidden_size: int, vocab_size: int, draft_vocab: int):
        self.kind, self.rank = _option(repo, "markov_head_type", "vanilla"), int(_option(repo, "markov_rank", 0))
        if self.kind not in KINDS or self.rank < 1:
            raise DrafterError(f"{repo.name}: markov_head_type {self.kind!r} of rank {self.rank}; it must be one of"
                               f" {', '.join(KINDS)}, of rank 1 or more")
        self.w1 = w.take("markov_head.markov_w1.weight", vocab_size, self.rank)
        self.w2 = Linear(w, [("markov_head.markov_w2", draft_vocab)], self.rank)
        if self.kind == "gated":
            self.gate = Linear(w, [("markov_head.gate_proj", self.rank)], hidden_size + self.rank, bias=True)
        if self.kind == "rnn":
            self.joint = Linear(w, [("markov_head.joint_proj", 3 * self.rank)], 2 * self.rank + hidden_size, bias=True)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.w1[ids]

    def start(self, n: int) -> torch.Tensor:
        return self.w1.new_zeros(n, self.rank)

    def step(self, state: torch.Tensor, before: torch.Tensor,
             hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """state, before [N, r] (the embedding of the id before), hidden [N, E] -> the next state, biases [N, V']."""
        if self.kind == "vanilla":
            return state, self.w2(before)
        if self.kind == "gated":
            return state, self.w2(torch.sigmoid(self.gate(torch.cat([hidden, before], 1))) * before)
        gate, candidate, output = self.joint(torch.cat([state, before, hidden], 1)).chunk(3, 1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), self.w2(torch.tanh(output))


def _confidence(repo: DraftRepo) -> tuple[float, bool]:
    """(the least confidence that is asked for, whether there is a head that tells it). Raises DrafterError."""
    threshold = repo.number("confidence", 0.0)
    unsaid = "transformer_layer_config" not in repo.raw  # DeepSpec's have one, speculators' have none
    has_head = bool(_option(repo, "enable_confidence_head", unsaid))
    if not 0 <= threshold < 1:
        raise DrafterError(f"{repo.name}: confidence={threshold:g} is no probability below 1")
    if threshold and not has_head:
        raise DrafterError(f"{repo.name} has no confidence head, so confidence={threshold:g} means nothing:"
                           " leave it out")
    return threshold, has_head


class DSparkDrafter(BlockDrafter):
    """`spec.api.Drafter`."""

    def __init__(self, repo: DraftRepo, layout: Layout, context: DrafterContext):
        self.threshold, self.has_confidence = _confidence(repo)
        self.with_markov = bool(_option(repo, "confidence_head_with_markov", False))

        def extra(w: Weights, source: WeightSource) -> None:
            hidden = layout.config.hidden_size
            draft_vocab = layout.draft_vocab or context.vocab_size
            self.markov = MarkovHead(repo, w, hidden, layout.config.vocab_size, draft_vocab)
            if self.has_confidence:
                inputs = hidden + (self.markov.rank if self.with_markov else 0)
                self.confidence = Linear(w, [("confidence_head.proj", 1)], inputs, bias=True)

        super().__init__(Backbone(repo, layout, context, extra), block_caps(layout, self.has_confidence), context)

    def chosen(self, hidden: torch.Tensor, rows: torch.Tensor | None,
               last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        n, width, size = hidden.shape
        base = self.backbone.logits(hidden.reshape(n * width, size)).view(n, width, -1)
        ids, befores, state, before = [last], [], self.markov.start(n), last
        for k in range(width):
            embedded = self.markov.embed(before)
            state, bias = self.markov.step(state, embedded, hidden[:, k])
            before = self.choose(base[:, k] + bias, rows, k, self.backbone.head.ids)
            ids.append(before)
            befores.append(embedded)
        return torch.stack(ids[1:], 1), self._wanted(hidden, befores)

    def _wanted(self, hidden: torch.Tensor, befores: list[torch.Tensor]) -> torch.Tensor | None:
        """How many ids stand before the first of too little confidence, [N] int32."""
        if not self.has_confidence:
            return None
        features = torch.cat([hidden, torch.stack(befores, 1)], 2) if self.with_markov else hidden
        n, width, size = features.shape
        chances = self.confidence(features.reshape(n * width, size)).view(n, width).float().sigmoid()
        sure = (chances >= self.threshold) & (chances.cumprod(1) >= self.slots.least)
        return sure.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)


def _option(repo: DraftRepo, key: str, default):
    section = repo.raw.get("dspark_config") or repo.raw.get("dflash_config") or {}
    return section.get(key, repo.raw.get(key, default))


class DSpark:
    """`spec.context.DrafterKind`. Settings: the draft checkpoint's folder or hub id, then confidence=0..1."""

    def caps(self, settings: str) -> DrafterCaps:
        repo = open_repo("dspark", settings, SETTINGS)
        size = int(_option(repo, "block_size", 7))
        return DrafterCaps(shape="block", max_width=size, variable=True, taps=frozenset({"hidden.*"}),
                           ingest="same_step", kv="own", lookahead=size, q="full")

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        repo, layout = self._open(settings, target)
        _, has_head = _confidence(repo)
        parameters = count_head_drafter(repo.source(), tensor_name, layout.config.hidden_size)
        return DrafterSizes(block_caps(layout, has_head), parameters, kv_groups(layout.config))

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        assert context.target is not None
        repo, layout = self._open(settings, context.target)
        return DSparkDrafter(repo, layout, context)

    @staticmethod
    def _open(settings: str, target: Target) -> tuple[DraftRepo, Layout]:
        repo = open_repo("dspark", settings, SETTINGS)
        section = "dspark_config" if "dspark_config" in repo.raw else "dflash_config"
        return repo, read_layout(repo, target, section, from_anchor=True)
