"""STANDALONE: any small language model of the same vocabulary proposes (Leviathan et al. 2023, arXiv 2211.17192).

It feeds every row of every step, as the target does, so its KV never lags behind. Filling it in later would save
nothing that counts: with 40 million parameters on one core, a pass over the 6 tokens of a verified window takes 9.1 ms
and one over a single token 9.6 ms. Where its context is shorter than the target's, a row that outgrows it goes on
without drafts.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.attn.api import Attend
from stretto.facts import model_facts
from stretto.model.api import CausalModel
from stretto.model.load import load_model
from stretto.spec.api import Drafter, DrafterCaps
from stretto.spec.chain import ChainDrafter
from stretto.spec.context import DrafterContext, DrafterError, DrafterSizes, Target
from stretto.spec.repos import DraftRepo, check_vocabulary, open_repo
from stretto.text.tokenizer import TokenizerError, load_tokenizer
from stretto.wire import STATE

WIDEST = 16


class WholeModel:
    """`spec.chain.ChainModel` of a causal model: its cells are made from tokens alone."""

    shift = 0

    def __init__(self, model: CausalModel):
        self.model, self.layers, self.max_position = model, model.layers, model.max_position

    def features(self, taps: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError("a model that continues tokens has no features")

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None, positions: torch.Tensor,
                attend: Attend) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.model.forward(ids, positions, attend), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


class Standalone:
    """`spec.context.DrafterKind`. Settings: the small model's folder, .gguf file or hub id."""

    def caps(self, settings: str) -> DrafterCaps:
        return DrafterCaps(shape="chain", max_width=WIDEST, ingest="same_step", kv="own", lookahead=WIDEST, q="full")

    def sizes(self, settings: str, target: Target) -> DrafterSizes:
        repo = open_repo("standalone", settings)
        facts = model_facts(repo.path)
        if any(group.window == STATE for group in facts.kv_groups):
            raise DrafterError(f"{repo.name}: some of its layers keep states, and a drafter's memory is made of cells")
        check_vocabulary(repo, facts.vocab_size, target)
        check_token_maps(repo, target)
        return DrafterSizes(self.caps(settings), facts.parameters,
                            tuple((group.window, group.values, group.heads) for group in facts.kv_groups))

    def make(self, settings: str, context: DrafterContext) -> Drafter:
        repo = open_repo("standalone", settings)
        own = model_facts(repo.path).context
        served = min(own, context.positions + context.width) if context.positions else own
        model = load_model(repo.path, dtype=context.dtype, device=context.device, context=served)
        return ChainDrafter(WholeModel(model), self.caps(settings), context)


def check_token_maps(draft: DraftRepo, target: Target) -> None:
    """Every id must be the same token on both sides. Raises DrafterError with both names and the first id that is not.
    Folders without a tokenizer (of tests, and of targets that are served without one) have only sizes to compare."""
    ours, theirs = _tokens(draft.path), _tokens(target.tokenizer or target.path)
    if ours is None or theirs is None:
        return
    for i in range(max(len(ours), len(theirs))):
        mine, other = (tokens[i] if i < len(tokens) else None for tokens in (ours, theirs))
        if mine != other:
            raise DrafterError(f"{draft.name} and target {target.name} have different vocabularies: id {i} is {mine!r}"
                               f" for the drafter and {other!r} for the target; choose a drafter of the same family")


def _tokens(path: Path) -> list[str | None] | None:
    if path.is_dir() and not (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
        return None
    try:
        backend = load_tokenizer(path).backend
    except TokenizerError as e:
        raise DrafterError(f"the tokenizer of {path.name} cannot be compared with the other side's: {e}") from e
    by_id = {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
    return [by_id.get(i) for i in range(max(by_id, default=-1) + 1)]
