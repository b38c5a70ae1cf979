"""The laws of docs/design.md that can be read off the source: who imports whom, who writes what, how long it is.

The source is parsed, not imported, except in one child process that imports the torch-free modules with torch blocked.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "stretto"
MAX_FUNCTION_LINES = 70

# ------------------------------------------------------------------------------------------------------ the source tree
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in FILES}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but nothing that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        yield child
        yield from runtime_nodes(child)


def imported(node: ast.AST, importer: str) -> list[str]:
    """Modules that an import statement names. `from stretto.a import b` names stretto.a.b where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{importer} line {node.lineno}: relative import; write the whole name"
        base = node.module or ""
        return [f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names]
    return []


def imports_of(module: str) -> dict[str, int]:
    """Imported module -> line, at any depth of the file."""
    found: dict[str, int] = {}
    for node in runtime_nodes(TREES[MODULES[module]]):
        for name in imported(node, module):
            found.setdefault(name, node.lineno)  # type: ignore[attr-defined]
    return found


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- imports
TORCH_FREE = ("stretto.host", "stretto.wire", "stretto.params", "stretto.protocol", "stretto.text", "stretto.config",
              "stretto.compat", "stretto.report", "stretto.cli.main", "stretto.cli.sources", "stretto.cli.options",
              "stretto.cli.failures", "stretto.model.hub", "stretto.model.config", "stretto.serve", "stretto.cli.serve",
              "stretto.engine.supervisor", "stretto.engine.locate", "stretto.evals", "stretto.batch", "stretto.asking",
              "stretto.bench.load", "stretto.bench.plots", "stretto.bench.compare", "stretto.cli.evaluate",
              "stretto.cli.run_batch", "stretto.cli.remote", "stretto.cli.bench_serve", "stretto.cli.bench_results",
              "stretto.cli.completion", "stretto.replicas", "stretto.cli.replicas", "stretto.cli.server",
              "stretto.plan", "stretto.cli.plan", "stretto.cli.mapped", "stretto.foreign")

IMPORT_WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ImportError(f"{name} is imported by a module that must do without it")

sys.meta_path.insert(0, NoTorch())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as e:
        failed.append(f"{name}: {e}")
