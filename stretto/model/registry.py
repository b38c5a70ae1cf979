"""Which architecture is built by what: our own families, and those that installed packages add.

A package adds one by an entry point of the group "stretto.models", named as the architecture in config.json:

    [project.entry-points."stretto.models"]
    NovelForCausalLM = "novel_for_stretto:build"
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from stretto.model.api import CausalModel
from stretto.model.config import ConfigError, ModelConfig
from stretto.model.families.gemma import gemma2, gemma3
from stretto.model.families.glm4 import glm, glm4
from stretto.model.families.granite import granite
from stretto.model.families.granite_hybrid import granite_hybrid
from stretto.model.families.llama import Llama
from stretto.model.families.llama4 import llama4
from stretto.model.families.mimo import mimo
from stretto.model.families.mistral import mistral
from stretto.model.families.moe import gpt_oss, mixtral, qwen3_moe
from stretto.model.families.olmo2 import olmo2
from stretto.model.families.phi3 import phi3
from stretto.model.families.qwen2 import qwen2
from stretto.model.families.qwen3 import qwen3
from stretto.model.families.qwen3_5 import qwen3_5
from stretto.model.families.qwen3_next import qwen3_next
from stretto.model.weights import Weights

GROUP = "stretto.models"

# Declares its parameters on the Weights and returns the model; the third argument is the number of positions served.
Builder = Callable[[ModelConfig, Weights, int], CausalModel]

NATIVE: dict[str, Builder] = {
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Glm4ForCausalLM": glm4,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "Llama4ForCausalLM": llama4,
    "LlamaForCausalLM": Llama,
    "MiMoForCausalLM": mimo,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5,
}


def find_builder(architecture: str) -> Builder | None:
    """The builder of an architecture, or None. Raises ConfigError where two would serve it: which one runs must not
    depend on the order of installation."""
    plugins = list(entry_points(group=GROUP, name=architecture))
    if len(plugins) > 1 or (plugins and architecture in NATIVE):
        claims = [f"{p.value} of {p.dist.name if p.dist else 'an unnamed package'}" for p in plugins]
        claims += ["stretto itself"] if architecture in NATIVE else []
        raise ConfigError(f"{architecture} is claimed by {' and by '.join(claims)}: uninstall all but one")
    return plugins[0].load() if plugins else NATIVE.get(architecture)
