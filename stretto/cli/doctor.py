"""`stretto doctor`: what of this machine, this installation and a model is in order, and how to mend the rest."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import torch
from cyclopts import Group, Parameter
from huggingface_hub import constants
from rich.table import Table
from rich.text import Text

from stretto.cache import cache_folder
from stretto.cli.failures import EXIT_FAILED, CommandFailed
from stretto.cli.options import SERVER, ServerOptions
from stretto.cli.screen import show
from stretto.cli.starting import expected_failures
from stretto.compat import ConfigError
from stretto.config import MIB, Config, SpeculationSection, gib
from stretto.engine.build import eos_ids
from stretto.engine.llm import LLM
from stretto.engine.prepare import Prepared, prepare
from stretto.facts import device_facts, usable_cores
from stretto.model.hub import hub_trouble
from stretto.ops.native import library
from stretto.params import SamplingParams
from stretto.resolve import check_values
from stretto.spec.context import DrafterError
from stretto.spec.registry import find_drafter, known_drafters, make_host_drafter, missing_package
from stretto.text.tokenizer import load_tokenizer

LEAST_SHARED_MEMORY = 64 * MIB
LEAST_FILES = 4096
PROBE = "One, two, three, one, two, three, one, two,"  # repeats itself, so that any drafter has something to propose
PROBE_TOKENS = 24

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line. `fix`: what to do about it; empty where nothing is to be done."""

    state: State
    what: str
    found: str
    fix: str = ""


def doctor(server: ServerOptions = SERVER, *,
           as_json: Annotated[bool, Parameter(name="--json", negative=(), group=Group("Output", sort_key=0))] = False,
           ) -> int:
    """Check this machine, and the model if one is named: its files, its memory, and an answer with and without drafts.

    Exits with 1 if something would keep `stretto serve` from working with these settings.

    Parameters
    ----------
    as_json
        Print one JSON object, for bug reports.
    """
    config = server.config()
    findings = [*machine(), *installation(), *network(config)]
    findings += list(model_findings(config) if config.model.model is not None else settings_findings(config))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        show(_table(findings))
    return EXIT_FAILED if any(finding.state == "fail" for finding in findings) else 0


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        table.add_row(Text(finding.state, styles[finding.state]), finding.what, finding.found, finding.fix)
    return table


# ------------------------------------------------------------------------------------------------------------- machine
def machine() -> Iterator[Finding]:
    yield Finding("ok", "system", f"{platform.platform()}, Python {platform.python_version()}")
    for device in device_facts():
        yield Finding("ok", f"device {device.kind}", f"{device.name}, {gib(device.memory_free)} free of "
                                                     f"{gib(device.memory_total)}")
    yield from _gpu()
    yield _threads()
    yield from _native_kernels()
    yield from _shared_memory()
    yield _open_files()


def _gpu() -> Iterator[Finding]:
    """A GPU that PyTorch cannot use is the commonest of all troubles."""
    present = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        old = (major, minor) < (8, 0)
        yield Finding("warn" if old else "ok", "GPU", f"compute capability {major}.{minor}, CUDA {torch.version.cuda}",
                      "kernels are made for 8.0 and newer" if old else "")
    elif not present:
        return
    elif torch.version.cuda is None:
        yield Finding("warn", "GPU", f"there is one, but PyTorch {torch.__version__} was built without CUDA",
                      "install a CUDA build: pip install --force-reinstall torch")
    elif visible is not None and visible.strip() in ("", "-1"):
        yield Finding("warn", "GPU", f"hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("warn", "GPU", f"there is one, but PyTorch (CUDA {torch.version.cuda}) cannot use it",
                      "compare the driver's version in nvidia-smi with that CUDA version")


def _threads() -> Finding:
    cores, threads = usable_cores(), torch.get_num_threads()
    found = f"{threads} on {cores} usable cores"
    if threads > cores:
        return Finding("warn", "threads", found, f"set OMP_NUM_THREADS={cores}")
    return Finding("ok", "threads", found)


