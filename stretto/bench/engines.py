"""The engines that can be measured, behind one small protocol. All greedy, all for exactly the tokens asked for."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from stretto.config import Config
from stretto.engine.llm import LLM
from stretto.model.gguf import GGUFSource
from stretto.model.gguf_config import gguf_config
from stretto.params import SamplingParams

Ids = Sequence[int]
OnTokens = Callable[[int], None]
"""Called whenever tokens of an answer have become known, with their number."""


class BenchEngine(Protocol):
    name: str
    dtype: str  # in which it computes

    def stream(self, prompt: Ids, output_tokens: int, on_tokens: OnTokens) -> list[int]:
        """Answers one prompt."""
        ...

    def batch(self, prompts: Sequence[Ids], output_tokens: int) -> list[list[int]]:
        """Answers all prompts as fast as it can."""
        ...

    def counters(self) -> dict[str, float]:
        """What the engine counted so far, of what explains its speed."""
        ...

    def forget(self) -> None:
        """Drops what it keeps of earlier prompts."""
        ...

    def close(self) -> None: ...


class EngineMissing(RuntimeError):
    """An engine to compare with that cannot run here, and why."""


class Stretto:
    """This engine, in process, with its text output on."""

    name = "stretto"

    def __init__(self, config: Config):
        self.llm = LLM(config=config)
        self.dtype = self.llm.prepared.resolved.dtype

    @staticmethod
    def _sampling(output_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)

    def stream(self, prompt: Ids, output_tokens: int, on_tokens: OnTokens) -> list[int]:
        ids: list[int] = []
        for output in self.llm.stream(list(prompt), self._sampling(output_tokens)):
            if output.token_ids:
                on_tokens(len(output.token_ids))
                ids += output.token_ids
        return ids

    def batch(self, prompts: Sequence[Ids], output_tokens: int) -> list[list[int]]:
        completions = self.llm.generate([list(prompt) for prompt in prompts], self._sampling(output_tokens))
        return [completion.token_ids for completion in completions]

    def counters(self) -> dict[str, float]:
        return dict(self.llm.core.stats().counters)

    def forget(self) -> None:
        self.llm.core.host.flush_cache()

    def close(self) -> None:
        self.llm.close()


class Transformers:
    """Hugging Face transformers: `generate` with its KV cache; batches are padded on the left, as it asks for."""

    name = "transformers"

    def __init__(self, path: Path, dtype: str, device: str, batch_size: int):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        kind = getattr(torch, dtype)
        loaded: Any = from_gguf(path, kind) if path.suffix == ".gguf" else \
            AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        self.model = loaded.to(device).eval()
        self.dtype, self.batch_size = dtype, batch_size

    def stream(self, prompt: Ids, output_tokens: int, on_tokens: OnTokens) -> list[int]:
        return self._generate([prompt], output_tokens, streamer=_Streamer(on_tokens))[0]

    def batch(self, prompts: Sequence[Ids], output_tokens: int) -> list[list[int]]:
        answers: list[list[int]] = []
        for start in range(0, len(prompts), self.batch_size):
            answers += self._generate(prompts[start : start + self.batch_size], output_tokens)
        return answers

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Ids], output_tokens: int, **options: Any) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        device = self.model.device
        out = self.model.generate(ids.to(device), attention_mask=mask.to(device), do_sample=False, pad_token_id=0,
                                  max_new_tokens=output_tokens, min_new_tokens=output_tokens, **options)
        return out[:, longest:].tolist()

    def counters(self) -> dict[str, float]:
        return {}

    def forget(self) -> None:
        """It keeps nothing between calls."""

    def close(self) -> None:
        del self.model


def from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """transformers' own model with the weights that this engine reads out of the file: the same numbers for both."""
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = gguf_config(path)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts), dtype=dtype)
    source = GGUFSource(path)
    missing, unexpected = model.load_state_dict({name: source.tensor(name).to(dtype) for name in source.names()},
                                                strict=False, assign=True)
    model.tie_weights()
    left = [name for name in missing if not (name == "lm_head.weight" and facts.get("tie_word_embeddings"))]
    if left or unexpected:
        raise EngineMissing(f"transformers cannot take {path.name}: missing {left}, left over {unexpected}")
    return model


class _Streamer:
    """What `generate` calls for the prompt, then for every token."""

    def __init__(self, on_tokens: OnTokens):
        self.on_tokens, self.prompt_seen = on_tokens, False

    def put(self, ids: torch.Tensor) -> None:
        if self.prompt_seen:
            self.on_tokens(ids.numel())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


class LlamaCpp:
    """llama.cpp through llama-cpp-python, on GGUF files. It computes in the file's own quantisation, so it is faster at
    batch 1 than any engine that holds the same weights in 16 or 32 bits; it is here as a yardstick, not as an equal."""

    name = "llama-cpp"

    def __init__(self, path: Path, context: int, threads: int, device: str):
        if path.suffix != ".gguf":
            raise EngineMissing(f"llama-cpp reads GGUF files; {path} is none")
        if importlib.util.find_spec("llama_cpp") is None:
            raise EngineMissing("llama-cpp-python is not installed: pip install llama-cpp-python")
        from llama_cpp import Llama

        layers = -1 if device == "cuda" else 0
        self.llama = Llama(str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=layers,
                           verbose=False)
        self.dtype = f"as stored in {path.name}"

    def stream(self, prompt: Ids, output_tokens: int, on_tokens: OnTokens) -> list[int]:
        ids: list[int] = []
        with contextlib.closing(self.llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)) as tokens:
            for token in tokens:
                ids.append(int(token))
                on_tokens(1)
                if len(ids) == output_tokens:
                    return ids
        return ids

    def batch(self, prompts: Sequence[Ids], output_tokens: int) -> list[list[int]]:
        return [self.stream(prompt, output_tokens, lambda _: None) for prompt in prompts]

    def counters(self) -> dict[str, float]:
        return {}

    def forget(self) -> None:
        self.llama.reset()

    def close(self) -> None:
        self.llama.close()


RIVALS = ("transformers", "llama-cpp")


def open_rival(name: str, path: Path, dtype: str, device: str, context: int, batch_size: int) -> BenchEngine:
    """Another engine with the same model. Raises EngineMissing."""
    if name == "transformers":
        return Transformers(path, dtype, device, batch_size)
    if name == "llama-cpp":
        return LlamaCpp(path, context, torch.get_num_threads(), device)
    raise EngineMissing(f"there is no engine {name!r} to compare with; there are {', '.join(RIVALS)}")
