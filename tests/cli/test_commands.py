"""Commands as a user runs them, on a real small model."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from stretto.cli.main import run_app
from stretto.cli.report import print_report, render
from stretto.spec.suffix import PACKAGE

MODEL = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"
needs_model = pytest.mark.skipif(not MODEL.is_dir(), reason="stories260k is not beside the repository")


class Ran:
    """What one command printed and how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture, *tokens: str, **environment: str):
        self.errors = io.StringIO()
        try:
            self.code = run_app([str(token) for token in tokens], environment, Console(file=self.errors, width=500))
        except SystemExit as e:  # cyclopts ends like this on a usage error
            self.code = int(e.code or 0)
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err + self.errors.getvalue()


@pytest.fixture
def stretto(capsys: pytest.CaptureFixture):
    return lambda *tokens, **environment: Ran(capsys, *tokens, **environment)


# ---------------------------------------------------------------------------------------------------------- the surface
def test_help_and_version_answer_without_torch():
    code = ("import sys; from stretto.cli.main import run_app; from rich.console import Console; "
            "run_app(sys.argv[1:], {}, Console()); assert 'torch' not in sys.modules, 'torch was imported'")
    for token in ("--help", "--version"):
        child = subprocess.run([sys.executable, "-c", code, token], capture_output=True, text=True, timeout=60)
        assert child.returncode == 0 and "stretto" in child.stdout, child.stderr
    assert "0." in child.stdout


def test_a_reader_that_stops_is_no_failure():
    """`stretto completion bash | head`."""
    code = "import sys; from stretto.cli.main import main; sys.argv[1:] = ['completion', 'bash']; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b"" and child.wait(60) == 141


@pytest.mark.parametrize("command", ["serve", "run", "explain", "doctor", "bench latency", "bench throughput"])
def test_each_command_has_help(stretto, command: str):
    ran = stretto(*command.split(), "--help")
    assert ran.code == 0 and "--max-model-len" in ran.out and "--config" in ran.out
    assert ("--port" in ran.out) == (command in ("serve", "explain", "doctor"))


@pytest.mark.parametrize(("tokens", "code", "message"), [
    (["explain", "--max-model-length", "3"], 2, "Did you mean --max-model-len"),
    (["explian"], 2, "explain"),
    (["explain", "--swap-space", "4"], 2, "--swap-space"),
    (["explain", "--kv-memory", "lots"], 2, "--kv-memory: 'lots' is not a number"),
    (["explain", "--max-num-seqs", "2.5"], 2, "--max-num-seqs is 2.5; it must be a whole number"),
    (["bench", "latency", "--rounds", "1.5"], 2, "--rounds is 1.5; it must be a whole number"),
    (["explain", "--config", "none.yaml"], 2, "none.yaml cannot be read"),
    (["explain", "./nowhere"], 1, "no such file or folder"),
    (["explain", "--dtype", "int3"], 2, "int3"),
    (["explain", "m", "n"], 2, "Unused Tokens: ['n']"),
    (["explain", "m", "--served-model-name", "a", "b", "c", "--port", "3"], 2,
     "again: --served-model-name b --served-model-name c"),
])
def test_what_cannot_be_understood(stretto, tokens: list[str], code: int, message: str):
    ran = stretto(*tokens)
    assert ran.code == code and message in " ".join(ran.err.replace("│", " ").split())
    assert "Traceback" not in ran.err


def test_numbers_that_would_be_rounded_are_named_with_their_source(stretto, tmp_path: Path):
    (tmp_path / "settings.yaml").write_text("max-num-seqs: 2.5")
    for ran, source in ((stretto("explain", "m", "--config", tmp_path / "settings.yaml"), "settings.yaml"),
                        (stretto("explain", "m", STRETTO_MAX_NUM_SEQS="2.5"), "a STRETTO_ variable")):
        assert ran.code == 2 and "--max-num-seqs is 2.5" in ran.err and source in ran.err


