"""HumanEval: a function is to be written, and its tests are run. Chen et al., "Evaluating Large Language Models Trained
on Code", 2021. A record has "task_id", "prompt", "entry_point" and "test".

The code of a model runs on this machine: in a process of its own with limits (sandbox.py), and only if one asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto.evals.sandbox import run_python
from stretto.evals.tasks import DataError, Record, Verdict, text_field

SYSTEM = "Complete the Python function. Answer with the whole function in one code block, and nothing else."
_BLOCK = re.compile(r"```(?:python|py)?[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


class HumanEval:
    """`evals.tasks.Task`."""

    name, max_tokens = "humaneval", 768
    stop: tuple[str, ...] = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint(", "\nassert ")
    columns = ("task_id", "prompt", "entry_point", "test")

    def check(self, record: Record) -> None:
        for name in ("prompt", "test"):
            text_field(record, name)
        if not text_field(record, "entry_point").isidentifier():
            raise DataError(f'its "entry_point" is {record["entry_point"]!r}; it must be the name of a function')

    def messages(self, record: Record, shots: Sequence[Record]) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"```python\n{record['prompt']}```"}]

    def prompt(self, record: Record, shots: Sequence[Record]) -> str:
        return record["prompt"]

    def judge(self, record: Record, reply: str) -> Verdict:
        failure = run_python(program(record, reply))
        return Verdict(failure is None, failure or "passed", "passed")


def program(record: Record, reply: str) -> str:
    """A module that ends without an error if and only if the reply is right."""
    block = _BLOCK.search(reply)
    code = block[1] if block else reply
    whole = re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(record['entry_point'])}\b", code, re.MULTILINE)
    prompt = record["prompt"]
    head = prompt[: prompt.rfind("def ")] if whole else prompt  # imports and helpers of the prompt stay
    return f"{head}{code}\n\n{record['test']}\n\ncheck({record['entry_point']})\n"
