"""config.resolve: what was set is kept or refused, what was not set is fitted and told."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.compat import ConfigError
from stretto.config import (
    GIB,
    MIB,
    Config,
    DeviceFacts,
    DrafterFacts,
    Facts,
    KVGroupFacts,
    KVSection,
    LoraSection,
    ModelFacts,
    ModelSection,
    ParallelSection,
    Resolved,
    ScheduleSection,
    ServeSection,
    SpeculationSection,
    parse_count,
    parse_size,
)
from stretto.device.graphs import usual_shapes
from stretto.resolve import ITEM_BYTES, resolve
from stretto.spec.context import DrafterError
from stretto.spec.registry import drafter_caps


@dataclass(frozen=True)
class Caps:
    shape: str = "chain"
    max_width: int = 7
    lookahead: int = 0
    taps: frozenset[str] = frozenset()
    ingest: str = "none"
    kv: str = "none"
    where: str = "device"


CPU = DeviceFacts("cpu", "a CPU", 32 * GIB, 24 * GIB, cores=8)
GPU = DeviceFacts("cuda", "a GPU", 80 * GIB, 79 * GIB, cores=8, bfloat16=True)
SMALL = ModelFacts("small", "LlamaForCausalLM", 30, 576, 1536, 49152, 8192, 135_000_000, "bfloat16",
                   (KVGroupFacts(None, 11520),))
WINDOWED = replace(SMALL, name="windowed", context=32768,
                   kv_groups=(KVGroupFacts(None, 5760), KVGroupFacts(1024, 5760)))
ALL_WINDOW = replace(SMALL, name="all-window", context=32768, kv_groups=(KVGroupFacts(1024, 11520),))
NGRAM = DrafterFacts("ngram", Caps())


def facts(device: DeviceFacts = CPU, model: ModelFacts = SMALL, drafter: DrafterFacts | None = None) -> Facts:
    return Facts((device,) if device.kind == "cpu" else (device, CPU), model, drafter)


def decision(resolved: Resolved, feature: str):
    return next(d for d in resolved.decisions if d.feature == feature)


def refusals(config: Config, found: Facts | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config, found or facts())
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------- defaults
def test_defaults_on_a_cpu():
    resolved = resolve(Config(), facts())
    assert (resolved.device, resolved.dtype, resolved.max_model_len) == ("cpu", "float32", 8192)
    assert resolved.mixed_chunk and resolved.prefix_caching and resolved.depth == 1
    assert resolved.drafter is None and resolved.speculation_tokens == 0
    assert resolved.memory.kv == 4 * GIB
    assert all(not d.changed for d in resolved.decisions)


def test_defaults_on_a_gpu():
    resolved = resolve(Config(), facts(GPU))
    assert (resolved.device, resolved.dtype) == ("cuda", "bfloat16")
    used_by_others = GPU.memory_total - GPU.memory_free
    assert resolved.memory.budget == pytest.approx(0.9 * GPU.memory_total - used_by_others, abs=2)


def test_case_17_09_graphs_have_their_memory_before_anything_is_loaded():
    """The KV cache leaves it to them, however much it was allowed; what was asked too large is refused by its name.
    The warm-up covers the largest batch with its drafts."""
    whole = Config(kv=KVSection(gpu_memory_utilization=1.0))
    plan = resolve(whole, facts(GPU)).memory
    assert plan.graphs > 0 and plan.budget <= GPU.memory_free
    eager = resolve(replace(whole, schedule=ScheduleSection(enforce_eager=True)), facts(GPU)).memory
    assert eager.graphs == 0 and eager.kv == pytest.approx(plan.kv + plan.graphs, rel=1e-3)
    assert resolve(Config(), facts()).memory.graphs == 0  # a CPU has none
    told = refusals(Config(kv=KVSection(kv_memory=GPU.memory_free - plan.budget + plan.kv + MIB)), facts(GPU))
    assert "graphs take" in told and "lower --kv-memory" in told
    shapes = usual_shapes(256, 1 + 4, 4)
    assert max(shape.rows for shape in shapes) == 256 and max(shape.tokens or 0 for shape in shapes) == 256 * 5


def test_strict_refuses_a_fitted_context():
    """Only what was left open is fitted; --strict wants that said."""
    small = Config(kv=KVSection(kv_tokens=1000))
    fitted = resolve(small, facts())
    assert any(decision.changed for decision in fitted.decisions)
    strict = replace(small, model=replace(small.model, strict=True))
    with pytest.raises(ConfigError, match=f"set --max-model-len {fitted.max_model_len}"):
        resolve(strict, facts())
    said = replace(strict, model=replace(strict.model, max_model_len=fitted.max_model_len))
    assert resolve(said, facts()).max_model_len == fitted.max_model_len


def test_graphs_and_templates_are_told(tmp_path: Path):
    def now(config: Config, feature: str) -> str:
        return next(d.now for d in resolve(config, facts()).decisions if d.feature == feature)

    assert now(Config(), "CUDA graphs") == "off"  # on this CPU
    template = tmp_path / "t.jinja"
    config = Config(model=ModelSection(chat_template=template))
    with pytest.raises(ConfigError, match="--chat-template"):
        resolve(config, facts())
    template.write_text("{{ messages }}")
    assert now(config, "chat template") == str(template)


def test_every_setting_is_told():
    """A setting without a line in the report could be off without anyone knowing."""
    untold = {"model", "tokenizer", "seed", "gpu_memory_utilization", "kv_tokens", "speculation_tokens",
              "acceptance_method"}  # elsewhere, or only with a drafter
    told = {"lora_modules": "LoRA adapters", "enable_lora": "LoRA adapters", "max_loras": "LoRA adapters",
            "max_lora_rank": "LoRA adapters", "mixed_chunk": "mixed steps", "cap_policy": "cap policy",
            "prefix_caching": "prefix caching", "kv_memory": "KV memory", "chat_template": "chat template",
            "enforce_eager": "CUDA graphs"}
    features = {d.feature for d in resolve(Config(), facts()).decisions}
    for section in (ModelSection, KVSection, ScheduleSection, SpeculationSection, LoraSection, ParallelSection):
        for setting in fields(section):
            assert setting.name in untold or told.get(setting.name, setting.name) in features, setting.name


@pytest.mark.parametrize(("section", "name", "value", "now"), [
    ("model", "dtype", "bfloat16", "dtype"), ("model", "max_model_len", 1000, "max_model_len"),
    ("kv", "page_size", 64, "page_size"), ("kv", "prefix_caching", False, "prefix_caching"),
    ("schedule", "max_num_seqs", 3, "max_num_seqs"),
    ("schedule", "max_num_batched_tokens", 77, "max_num_batched_tokens"),
    ("schedule", "chunk_size", 33, "chunk_size"), ("schedule", "mixed_chunk", False, "mixed_chunk"),
    ("schedule", "cap_policy", "one_in_mixed", "cap_policy"),
])
def test_what_is_set_is_kept(section: str, name: str, value: object, now: str):
    config = Config()
    config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    assert getattr(resolve(config, facts()), now) == value


def test_overlap_off_means_no_step_in_flight():
    resolved = resolve(Config(schedule=ScheduleSection(overlap=False)), facts())
    assert resolved.depth == 0 and decision(resolved, "overlap").now == "off"


# --------------------------------------------------------------------------------------------------------------- dtype
@pytest.mark.parametrize(("device", "stored", "expected"), [
    (GPU, "float16", "float16"), (GPU, "float32", "bfloat16"), (replace(GPU, bfloat16=False), "bfloat16", "float16"),
    (CPU, "bfloat16", "float32"),
])
def test_automatic_dtype(device: DeviceFacts, stored: str, expected: str):
    assert resolve(Config(), facts(device, replace(SMALL, dtype=stored))).dtype == expected


def test_automatic_dtype_shrinks_where_float32_would_fill_the_memory():
    resolved = resolve(Config(), facts(model=replace(SMALL, parameters=4_000_000_000)))
    assert resolved.dtype == "bfloat16" and "14.90 GiB" in decision(resolved, "dtype").why


# ----------------------------------------------------------------------------------------------------------------- fit
def test_context_is_fitted_only_where_it_was_not_set():
    little = Config(kv=KVSection(kv_tokens=1000))
    resolved = resolve(little, facts())
    assert resolved.max_model_len == resolved.kv_tokens == 1008  # whole pages
    assert decision(resolved, "max_model_len").changed
    message = refusals(replace(little, model=ModelSection(max_model_len=8192)))
    assert "--max-model-len 8192 does not work with the KV cache" in message and "1008" in message


def test_step_buffers_are_fitted_only_where_they_were_not_set():
    tight = replace(CPU, memory_free=400 * 1024**2)
    resolved = resolve(Config(), facts(tight))
    assert resolved.max_num_batched_tokens < 512 and decision(resolved, "max_num_batched_tokens").changed
    assert resolved.memory.budget <= tight.memory_free
    kept = resolve(Config(schedule=ScheduleSection(max_num_batched_tokens=500)), facts(tight))
    assert kept.max_num_batched_tokens == 500


def test_a_model_that_does_not_fit_is_refused_with_both_sizes():
    message = refusals(Config(model=ModelSection(dtype="float32")), facts(model=replace(SMALL, parameters=10**10)))
    assert "model small does not work with the memory of a CPU" in message and "37.2" in message


# -------------------------------------------------------------------------------------------------------------- groups
def test_host_memory_is_shared_out_as_the_devices_is():
    asked = Config(kv=KVSection(kv_memory=GIB, kv_host_bytes=3 * GIB))
    resolved = resolve(asked, facts(model=WINDOWED))
    assert len(resolved.host_pages) == len(resolved.pages) == 2
    for host, device in zip(resolved.host_pages, resolved.pages):
        assert host == pytest.approx(3 * (device - 1), rel=0.01)
    assert 2.9 * GIB < sum(n * size for n, size in zip(resolved.host_pages, resolved.page_bytes)) <= 3 * GIB
    told = decision(resolved, "kv_host_bytes")
    assert told.now == "3.00 GiB" and f"{resolved.host_pages[0] * 16} tokens" in told.why
    assert resolve(Config(), facts()).host_pages == () and decision(resolve(Config(), facts()),
                                                                    "kv_host_bytes").now == "off"


def test_kv_tokens_are_exact():
    resolved = resolve(Config(kv=KVSection(kv_tokens=320, page_size=16)), facts(model=WINDOWED))
    assert resolved.kv_tokens == 320 and resolved.pages == (21, 21)  # and the null page


def test_a_window_group_leaves_memory_to_the_full_group():
    config = Config(kv=KVSection(kv_memory=4 * GIB), schedule=ScheduleSection(max_num_seqs=2))
    resolved = resolve(config, facts(model=WINDOWED))
    full, window = resolved.pages
    assert full > window and window * 16 >= 2 * (1024 + 512)
    assert sum(pages * 16 * 5760 * ITEM_BYTES["float32"] for pages in resolved.pages) <= 4 * GIB
    assert resolved.windows == (None, 1024)


def test_where_every_layer_has_a_window_the_context_needs_no_more_pages_than_the_window():
    config = Config(kv=KVSection(kv_memory=GIB), schedule=ScheduleSection(max_num_seqs=2, max_num_batched_tokens=128))
    resolved = resolve(config, facts(model=ALL_WINDOW))
    assert resolved.max_model_len == 32768 > resolved.pages[0] * 16


# --------------------------------------------------------------------------------------------------------- speculation
def test_speculation_width():
    on = SpeculationSection("ngram")
    assert resolve(Config(speculation=on), facts(drafter=NGRAM)).speculation_tokens == 4
    resolved = resolve(Config(speculation=replace(on, speculation_tokens=7)), facts(drafter=NGRAM))
    assert resolved.speculation_tokens == 7 and resolved.drafter == "ngram"


def test_packed_weights_count_as_what_they_take():
    found = replace(SMALL, parameters=2_000_000_000, packed_bytes=(("cpu", GIB), ("cuda", GIB)))
    on_cpu, on_gpu = resolve(Config(), facts(model=found)), resolve(Config(), facts(GPU, model=found))
    assert on_cpu.dtype == "bfloat16" and "stay packed" in decision(on_cpu, "dtype").why
    assert on_cpu.memory.weights == on_gpu.memory.weights == GIB
    exact = resolve(Config(model=ModelSection(dtype="float32")), facts(model=found))
    assert exact.memory.weights == 8_000_000_000 and "dequantised" in decision(exact, "quantised weights").why
    fixed = resolve(Config(model=ModelSection(deterministic=True)), facts(GPU, model=found))
    assert fixed.memory.weights == 4_000_000_000
    large = replace(found, unpacked_bytes=GIB // 4)
    assert resolve(Config(), facts(GPU, model=large)).memory.step_buffers - on_gpu.memory.step_buffers == 2 * GIB // 4
    assert resolve(Config(), facts(model=large)).memory == on_cpu.memory, "a CPU makes none anew"
    small = resolve(Config(), facts(model=replace(found, parameters=135_000_000)))
    assert small.dtype == "float32", "small models are exact and fast as they are"


def test_native_kernels_keep_weights_packed_in_float32():
    found = replace(SMALL, parameters=2_000_000_000, packed_bytes=(("cpu", GIB),), exact_packed_bytes=GIB + 4)
    exact = resolve(Config(), facts(model=found))
    assert exact.dtype == "float32" and exact.memory.weights == GIB + 4
    assert "as float32 all would take" in decision(exact, "quantised weights").why
    half = resolve(Config(model=ModelSection(dtype="float16")), facts(model=found))
    assert half.memory.weights == 4_000_000_000
    assert "stay packed with --dtype float32 and bfloat16" in decision(half, "quantised weights").why
    fixed = resolve(Config(model=ModelSection(deterministic=True)), facts(model=found))
    assert fixed.memory.weights == GIB + 4, "they have one order of sums as it is"


def test_which_native_kernels_there_are_is_told():
    why = "there is no C++ compiler; install one"
    assert decision(resolve(Config(), facts(replace(CPU, kernels=("a", "b")))), "native kernels").now == "a, b"
    some = decision(resolve(Config(), facts(replace(CPU, kernels=("a",), missing=(("b", why),)))), "native kernels")
    assert (some.now, some.why) == ("a", f"without b: {why}")
    none = decision(resolve(Config(), facts(replace(CPU, missing=(("a", why), ("b", why))))), "native kernels")
    assert (none.now, none.why) == ("none", f"without a, b: {why}")
    assert all(d.feature != "native kernels" for d in resolve(Config(), facts(GPU)).decisions)


def test_an_8_bit_cache_holds_nearly_twice_the_tokens():
    found = replace(SMALL, kv_groups=(KVGroupFacts(None, 11520, 180),))
    asked = Config(kv=KVSection(kv_memory=64 * MIB, kv_cache_dtype="fp8_e4m3"))
    small = resolve(asked, facts(model=found))
    large = resolve(replace(asked, kv=replace(asked.kv, kv_cache_dtype="bfloat16")), facts(model=found))
    assert small.kv_dtype == "fp8_e4m3" and small.dtype == "float32" and small.page_bytes == (16 * (11520 + 180),)
    assert large.page_bytes == (16 * 2 * 11520,) and small.pages[0] > 1.9 * large.pages[0]
    old = replace(GPU, fp8=False)
    told = refusals(replace(asked, kv=replace(asked.kv, kv_memory=None)), facts(old, model=found))
    assert "--kv-cache-dtype fp8_e4m3 does not work with device" in told and "8.9" in told


def test_drafters_memory_counts():
    own = (KVGroupFacts(None, 1000),)
    big = DrafterFacts("model", Caps(lookahead=3), parameters=10**8, kv_groups=own, tap_values=64)
    with_drafter = resolve(Config(speculation=SpeculationSection("model")), facts(drafter=big))
    assert with_drafter.memory.draft_weights == 4 * 10**8 and with_drafter.lookahead == 3
    without = resolve(Config(), facts())
    assert with_drafter.kv_tokens < without.kv_tokens
    off = resolve(Config(), facts(drafter=big))
    assert off.memory == without.memory, "a drafter that is not asked for takes nothing"


def test_the_drafters_layers_join_the_groups_of_their_window():
    own = DrafterFacts("d", Caps(), kv_groups=(KVGroupFacts(None, 100), KVGroupFacts(128, 50)))
    on = Config(speculation=SpeculationSection("d"))
    assert resolve(on, facts(model=WINDOWED, drafter=own)).windows == (None, 128, 1024)
    assert resolve(on, facts(model=ALL_WINDOW, drafter=own)).windows == (None, 128, 1024)
    assert resolve(Config(), facts(model=WINDOWED, drafter=own)).windows == (None, 1024)


def test_a_drafter_that_reads_a_layer_the_model_lacks_is_refused():
    own = DrafterFacts("d", Caps(taps=frozenset({"hidden.29", "hidden.30"})))
    assert "drafter d does not work with engine stretto: tap hidden.30 is not among" in \
        refusals(Config(speculation=SpeculationSection("d")), facts(drafter=own))


# ------------------------------------------------------------------------------------------------------------ refusals
REFUSED = {
    "device": (Config(model=ModelSection(device="tpu")), "--device tpu does not work with engine stretto"),
    "no cuda": (Config(model=ModelSection(device="cuda")), "--device cuda does not work with this machine"),
    "context": (Config(model=ModelSection(max_model_len=9000)), "--max-model-len 9000 does not work with model small"),
    "two sizes": (Config(kv=KVSection(kv_memory=GIB, kv_tokens=10)), "--kv-memory does not work with --kv-tokens"),
    "gpu share": (Config(kv=KVSection(gpu_memory_utilization=0.5)), "--gpu-memory-utilization 0.5 does not work with"),
    "share range": (Config(kv=KVSection(gpu_memory_utilization=1.5)), "it is a fraction of the memory"),
    "no drafter": (Config(speculation=SpeculationSection("eagle9")), "--speculation eagle9 does not work with"),
    "tokens, off": (Config(speculation=SpeculationSection("off", speculation_tokens=3)), "--speculation off"),
    "chunk": (Config(schedule=ScheduleSection(chunk_size=300, max_num_batched_tokens=200)), "--chunk-size 300"),
    "no ranks": (Config(parallel=ParallelSection(tensor_parallel_size=0)), "--tensor-parallel-size 0"),
    "negative": (Config(schedule=ScheduleSection(max_num_seqs=0)), "--max-num-seqs 0"),
    "port": (Config(serve=ServeSection(port=70000)), "--port 70000"),
    "memory": (Config(kv=KVSection(kv_memory=100 * GIB)), "a KV cache of 100.00 GiB does not work with the memory"),
    "host memory": (Config(kv=KVSection(kv_host_bytes=100 * GIB)),
                    "--kv-host-bytes 100.00 GiB does not work with the memory of this machine"),
    "little host memory": (Config(kv=KVSection(kv_host_bytes=100)), "it does not hold one page of each KV group"),
    "negative host memory": (Config(kv=KVSection(kv_host_bytes=-1)), "--kv-host-bytes -1 does not work with any start"),
    "empty key": (Config(serve=ServeSection(api_key=("",))), "--api-key ''"),
    "empty operator's key": (Config(serve=ServeSection(admin_api_key=("k", ""))), "--admin-api-key ''"),
    "empty name": (Config(serve=ServeSection(served_model_name=("",))), "--served-model-name ''"),
    "drain": (Config(serve=ServeSection(drain_timeout=-1.0)), "--drain-timeout -1"),
    "root path": (Config(serve=ServeSection(root_path="foo")), "write it as /foo"),
    "origin": (Config(serve=ServeSection(allowed_origins=("*", "foo"))), "--allowed-origins foo"),
    "origin with a path": (Config(serve=ServeSection(allowed_origins=("https://a.b/",))), "without a / at its end"),
    "socket and port": (Config(serve=ServeSection(uds=Path("/x"), port=5)), "--port 5 does not work with --uds /x"),
    "socket and host": (Config(serve=ServeSection(uds=Path("/x"), host="::")), "--host :: does not work with --uds /x"),
    "page": (Config(kv=KVSection(kv_memory=1000)), "it does not hold two pages"),
    "context of 1": (Config(model=ModelSection(max_model_len=1)), "a prompt and an answer need 2 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_both_names(name: str):
    config, sentence = REFUSED[name]
    message = refusals(config)
    assert sentence in message and ";" in message, "a refusal names the way out"


def test_models_that_are_not_cut_into_ranks_are_refused():
    config = Config(parallel=ParallelSection(tensor_parallel_size=2))
    message = refusals(config, facts(model=replace(SMALL, native=False)))
    assert "--tensor-parallel-size 2 does not work with model small" in message and "; set it to 1" in message


def test_a_tree_drafter_is_refused():
    message = refusals(Config(speculation=SpeculationSection("t")), facts(drafter=DrafterFacts("t", Caps("tree"))))
    assert "drafter t does not work with engine stretto: draft shape tree is not among" in message


def test_too_wide_drafts_are_refused():
    config = Config(speculation=SpeculationSection("ngram", speculation_tokens=8))
    assert "it proposes at most 7 tokens" in refusals(config, facts(drafter=NGRAM))


def test_a_step_must_hold_a_verified_row():
    config = Config(speculation=SpeculationSection("ngram", speculation_tokens=7),
                    schedule=ScheduleSection(max_num_batched_tokens=4))
    message = refusals(config, facts(drafter=NGRAM))
    assert "--max-num-batched-tokens 4 does not work with --speculation-tokens 7" in message


def test_all_refusals_are_told_at_once():
    config = Config(model=ModelSection(max_model_len=0), serve=ServeSection(port=-1))
    assert len(refusals(config).splitlines()) == 2


# ---------------------------------------------------------------------------------------------------- sampling defaults
def test_case_18_01_sampling_defaults_are_told_and_can_be_left_out():
    model = replace(SMALL, sampling_defaults=(("temperature", 0.1), ("top_k", 1)))
    resolved = resolve(Config(), facts(model=model))
    assert dict(resolved.sampling_defaults) == {"temperature": 0.1, "top_k": 1}
    assert decision(resolved, "sampling defaults").now == "temperature 0.1, top_k 1"
    none = resolve(Config(serve=ServeSection(generation_config="none")), facts(model=model))
    assert none.sampling_defaults == () and "temperature 0.1" in decision(none, "sampling defaults").why


# ------------------------------------------------------------------------------------------------------------ property
maybe = st.none()
CONFIGS = st.builds(
    Config,
    model=st.builds(ModelSection, max_model_len=maybe | st.integers(2, 40000),
                    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
                    device=st.sampled_from(["auto", "cpu", "cuda"])),
    kv=st.builds(KVSection, page_size=maybe | st.sampled_from([1, 16, 64, 256]),
                 kv_memory=maybe | st.integers(1, 8 * GIB), kv_tokens=maybe | st.integers(1, 100_000),
                 kv_host_bytes=maybe | st.integers(0, 8 * GIB)),
    schedule=st.builds(ScheduleSection, max_num_seqs=maybe | st.integers(1, 512),
                       max_num_batched_tokens=maybe | st.integers(1, 20_000), chunk_size=maybe | st.integers(1, 20_000),
                       mixed_chunk=maybe | st.booleans(), overlap=maybe | st.booleans()),
    speculation=st.builds(SpeculationSection, st.sampled_from(["off", "ngram"]),
                          speculation_tokens=st.just("auto") | st.integers(0, 9)),
)
FACTS = st.builds(
    lambda device, model, free, width, lookahead: facts(
        replace(device, memory_free=min(free, device.memory_total)), model,
        DrafterFacts("ngram", Caps(max_width=width, lookahead=lookahead))),
    st.sampled_from([CPU, GPU]), st.sampled_from([SMALL, WINDOWED, ALL_WINDOW]), st.integers(GIB // 2, 80 * GIB),
    st.integers(0, 8), st.integers(0, 8))


@settings(max_examples=300, deadline=None)
@given(CONFIGS, FACTS)
def test_any_configuration_is_kept_or_refused(config: Config, found: Facts):
    try:
        resolved = resolve(config, found)
    except ConfigError as e:
        assert e.refusals and all(str(r).count("does not work with") == 1 for r in e.refusals)
        return
    for section in (config.model, config.kv, config.schedule):
        for setting in fields(section):
            asked, now = getattr(section, setting.name), getattr(resolved, setting.name, None)
            if asked not in (None, "auto") and hasattr(resolved, setting.name) and setting.name != "kv_tokens":
                assert now == asked, setting.name
    assert 2 <= resolved.max_model_len <= found.model.context
    assert min(resolved.pages) >= 2 and len(resolved.pages) == len(found.model.kv_groups)
    assert sum(resolved.pages[i] * resolved.page_size * group.values * ITEM_BYTES[resolved.dtype]
               for i, group in enumerate(found.model.kv_groups)) <= resolved.memory.kv
    assert resolved.max_model_len + resolved.speculation_tokens + resolved.lookahead <= resolved.kv_tokens
    assert 1 <= resolved.chunk_size <= resolved.max_num_batched_tokens
    assert 1 + resolved.speculation_tokens <= resolved.max_num_batched_tokens
    device = next(d for d in found.devices if d.kind == resolved.device)
    assert 0 < resolved.memory.budget <= device.memory_free
    if config.speculation.speculation == "off":
        assert resolved.drafter is None


# ------------------------------------------------------------------------------------------------------------- numbers
@pytest.mark.parametrize(("text", "size"), [
    ("4GiB", 4 * GIB), ("4g", 4 * GIB), ("4 GB", 4 * 10**9), ("512MiB", 512 * 1024**2), ("1.5k", 1536), ("77", 77)])
def test_sizes(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "count"), [
    ("8192", 8192), ("8k", 8000), ("8K", 8192), ("1M", 1024**2), ("1m", 10**6)])
def test_counts(text: str, count: int):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "4 cats", "GiB", "1e400", "nan"])
def test_what_is_no_number(text: str):
    for parse in (parse_size, parse_count):
        with pytest.raises(ValueError, match="is not a number as in"):
            parse(text)


def test_what_is_refused_last_is_refused_too():
    told = refusals(Config(model=ModelSection(deterministic=True), lora=LoraSection(enable_lora=True)))
    assert "--enable-lora does not work with --deterministic" in told


@pytest.mark.parametrize("asked", ["ngram:longest=2,shortest=4", "ngram:foo=1", "ngram:longest=0", "scripted",
                                   "scripted:nowhere.json"])
def test_settings_of_a_drafter_are_read_before_anything_is_loaded(asked: str):
    with pytest.raises(DrafterError, match=asked.partition(":")[0]):
        drafter_caps(asked)
