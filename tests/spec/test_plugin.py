"""The drafter of docs/drafters.md, found by its entry point like any third party's, through the conformance kit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stretto.compat import ConfigError
from stretto.config import Config, ModelSection, SpeculationSection
from stretto.engine.prepare import prepare
from stretto.spec.registry import DrafterError, find_drafter
from stretto.testing import CHECKS, Lab
from tests.spec import checkpoints as made

DOCS = Path(__file__).resolve().parents[2] / "docs" / "drafters.md"
EXAMPLE = re.search(r"```python\n(import torch\n.*?)```", DOCS.read_text(), re.S)[1]
UNDECLARED = '''
class Tree:
    def caps(self, settings):
        from stretto.spec.api import DrafterCaps
        return DrafterCaps(shape="tree", max_width=4)

class Lazy:
    def caps(self, settings):
        from stretto.spec.api import DrafterCaps
        return DrafterCaps(max_width=4, ingest="lazy", kv="target_readonly", taps=frozenset({"attention.3"}))
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with an installed package, as pip leaves it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "medusa_for_stretto.py").write_text(EXAMPLE + UNDECLARED)
    info = folder / "medusa_for_stretto-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: medusa-for-stretto\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stretto.drafters]\nmedusa = medusa_for_stretto:Medusa\n"
                                           "tree = medusa_for_stretto:Tree\nlazy = medusa_for_stretto:Lazy\n")
    g = torch.Generator().manual_seed(3)
    save_file({"heads": torch.randn(3, made.HIDDEN, made.HIDDEN, generator=g) * 0.2}, folder / "heads.safetensors")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> made.TinyTarget:
    return made.make_target(tmp_path_factory.mktemp("target"))


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.splitlines()) < 60


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
def test_plugin(check, site, tiny) -> None:
    check(Lab(tiny.model, tiny.target, f"medusa:{site / 'heads.safetensors'}", width=3))


def config(tiny: made.TinyTarget, asked: str, **more) -> Config:
    return Config(model=ModelSection(str(tiny.target.path)), speculation=SpeculationSection(asked, **more))


@pytest.mark.parametrize(("asked", "lacks"), [("tree", "draft shape tree"), ("lazy", "ingest lazy"),
                                              ("lazy", "kv target readonly"), ("lazy", "tap attention.3")])
def test_what_the_engine_lacks_is_named_with_both_sides(site, tiny, asked: str, lacks: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prepare(config(tiny, asked))
    lines = [str(r) for r in refused.value.refusals]
    assert any(f"drafter {asked}" in line and "engine stretto" in line and lacks in line.replace("_", " ")
               for line in lines), lines


def test_a_built_in_name_cannot_be_claimed(site, tmp_path, monkeypatch) -> None:
    info = tmp_path / "claim-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: claim\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stretto.drafters]\nngram = medusa_for_stretto:Medusa\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DrafterError, match="built in"):
        find_drafter("ngram")
