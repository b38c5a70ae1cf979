"""Answered prompts on disk, and batches of them. Token ids only; a sequence is [prompt | answer].

    batch    ids [B, T], padded on the right      anchors [B, A]: the last known token, from where a draft is made

                 prompt            answer
    ids       p p p p p p p  a a a a a a a a a a . . .
    anchor                         ^ a draft continues here: ids after it are its labels, states before it its context
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

PADDED = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1152)  # lengths of batches; longer sequences are cut
VALIDATION = 128  # sequences that are never trained on


@dataclass(frozen=True)
class Answered:
    prompt: Sequence[int]
    answer: Sequence[int]
    greedy: bool


class Answers:
    """What `generate` collects."""

    def __init__(self) -> None:
        self._ids, self._starts, self._prompts, self._greedy = array("H"), array("q", [0]), array("i"), array("b")
        self.tokens = 0  # of answers

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, one: Answered) -> None:
        self._ids.extend(one.prompt)
        self._ids.extend(one.answer)
        self._starts.append(len(self._ids))
        self._prompts.append(len(one.prompt))
        self._greedy.append(one.greedy)
        self.tokens += len(one.answer)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, ids=np.array(self._ids, np.uint16), starts=np.array(self._starts, np.int64),
                            prompts=np.array(self._prompts, np.int32), greedy=np.array(self._greedy, np.bool_))


@dataclass(frozen=True)
class Batch:
    """Shapes: B sequences, T positions, A anchors a sequence, K labels after an anchor."""

    rows: torch.Tensor  # [B, T] int64: the place of each position in the packed data
    anchors: torch.Tensor  # [B, A] int64: positions
    labels: torch.Tensor  # [B, A, K] int64: ids after the anchor
    label_rows: torch.Tensor  # [B, A, K] int64: packed places of the positions that predict them
    valid: torch.Tensor  # [B, A, K] bool: inside the answer


class Dataset:
    """Answers of at least `width` tokens, packed in one tensor on the device."""

    def __init__(self, path: Path, width: int, device: torch.device, seed: int = 0):
        stored = np.load(path)
        self.width, self.device = width, device
        self.ids = torch.from_numpy(stored["ids"].astype(np.int64)).to(device)
        starts, prompts = torch.from_numpy(stored["starts"]), torch.from_numpy(stored["prompts"]).long()
        self.start, self.stop, self.prompt = starts[:-1].to(device), starts[1:].to(device), prompts.to(device)
        self.lengths = (starts[1:] - starts[:-1])  # on the host: they decide shapes
        usable = (self.lengths - prompts > width).nonzero().flatten()
        order = usable[torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))]
        greedy = torch.from_numpy(stored["greedy"])
        held = min(VALIDATION, len(order) // 8)
        self.validation = order[greedy[order]][:held]  # greedy answers: acceptance is simulated on them
        self.train = order[~torch.isin(order, self.validation)]
        answer = torch.arange(len(self.ids), device=device)
        owner = torch.searchsorted(self.stop, answer, right=True)
        self.answer_ids = self.ids[answer >= self.start[owner] + self.prompt[owner]]

    def batches(self, tokens: int, anchors: int, seed: int = 0) -> Iterator[Batch]:
        """Endlessly: sequences of similar lengths, about `tokens` positions and `anchors` anchors in all. Shapes are
        few, so that a GPU's memory does not fall into pieces."""
        host, device = torch.Generator().manual_seed(seed), torch.Generator(self.device).manual_seed(seed)
        padded = torch.tensor([min(n for n in PADDED if n >= length or n == PADDED[-1]) for length in
                               self.lengths[self.train].tolist()])
        while True:
            groups = []
            for length in padded.unique().tolist():
                mine = self.train[padded == length]
                each = max(1, tokens // length)
                mine = mine[torch.randperm(len(mine), generator=host)]
                mine = torch.cat([mine, mine[torch.randint(len(mine), (-len(mine) % each,), generator=host)]])
                groups += [(length, chosen) for chosen in mine.split(each)]
            for i in torch.randperm(len(groups), generator=host).tolist():
                length, chosen = groups[i]
                each = max(1, anchors // len(chosen))
                yield self.batch(chosen, self._random_anchors(chosen.to(self.device), each, length, device), length)

    def groups(self, ordered: torch.Tensor, tokens: int) -> Iterator[torch.Tensor]:
        """Sequences in order of length, in groups of about `tokens` positions."""
        lengths, first = self.lengths[ordered].tolist(), 0
        while first < len(ordered):
            last = first + 1
            while last < len(ordered) and lengths[last] * (last + 1 - first) <= tokens:
                last += 1
            yield ordered[first:last]
            first = last

    def _random_anchors(self, chosen: torch.Tensor, count: int, length: int,
                        generator: torch.Generator) -> torch.Tensor:
        """[B, count], from the answer's first token to the last that has one after it, among `length` positions."""
        low, high = self.prompt[chosen], (self.stop[chosen] - self.start[chosen]).clamp(max=length) - 1
        share = torch.rand(len(chosen), count, device=self.device, generator=generator)
        return (low[:, None] + share * (high - low)[:, None]).long()

    def batch(self, chosen: torch.Tensor, anchors: torch.Tensor, length: int | None = None) -> Batch:
        """Sequences padded or cut to `length`; None: to the longest."""
        most = length or int(self.lengths[chosen].max())
        sequences = chosen.to(self.device)
        start, stop = self.start[sequences], self.stop[sequences]
        rows = (start[:, None] + torch.arange(most, device=self.device)).clamp(max=len(self.ids) - 1)
        after = start[:, None, None] + anchors[:, :, None] + torch.arange(1, self.width + 1, device=self.device)
        valid = after < stop[:, None, None]
        after = after.clamp(max=len(self.ids) - 1)
        return Batch(rows, anchors, self.ids[after], after - 1, valid)
