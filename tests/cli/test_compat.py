"""compat.check: needs and capabilities, and the sentence with both names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.attn.api import AttnCaps, LayerSpec
from stretto.attn.torch_ragged import TorchRagged
from stretto.compat import (
    Component,
    Feature,
    attention_component,
    attention_features,
    check,
    drafter_features,
    engine_component,
)
from stretto.spec.api import DrafterCaps

EVERYTHING = AttnCaps(page_sizes=None, head_dims=None, window=True, sinks=True, softcap=True, empty_rows=True,
                      host_lengths="none", graphs=True)
PLAIN = LayerSpec(n_heads=8, n_kv_heads=2, head_dim=64, scale=0.125)
DEMANDING = replace(PLAIN, window=128, softcap=30.0, has_sinks=True)


def told(caps: AttnCaps, layers=(PLAIN, DEMANDING), page_size: int = 16, device: str = "cpu", graphs: bool = False):
    found = check(attention_features(layers, page_size, device, graphs), [attention_component("some-kernel", caps)])
    return [str(refusal) for refusal in found]


def test_nothing_to_refuse():
    assert told(EVERYTHING, graphs=True) == []
    assert told(TorchRagged().caps) == [], "the reference backend serves every layer"


@pytest.mark.parametrize(("caps", "sentence"), [
    (replace(EVERYTHING, window=False),
     "sliding window 128 of layer 1 does not work with attention some-kernel: it has no window"),
    (replace(EVERYTHING, softcap=False), "logit soft-cap 30 of layer 1 does not work with attention some-kernel"),
    (replace(EVERYTHING, sinks=False), "attention sinks of layer 1 does not work with attention some-kernel"),
    (replace(EVERYTHING, head_dims=frozenset({96, 128})),
     "head size 64 of layer 0 does not work with attention some-kernel: head dim 64 is not among those it takes"
     " (96, 128)"),
    (replace(EVERYTHING, page_sizes=frozenset({64})),
     "page size 16 does not work with attention some-kernel: page size 16 is not among those it takes (64);"
     " set another --page-size"),
    (replace(EVERYTHING, devices=frozenset({"cuda"})), "device cpu does not work with attention some-kernel"),
    (replace(EVERYTHING, empty_rows=False), "the ragged step does not work with attention some-kernel"),
])
def test_what_a_backend_lacks_is_told_with_both_names(caps: AttnCaps, sentence: str):
    found = told(caps)
    assert len(found) == 1 and found[0].startswith(sentence)


def test_a_backend_that_needs_exact_lengths_on_the_host_is_refused():
    caps = replace(EVERYTHING, host_lengths="exact")  # type: ignore[arg-type]
    assert told(caps) == ["the ragged step does not work with attention some-kernel: it has no device lengths"]


def test_graphs_are_needed_only_where_they_are_asked_for():
    eager = replace(EVERYTHING, graphs=False)
    assert told(eager) == [] and len(told(eager, graphs=True)) == 1


def test_layers_that_need_the_same_are_told_once():
    assert len(told(replace(EVERYTHING, window=False), layers=[DEMANDING] * 40)) == 1


def test_a_need_that_no_component_answers_is_refused():
    speech = Feature("speech", frozenset({"audio:decoder"}), "send text")
    found = check([speech], [Component("engine", "x", frozenset())])
    assert [str(r) for r in found] == \
        ["speech does not work with this configuration: nothing in it provides audio:decoder; send text"]


# ------------------------------------------------------------------------------------------------------------ drafters
ENGINE = engine_component(taps=frozenset({"hidden.last", "hidden.3"}))


def refused(caps: DrafterCaps) -> list[str]:
    return [str(refusal) for refusal in check(drafter_features("d", caps), [ENGINE])]


def test_a_drafter_without_weights_runs():
    assert refused(DrafterCaps(max_width=4, variable=True)) == []
    assert refused(DrafterCaps(max_width=4, taps=frozenset({"hidden.3"}), ingest="same_step")) == []
    assert refused(DrafterCaps(max_width=4, where="host")) == []


@pytest.mark.parametrize(("caps", "what"), [
    (DrafterCaps(shape="tree", max_width=4), "draft shape tree"),
    (DrafterCaps(max_width=4, taps=frozenset({"hidden.9"})), "tap hidden.9"),
    (DrafterCaps(max_width=4, kv="target_readonly"), "kv target_readonly"),
    (DrafterCaps(max_width=4, ingest="lazy"), "ingest lazy"),
])
def test_what_the_engine_lacks_is_refused(caps: DrafterCaps, what: str):
    found = refused(caps)
    assert len(found) == 1 and found[0].startswith("drafter d does not work with engine stretto: " + what)


def test_host_drafts_can_be_out_of_reach():
    engine = engine_component(taps=frozenset(), host_drafts=False)
    found = check(drafter_features("d", DrafterCaps(max_width=2, where="host")), [engine])
    assert [str(r) for r in found] == ["drafter d does not work with engine stretto: it has no host drafts;"
                                       " choose another --speculation"]
