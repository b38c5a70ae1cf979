"""Models of other packages: found by entry point, loaded like our own, never in doubt which one runs. The model is the
example of docs/models.md, taken from that page."""

from __future__ import annotations

import re
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import transformers

from stretto.model import registry
from stretto.model.config import ConfigError
from stretto.model.load import load_model
from stretto.model.source import WeightError
from stretto.model.table import CHECKED, FAMILIES, with_table
from tests.model.dense import greedy, run
from tests.model.test_families import FAMILIES as CASES
from tests.model.tiny import ids_of, oracle_greedy, oracle_logits, save

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
CPU = torch.device("cpu")


def install(monkeypatch, **found: str) -> None:
    points = [EntryPoint(name, value, registry.GROUP) for name, value in found.items()]
    monkeypatch.setattr(registry, "entry_points", lambda *, group, name: [p for p in points if p.name == name])


@pytest.fixture
def example(monkeypatch):
    code = re.search(r"```python\n# olmo_for_stretto\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    module = types.ModuleType("olmo_for_stretto")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code.group(1), str(PAGE), "exec"), module.__dict__)
    install(monkeypatch, OlmoForCausalLM="olmo_for_stretto:Olmo")
    return module


def test_the_example_of_the_documentation_equals_transformers(example, tmp_path):
    oracle = save(tmp_path, "Olmo", num_key_value_heads=2)
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(20)
    assert type(model) is example.Olmo
    torch.testing.assert_close(run(model, ids), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)
    assert greedy(model, ids, 8) == oracle_greedy(oracle, ids, 8)


def test_the_example_fills_taps(example, tmp_path):
    oracle = save(tmp_path, "Olmo")
    model, ids = load_model(tmp_path, dtype=torch.float32, device=CPU), ids_of(6)
    taps = dict.fromkeys(("hidden.0", "hidden.last"))
    run(model, ids, taps=taps)
    states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps["hidden.0"], states[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(taps["hidden.last"], states[-1][0], atol=1e-5, rtol=1e-5)


def test_the_example_has_its_weights_checked(example, tmp_path):
    save(tmp_path, "Olmo", num_hidden_layers=2)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(WeightError, match=r"missing: model\.layers\.2\."):
        load_model(tmp_path, dtype=torch.float32, device=CPU)


def test_two_claims_on_one_architecture_are_refused(monkeypatch, tmp_path):
    save(tmp_path, "Llama")
    install(monkeypatch, LlamaForCausalLM="elsewhere:Llama")
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is claimed by elsewhere:Llama of .* stretto itself"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)


def test_the_table_of_families_is_up_to_date():
    assert with_table(PAGE.read_text()) == PAGE.read_text(), "run `make docs`"
    assert sorted(name for family in FAMILIES for name in family.architectures) == sorted(registry.NATIVE)


def test_every_family_of_the_table_is_checked_against_transformers():
    checked = {f"{family}ForCausalLM" for family, _ in CASES.values()}
    assert set(registry.NATIVE) - checked == {"MiMoForCausalLM"}, "transformers has no MiMo: it is Qwen2 to it"
    if transformers.__version__ != CHECKED:
        pytest.skip(f"the table names transformers {CHECKED}; this is {transformers.__version__}")


def test_our_own_families_are_short():
    """A family that grows past this has shared layers in it."""
    folder = Path(registry.__file__).parent / "families"
    long = {p.name: n for p in folder.glob("*.py") if (n := len(p.read_text().splitlines())) > 160}
    assert long == {}
