"""Answered prompts on disk, and batches of them. Token ids only; a sequence is [prompt | answer].

A batch is made of windows, into which whole sequences are packed, so that batches have few shapes (two: attention of
short sequences costs less in short windows):

    window    | p p p p a a a a a a | p p a a a a a a a | p p p a a a a . . |     [B, T], the rest is padding
    position    0 1 2 3 4 ...         0 1 2 ...           0 1 2 ...
    anchor            the last known id ^ from where a draft is made: ids after it are its labels, states of the same
                                          sequence before it its context
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

WINDOWS = (512, 2048)  # ids of a window: a sequence goes to the shortest that holds it, or is cut
VALIDATION = 128  # sequences that are never trained on
MOST = 16_000_000  # ids that are kept: 6 KB of states each


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
    """Shapes: B windows, T positions, A anchors a window, K labels after an anchor."""

    rows: torch.Tensor  # [B, T] int64: the place of each position in the packed data
    owner: torch.Tensor  # [B, T] int64: its sequence; -1 for padding
    position: torch.Tensor  # [B, T] int64: in its sequence
    anchors: torch.Tensor  # [B, A] int64: places in the window
    labels: torch.Tensor  # [B, A, K] int64: ids after the anchor
    label_rows: torch.Tensor  # [B, A, K] int64: packed places of the positions that predict them
    valid: torch.Tensor  # [B, A, K] bool: inside the answer


class Dataset:
    """Answers of at least `width` tokens, of one file or several, packed in one tensor on the device."""

    def __init__(self, paths: Sequence[Path], width: int, device: torch.device, seed: int = 0, most: int = MOST):
        """`most`: ids that are kept, of random sequences."""
        ids, lengths, prompts, greedy = _read(paths, most, seed)
        self.width, self.device = width, device
        self.ids, self.lengths = torch.from_numpy(ids.astype(np.int64)).to(device), torch.from_numpy(lengths)
        prompts, greedy = torch.from_numpy(prompts).long(), torch.from_numpy(greedy)
        self.stop = self.lengths.cumsum(0).to(device)
        self.start, self.prompt = self.stop - self.lengths.to(device), prompts.to(device)
        usable = (self.lengths - prompts > width).nonzero().flatten()
        order = usable[torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))]
        held = min(VALIDATION, len(order) // 8)
        self.validation = order[greedy[order]][:held]  # greedy answers: acceptance is simulated on them
        self.train = order[~torch.isin(order, self.validation)]
        places = torch.arange(len(self.ids), device=device)
        self.owner = torch.searchsorted(self.stop, places, right=True)
        self.position = places - self.start[self.owner]
        answered = self.position >= self.prompt[self.owner]
        self.answer_ids = self.ids[answered]
        self.anchorable = answered & (places + 1 < self.stop[self.owner])

    def batches(self, tokens: int, anchors: int, seed: int = 0, windows: Sequence[int] = WINDOWS) -> Iterator[Batch]:
        """Endlessly: batches of `tokens` positions and `anchors` random anchors, of one shape for each window."""
        host, device = torch.Generator().manual_seed(seed), torch.Generator(self.device).manual_seed(seed)
        while True:
            made, least = [], 0
            for window in windows:
                most = window if window < windows[-1] else None
                packed, each = self._packed(window, least, most, host), max(1, tokens // window)
                made += [part for part in packed.split(each) if len(part) == each]
                least = window + 1
            if not made:
                raise ValueError(f"the answers do not fill a batch of {tokens} ids: there are too few of them, or"
                                 " --tokens must be less")
            for i in torch.randperm(len(made), generator=host).tolist():
                yield self.batch(made[i].to(self.device), anchors // len(made[i]), device)

    def _packed(self, window: int, least: int, most: int | None, generator: torch.Generator) -> torch.Tensor:
        """The sequences to train on of least .. most ids, in random order, each in the first window that has room after
        the one before: places in the packed data, -1 for padding, [W, window] int32."""
        lengths = self.lengths[self.train]
        fits = self.train[(lengths >= least) & (lengths <= (most or int(lengths.max())))]
        order = fits[torch.randperm(len(fits), generator=generator)]
        starts = (self.lengths.cumsum(0) - self.lengths)[order].tolist()
        full, free = [], window + 1
        for start, length in zip(starts, self.lengths[order].clamp(max=window).tolist(), strict=True):
            if length > window - free:
                full.append(np.full(window, -1, np.int32))
                free = 0
            full[-1][free : free + length] = np.arange(start, start + length)
            free += length
        return torch.from_numpy(np.stack(full)) if full else torch.empty(0, window, dtype=torch.int32)

    def groups(self, ordered: torch.Tensor, tokens: int) -> Iterator[torch.Tensor]:
        """Sequences in order of length, in groups of about `tokens` positions."""
        lengths, first = self.lengths[ordered].tolist(), 0
        while first < len(ordered):
            last = first + 1
            while last < len(ordered) and lengths[last] * (last + 1 - first) <= tokens:
                last += 1
            yield ordered[first:last]
            first = last

    def whole(self, chosen: torch.Tensor) -> Batch:
        """One sequence a window, and every place of its answer that can be one is an anchor."""
        places = torch.arange(int(self.lengths[chosen].max()), device=self.device)
        sequences = chosen.to(self.device)
        rows = self.start[sequences][:, None] + places
        rows = torch.where(rows < self.stop[sequences][:, None], rows, -1)
        most = int((self.lengths[chosen].to(self.device) - self.prompt[sequences]).max()) - 1
        return self.batch(rows, most, None)

    def batch(self, windows: torch.Tensor, anchors: int, generator: torch.Generator | None) -> Batch:
        """windows [B, T]: places in the packed data, -1 for padding. Of the places where an answer goes on, `anchors`
        are taken, at random, or the first ones without a generator; where there are fewer, others are not valid."""
        rows = windows.long().clamp(min=0)
        inside, width = windows >= 0, windows.shape[1]
        able = self.anchorable[rows] & inside
        rank = (torch.rand(rows.shape, device=self.device, generator=generator) if generator is not None else
                torch.linspace(1, 0.5, width, device=self.device).expand(rows.shape))
        at = rank.masked_fill(~able, -1).topk(min(anchors, width), 1).indices
        if generator is None:
            at = at.masked_fill(~able.gather(1, at), width).sort(1).values.clamp(max=width - 1)
        place = rows.gather(1, at)
        after = place[..., None] + torch.arange(1, self.width + 1, device=self.device)
        valid = (after < self.stop[self.owner[place]][..., None]) & able.gather(1, at)[..., None]
        after = after.clamp(max=len(self.ids) - 1)
        owner = torch.where(inside, self.owner[rows], -1)
        return Batch(rows, owner, self.position[rows], at.clamp(min=1), self.ids[after], after - 1, valid)


def _read(paths: Sequence[Path], most: int, seed: int) -> tuple[np.ndarray, ...]:
    """Of the sequences of all files, some in random order if there are too many: ids one after another, and of each
    sequence its length, that of its prompt, and whether its answer is greedy."""
    stored = [np.load(path) for path in paths]
    ids, lengths, prompts, greedy = (np.concatenate(parts) for parts in (
        [s["ids"] for s in stored], [np.diff(s["starts"]) for s in stored], [s["prompts"] for s in stored],
        [s["greedy"] for s in stored]))
    if len(ids) <= most:
        return ids, lengths, prompts, greedy
    order = np.random.default_rng(seed).permutation(len(lengths))
    chosen = order[lengths[order].cumsum() <= most]
    starts = lengths.cumsum() - lengths
    ids = np.concatenate([ids[starts[i] : starts[i] + lengths[i]] for i in chosen])
    return ids, lengths[chosen], prompts[chosen], greedy[chosen]
