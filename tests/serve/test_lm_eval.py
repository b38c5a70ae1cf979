"""EleutherAI's lm-eval against the server (`local-completions`): the log-likelihoods that transformers computes.

lm-eval and what it needs live in an environment of their own: $LM_EVAL_PYTHON names its Python, else one is made from
the package index, once, in pytest's cache.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stretto.bench.engines import from_gguf
from stretto.model.hub import resolve_model
from stretto.text.tokenizer import load_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

STORIES = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"
REQUIRED = ["lm_eval[api]>=0.4.9,<0.5", "transformers>=5.13"]
MAIN = "from stretto.cli.main import main; main()"
QUESTIONS = [
    ("Once upon a time there was a little girl named", [" Lily", " Tom", " the dog", " Sue who liked to play"]),
    ("The sun was bright and the", [" sky was blue.", " rain fell", " end", " birds sang in the trees all day long."]),
    ("Tom said,", [' "Hello!"', ' "No, I do not want to go home."', " never"]),
    ("She was very", [" happy", " sad", " 7"]),
    ("One day, a big bear saw a", [" small bird.", " tree", " boat on the lake and he was very surprised."]),
]
TEXTS = ["Once upon a time there was a little girl named Lily. She loved to play outside in the park.",
         "Tom and Sue went to the big lake. They saw a boat."]
FILES = {
    "questions.yaml": """
        task: questions
        dataset_path: json
        dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
        output_type: multiple_choice
        test_split: test
        doc_to_text: "{{context}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: 0
        target_delimiter: ""
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
        """,
    "texts.yaml": """
        task: texts
        dataset_path: json
        dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
        output_type: loglikelihood_rolling
        test_split: test
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
        """,
    "answers.yaml": """
        task: answers
        dataset_path: json
        dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
        output_type: generate_until
        test_split: test
        doc_to_text: "{{context}}"
        doc_to_target: ""
        generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: false, temperature: 0.0}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
        """,
    "questions.jsonl": "\n".join(json.dumps({"context": context, "choices": choices})
                                 for context, choices in QUESTIONS),
    "texts.jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS),
}


@pytest.fixture(scope="session")
def lm_eval(pytestconfig: pytest.Config) -> Path:
    """A Python with lm-eval."""
    if named := os.environ.get("LM_EVAL_PYTHON"):
        return Path(named)
    folder = pytestconfig.cache.mkdir("lm-eval")  # type: ignore[union-attr]
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        venv.create(folder, with_pip=True, clear=True)
        made = subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIRED], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"lm-eval cannot be installed: {made.stderr.strip().splitlines()[-1:]}")
        (folder / "ready").touch()
    return python


@contextmanager
def served(log: Path, model: Path, *arguments: str) -> Iterator[str]:
    """A server's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(log, "w") as said:
        server = subprocess.Popen([sys.executable, "-c", MAIN, "serve", str(model), "--port", str(port),
                                   "--served-model-name", "served", *arguments],
                                  stderr=said, stdout=said)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def evaluate(python: Path, url: str, tokenizer: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs the three tasks; lm-eval's samples of each, in the order of the documents."""
    for name, text in FILES.items():
        lines = [line.removeprefix("        ") for line in text.strip("\n").splitlines()]
        (folder / name).write_text("\n".join(lines).replace("FOLDER", str(folder)) + "\n")
    settings = {"model": "served", "base_url": f"{url}/v1/completions", "tokenizer": str(tokenizer), "max_length": 256,
                "tokenizer_backend": "huggingface", "tokenized_requests": True, "num_concurrent": 3, "max_retries": 1}
    told = ",".join(f"{k}={v}" for k, v in settings.items())
    ran = subprocess.run(
        [python, "-m", "lm_eval", "--model", "local-completions", "--tasks", "questions,texts,answers",
         "--batch_size", "4", "--model_args", told, "--include_path", folder, "--log_samples",
         "--output_path", folder / "out"], capture_output=True, text=True, timeout=900,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OPENAI_API_KEY": "none"})
    assert ran.returncode == 0, ran.stderr[-2000:] + (folder / "log").read_text()[-4000:]
    found = {}
    for task in ("questions", "texts", "answers"):
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        found[task] = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return found


class Reference:
    """transformers' own numbers."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def loglikelihood(self, ids: list[int], start: int) -> tuple[float, bool]:
        """Of ids[start:] after those before them; whether each is the likeliest one."""
        logits = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        rows = [(float(logits[i - 1, ids[i]]), int(logits[i - 1].argmax()) == ids[i]) for i in range(start, len(ids))]
        return sum(p for p, _ in rows), all(best for _, best in rows)

    def answer(self, text: str, n: int) -> str:
        """What follows `text`, up to the first full stop, with the space that a text's beginning would lose."""
        ids = torch.tensor([self.ids(text)])
        whole = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False,
                                    pad_token_id=0)[0]
        asked, said = (self.tokenizer.decode(made, skip_special_tokens=True) for made in (ids[0], whole))
        assert said.startswith(asked)
        return said.removeprefix(asked).partition(".")[0]


def compare(found: dict[str, list[dict[str, Any]]], reference: Reference) -> None:
    for sample, (context, choices) in zip(found["questions"], QUESTIONS, strict=True):
        for (told,), choice in zip(sample["resps"], choices, strict=True):
            start = len(reference.ids(context))
            value, best = reference.loglikelihood(reference.ids(context + choice), start)
            assert float(told[0]) == pytest.approx(value, abs=1e-3) and str(told[1]) == str(best), (context, choice)
    prefix = reference.tokenizer.bos_token_id
    prefix = reference.tokenizer.eos_token_id if prefix is None else prefix
    for sample, text in zip(found["texts"], TEXTS, strict=True):
        ids = reference.ids(text)
        values = [reference.loglikelihood([first, *ids], 1)[0] for first in {prefix, reference.tokenizer.eos_token_id}]
        told = sample["resps"][0][0]
        told = float(told[0] if isinstance(told, list) else told)
        assert any(told == pytest.approx(value, abs=1e-3) for value in values), (text, told, values)
    for sample, (context, _) in zip(found["answers"], QUESTIONS, strict=True):
        assert sample["resps"][0][0] == reference.answer(context, 16)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_tiny_model(lm_eval: Path, tmp_path: Path, drafter: str):
    if not STORIES.is_dir():
        pytest.skip("shared/data/models/stories260k is absent")
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    reference = Reference(model, transformers.AutoTokenizer.from_pretrained(STORIES))
    drafts = () if drafter == "none" else ("--speculation", drafter)
    with served(tmp_path / "log", STORIES, "--dtype", "float32", "--chunk-size", "8", *drafts) as url:
        compare(evaluate(lm_eval, url, STORIES, tmp_path), reference)


def test_smollm2(lm_eval: Path, tmp_path: Path):
    """The default model, in float32 on both sides."""
    path = resolve_model(None, progress=False)
    tokenizer = load_tokenizer(path)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    end = tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=False)  # type: ignore[list-item]
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast",
                                                              "eos_token": end, "bos_token": end}))
    reference = Reference(from_gguf(path, torch.float32).eval(), transformers.AutoTokenizer.from_pretrained(folder))
    with served(tmp_path / "log", path, "--dtype", "float32", "--max-model-len", "1024") as url:
        compare(evaluate(lm_eval, url, folder, tmp_path), reference)