# -------------------------------------------------------------------------------------------------------------- explain
@needs_model
def test_a_drafter_whose_package_is_missing_is_not_the_models_fault(stretto, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    ran = stretto("explain", MODEL, "--speculation", "suffix")
    said = " ".join(ran.err.split())
    assert ran.code == 3 and "this installation" in said and "pip install 'stretto[suffix]'" in said


@needs_model
def test_explain_as_json(stretto):
    ran = stretto("explain", MODEL, "--max-model-len", "0.25K", "--kv-memory", "1MiB", "--json", "--api-key", "hush")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["limits"]["max_model_len"] == 256 and report["memory"]["kv"] == 1024**2
    assert report["model"]["parameters"] == 260032 and report["server"]["api_keys"] == 1
    assert "hush" not in ran.out, "a report must hold no secret"
    asked = {line["feature"]: line["asked"] for line in report["features"]}
    assert asked["max_model_len"] == "256" and asked["overlap"] == "auto"


@needs_model
def test_explain_as_table(stretto):
    ran = stretto("explain", MODEL, "--no-overlap", "--context-length", "100")
    assert ran.code == 0 and "stories260k" in ran.out and "note: --context-length is read as" in ran.err
    overlap = next(line for line in ran.out.splitlines() if line.startswith("overlap"))
    assert overlap.split() == ["overlap", "off", "off"]


@needs_model
def test_explain_ends_with_3_where_something_would_be_off(stretto):
    ran = stretto("explain", MODEL, "--device", "cuda", "--speculation", "eagle9")
    assert ran.code == 3 and "refused: --speculation eagle9 does not work with" in ran.err
    as_json = stretto("explain", MODEL, "--max-model-len", "1000", "--json")
    refused = json.loads(as_json.out)["refused"]
    assert as_json.code == 3 and refused[0]["feature"] == "--max-model-len 1000"
    assert refused[0]["component"] == "model stories260k" and refused[0]["remedy"] == "set 512 or fewer"


@needs_model
def test_the_command_line_wins_over_variables_and_variables_over_the_file(stretto, tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {MODEL}\nmax-model-len: 100\nmax-num-seqs: 5\nseed: 1\n")
    ran = stretto("explain", "--json", "--max-num-seqs", "7", STRETTO_CONFIG=str(file), STRETTO_MAX_NUM_SEQS="6",
                  STRETTO_MAX_MODEL_LEN="200")
    limits = json.loads(ran.out)["limits"]
    assert (limits["max_model_len"], limits["max_num_seqs"]) == (200, 7)


# --------------------------------------------------------------------------------------------------------------- report
@needs_model
def test_the_start_report_is_a_table_on_a_terminal_and_a_json_line_elsewhere(stretto):
    report = json.loads(stretto("explain", MODEL, "--json").out)
    log = io.StringIO()
    print_report(report, Console(file=log))
    assert log.getvalue().count("\n") == 1 and json.loads(log.getvalue())["event"] == "start"
    screen = io.StringIO()
    print_report(report, Console(file=screen, force_terminal=True, width=200))
    assert "mixed steps" in screen.getvalue() and not screen.getvalue().lstrip().startswith("{")
    plain = Console(file=io.StringIO(), width=200)
    plain.print(render({**report, "start": {"weights": 1.25}, "attention": "TritonRagged; a kernel is missing"}))
    assert "weights 1.2 s" in plain.file.getvalue()  # type: ignore[attr-defined]
    assert "TritonRagged; a kernel is missing" in plain.file.getvalue()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------------ run
@needs_model
def test_run_answers_one_prompt(stretto):
    ran = stretto("run", MODEL, "Once upon a time", "--raw", "--max-tokens", "12", "--temperature", "0", "--stats")
    assert ran.code == 0 and "there was a little girl" in ran.out
    assert "12 tokens in" in ran.err


@needs_model
def test_run_reads_the_prompt_from_standard_input(stretto, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time"))
    ran = stretto("run", MODEL, "--raw", "--max-tokens", "4", "--temperature", "0")
    assert ran.code == 0 and ran.out.strip() == ", there was a"


@needs_model
def test_run_says_why_there_is_no_answer(stretto):
    ran = stretto("run", MODEL, "--prompt", "hello")
    assert ran.code == 1 and "chat template" in ran.err and "Traceback" not in ran.err
    assert stretto("run", MODEL, "--prompt", "x", "--raw", "--temperature", "-1").code == 1


@needs_model
def test_run_holds_a_conversation(stretto, monkeypatch: pytest.MonkeyPatch):
    lines = iter(["Once upon a time", "/what", "/clear", "Once upon a time", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    ran = stretto("run", MODEL, "--raw", "--max-tokens", "4", "--temperature", "0")
    assert ran.code == 0 and ran.out.count(", there was") == 2 and "/clear starts" in ran.err


# --------------------------------------------------------------------------------------------------------------- doctor
@needs_model
def test_doctor_checks_the_model_and_compares_drafts(stretto):
    ran = stretto("doctor", MODEL, "--speculation", "ngram", "--port", "0", "--json")
    findings = {finding["what"]: finding for finding in json.loads(ran.out)["findings"]}
    assert ran.code == 0 and findings["self-test"]["found"] == "24 tokens generated with and without drafts"
    assert findings["tokenizer"]["state"] == "warn" and "chat template" in findings["tokenizer"]["found"]


def test_doctor_fails_for_a_model_that_is_not_there(stretto):
    ran = stretto("doctor", "./nowhere", "--port", "0", "--json")
    failed = [finding for finding in json.loads(ran.out)["findings"] if finding["state"] == "fail"]
    assert ran.code == 1 and [finding["what"] for finding in failed] == ["model"]


def _findings(ran: Ran, state: str) -> dict[str, str]:
    return {found["what"]: found["found"] for found in json.loads(ran.out)["findings"] if found["state"] == state}


def test_doctor_without_a_model_says_what_it_cannot_try(stretto, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    ran = stretto("doctor", "--port", "0", "--json", "--kv-memory", "1KB", "--max-model-len", "99999999",
                  "--no-overlap")
    warned = _findings(ran, "warn")
    assert ran.code == 0 and "--max-model-len, --kv-memory, --no-overlap cannot be tried" in warned["settings"]
    drafters = next(found for found in json.loads(ran.out)["findings"] if found["what"] == "drafters")
    assert "ngram" in drafters["found"] and "suffix" not in drafters["found"] and "stretto[suffix]" in drafters["fix"]
    for speculation in ("foo", "suffix"):
        ran = stretto("doctor", "--port", "0", "--json", "--speculation", speculation)
        assert ran.code == 1 and f"--speculation {speculation}" in _findings(ran, "fail")
    ran = stretto("doctor", "--port", "0", "--json", "--page-size", "0")
    assert ran.code == 1 and "--page-size 0" in _findings(ran, "fail")
    ran = stretto("doctor", "--port", "0", "--json")
    assert ran.code == 0 and "settings" not in _findings(ran, "warn")


def test_tables_show_brackets_as_they_are(stretto, monkeypatch: pytest.MonkeyPatch):
    """`[suffix]` would be rich's markup, and "pip install 'stretto'" of no help; "[/]" would end the command."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    ran = stretto("doctor", "--port", "0")
    assert ran.code == 0 and "stretto[suffix]" in "".join(ran.out.split())
    ran = stretto("doctor", "./[/]", "--port", "0")
    assert ran.code == 1 and "[/]" in ran.out


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch):
    """An endpoint where nobody listens."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("hub")
def test_doctor_asks_the_hub(stretto, monkeypatch: pytest.MonkeyPatch):
    ran = stretto("doctor", "--port", "0", "--json")
    (found,) = [finding for finding in json.loads(ran.out)["findings"] if finding["what"] == "hub"]
    assert ran.code == 0 and found["state"] == "warn" and "http://127.0.0.1:9 cannot be reached" in found["found"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = threading.Thread(target=_say_nothing, args=(server,))
        answer.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        ran = stretto("doctor", "--port", "0", "--json")
        answer.join()
    (found,) = [finding for finding in json.loads(ran.out)["findings"] if finding["what"] == "hub"]
    assert found["state"] == "ok" and "answers" in found["found"]


def _say_nothing(server: socket.socket) -> None:
    """One request is answered with 204."""
    server.settimeout(30)
    with server.accept()[0] as call:
        call.recv(65536)
        call.sendall(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")


def test_doctor_never_shows_a_token(stretto, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_hush")
    ran = stretto("doctor", "--port", "0", "--json")
    assert "token set" in ran.out and "hf_hush" not in ran.out


# ---------------------------------------------------------------------------------------------------------------- bench
@needs_model
def test_bench_against_transformers(stretto, tmp_path: Path):
    output = tmp_path / "figures.json"
    ran = stretto("bench", "throughput", MODEL, "--against", "transformers", "--num-prompts", "3", "--input-len",
                  "20", "--output-len", "16", "--rounds", "2", "--no-memory", "--output-json", output, "--json")
    assert "throughput of stretto and transformers: a warm-up and 2 rounds of 3 prompts with" in ran.err
    assert ran.code == 0 and json.loads(ran.out) == json.loads(output.read_text())
    found = json.loads(ran.out)
    assert [engine["name"] for engine in found["engines"]] == ["stretto", "transformers"]
    assert found["ratios"][0]["same_answer_share"] == 1.0, "float32, greedy: the same answers"
    assert len(found["engines"][0]["rates"]) == 2 and found["machine"]["threads"] >= 1


@needs_model
def test_bench_refuses_what_it_cannot_measure(stretto, tmp_path: Path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"text": "no prompt"}\n')
    for tokens, message in ((["--input-len", "600"], "exceed the context of 512"),
                            (["--rounds", "0"], "--rounds is 0"),
                            (["--dataset-path", str(prompts)], 'has neither "prompt"'),
                            (["--against", "llama-cpp"], "llama-cpp reads GGUF files")):
        ran = stretto("bench", "latency", MODEL, "--no-memory", "--output-len", "4", *tokens)
        assert ran.code == 1 and message in ran.err


@needs_model
def test_bench_startup_adds_up(stretto, tmp_path: Path):
    output = tmp_path / "start.json"
    ran = stretto("bench", "startup", MODEL, "--rounds", "1", "--output-json", output)
    found = json.loads(output.read_text())
    assert ran.code == 0 and "weights" in ran.out
    ready, phases = found["ready"]["median"], {name: one["median"] for name, one in found["phases"].items()}
    assert sum(phases.values()) == pytest.approx(ready, rel=0.01)
    assert found["first_answer"]["median"] > ready > phases["Python and imports"] > 0
    ran = stretto("bench", "startup", "/nowhere")
    assert ran.code == 1 and "/nowhere" in ran.err


def test_a_prompt_without_a_model_is_told_apart(stretto):
    ran = stretto("run", "Name three colours.")
    assert ran.code == 1 and "--prompt 'Name three colours.'" in ran.err


def test_shells_complete_commands_and_flags(stretto, tmp_path: Path):
    script = tmp_path / "stretto.bash"
    ran = stretto("completion", "bash")
    script.write_text(ran.out)
    ask = (f"source {script}; COMP_WORDS=(stretto $1 $2); COMP_CWORD=$#; _stretto stretto \"${{@: -1}}\" x;"
           ' echo "${COMPREPLY[@]}"')
    def complete(*words: str) -> str:
        return subprocess.run(["bash", "-c", ask, "bash", *words], capture_output=True, text=True, check=True).stdout

    assert ran.code == 0 and complete("run-b") == "run-batch\n"
    assert complete("serve", "--max-num-s") == "--max-num-seqs\n"
    assert "compdef" in stretto("completion", "zsh").out and "complete -c stretto" in stretto("completion", "fish").out


def test_the_installed_command_runs():
    script = Path(sys.executable).with_name("stretto")
    if not script.exists():
        pytest.skip("the package is not installed with its command")
    child = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert child.returncode == 0 and child.stdout.startswith("stretto ")
