"""Settings from the command line, variables and a file; other engines' flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli.sources import (
    ALIASES,
    DRAFT_MODEL,
    REFUSED,
    UsageError,
    gather,
    read_file,
    read_variables,
    setting_names,
    translate_tokens,
)

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
])
def test_other_engines_flags(theirs: str, ours: str):
    notes: list[str] = []
    assert translate_tokens(theirs.split(), notes) == ours.split()
    assert bool(notes) == (theirs != ours), "a translation is told"


def test_speculative_config():
    tokens = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    assert translate_tokens(tokens, []) == ["--speculation", "ngram", "--speculation-tokens", "3"]
    tokens[1] = '{"method": "eagle3", "model": "a/b"}'
    assert translate_tokens(tokens, []) == ["--speculation", "eagle3:a/b"]
    for bad in ("{", "[]", '{"method": "ngram", "draft_model": "x"}'):
        with pytest.raises(UsageError, match="--speculative-config"):
            translate_tokens(["--speculative-config", bad], [])


def test_every_alias_leads_to_a_setting():
    for theirs, alias in ALIASES.items():
        assert alias.flag in {DRAFT_MODEL, *KNOWN_FLAGS, *(f"--no-{flag[2:]}" for flag in KNOWN_FLAGS)}, theirs
        assert theirs not in KNOWN_FLAGS, f"{theirs} is a setting of ours"
    assert not set(REFUSED) & (set(ALIASES) | KNOWN_FLAGS)


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_flags_that_cannot_be_honoured_are_refused_with_the_reason(flag: str):
    with pytest.raises(UsageError, match=r"is not a setting of this engine: .+"):
        translate_tokens([flag], [])


def test_after_two_dashes_nothing_is_translated():
    assert translate_tokens(["--", "--tp", "2"], []) == ["--", "--tp", "2"]


def test_variables():
    notes: list[str] = []
    found = read_variables({"STRETTO_MAX_MODEL_LEN": "8K", "STRETTO_API_KEY": "a, b", "PATH": "/bin",
                            "STRETTO_CACHE": "/c"}, notes)
    assert found == {"max_model_len": "8K", "api_key": ["a", "b"]} and notes == []


def test_an_unknown_variable_is_told():
    notes: list[str] = []
    assert read_variables({"STRETTO_MAX_MODEL_LENGTH": "8K"}, notes) == {}
    assert notes == ["the variable STRETTO_MAX_MODEL_LENGTH is not a setting; did you mean STRETTO_MAX_MODEL_LEN?"]


def test_variables_of_a_kubernetes_service_are_no_settings():
    """A Service called "stretto" puts these into every pod."""
    link = {"STRETTO_SERVICE_HOST": "10.0.0.1", "STRETTO_SERVICE_PORT": "8000", "STRETTO_PORT": "tcp://10.0.0.1:8000",
            "STRETTO_PORT_8000_TCP": "tcp://10.0.0.1:8000", "STRETTO_PORT_8000_TCP_PROTO": "tcp"}
    notes: list[str] = []
    assert read_variables(link, notes) == {} and notes == []


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return path


def test_file(tmp_path: Path):
    notes: list[str] = []
    path = write(tmp_path, "max-model-len: 8K\nkv_memory: 2GiB\noverlap: false\napi-key: [a, b]\n"
                           "enable-mixed-chunk: true\n")
    assert read_file(path, notes) == {"max_model_len": "8K", "kv_memory": "2GiB", "overlap": False,
                                      "api_key": ["a", "b"], "mixed_chunk": True}
    assert notes == ["--enable-mixed-chunk is read as --mixed-chunk"]
    assert read_file(write(tmp_path, ""), []) == {}
    theirs = "speculative-draft-model-path: a/b\nspeculative-algorithm: EAGLE3\n"
    assert read_file(write(tmp_path, theirs), []) == {"speculation": "eagle3:a/b"}


@pytest.mark.parametrize(("text", "message"), [
    ("max-model-length: 3", "unknown setting 'max-model-length'; did you mean max_model_len?"),
    ("- a\n- b", "it must hold settings"), ("a: [", "is not YAML"), ("enable-lora: true", "there are no LoRA adapters"),
    ("enable-mixed-chunk: false", "can only be true; use mixed-chunk"), ("model: a\nmodel-path: b", "sets model twice"),
])
def test_bad_files(tmp_path: Path, text: str, message: str):
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        read_file(write(tmp_path, text), [])


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_file(tmp_path / "none.yaml", [])


def test_settings_of_the_server_are_left_out_for_other_commands(tmp_path: Path):
    path = write(tmp_path, "port: 9\nseed: 3\n")
    settings = gather(["run", "m"], {"STRETTO_HOST": "0.0.0.0"}, path)
    assert settings.file == {"seed": 3} and settings.variables == {}
    assert settings.notes == ["host is a setting of the server; `stretto run` has none",
                              "port is a setting of the server; `stretto run` has none"]
    assert gather(["serve", "m"], {}, path).file == {"port": 9, "seed": 3}