def _native_kernels() -> Iterator[Finding]:
    missing = library.troubles()
    there = [name for name in library.names() if name not in missing]
    if there:
        yield Finding("ok", "native kernels", f"{', '.join(there)}: compiled for this processor")
    for name, why in missing.items():
        reason, _, way_out = why.partition("; ")
        yield Finding("warn", "native kernels", f"without {name}: {reason}", way_out)


def _shared_memory() -> Iterator[Finding]:
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        small = free < LEAST_SHARED_MEMORY
        yield Finding("warn" if small else "ok", "shared memory", f"{gib(free)} free in /dev/shm",
                      "start the container with --shm-size=1g" if small else "")


def _open_files() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = hard != resource.RLIM_INFINITY and hard < LEAST_FILES
    shown = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Finding("warn" if few else "ok", "open files", f"at most {shown}",
                   f"raise the hard limit (ulimit -Hn) to {LEAST_FILES} for many clients" if few else "")


# -------------------------------------------------------------------------------------------------------- installation
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "gguf", "numpy", "fastapi",
            "uvicorn", "pyzmq", "msgspec", "triton", "flashinfer-python")
OPTIONAL = {"triton", "flashinfer-python"}


def installation() -> Iterator[Finding]:
    found, missing = [], []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    yield Finding("ok", "packages", f"stretto {version('stretto')}; " + ", ".join(found))
    needed = [package for package in missing if package not in OPTIONAL]
    if needed:
        yield Finding("fail", "packages", f"missing: {', '.join(needed)}", f"pip install {' '.join(needed)}")
    lacking = {name: missing_package(name) for name in known_drafters(())}
    yield Finding("ok", "drafters", ", ".join(name for name, lacks in lacking.items() if lacks is None),
                  "; ".join(lacks for lacks in lacking.values() if lacks is not None))
    yield _writable("own cache", cache_folder(), "STRETTO_CACHE")
    yield _writable("hub cache", Path(constants.HF_HUB_CACHE), "HF_HUB_CACHE")


def _writable(what: str, folder: Path, variable: str) -> Finding:
    """The folder, or the nearest one above it that exists, must take new files."""
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    if os.access(existing, os.W_OK):
        return Finding("ok", what, f"{folder}, {gib(shutil.disk_usage(existing).free)} free on its disk")
    return Finding("warn", what, f"{folder} cannot be written", f"set {variable} to a folder that can")


def network(config: Config) -> Iterator[Finding]:
    token = "set" if os.environ.get("HF_TOKEN") or Path(constants.HF_TOKEN_PATH).exists() else "not set"
    trouble = None if constants.HF_HUB_OFFLINE else hub_trouble()
    if trouble is not None:
        yield Finding("warn", "hub", f"{trouble}, token {token}",
                      "models on this disk work; HF_ENDPOINT names a mirror, HF_HUB_OFFLINE=1 asks nobody")
    else:
        found = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} answers"
        yield Finding("ok", "hub", f"{found}, token {token}")
    host, port = config.serve.host, config.serve.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            yield Finding("fail", "port", f"{host}:{port}: {e.strerror}", "choose another --port or --host")
        else:
            yield Finding("ok", "port", f"{host}:{port} is free")


# ----------------------------------------------------------------------------------------------- settings by themselves
def settings_findings(config: Config) -> Iterator[Finding]:
    """Of settings for which no model is named: what is wrong with them whatever the model, and what was not looked
    at."""
    try:
        check_values(config)
        _check_drafter(config.speculation.speculation)
    except ConfigError as e:
        for refusal in e.refusals:
            yield Finding("fail", refusal.feature, f"{refusal.component}: {refusal.why}", refusal.remedy)
    except DrafterError as e:
        yield Finding("fail", f"--speculation {config.speculation.speculation}", str(e), "choose another drafter")
    if given := _given(config):
        yield Finding("warn", "settings", f"no model is named, so {', '.join(given)} cannot be tried",
                      "name the model: stretto doctor MODEL ...")


def _check_drafter(asked: str) -> None:
    """By its name and packages alone; a checkpoint is not fetched for it. Raises DrafterError."""
    if asked == "off" or "/" in asked:
        return
    kind, _ = find_drafter(asked)
    if hasattr(kind, "host"):
        make_host_drafter(asked)


