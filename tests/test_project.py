"""The project's own machinery: finding a Python, tiers of tests, documents that do not lie."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from prometheus_client.parser import text_string_to_metric_families

from stretto import __version__
from stretto.cli.flags import with_table
from stretto.cli.main import build_app
from stretto.cli.sources import read_units
from stretto.foreign.translate import setting_names, translate_tokens
from stretto.matrix import load
from stretto.protocol import EngineInfo, EngineStats
from stretto.serve.errors import REFUSALS
from stretto.serve.metric_names import BY_PLACE, COUNTERS, GAUGES
from stretto.serve.metrics import ServerMetrics

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=120,
                          env={**os.environ, **environment})


# --------------------------------------------------------------------------------------------------------------- set-up
def fake_python(folder: Path, name: str, old: bool = False, no_venv: bool = False) -> None:
    """An interpreter that answers the two questions of .ci/find-python."""
    script = folder / name
    script.write_text("#!/bin/sh\n"
                      'case "$*" in\n'
                      f"  *version_info*) exit {int(old)};;\n"
                      f"  *venv*) exit {int(no_venv)};;\n"
                      "  --version) echo Python 3.9.1;;\n"
                      "esac\n")
    script.chmod(0o755)


def find_python(folder: Path, *asked: str) -> subprocess.CompletedProcess[str]:
    return run(shutil.which("sh") or "/bin/sh", ROOT / ".ci/find-python", *asked, PATH=str(folder))


def test_set_up_takes_the_first_python_that_will_do(tmp_path: Path):
    fake_python(tmp_path, "python3.12", old=True)
    fake_python(tmp_path, "python3.13", no_venv=True)
    fake_python(tmp_path, "python3")
    assert find_python(tmp_path).stdout == "python3\n"


def test_set_up_says_what_is_missing(tmp_path: Path):
    fake_python(tmp_path, "python3", old=True)
    fake_python(tmp_path, "python3.12", no_venv=True)
    found = find_python(tmp_path)
    assert found.returncode == 1 and found.stdout == ""
    assert "too old: python3 (Python 3.9.1)" in found.stderr and "without venv: python3.12" in found.stderr
    assert "asked for by PYTHON=: python9" in find_python(tmp_path, "python9").stderr


# ---------------------------------------------------------------------------------------------------------------- tiers
TEN_TESTS = "import pytest, time\n" + "".join(f"def test_{i}(): time.sleep(0.05)\n" for i in range(10))


def run_tier(folder: Path, *options: str) -> set[str]:
    (folder / "test_ten.py").write_text(TEN_TESTS)
    ran = run(sys.executable, "-m", "pytest", "-p", "tiers", "-p", "no:cacheprovider", "-v", *options, folder,
              cwd=folder, PYTHONPATH=str(ROOT / ".ci"))
    return set(re.findall(r"test_ten.py::(test_\d+) PASSED", ran.stdout))


def test_tiers_cover_every_test_once(tmp_path: Path):
    parts = [run_tier(tmp_path, "--tier", f"{i}/3", "--rotate", "5") for i in range(3)]
    assert sum(len(part) for part in parts) == 10 and len(set().union(*parts)) == 10


def test_a_tier_ends_with_its_time(tmp_path: Path):
    assert 0 < len(run_tier(tmp_path, "--time-box", "0.12")) < 10


# ------------------------------------------------------------------------------------------------------------ documents
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__ and __version__ in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_metrics_that_are_named_exist(document: Path):
    info = EngineInfo(model_name="m", vocab_size=1, max_model_len=1, max_num_seqs=1, kv_tokens=1, eos_token_ids=[])
    metrics = ServerMetrics(info, "m")
    metrics.take(EngineStats(counters=dict.fromkeys([*COUNTERS, *(f"{name}.1" for name in BY_PLACE)], 1.0),
                             gauges=dict.fromkeys(GAUGES, 1.0)))
    families = list(text_string_to_metric_families(metrics.render().decode()))
    served = {family.name for family in families if family.type in ("histogram", "gauge")}
    served |= {sample.name for family in families for sample in family.samples}
    named = set(re.findall(r"\bstretto_[a-z0-9_]+[a-z0-9]\b", document.read_text()))
    assert named <= served, f"{document.name} names {sorted(named - served)}"


def test_every_error_is_in_the_table_of_errors():
    text = (ROOT / "docs/api.md").read_text()
    rows = re.findall(r"^\| ([0-9, ]+) \| (.*?) \|", text, re.M)
    table = {int(status): codes for numbers, codes in rows for status in numbers.split(",")}
    code = "".join(path.read_text() for path in sorted((ROOT / "stretto/serve").glob("*.py")))
    statuses = {int(status) for status in re.findall(r"ApiError\((\d+)", code)} | set(REFUSALS.values())
    assert statuses <= table.keys(), f"docs/api.md lacks {sorted(statuses - table.keys())}"
    conflicts = {code for code, status in REFUSALS.items() if status in (409, 429, 500)}
    assert all(f"`{code}`" in text for code in conflicts)


def test_files_that_are_named_exist():
    """Paths of this repository in backquotes, as far as they begin with one of its folders."""
    folders = "tests|stretto|benchmarks|training|deploy|docs"
    for document in DOCUMENTS:
        for named in re.findall(rf"`((?:{folders})/[\w./-]+\.\w+)`", document.read_text()):
            assert (ROOT / named).exists(), f"{document.name} names {named}"


def test_the_page_of_what_works_is_up_to_date():
    """In a process of its own: where kernels run in Triton's interpreter, they declare the CPU too."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    written = run(sys.executable, "-c", "from stretto.cli.matrix_page import collected, matrix_page; from"
                  " stretto.matrix import dump; m = collected(); print(dump(m), matrix_page(m))",
                  TRITON_INTERPRET="0")
    assert written.returncode == 0, written.stderr
    record, page = (ROOT / "stretto/matrix.json").read_text(), (ROOT / "docs/matrix.md").read_text()
    assert written.stdout == f"{record} {page}\n", "run `make docs`"


