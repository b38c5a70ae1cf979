"""Settings from the command line, variables and a file; other engines' flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli.sources import gather, read_file, read_variables
from stretto.config import UsageError
from stretto.foreign.flags import ALIASES, ALWAYS, DRAFT_MODEL, DRAFT_STEPS, FAMILIES, REFUSED
from stretto.foreign.translate import Told, setting_names, translate_tokens

KNOWN_FLAGS = {"--" + name.replace("_", "-") for name in setting_names()}


@pytest.mark.parametrize(("theirs", "ours"), [
    ("--context-length 4096", "--max-model-len 4096"), ("--context-length=4096", "--max-model-len 4096"),
    ("--model-path m", "--model m"), ("--mem-fraction-static 0.8", "--gpu-memory-utilization 0.8"),
    ("--disable-overlap-schedule", "--no-overlap"), ("--enable-mixed-chunk", "--mixed-chunk"),
    ("--speculative-algorithm NGRAM", "--speculation ngram"),
    ("--speculative-num-draft-tokens 8", "--speculation-tokens 7"),
    ("--enable-prefix-caching", "--prefix-caching"), ("--no-enable-prefix-caching", "--no-prefix-caching"),
    ("--async-scheduling", "--overlap"), ("--block-size 64", "--page-size 64"), ("-tp 2", "--tensor-parallel-size 2"),
    ("--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b", "--speculation eagle3:a/b"),
    ("--speculative-draft-model-path=a/b --speculative-num-draft-tokens=3", "--speculation-tokens 2 --speculation a/b"),
    ("--enable-chunked-prefill", ""), ("--max-num-seqs 3", "--max-num-seqs 3"),
    ("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4", "--speculation-tokens 3"),
    ("--speculative-num-steps 5", "--speculation-tokens 5"), ("--disable-cuda-graph", "--enforce-eager"),
    ("m --tool-call-parser hermes --enable-auto-tool-choice --port 3", "m --port 3"),
    ("--reasoning-parser=qwen3 --quantization none --pp-size 1", ""), ("--load-format=safetensors m", "m"),
    ("--dtype half m", "--dtype float16 m"), ("--dtype=float", "--dtype float32"),
    ("--dtype bfloat16", "--dtype bfloat16"),
    ("--max-model-len auto m", "m"), ("m --max-model-len=-1", "m"), ("--max-model-len 8K", "--max-model-len 8K"),
    ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8_e4m3"), ("--kv-cache-dtype=bf16 m", "--kv-cache-dtype bfloat16 m"),
])
def test_other_engines_flags(theirs: str, ours: str):
    told = Told([], [])
    assert translate_tokens(theirs.split(), told) == ours.split()
    assert bool(told.notes or told.void) == (theirs != ours), "a translation is told"


@pytest.mark.parametrize(("theirs", "reasons", "accepted"), [
    ("serve m --quantization fp8 --context-length 4096", ["--quantization"], "serve m --max-model-len 4096"),
    ("serve m --trust-remote-code --port 3", ["--trust-remote-code"], "serve m --port 3"),
    ("serve m --swap-space 4 --hf-overrides {} --tp 2 --speculative-eagle-topk=4",
     ["--swap-space", "--hf-overrides", "--speculative-eagle-topk"], "serve m --tensor-parallel-size 2"),
    ("serve m --schedule-conservativeness 0.3 --cuda-graph-max-bs=8 --no-chunked-prefill -O3 -O 2 --port 3",
     ["--schedule-conservativeness", "--cuda-graph-max-bs", "--no-chunked-prefill", "-O", "-O"], "serve m --port 3"),
])
def test_a_refusal_prints_the_nearest_command_line(theirs: str, reasons: list[str], accepted: str):
    with pytest.raises(UsageError) as refused:
        translate_tokens(theirs.split(), Told([], []))
    *said, last = str(refused.value).splitlines()
    assert [line.split()[0] for line in said] == reasons and last == f"accepted is: stretto {accepted}"
    assert translate_tokens(accepted.split(), Told([], [])) == accepted.split()


@pytest.mark.parametrize("how", ["--strict", "variable", "file"])
def test_strict_refuses_what_means_nothing_here(how: str, tmp_path: Path):
    path = tmp_path / "settings.yaml"
    path.write_text("strict: true\n" if how == "file" else "port: 3\n")
    environment = {"STRETTO_STRICT": "1"} if how == "variable" else {}
    strict = ["--strict"] if how == "--strict" else []
    for tokens, more in ((["--enable-chunked-prefill"], {}), ([], {"STRETTO_PROT": "3"})):
        with pytest.raises(UsageError, match="refused by --strict"):
            gather(["serve", "m", *tokens, *strict], environment | more, path)
        free = gather(["serve", "m", *tokens, "--no-strict"], environment | more, path)
        assert free.notes, "told where it is not refused"
    assert not gather(["serve", "m", *strict], environment, path).notes


def test_commands_for_a_running_server_have_flags_of_their_own():
    assert gather(["bench", "serve", "--model-path", "x"], {}, None).tokens == ["bench", "serve", "--model-path", "x"]


def test_speculative_config():
    tokens = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    assert translate_tokens(tokens, Told([], [])) == ["--speculation", "ngram", "--speculation-tokens", "3"]
    tokens[1] = '{"method": "eagle3", "model": "a/b"}'
    assert translate_tokens(tokens, Told([], [])) == ["--speculation", "eagle3:a/b"]
    tokens[1] = '{"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3}'
    assert translate_tokens(tokens, Told([], [])) == ["--speculation", "ngram:longest=5,shortest=3"]
    tokens[1] = '{"method": "ngram", "prompt_lookup_max": 4}'
    assert translate_tokens(tokens, Told([], [])) == ["--speculation", "ngram:longest=4,shortest=4"]
    for bad in ("{", "[]", '{"method": "ngram", "draft_model": "x"}', '{"method": "mtp", "prompt_lookup_max": 4}'):
        with pytest.raises(UsageError, match="--speculative-config"):
            translate_tokens(["--speculative-config", bad], Told([], []))


def test_speculation_has_a_short_spelling(tmp_path: Path):
    """As a flag, a variable, and a key of the file, plain and nested."""
    told = Told([], [])
    assert translate_tokens(["--spec", "dflash", "--spec.tokens=5"], told) == ["--speculation", "dflash",
                                                                             "--speculation-tokens", "5"]
    assert translate_tokens(["--spec.method", "ngram"], told) == ["--speculation", "ngram"]
    assert read_variables({"STRETTO_SPEC": "dspark", "STRETTO_SPEC_TOKENS": "3"}, told) == {
        "speculation": "dspark", "speculation_tokens": "3"}
    assert read_variables({"STRETTO_SPEC_METHOD": "ngram"}, told) == {"speculation": "ngram"}
    with pytest.raises(UsageError, match="both set speculation"):
        read_variables({"STRETTO_SPEC": "ngram", "STRETTO_SPECULATION": "dspark"}, told)
    for text in ("spec: dflash\nspec.tokens: 4\n", "spec:\n  method: dflash\n  tokens: 4\n"):
        (tmp_path / "c.yaml").write_text(text)
        assert {k: str(v) for k, v in read_file(tmp_path / "c.yaml", told).items()} == {
            "speculation": "dflash", "speculation_tokens": "4"}
    (tmp_path / "c.yaml").write_text("spec:\n  metod: dflash\n")
    with pytest.raises(UsageError, match=r"spec\.metod"):
        read_file(tmp_path / "c.yaml", told)
    assert told.void == []


@pytest.mark.parametrize("source", ["command line", "variable"])
def test_a_word_for_the_default_unsets_what_sources_of_less_weight_set(source: str, tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("max-model-len: 4K\ndtype: half\n")
    on_the_line = ["--max-model-len", "auto"] if source == "command line" else []
    environment = {"STRETTO_MAX_MODEL_LEN": "8K" if source == "command line" else "auto"}
    settings = gather(["serve", "m", *on_the_line], environment, path)
    assert settings.tokens == ["serve", "m"] and settings.variables == {} and settings.file == {"dtype": "float16"}
    assert len(settings.notes) == 2
    path.write_text("max-model-len: -1\npage-size: 8\n")
    assert gather(["serve", "m"], {}, path).file == {"page_size": 8}


def test_every_alias_leads_to_a_setting():
    for theirs, alias in ALIASES.items():
        negated = {f"--no-{flag[2:]}" for flag in KNOWN_FLAGS}
        assert alias.flag in {DRAFT_MODEL, DRAFT_STEPS} | KNOWN_FLAGS | negated, theirs
        assert theirs not in KNOWN_FLAGS, f"{theirs} is a setting of ours"
    assert not {*REFUSED, *ALWAYS} & (set(ALIASES) | KNOWN_FLAGS) and not set(REFUSED) & set(ALWAYS)


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_flags_that_cannot_be_honoured_are_refused_with_the_reason(flag: str):
    with pytest.raises(UsageError, match=r"is not a setting of this engine: .+"):
        translate_tokens([flag], Told([], []))


def test_after_two_dashes_nothing_is_translated():
    assert translate_tokens(["--", "--tp", "2"], Told([], [])) == ["--", "--tp", "2"]


def test_variables():
    told = Told([], [])
    found = read_variables({"STRETTO_MAX_MODEL_LEN": "8K", "STRETTO_API_KEY": "a, b", "PATH": "/bin",
                            "STRETTO_CACHE": "/c"}, told)
    assert found == {"max_model_len": "8K", "api_key": ["a", "b"]} and told == Told([], [])


def test_an_unknown_variable_is_told():
    told = Told([], [])
    assert read_variables({"STRETTO_MAX_MODEL_LENGTH": "8K"}, told) == {}
    assert told.void == ["the variable STRETTO_MAX_MODEL_LENGTH is not a setting; did you mean STRETTO_MAX_MODEL_LEN?"]


def test_variables_of_a_kubernetes_service_are_no_settings():
    """A Service called "stretto" puts these into every pod."""
    link = {"STRETTO_SERVICE_HOST": "10.0.0.1", "STRETTO_SERVICE_PORT": "8000", "STRETTO_PORT": "tcp://10.0.0.1:8000",
            "STRETTO_PORT_8000_TCP": "tcp://10.0.0.1:8000", "STRETTO_PORT_8000_TCP_PROTO": "tcp"}
    told = Told([], [])
    assert read_variables(link, told) == {} and told == Told([], [])


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_file(tmp_path: Path):
    told = Told([], [])
    path = write(tmp_path, "max-model-len: 8K\nkv_memory: 2GiB\noverlap: false\napi-key: [a, b]\n"
                           "enable-mixed-chunk: true\n")
    assert read_file(path, told) == {"max_model_len": "8K", "kv_memory": "2GiB", "overlap": False,
                                      "api_key": ["a", "b"], "mixed_chunk": True}
    assert told.notes == ["--enable-mixed-chunk is read as --mixed-chunk"]
    assert read_file(write(tmp_path, ""), Told([], [])) == {}
    theirs = "speculative-draft-model-path: a/b\nspeculative-algorithm: EAGLE3\n"
    assert read_file(write(tmp_path, theirs), Told([], [])) == {"speculation": "eagle3:a/b"}


@pytest.mark.parametrize(("text", "message"), [
    ("max-model-length: 3", "unknown setting 'max-model-length'; did you mean max_model_len?"),
    ("- a\n- b", "it must hold settings"), ("a: [", "is not YAML"), ("hf-overrides: x", "what its config.json says"),
    ("enable-mixed-chunk: maybe", "can only be true or false; use mixed-chunk"),
    ("model: a\nmodel-path: b", "sets model twice"),
])
def test_bad_files(tmp_path: Path, text: str, message: str):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        read_file(write(tmp_path, text), Told([], []))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_file(tmp_path / "none.yaml", Told([], []))


def test_settings_of_the_server_are_left_out_for_other_commands(tmp_path: Path):
    path = write(tmp_path, "port: 9\nseed: 3\n")
    settings = gather(["run", "m"], {"STRETTO_HOST": "0.0.0.0"}, path)
    assert settings.file == {"seed": 3} and settings.variables == {}
    assert settings.notes == ["host is a setting of the server; `stretto run` has none",
                              "port is a setting of the server; `stretto run` has none"]
    assert gather(["serve", "m"], {}, path).file == {"port": 9, "seed": 3}


@pytest.mark.parametrize(("line", "noted"), [
    ("serve --served-model-name a b", True), ("serve --port 3 --api-key a b --port 4", True),
    ("serve m --served-model-name a", False), ("serve --served-model-name a --port 3", False),
    ("serve --model m --served-model-name a b", False), ("serve --served-model-name a --served-model-name b", False)])
def test_a_second_name_that_becomes_the_model_is_told(line: str, noted: bool):
    notes = gather(line.split(), {}, None).notes
    assert [note.partition(" is read as the model")[0] for note in notes] == (["b"] if noted else [])


def test_flags_of_a_family_are_refused_with_its_reason():
    for line, words, accepted in (
            ("serve m --moe-a2a-backend deepep --port 3", "experts", "serve m --port 3"),
            ("serve --enable-eplb m", "experts", "serve m"), ("serve m --mm-foo=3 --dp-bar", "text alone", "serve m"),
            ("serve m --speculative-something 3", "--speculation", "serve m")):
        with pytest.raises(UsageError, match=words) as refused:
            translate_tokens(line.split(), Told([], []))
        assert str(refused.value).endswith(f"accepted is: stretto {accepted}")
    ours = {*KNOWN_FLAGS, *(f"--no-{flag[2:]}" for flag in KNOWN_FLAGS)}
    assert [flag for flag in ours if flag.startswith(tuple(FAMILIES))] == []