def _given(config: Config) -> list[str]:
    """Flags that are not at their defaults and mean something only beside a model."""
    usual, flags = Config(), []
    for section in fields(config):
        if section.name != "serve":
            now, default = getattr(config, section.name), getattr(usual, section.name)
            flags += [f"--{'no-' if getattr(now, field.name) is False else ''}{field.name.replace('_', '-')}"
                      for field in fields(now) if getattr(now, field.name) != getattr(default, field.name)]
    return flags


# --------------------------------------------------------------------------------------------------------------- model
def model_findings(config: Config) -> Iterator[Finding]:
    """Stops at the first failure: what follows would only repeat it."""
    try:
        with expected_failures():
            prepared = prepare(config)
    except CommandFailed as e:
        yield Finding("fail", "model", str(e))
        return
    except ConfigError as e:
        for refusal in e.refusals:
            yield Finding("fail", refusal.feature, f"{refusal.component}: {refusal.why}", refusal.remedy)
        return
    facts, memory = prepared.facts.model, prepared.resolved.memory
    yield Finding("ok", "model", f"{prepared.path}: {facts.architecture}, {facts.parameters / 1e6:,.1f}M parameters, "
                                 f"stored as {facts.dtype}")
    yield Finding("ok", "memory", f"{gib(memory.budget)} needed: weights {gib(memory.weights)}, KV {gib(memory.kv)}")
    steps: tuple[Callable[[], Finding], ...] = (lambda: _tokenizer(prepared), lambda: _ends(prepared),
                                                lambda: _answers(config))
    for step in steps:
        try:
            with expected_failures():
                yield step()
        except CommandFailed as e:
            yield Finding("fail", "model", str(e))
            return


def _tokenizer(prepared: Prepared) -> Finding:
    tokenizer = load_tokenizer(prepared.tokenizer_path)
    text = "Größe 12 → 猫"
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not all(0 <= token < prepared.facts.model.vocab_size for token in ids):
        return Finding("fail", "tokenizer", f"gives ids beyond the model's {prepared.facts.model.vocab_size}",
                       "it belongs to another model: see --tokenizer")
    if tokenizer.decode(ids).strip() != text:
        return Finding("warn", "tokenizer", f"does not give {text!r} back", "it does not know all of these characters")
    if tokenizer.chat_template is None:
        return Finding("warn", "tokenizer", "has no chat template", "chat requests will be refused; completions work")
    return Finding("ok", "tokenizer", "round trip and chat template in order")


def _ends(prepared: Prepared) -> Finding:
    """What ends an answer."""
    tokenizer, size = load_tokenizer(prepared.tokenizer_path), prepared.facts.model.vocab_size
    ends = sorted(eos_ids(prepared, tokenizer))
    if beyond := [token for token in ends if token >= size]:
        return Finding("warn", "end of answers", f"{beyond} are ids beyond the model's {size}, which it never gives",
                       "correct eos_token_id in generation_config.json")
    if not ends:
        return Finding("warn", "end of answers", "no id ends one", "set eos_token_id in generation_config.json; until "
                       "then max_tokens and stop strings end answers")
    return Finding("ok", "end of answers", ", ".join(f"{token} {tokenizer.decode([token], False)!r}" for token in ends))


def _answers(config: Config) -> Finding:
    """The same short text with drafts and without must be the same tokens."""
    plain, drafted = _answer(config, "off"), None
    if config.speculation.speculation != "off":
        drafted = _answer(config, config.speculation.speculation)
    if drafted is not None and drafted != plain:
        return Finding("fail", "self-test", f"with --speculation {config.speculation.speculation} the answer differs",
                       "please report this, with `stretto doctor --json`")
    how = "with and without drafts" if drafted is not None else "without drafts"
    return Finding("ok", "self-test", f"{len(plain)} tokens generated {how}")


def _answer(config: Config, speculation: str) -> list[int]:
    section = SpeculationSection() if speculation == "off" else config.speculation
    with LLM(config=replace(config, speculation=section)) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=PROBE_TOKENS, ignore_eos=True)
        return llm.generate(PROBE, greedy)[0].token_ids