def test_no_cell_of_the_matrix_is_untested():
    assert load().untested() == []


def test_every_setting_is_documented():
    page = (ROOT / "docs/configuration.md").read_text()
    assert with_table(page) == page, "run `make docs`"
    flags = {"--" + name.replace("_", "-") for name in setting_names()}
    assert [flag for flag in sorted(flags) if f"`{flag}`" not in page] == []


def commands_of(document: Path) -> Iterator[str]:
    """Lines of code that call stretto, without what follows: a comment, another program, a file."""
    text = document.read_text().replace("\\\n", " ")
    for line in re.findall(r"^(?: {4}|\$ )?(?:[a-z ]+ \| )?(stretto [a-z].*)$", text, re.MULTILINE):
        yield re.split(r"\s+#|\s\|\s|\s>\s", line)[0].strip()


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if any(commands_of(d))], ids=lambda path: path.name)
def test_documented_commands_are_understood(document: Path):
    for command in commands_of(document):
        app = build_app()
        app.config = [read_units]
        try:
            app.parse_args(translate_tokens(shlex.split(command)[1:], []), exit_on_error=False, print_error=False)
        except CycloptsError as e:
            pytest.fail(f"{document.name}: {command}: {e}")


def test_every_command_is_documented():
    page = (ROOT / "docs/commands.md").read_text()
    app = build_app()
    names = [name for name in app if not name.startswith("-")] + [f"bench {name}" for name in app["bench"]
                                                                  if not name.startswith("-")]
    assert len(names) > 15 and [name for name in names if f"stretto {name}" not in page] == []


def test_every_file_of_kernels_is_in_the_table_of_kernels():
    page = (ROOT / "docs/kernels.md").read_text()
    table = "".join(line for line in page.splitlines() if line.startswith("| "))
    files = [str(path.relative_to(ROOT / "stretto")) for path in (ROOT / "stretto").rglob("*.py")
             if re.search(r"^def \w+_kernel\(", path.read_text(), re.MULTILINE)]
    assert len(files) > 15 and [name for name in files if f"`{name}`" not in table] == []


# ---------------------------------------------------------------------------------------------------------- mined cases
def test_tests_that_a_page_names_exist() -> None:
    """Functions and files of tests, in any page."""
    tests = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.name for path in tests} | {name for path in tests
                                             for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {(page.name, name) for page in (ROOT / "docs").glob("*.md")
             for name in re.findall(r"`(?:tests/\w+/)?(test_\w+(?:\.py)?)`", page.read_text())}
    assert len(named) > 40 and sorted(one for one in named if one[1] not in known) == []


CASES = ROOT.parent / "shared/cases/field_bugs.md"


def test_every_mined_case_has_a_test():
    """By its number in the name or the id of a test, as case_3_01."""
    if not CASES.exists():
        pytest.skip("the list of cases is not beside the repository")
    cases = set(re.findall(r"^\*\*(\d+\.\d+)", CASES.read_text(), re.MULTILINE))
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    tested = {f"{section}.{number}" for section, number in re.findall(r"case_(\d+)_(\d+)", text)}
    assert sorted(cases - tested) == []
