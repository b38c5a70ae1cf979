"""Which features work with which components, decided at start-up by set inclusion. No torch in this module.

A feature says what it needs, a component says what it provides; nobody asks for anybody's name. A capability is written
"kind:capability": the kind of component that must have it, then what it must have. Capabilities with a value end in
"=value"; a component that takes any value provides "=*".

    Feature("sliding window of layer 3", {"attention:window"})
    Component("attention", "triton-ragged", {"attention:window", "attention:page_size=*"})

What is missing becomes a Refusal, which carries the names of both sides and the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # types only: the module imports torch
    from stretto.attn.api import AttnCaps, LayerSpec

DEVICES = ("cpu", "cuda")
DRAFT_SHAPES = ("chain", "block")  # a tree needs a parent column, a tree mask and a compaction op
DRAFT_INGEST = ("none", "same_step")
DRAFT_KV = ("none", "own")


@dataclass(frozen=True)
class Feature:
    """Something the model or the configuration asks for. `remedy` says how to do without it."""

    name: str
    needs: frozenset[str]
    remedy: str = ""


@dataclass(frozen=True)
class Component:
    """A part that was chosen. `kind` is the part before the colon of every capability it can answer for."""

    kind: str
    name: str
    provides: frozenset[str]


@dataclass(frozen=True)
class Refusal:
    """A combination that cannot work, with the names of both sides."""

    feature: str
    component: str
    why: str
    remedy: str = ""

    def __str__(self) -> str:
        sentence = f"{self.feature} does not work with {self.component}: {self.why}"
        return f"{sentence}; {self.remedy}" if self.remedy else sentence


class ConfigError(ValueError):
    """A configuration that cannot be served as asked. Carries every refusal, not only the first."""

    def __init__(self, refusals: Iterable[Refusal]):
        self.refusals = tuple(refusals)
        super().__init__("\n".join(str(refusal) for refusal in self.refusals))


def check(features: Iterable[Feature], components: Iterable[Component]) -> list[Refusal]:
    """Every need that the component of its kind does not provide. A kind without a component is refused as well."""
    by_kind = {component.kind: component for component in components}
    refusals = []
    for feature in features:
        for need in sorted(feature.needs):
            component = by_kind.get(need.partition(":")[0])
            if component is None:
                refusals.append(Refusal(feature.name, "this configuration", f"nothing in it provides {need}",
                                        feature.remedy))
            elif not _provided(need, component):
                refusals.append(Refusal(feature.name, f"{component.kind} {component.name}",
                                        _lack(need, component), feature.remedy))
    return refusals


def _provided(need: str, component: Component) -> bool:
    name, equals, _ = need.partition("=")
    return need in component.provides or (bool(equals) and f"{name}=*" in component.provides)


def _lack(need: str, component: Component) -> str:
    if need == "drafter:q":
        return "it does not draw its ids, so there is no probability to divide by"
    name, equals, value = need.partition(":")[2].partition("=")
    if not equals:
        return f"it has no {name.replace('_', ' ')}"
    prefix = f"{component.kind}:{name}="
    values = sorted((c.removeprefix(prefix) for c in component.provides if c.startswith(prefix)), key=_numeric)
    have = ", ".join(values) if values else "none"
    return f"{name.replace('_', ' ')} {value} is not among those it takes ({have})"


def _numeric(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)


# -------------------------------------------------------------------------------------------- attention and layers
def attention_component(name: str, caps: AttnCaps) -> Component:
    """What an attention backend declares, as capabilities."""
    flags = {"window": caps.window, "sinks": caps.sinks, "softcap": caps.softcap, "empty_rows": caps.empty_rows,
             "graphs": caps.graphs, "device_lengths": caps.host_lengths in ("none", "bound")}
    provides = {f"attention:{flag}" for flag, has in flags.items() if has}
    provides |= _values("attention:page_size", caps.page_sizes) | _values("attention:head_dim", caps.head_dims)
    provides |= {f"attention:device={device}" for device in caps.devices}
    provides |= {f"attention:kv_dtype={dtype}" for dtype in caps.kv_dtypes}
    return Component("attention", name, frozenset(provides))


def _values(capability: str, values: frozenset[int] | None) -> set[str]:
    return {f"{capability}=*"} if values is None else {f"{capability}={value}" for value in values}


def attention_features(layers: Sequence[LayerSpec], page_size: int, device: str, graphs: bool,
                       kv_dtype: str | None = None) -> list[Feature]:
    """What the model's layers and the configuration need of the attention backend. Layers that need the same are named
    once, by the first of them. `kv_dtype`: of the cache, where it is not that of the activations."""
    features = [
        Feature("the ragged step", frozenset({"attention:empty_rows", "attention:device_lengths"})),
        Feature(f"page size {page_size}", frozenset({f"attention:page_size={page_size}"}), "set another --page-size"),
        Feature(f"device {device}", frozenset({f"attention:device={device}"}), "choose another --device"),
    ]
    if graphs:
        features.append(Feature("CUDA graphs", frozenset({"attention:graphs"})))
    if kv_dtype is not None:
        features.append(Feature(f"--kv-cache-dtype {kv_dtype}", frozenset({f"attention:kv_dtype={kv_dtype}"}),
                                "leave it out"))
    seen: set[str] = set()
    for index, layer in enumerate(layers):
        for need, what in _layer_needs(layer):
            if need not in seen:
                seen.add(need)
                features.append(Feature(f"{what} of layer {index}", frozenset({need})))
    return features


def _layer_needs(layer: LayerSpec) -> list[tuple[str, str]]:
    needs = [(f"attention:head_dim={layer.head_dim}", f"head size {layer.head_dim}")]
    if layer.window is not None:
        needs.append(("attention:window", f"sliding window {layer.window}"))
    if layer.softcap is not None:
        needs.append(("attention:softcap", f"logit soft-cap {layer.softcap:g}"))
    if layer.has_sinks:
        needs.append(("attention:sinks", "attention sinks"))
    return needs


# ---------------------------------------------------------------------------------------------- drafters and engine
class Drafting(Protocol):
    """spec.api.DrafterCaps, without torch."""

    @property
    def shape(self) -> str: ...
    @property
    def max_width(self) -> int: ...
    @property
    def taps(self) -> frozenset[str]: ...
    @property
    def ingest(self) -> str: ...
    @property
    def kv(self) -> str: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def q(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def confidence(self) -> bool: ...


def model_taps(n_layers: int) -> frozenset[str]:
    """The hidden states that a model hands out (model.api.CausalModel)."""
    return frozenset({"hidden.last", *(f"hidden.{layer}" for layer in range(n_layers))})


def engine_component(taps: frozenset[str], host_drafts: bool = True) -> Component:
    """What the engine offers to a drafter. `taps`: the hidden states that the model can hand out."""
    provides = {f"engine:draft_shape={shape}" for shape in DRAFT_SHAPES}
    provides |= {f"engine:ingest={kind}" for kind in DRAFT_INGEST} | {f"engine:kv={kind}" for kind in DRAFT_KV}
    provides |= {f"engine:tap={tap}" for tap in taps}
    if host_drafts:
        provides.add("engine:host_drafts")
    return Component("engine", "stretto", frozenset(provides))


REJECTION = Feature("--acceptance-method rejection", frozenset({"drafter:q"}),
                    "leave it out, or choose a drafter that draws its ids from a distribution")


def drafter_features(name: str, caps: Drafting) -> list[Feature]:
    """What a drafter needs of the engine. What it does not declare has the closed value: refused, never guessed."""
    drafter = f"drafter {name}"
    needs = {f"engine:draft_shape={caps.shape}", f"engine:ingest={caps.ingest}", f"engine:kv={caps.kv}"}
    needs |= {f"engine:tap={tap}" for tap in caps.taps}
    if caps.where == "host":
        needs.add("engine:host_drafts")
    return [Feature(drafter, frozenset(needs), "choose another --speculation")]
