"""Questions with lettered answers, as in MMLU (Hendrycks et al., "Measuring Massive Multitask Language Understanding",
2021). A record has "question", and either "choices" (a list) or columns "a", "b", "c", "d" ...; "answer" is a letter,
or an index from 0. MMLU's own CSV files have no header: question, A, B, C, D, answer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from stretto.evals.tasks import DataError, Record, Verdict, dialogue, text_field

SYSTEM = "Answer the question with the letter of the right choice, and nothing else."


class Choices:
    """`evals.tasks.Task`."""

    name, max_tokens = "mmlu", 16
    stop: tuple[str, ...] = ("\n",)
    columns = ("question", "a", "b", "c", "d", "answer")

    def check(self, record: Record) -> None:
        text_field(record, "question")
        self._letter(record)

    def messages(self, record: Record, shots: Sequence[Record]) -> list[dict[str, str]]:
        return dialogue([(self._ask(shot), self._letter(shot)) for shot in shots], self._ask(record), SYSTEM)

    def prompt(self, record: Record, shots: Sequence[Record]) -> str:
        head = "The following are multiple choice questions (with answers).\n\n"
        before = "".join(f"{self._ask(shot)}\nAnswer: {self._letter(shot)}\n\n" for shot in shots)
        return f"{head}{before}{self._ask(record)}\nAnswer:"

    def judge(self, record: Record, reply: str) -> Verdict:
        answer = letter_of(reply, len(self._texts(record)))
        return Verdict(answer == self._letter(record), answer, self._letter(record))

    def _ask(self, record: Record) -> str:
        lines = (f"{letter}. {text}" for letter, text in zip(string.ascii_uppercase, self._texts(record)))
        return "\n".join([record["question"], *lines])

    def _texts(self, record: Record) -> list[str]:
        if isinstance(record.get("choices"), list):
            found = [str(choice) for choice in record["choices"]]
        else:
            lower = {key.lower(): value for key, value in record.items()}
            found = []
            for letter in string.ascii_lowercase:
                if letter not in lower:
                    break
                found.append(str(lower[letter]))
        if not 2 <= len(found) <= len(string.ascii_uppercase):
            raise DataError('it has no "choices" and no columns "a", "b" ...')
        return found

    def _letter(self, record: Record) -> str:
        count, answer = len(self._texts(record)), record.get("answer")
        if isinstance(answer, str) and answer.strip().isdigit():
            answer = int(answer)
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < count:
            return string.ascii_uppercase[answer]
        if isinstance(answer, str) and answer.strip().upper() in tuple(string.ascii_uppercase[:count]):
            return answer.strip().upper()
        raise DataError(f'its "answer" is {answer!r}; it must be a letter or an index of its {count} choices')


def letter_of(reply: str, count: int) -> str | None:
    """The letter that a reply chooses: alone ("B", "(b)."), before its text ("B. Paris"), or after "answer is". None
    where it is unclear: "A man" begins with an article."""
    letters = string.ascii_uppercase[:count]
    text = reply.strip().strip("*_ ")
    if found := re.match(rf"\(?([{letters}{letters.lower()}])(?:[).:,*_]*\s*$|[).:]|\s*\n)", text):
        return found[1].upper()
    found_all = re.findall(rf"answer(?:\s+is)?\s*:?\s*\**\(?([{letters}])\b", text, re.IGNORECASE)
    return found_all[-1].upper() if found_all else None
