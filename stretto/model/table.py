"""The table of native families in docs/models.md.

    python -m stretto.model.table docs/models.md     writes it between its two marks
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from stretto.marked import with_part

START, END = "<!-- families: written by `make docs` -->", "<!-- end of families -->"
CHECKED = "5.24.0"  # the version of transformers that tests/model/test_families.py was last passed with


@dataclass(frozen=True)
class Family:
    """Models that one builder serves."""

    title: str
    architectures: tuple[str, ...]
    features: str


FAMILIES = (
    Family("Llama 2, 3.x, SmolLM2 and relatives", ("LlamaForCausalLM",), "biases where the config asks for them"),
    Family("Llama 4, text", ("Llama4ForCausalLM",), "experts that scale their inputs; layers without rotation; up to"
           " 8192 positions, the first chunk of its attention"),
    Family("Mistral", ("MistralForCausalLM",), "window in every layer"),
    Family("Mixtral", ("MixtralForCausalLM",), "experts"),
    Family("Qwen2, Qwen2.5", ("Qwen2ForCausalLM",), "windows from a layer on, or by layer"),
    Family("Qwen3", ("Qwen3ForCausalLM",), "head norms; windows as Qwen2"),
    Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",), "experts, dense layers between them; head norms"),
    Family("Qwen3-Next", ("Qwen3NextForCausalLM",), "three of four layers keep a state (gated delta rule); gated heads;"
           " a shared expert"),
    Family("Qwen3.5, text", ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "as Qwen3-Next, with experts or without"),
    Family("Granite 3", ("GraniteForCausalLM",), "embeddings, scores, logits and what a layer adds are scaled"),
    Family("Granite 4", ("GraniteMoeHybridForCausalLM",), "most layers keep a state (Mamba-2), some or all attend"
           " without rotation; experts beside an MLP, or the MLP alone"),
    Family("MiMo", ("MiMoForCausalLM",), "its predicting layer is the drafter `mtp`"),
    Family("Gemma 2", ("Gemma2ForCausalLM",), "soft caps of scores and logits; windows in every other layer"),
    Family("Gemma 3, text", ("Gemma3ForCausalLM",), "head norms; two rotations; windows in five of six layers"),
    Family("OLMo 2", ("Olmo2ForCausalLM",), "norms after attention and MLP, and of whole q and k"),
    Family("Phi-3, Phi-3.5, Phi-4", ("Phi3ForCausalLM",), "rotation of a part of each head; longrope; window"),
    Family("GLM-4", ("GlmForCausalLM", "Glm4ForCausalLM"), "rotation of neighbours, in half of each head; four norms"),
    Family("gpt-oss", ("GptOssForCausalLM",), "sinks; experts; windows in every other layer; MXFP4 checkpoints"),
)


def table() -> str:
    """In Markdown, one row a family."""
    rows = ["| models | architecture in config.json | what sets them apart | equal to transformers |",
            "|---|---|---|---|"]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.architectures)
        rows.append(f"| {family.title} | {names} | {family.features} | {CHECKED} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The page with the table of today between its marks. ValueError where they are missing."""
    return with_part(page, START, END, table())


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
