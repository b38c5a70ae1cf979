"""`stretto eval`: what is asked, what is read out of a reply, what it counts; and code that must not get away."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from stretto.cli.main import run_app
from stretto.evals.choices import Choices, letter_of
from stretto.evals.gsm8k import Gsm8k, number_of
from stretto.evals.humaneval import HumanEval, program
from stretto.evals.run import choose, wilson
from stretto.evals.sandbox import run_python
from stretto.evals.tasks import DataError, checked, records_of
from tests.serve.test_server import Program
from tests.serve.test_server import program as scripted_server

GSM8K = Path(__file__).resolve().parents[2] / "../shared/data/eval/gsm8k"
ADD = {"task_id": "t/0", "entry_point": "add", "prompt": 'import math\n\n\ndef add(a, b):\n    """Sum."""\n',
       "test": "def check(f):\n    assert f(1, 2) == 3\n    assert math.pi > 3\n"}


@pytest.mark.parametrize("text, number", [
    ("so it is\n#### 1,200", "1200"), ("#### $3.50", "3.5"), ("first 3, then 4.", "4"), ("\\boxed{18} apples, 7", "18"),
    ("#### 5\nno wait\n#### -6", "-6"), ("no number", None), ("x = 007", "7"), ("12.0 of 3.", "3"),
    ("#### 12.00", "12")])
def test_numbers(text: str, number: str | None):
    assert number_of(text) == number


@pytest.mark.parametrize("text, letter", [
    ("B", "B"), (" (c). ", "C"), ("D. Paris", "D"), ("**A**", "A"), ("The answer is B.", "B"), ("A man", None),
    ("Answer: (C)", "C"), ("E", None), ("b\nbecause", "B"), ("Because of A", None), ("", None), ("a cat", None)])
def test_letters(text: str, letter: str | None):
    assert letter_of(text, 4) == letter


def test_the_interval_is_wilsons():
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # of the literature
    assert wilson(0, 20)[0] == 0.0 and 0.1 < wilson(0, 20)[1] < 0.2 and wilson(20, 20)[1] == 1.0


def test_files_of_every_kind(tmp_path: Path):
    (tmp_path / "a.csv").write_text('"1, 2?",x,y,z,w,B\n')
    (tmp_path / "b.csv").write_text("Question,A,B,Answer\nq,x,y,A\n")
    (tmp_path / "c.json").write_text('[{"question": "q", "choices": ["x", "y"], "answer": 1}]')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"question": "q", "choices": ["x", "y"], "answer": "0"}\n'))
    task, letters = Choices(), []
    for path in sorted(tmp_path.iterdir()):
        (record,) = checked(task, path, records_of(path, task.columns))
        letters.append(task.judge(record, "A").expected)
    assert letters == ["B", "A", "B", "A"]
    (shot,) = records_of(tmp_path / "a.csv", task.columns)
    assert task.prompt(shot, [shot]).endswith("Answer: B\n\n1, 2?\nA. x\nB. y\nC. z\nD. w\nAnswer:")
    assert [m["role"] for m in task.messages(shot, [shot])] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("task, record, words", [
    (Gsm8k(), {"question": "q"}, 'no text "answer"'), (Gsm8k(), {"question": "q", "answer": "x"}, "no number"),
    (Choices(), {"question": "q", "answer": "A"}, 'no "choices"'),
    (Choices(), {"question": "q", "choices": ["x", "y"], "answer": 2}, "letter or an index"),
    (Choices(), {"question": "q", "choices": ["x", "y"], "answer": True}, "letter or an index"),
    (HumanEval(), ADD | {"entry_point": "os.system('x')"}, "name of a function"),
    (HumanEval(), {}, 'no text "prompt"')])
def test_records_that_cannot_be_asked_are_named(tmp_path: Path, task, record: dict, words: str):
    with pytest.raises(DataError, match=f"f.jsonl, example 2: .*{words}"):
        good = {"question": "q", "answer": "1", "choices": ["x", "y"], **ADD}
        checked(task, tmp_path / "f.jsonl", [good, record])


def test_a_sample_is_the_same_every_time():
    records = [{"n": n} for n in range(50)]
    assert choose(records, 5, 1) == choose(records, 5, 1) != choose(records, 5, 2) and choose(records, 99, 0) == records


# ----------------------------------------------------------------------------------------------------------- humaneval
@pytest.mark.parametrize("reply, passed", [
    ("    return a + b\n", True), ("    return a - b\n", False),
    ("Here:\n```python\nimport math\n\ndef add(a, b):\n    return a + b\n```\nDone.", True),
    ("```python\n    return a + b\n```", True), ("```python\ndef add(a, b):\n    return a + b", True),
    ("    raise SystemExit(0)\n", False), ("    import os; os._exit(0)\n", False), ("    return (\n", False)])
def test_programs_pass_only_by_their_tests(reply: str, passed: bool):
    verdict = HumanEval().judge(ADD, reply)
    assert verdict.correct is passed and (verdict.answer == "passed") is passed


@pytest.mark.parametrize("code, words", [
    ("while True: pass", "did not end within 1 s"), ("x = bytearray(8 << 30)", "MemoryError"),
    ("open('big', 'wb').write(bytes(64 << 20))", "exit code|File too large"),
    ("import sys; sys.exit(0)", "exit code 0"),
    ("import os; assert 'SECRET' not in os.environ; assert os.listdir() == []; raise OSError('clean')", "clean"),
    ("input()", "EOF")])
def test_code_is_held(code: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "x")
    failure = run_python(code, seconds=1.0)
    assert failure is not None and any(word in failure for word in words.split("|")), failure


def test_what_the_code_has_started_ends_with_it(tmp_path: Path):
    mark = tmp_path / "mark"
    later = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {later!r}])\n"
    assert run_python(code) is None
    time.sleep(2)
    assert not mark.exists()


def test_the_prompts_helpers_stay():
    record = ADD | {"prompt": "def helper():\n    return 2\n\n\ndef add(a, b):\n"}
    made = program(record, "def add(a, b):\n    return helper()\n")
    assert made.count("def add") == 1 and "def helper" in made


# ----------------------------------------------------------------------------------------------------- the command
@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with scripted_server({"max_model_len": 4000}) as made:
        made.until("/readyz", 200)
        yield made


def command(server: Program, *tokens: object) -> tuple[int, str]:
    notes = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    code = run_app(["eval", *map(str, tokens), "--url", f"http://127.0.0.1:{server.port}"], {}, notes)
    return code, notes.export_text()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_answers_are_counted(server: Program, tmp_path: Path, capsys: pytest.CaptureFixture, api: str):
    """The scripted server says what the question tells it to say; a completion's prompt ends in "\\nAnswer:"."""
    data, out = tmp_path / "d.jsonl", tmp_path / "out.json"
    replies = ["#### 4", "about 4", "#### 5", "none"]
    data.write_text("\n".join(json.dumps({"question": f"say:{reply}", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"})
                              for reply in replies))
    code, _ = command(server, "gsm8k", "--data", data, "--api", api, "--json", "--output-json", out)
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and found == json.loads(out.read_text())
    assert (found["examples"], found["correct"], found["accuracy"], found["unreadable"]) == (4, 2, 0.5, 1)
    assert found["interval"] == list(wilson(2, 4)) and found["failed"] == 0
    assert found["answers"][0]["verdict"] == {"correct": True, "answer": "4", "expected": "4"}
    assert [answer["verdict"]["answer"] for answer in found["answers"]] == ["4", "4", "5", None]
    assert command(server, "gsm8k", "--data", data, "--num-examples", 2)[0] == 0
    assert "95 % interval" in capsys.readouterr().out


def test_a_failed_request_is_wrong_and_told(server: Program, tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "d.jsonl").write_text('{"question": "refuse:x", "answer": "1"}')
    code, _ = command(server, "gsm8k", "--data", tmp_path / "d.jsonl", "--json")
    printed = capsys.readouterr()
    assert code == 1 and json.loads(printed.out)["failed"] == 1 and "refused" in printed.err


@pytest.mark.parametrize("tokens, words", [
    (["humaneval", "--data", "x"], "--execute-code"), (["gsm8k", "--data", "/nowhere"], "cannot be read"),
    (["gsm8k", "--data", "x", "--shots", "2"], "--shots-data"),
    (["mmlu", "--data", "x", "--num-examples", "0"], "1 or more"),
    (["humaneval", "--execute-code", "--data", "x", "--shots", "1"], "leave out --shots")])
def test_refusals(server: Program, tokens: list[str], words: str):
    code, said = command(server, *tokens)
    assert code == 1 and words in said


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository")
def test_every_answer_of_gsm8k_is_read():
    task = Gsm8k()
    for path in GSM8K.glob("*.jsonl"):
        for record in checked(task, path, records_of(path, task.columns)):
            assert task.judge(record, record["answer"]).correct
