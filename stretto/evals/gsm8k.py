"""GSM8K: word problems whose answer is a number. Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021.

A record has "question", and "answer" that ends in "#### 42". Right is what has the same number, however it is written:
after "####" or \\boxed{}, else the last number of the reply.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto.evals.tasks import DataError, Record, Verdict, dialogue, text_field

SYSTEM = ("Solve the problem step by step. End with a line that holds #### and the answer alone, as a plain number:"
          " #### 42")
_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_MARKED = (re.compile(rf"####\s*({_NUMBER})"), re.compile(rf"\\boxed\{{\s*({_NUMBER})"))


class Gsm8k:
    """`evals.tasks.Task`."""

    name, max_tokens = "gsm8k", 512
    stop: tuple[str, ...] = ("\nQuestion:",)
    columns = ("question", "answer")

    def check(self, record: Record) -> None:
        text_field(record, "question")
        if number_of(text_field(record, "answer")) is None:
            raise DataError('its "answer" holds no number')

    def messages(self, record: Record, shots: Sequence[Record]) -> list[dict[str, str]]:
        return dialogue([(shot["question"], _worked(shot)) for shot in shots], record["question"], SYSTEM)

    def prompt(self, record: Record, shots: Sequence[Record]) -> str:
        before = "".join(f"Question: {shot['question']}\nAnswer: {_worked(shot)}\n\n" for shot in shots)
        return f"{before}Question: {record['question']}\nAnswer:"

    def judge(self, record: Record, reply: str) -> Verdict:
        expected, answer = number_of(record["answer"]), number_of(reply)
        return Verdict(answer is not None and answer == expected, answer, str(expected))


def _worked(shot: Record) -> str:
    """Without the calculator's marks, <<2+3=5>>, that the data set holds."""
    return re.sub(r"<<.*?>>", "", shot["answer"])


def number_of(text: str) -> str | None:
    """The answer's number in one form: "1,200.50" and "$1200.5" are both "1200.5"."""
    for marked in _MARKED:
        if found := marked.findall(text):
            return _plain(found[-1])
    found = re.findall(_NUMBER, text)
    return _plain(found[-1]) if found else None


def _plain(number: str) -> str:
    text = number.replace(",", "").replace("$", "")
    return text.rstrip("0").rstrip(".") if "." in text else str(int(text))
