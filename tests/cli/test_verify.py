"""`stretto parity` and `stretto soak` over a tiny random model: what is equal, what is not, and who is to blame."""

from __future__ import annotations

import json

import pytest

from stretto.cli.main import run_app
from stretto.replay import World
from tests.engine.small import VOCAB, save_tiny
from tests.text.vocabularies import byte_level


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models that share a tokenizer, and say other things."""
    made = []
    for name, sharpness in (("llama", 20), ("qwen3", 20)):
        path = tmp_path_factory.mktemp(name)
        save_tiny(path, name, sharpness=sharpness)
        byte_level(VOCAB).save(str(path / "tokenizer.json"))
        made.append(path)
    return made


def run(capsys, *tokens: str) -> tuple[int, str, str]:
    from rich.console import Console
    code = run_app(tokens, {}, Console(stderr=True, width=200))
    told = capsys.readouterr()
    return code, told.out, told.err


SIZES = "--dtype float32 --kv-tokens 1024 --max-model-len 200"


def test_parity_of_equals(folders, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two one two one two\n\nthe other\n")
    settings = tmp_path / "b.yaml"
    settings.write_text(f"model: {folders[0]}\ndtype: float32\nkv-tokens: 1024\nmax-model-len: 200\npage-size: 1\n"
                        "chunk-size: 3\nspeculation: ngram\n")
    code, out, _ = run(capsys, "parity", f"{folders[0]} {SIZES}", str(settings), "--prompts", str(prompts),
                       "--output-tokens", "24", "--json")
    found = json.loads(out)
    assert code == 0 and found["differences"] == [] and found["prompts"] == 2
    assert found["drafted"][0] == 0 < found["drafted"][1]


def test_parity_tells_what_differs(folders, capsys):
    code, out, _ = run(capsys, "parity", f"{folders[0]} {SIZES}", f"{folders[1]} {SIZES}", "--output-tokens", "8")
    assert code == 4 and "NOT explained by rounding" in out and "0 of 8 answers are equal" in out


def test_parity_refuses_nonsense(folders, capsys):
    code, _, err = run(capsys, "parity", f"{folders[0]} --page-sise 3", f"{folders[0]}")
    assert code != 0 and "page-sise" in err


def test_soak(folders, capsys):
    code, out, _ = run(capsys, "soak", str(folders[0]), "--dtype", "float32", "--rounds", "1", "--seed", "5",
                       "--actions", "60", "--json")
    found = json.loads(out)
    assert code == 0 and found["wrong"] is None and found["rounds"] == 1
    assert found["seen"]["answers"] > 5 and found["seen"]["aborts"] and found["seen"]["session_turns"]


def test_soak_without_a_model_has_every_drafter(capsys):
    code, out, _ = run(capsys, "soak", "--rounds", "3", "--seed", "8", "--actions", "12", "--json")
    found = json.loads(out)
    assert code == 0 and found["wrong"] is None and found["rounds"] == 3 == sum(found["with_drafter"].values())
    code, _, err = run(capsys, "soak", "--rounds", "1", "--max-model-len", "100")
    assert code == 1 and "name a model" in err
    code, _, err = run(capsys, "soak", "--rounds", "1", "--drafter", "eagel")
    assert code == 1 and "eagel" in err


def test_soak_finds_what_is_wrong(folders, capsys, monkeypatch):
    """An engine that leaves out a part of a history: the failure names the seed, which does it again."""
    prompt = World._prompt
    monkeypatch.setattr(World, "_prompt", lambda self, talk, ask: prompt(self, talk, ask)[1:] or [1])
    codes = [run(capsys, "soak", str(folders[0]), "--dtype", "float32", "--rounds", "3", "--seed", str(seed), "--json")
             for seed in (5, 5)]
    first, second = (json.loads(out) for _, out, _ in codes)
    assert codes[0][0] == 4 and first["seed"] >= 5 and first["wrong"] == second["wrong"]




# --------------------------------------------------------------------------------------------------------------- matrix
def test_matrix(capsys):
    code, out, _ = run(capsys, "matrix")
    assert code == 0 and "mixed chunk" in out and "untested" in out and "●" in out
    code, out, _ = run(capsys, "matrix", "window", "drafter eagle3")
    assert code == 0 and out.startswith("window with drafter eagle3: yes, by tests/engine/test_matrix")
    code, out, _ = run(capsys, "matrix", "n > 1", "--json")
    cells = {cell["features"][1]: cell for cell in json.loads(out)}
    assert cells["session: tag"]["state"] == "refused" and "branch the session" in cells["session: tag"]["says"]
    for asked, meant in (("windows", "'window'"), ("sessions", "'session: ")):
        code, _, err = run(capsys, "matrix", asked)
        assert code == 1 and "name at most two of" in err and f"did you mean {meant}" in err