print("\\n".join(failed))
"""


def test_the_host_half_and_the_contracts_run_without_torch():
    names = [module for module in MODULES if any(under(module, prefix) for prefix in TORCH_FREE)]
    assert {"stretto.wire", "stretto.host", "stretto.config"} <= set(names)
    child = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_TORCH, *names], capture_output=True, text=True,
                           timeout=120)
    assert child.returncode == 0 and child.stdout.strip() == "", child.stdout + child.stderr


ABOVE_OPS = tuple(f"stretto.{part}" for part in ("device", "engine", "host", "model", "sample", "serve", "spec", "cli"))
NEVER = {  # importer -> what it may not import
    "stretto.host": ("torch", "stretto.device", "stretto.ragged", "stretto.ops", "stretto.attn", "stretto.model",
                     "stretto.sample", "stretto.spec", "stretto.engine", "stretto.serve", "stretto.cli"),
    "stretto.device": ("stretto.host", "stretto.engine", "stretto.serve", "stretto.cli"),
    "stretto.spec": ("stretto.host", "stretto.device.slots", "stretto.engine", "stretto.serve", "stretto.cli"),
    "stretto.model": ("stretto.sample", "stretto.host", "stretto.device", "stretto.spec", "stretto.engine",
                      "stretto.serve", "stretto.cli"),
    "stretto.ops": ABOVE_OPS,
    "stretto.attn": ABOVE_OPS,
    "stretto.sample": ("stretto.model", "stretto.spec", "stretto.host", "stretto.engine", "stretto.serve",
                       "stretto.cli"),
    "stretto.text": ("torch", "stretto.host", *ABOVE_OPS),
    "stretto.serve": ("stretto.host", "stretto.device", "stretto.ops", "stretto.attn", "stretto.sample", "stretto.spec",
                      "stretto.cli"),
    "stretto.engine": ("stretto.serve", "stretto.cli"),
    "stretto.wire": ("torch", "stretto"),
    "stretto.ragged": ("stretto",),
    "stretto.protocol": ("torch", "stretto.wire", *ABOVE_OPS),
    "stretto.config": ("torch", *ABOVE_OPS),
    "stretto.compat": ("torch", *ABOVE_OPS),
}


@pytest.mark.parametrize("importer", sorted(NEVER))
def test_imports_point_down(importer: str):
    own = [module for module in MODULES if under(module, importer)]
    assert own, f"{importer} is gone; correct this test"
    wrong = [f"{module} line {line} imports {name}" for module in own for name, line in imports_of(module).items()
             for forbidden in NEVER[importer] if under(name, forbidden) and not under(name, importer)]
    assert wrong == []


def test_no_import_cycle():
    """Imports inside functions count too."""
    graph = {module: {name for name in imports_of(module) if name in MODULES and name != module} for module in MODULES}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as e:
        pytest.fail("import cycle: " + " <- ".join(e.args[1]))


# Third-party packages that an installation may lack, or that only one path needs and that take long to import.
OPTIONAL = {"opentelemetry", "triton", "flashinfer", "llama_cpp", "matplotlib", "llguidance", "transformers", "dill"}
KERNEL_PACKAGES = {"triton", "flashinfer"}


def needs_optional(module: str) -> bool:
    """Modules of ours that import such a package at their top may be imported where they are used."""
    own = module in MODULES and any(name.partition(".")[0] in KERNEL_PACKAGES for name in imports_of(module))
    return own or module in ("stretto.model.fallback", "stretto.attn.triton_ragged")


def test_imports_stand_at_the_top():
    wrong = []
    for path, tree in TREES.items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in runtime_nodes(function):
                names = imported(node, str(path))
                wrong += [f"{where(path, node)} imports {name} inside {function.name}" for name in names
                          if name.partition(".")[0] not in OPTIONAL and not needs_optional(name)]
    assert sorted(set(wrong)) == []


# --------------------------------------------------------------------------------------------------------------- shape
def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_functions_are_short():
    long = [f"{where(path, node)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
            for path, tree in TREES.items() for node in functions(tree)
            if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES]
    assert long == [], f"longer than {MAX_FUNCTION_LINES} lines"


def test_every_module_says_what_it_is_for():
    silent = [str(path.relative_to(ROOT)) for path, tree in TREES.items()
              if tree.body and not ast.get_docstring(tree)]
    assert silent == []


ALGORITHMS = r"eagle3?|ngram|suffix|mtp|nextn|dflash|dspark|standalone|medusa|scripted"


def test_nobody_asks_for_an_algorithm_by_name():
    """Capabilities, not names: no is_eagle(), no comparison with the name of a drafter, no enum of phases."""
    wrong = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            name = getattr(node, "name", None) or getattr(node, "attr", None) or getattr(node, "id", None)
            if isinstance(name, str) and re.fullmatch(rf"_?(is|uses|supports)_({ALGORITHMS})", name):
                wrong.append(f"{where(path, node)} {name}")
            if isinstance(node, ast.Compare) and under(module_name(path), "stretto") \
                    and any(isinstance(c, ast.Constant) and isinstance(c.value, str)
                            and re.fullmatch(ALGORITHMS, c.value.lower()) for c in [node.left, *node.comparators]):
                wrong.append(f"{where(path, node)} {ast.unparse(node)}")
            if isinstance(node, ast.ClassDef) and re.search(r"(Forward|Step|Batch)(Mode|Phase|Kind)$", node.name):
                wrong.append(f"{where(path, node)} class {node.name}")
    assert wrong == []


# -------------------------------------------------------------------------------------------------------------- writers
def written(node: ast.AST) -> list[ast.expr]:
    """Expressions that a statement writes to: assigned, deleted, or changed by a method of torch that ends in "_"."""
    if isinstance(node, ast.Assign):
        return list(node.targets)
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Delete):
        return list(node.targets)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) \
            and re.fullmatch(r"[a-z][a-z_0-9]*[a-z0-9]_", node.func.attr):
        return [node.func.value]
    return []


def flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            yield from flat(target.elts)
        else:
            yield target


VIEWS = {"view", "flatten", "narrow", "select", "reshape", "unsqueeze", "squeeze", "transpose", "unbind", "get"}


def chain(expression: ast.expr) -> list[str]:
    """Names along a chain of attributes and subscripts, outermost first: a.b[i].c -> ["c", "b", "a"]."""
    names: list[str] = []
    while True:
        if isinstance(expression, ast.Attribute):
            names.append(expression.attr)
            expression = expression.value
        elif isinstance(expression, ast.Subscript):
            expression = expression.value
        elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) \
                and expression.func.attr in VIEWS:
            expression = expression.func.value
        elif isinstance(expression, ast.Call):  # a new object
            return names
        else:
            return [*names, expression.id] if isinstance(expression, ast.Name) else names


def stores(expression: ast.expr) -> bool:
    """False for a plain name or an attribute of self: that binds a reference and changes no contents."""
    own = isinstance(expression, ast.Attribute) and ast.unparse(expression.value) == "self"
    return not (own or isinstance(expression, ast.Name))


SLOT_COLUMNS = {"ints", "reals", "log", "stops", "page_tables", "bias_ids", "bias_values"}
SLOT_WRITERS = {"stretto.device.slots", "stretto.ops.commit"}


def slot_writes(tree: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(tree) for target in flat(written(node))
            if SLOT_COLUMNS & set(chain(target)) and (stores(target) or isinstance(node, ast.Call))]


def test_one_writer_of_the_slot_table():
    device_side = [m for m in MODULES if m.split(".")[1:2] in (["device"], ["ops"], ["sample"], ["spec"], ["attn"])]
    writers = {m for m in device_side if slot_writes(TREES[MODULES[m]])}
    assert "stretto.device.slots" in writers, "this test no longer sees the writes it guards"
    wrong = [where(MODULES[m], node) for m in sorted(writers - SLOT_WRITERS) for node in slot_writes(TREES[MODULES[m]])]
    assert wrong == []


LEASE_FACTS = {"lo", "draft_lo", "top", "flight", "flying"}
LEASE_BOOKS = {"nodes", "pages", "first", "root"}  # names that others use too: counted where the owner is a lease
CHANGERS = {"append", "appendleft", "extend", "insert", "pop", "popleft", "remove", "clear", "update", "add", "discard",
            "setdefault", "sort", "reverse"}


def lease_writes(tree: ast.AST) -> list[ast.AST]:
    found = []
    for node in ast.walk(tree):
        targets = list(flat(written(node)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGERS:
            targets.append(node.func.value)
        for target in targets:
            names = chain(target)
            if names[:1] and names[0] in LEASE_FACTS and len(names) > 1:
                found.append(node)
            if len(names) > 1 and names[0] in LEASE_BOOKS and names[1] == "lease":
                found.append(node)
    return found


def test_one_writer_of_leases():
    host = [module for module in MODULES if under(module, "stretto.host")]
    writers = {module for module in host if lease_writes(TREES[MODULES[module]])}
    if "stretto.host.ledger" in MODULES:
        assert "stretto.host.ledger" in writers, "this test no longer sees the writes it guards"
    wrong = [where(MODULES[m], node) for m in sorted(writers - {"stretto.host.ledger"})
             for node in lease_writes(TREES[MODULES[m]])]
    assert wrong == []


def test_one_writer_of_copies_in_host_memory():
    """Who notes which host page holds what: the tier alone, for the ledger, which alone calls it."""
    facts = {"saved", "saved_kids"}
    for module in (m for m in MODULES if under(m, "stretto.host")):
        written_here = [where(MODULES[module], node) for node in ast.walk(TREES[MODULES[module]])
                        for target in flat(written(node)) if len(names := chain(target)) > 1 and names[0] in facts
                        and names[1] != "self"]  # a name alone is a field's declaration
        assert bool(written_here) == (module == "stretto.host.tier"), written_here
    for module in ("stretto.host.tier", "stretto.host.copies"):
        assert {m for m in MODULES if module in imports_of(m)} == {"stretto.host.ledger"}


def test_a_plan_names_no_length_of_a_live_row():
    """A row of a plan is (slot, epoch, q_cap) and nothing more."""
    plan = next(node for node in ast.walk(TREES[PACKAGE / "wire.py"])
                if isinstance(node, ast.ClassDef) and node.name == "StepPlan")
    fields = {node.target.id: ast.unparse(node.annotation) for node in plan.body
              if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert fields["rows"] == "list[tuple[int, int, int]]"
    assert not [name for name in fields if re.search(r"len|known|base|position", name)]


# -------------------------------------------------------------------------------------------------------- global state
MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "count", "bytearray", "Queue",
                 "SimpleQueue", "WeakKeyDictionary", "WeakValueDictionary"}


def module_level(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def test_no_global_state():
    """No `global`, no counter or empty container at module level, no table that a function changes."""
    wrong = []
    for path, tree in TREES.items():
        wrong += [f"{where(path, node)} global" for node in ast.walk(tree) if isinstance(node, ast.Global)]
        tables = {}
        for name, value in module_level(tree):
            tables[name] = value
            called = chain(value.func)[:1] if isinstance(value, ast.Call) else []
            empty = isinstance(value, ast.Dict | ast.List) and not (getattr(value, "keys", None) or
                                                                    getattr(value, "elts", None))
            bare = isinstance(value, ast.Call) and not (value.args or value.keywords)
            if (called and called[0] in MUTABLE_CALLS and (bare or called[0] == "count")) or empty:
                wrong.append(f"{where(path, value)} {name} can only be useful if it is changed")
        for function in functions(tree):
            wrong += [f"{where(path, node)} {function.name} changes {name}" for node in ast.walk(function)
                      for name in changed_tables(node) if name in tables]
    assert sorted(set(wrong)) == []


def changed_tables(node: ast.AST) -> list[str]:
    """Names whose contents a node changes: x[...] = , del x[...], x.append(...)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGERS:
        return [node.func.value.id] if isinstance(node.func.value, ast.Name) else []
    targets = [target for target in flat(written(node)) if isinstance(target, ast.Subscript)]
    return [target.value.id for target in targets if isinstance(target.value, ast.Name)]


# ------------------------------------------------------------------------------------------- the tests test something
PLANTED = '''
import itertools
numbers = itertools.count()
CACHE = {}
TABLE = {"a": 1}
def is_eagle(x): ...
def f(slots, lease):
    global CACHE
    TABLE["b"] = 2
    slots.ints[3] = 1
    slots.log.view(3).copy_(x)
    slots.log[rows].long().clamp_(min=0)
    lease.lo = 3
    lease.pages[0].append(1)
    y.lease.flying += 1
'''


def test_the_rules_catch_what_they_forbid():
    tree = ast.parse(PLANTED)
    assert len(slot_writes(tree)) == 2
    assert len(lease_writes(tree)) == 3
    assert [name for node in ast.walk(tree) for name in changed_tables(node)] == ["TABLE"]
    assert imported(ast.parse("from stretto.host import ledger").body[0], "x") == ["stretto.host.ledger"]
