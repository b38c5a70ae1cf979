"""Logit processors: code of your own between the model's logits and the choice of a token.

    class Avoid(LogitProcessor):                          # in a package of yours, installed beside the server
        def __call__(self, logits, rows):                 # every position that this step samples, of every request
            for i, params in enumerate(rows.params):      # that asked for it
                logits[i, params["ids"]] -= params["by"]
            return logits

    [project.entry-points."stretto.logit_processors"]     # in its pyproject.toml: now a request may say
    avoid = "my_package:Avoid"                            # {"logit_processors": [{"name": "avoid", "params": {}}]}

A processor sees each position of a verify window with the ids before it, drafts included, exactly as if those had been
generated one by one; so drafters change nothing. docs/sampling.md has the rules and a complete example.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

Params = Mapping[str, Any]


@dataclass(frozen=True)
class ProcessorContext:
    """What a processor may know when it is made."""

    vocab_size: int
    device: torch.device
    n_slots: int  # slots are 0 .. n_slots - 1


class Rows:
    """The positions that a call is about. Shapes: N positions, C tokens of context.

    `slots` [N] int64: which place among the running sequences each belongs to; `length` [N] int64: how many ids stand
    before it; `prompt` [N] int64: how many of those are prompt; `mine` [N] bool: False where the position's request did
    not ask for this processor, which only `graph_safe` processors get to see (what they do there is undone)."""

    def __init__(self, slots: torch.Tensor, length: torch.Tensor, prompt: torch.Tensor, mine: torch.Tensor,
                 log: torch.Tensor, params_of: Callable[[int], Params]):
        self.slots, self.length, self.prompt, self.mine = slots, length, prompt, mine
        self._log, self._params_of = log, params_of

    def __len__(self) -> int:
        return len(self.slots)

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[N, C] int32: the ids before each position, prompt first; what stands at column `length` and behind it means
        nothing."""
        return self._log[self.slots]

    @cached_property
    def params(self) -> list[Params]:
        """Of each position's request. Waits for the device: not for `graph_safe` processors."""
        return [self._params_of(slot) for slot in self.slots.tolist()]

    @cached_property
    def histories(self) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, ids after them) of each position, as lists. Waits for the device."""
        ids = self.tokens[:, : int(self.length.max())].tolist() if len(self) else []
        return [(row[:prompt], row[prompt:length])
                for row, prompt, length in zip(ids, self.prompt.tolist(), self.length.tolist(), strict=True)]


class LogitProcessor(ABC):
    """One object serves all requests. What it keeps for a request is keyed by the request's slot, and made from its
    parameters and the ids before a position: a sequence may be moved to another slot in the middle of its answer, and a
    call may be repeated."""

    graph_safe: ClassVar[bool] = False
    """Promise: the call neither waits for the device nor depends on values on the host, and its tensors have sizes that
    follow from those of its arguments. Then it gets every position of the step (`Rows.mine`) and becomes part of the
    step's CUDA graph. Without it, steps in which it takes part are launched kernel by kernel."""

    def __init__(self, context: ProcessorContext):
        self.context = context

    @classmethod  # noqa: B027 - takes whatever comes, where it is not overridden
    def check(cls, params: Params) -> None:
        """Raises ValueError, which the client is told, for parameters that the processor cannot honour."""

    def seat(self, slot: int, params: Params) -> None:  # noqa: B027
        """A request that uses this processor takes the slot."""

    def release(self, slot: int) -> None:  # noqa: B027
        """It has left the slot."""

    @abstractmethod
    def __call__(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """logits [N, V] float32, after biases, bad words, min_tokens and penalties; may be changed in place. Returns
        [N, V]. -inf forbids a token; one finite logit must be left, none may be NaN or +inf."""


class RowProcessor(LogitProcessor):
    """For code that looks at one position at a time, as vLLM's request-level processors do."""

    @abstractmethod
    def row(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor, params: Params) -> torch.Tensor:
        """logits [V] -> [V]."""

    def __call__(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        for i, ((prompt_ids, output_ids), params) in enumerate(zip(rows.histories, rows.params, strict=True)):
            logits[i] = self.row(prompt_ids, output_ids, logits[i], params)
        return logits


class CustomLogitProcessor(ABC):
    """A client's own code in SGLang's form, which a server runs only with --enable-custom-logit-processor:

        class Force(CustomLogitProcessor):
            def __call__(self, logits, custom_param_list):
                for i, params in enumerate(custom_param_list):
                    output_ids = params["__req__"].output_ids
                    ...
                return logits

        body = {"custom_logit_processor": Force.to_str(), "custom_params": {"token_id": 5}, ...}
    """

    @abstractmethod
    def __call__(self, logits: torch.Tensor, custom_param_list: Sequence[dict[str, Any]]) -> torch.Tensor:
        """logits [N, V]; each position's `custom_params`, and under "__req__" what SGLang shows there of a request:
        `origin_input_ids` and `output_ids`, as of that position. Returns [N, V]."""

    @classmethod
    def to_str(cls) -> str:
        """For `custom_logit_processor`. Needs the package dill, here and on the server."""
        import dill

        return json.dumps({"callable": dill.dumps(cls).hex()})
