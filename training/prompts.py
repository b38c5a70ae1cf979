"""Prompts for training, from openly licensed text: GSM8K's training questions, also with other numbers; questions about
names that occur in texts; and instructions about passages of books in the public domain, of Wikipedia's articles in
WikiText-2, of Python's proposals (PEPs), of Python's documentation and of the Rust book.

Evaluation sets are read for one purpose: a prompt that shares a run of words with one of theirs is left out.
"""

from __future__ import annotations

import functools
import json
import lzma
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cyclopts

SHARED_WORDS = 12  # a run of so many words that an evaluation prompt has too disqualifies a prompt

SUMMARISE = ("Summarize: {text}", "Summarize: {text}",
             "Summarize the following text in two or three sentences.\n\n{text}",
             "{text}\n\nGive a short summary of the passage above.", "What are the key points of this text?\n\n{text}",
             "{text}\n\nTL;DR")
ANSWER = ("{text}\n\nAnswer the question using the passage above: {question}",
          "Read the passage and answer the question.\n\nPassage: {text}\n\nQuestion: {question}",
          "{text}\n\n{question}")
QUESTIONS = ("What is this passage about?", "Who is speaking, and to whom?", "What happens in this passage?",
             "Who are the people in it, and how are they related?", "Why does it happen?", "Where does it take place?",
             "What does the author want to say?", "Which details show how the characters feel?",
             "What is likely to happen next?", "What is the most important sentence, and why?")
RETRIEVED = ("{text}\n{question}",)
NAMED = ("Who is {name}?", "Who was {name}?", "When was {name} born?", "What did {name} do?", "Where does {name} live?",
         "Why is {name} important?", "How old is {name}?", "What is {name} known for?", "Who plays {name} in it?",
         "Who is the father of {name}?", "When does {name} come out?", "How many books did {name} write?",
         "Where is {name} from?", "What happened to {name}?", "Who wrote the song {name}?", "Where was {name} made?")
REWRITE = ("Rewrite the following text in simple modern English.\n\n{text}",
           "Rewrite this as an email to a colleague.\n\n{text}",
           "Turn the following into a list of bullet points.\n\n{text}",
           "Paraphrase this paragraph.\n\n{text}", "Correct any mistakes in the following text.\n\n{text}",
           "Rewrite the following as a dialogue between two people.\n\n{text}",
           "Make this text shorter by half.\n\n{text}")
CONTINUE = ("Continue the story.\n\n{text}", "Write the next paragraph.\n\n{text}",
            "Here is the beginning of a text. Go on.\n\n{text}")
EXPLAIN = ("Explain the following to a beginner.\n\n{text}", "What does this mean?\n\n{text}",
           "{text}\n\nExplain step by step.", "Write a short tutorial about this.\n\n{text}",
           "Give an example in code for the following.\n\n{text}", "What are the pros and cons of this?\n\n{text}",
           "List the steps that this describes.\n\n{text}")
TRANSLATE = ("Translate English to German: {text}", "Translate English to German: {text}",
             "Translate English to German: {text}", "Translate English to French: {text}",
             "Translate the following sentence to Spanish: {text}")
EXTRACT = ("List all names of people and places in the following text.\n\n{text}",
           "Extract the nouns of this sentence as a JSON list.\n\n{text}",
           "Classify the mood of the following text as happy, sad, angry or neutral, and say why.\n\n{text}")


@dataclass(frozen=True)
class Recipe:
    """How many prompts are made of which passages (of `words` words, between the two) with which templates. `chunks`:
    the passage is cut up into so many of equal length, anywhere, as retrieval finds them."""

    templates: tuple[str, ...]
    corpora: tuple[str, ...]
    words: tuple[int, int]
    count: int
    chunks: int = 1


BOOKS, PROSE = ("public-domain-books",), ("public-domain-books", "peps", "wikitext-2/valid")
FACTS = ("wikitext-2/valid", "public-domain-books")
TECHNICAL = ("peps", "python-docs", "rust-book")
VARIED = 2  # times that each question of GSM8K is asked with other numbers
NAMES = 4000  # questions about names, without a text
RECIPES = (
    Recipe(SUMMARISE, PROSE, (80, 900), 3500), Recipe(ANSWER, PROSE, (60, 450), 2500),
    Recipe(RETRIEVED, FACTS, (420, 500), 2500, chunks=5), Recipe(REWRITE, PROSE, (25, 120), 2500),
    Recipe(CONTINUE, BOOKS, (20, 120), 1500), Recipe(EXPLAIN, TECHNICAL, (15, 120), 3500),
    Recipe(TRANSLATE, BOOKS, (8, 40), 3000), Recipe(EXTRACT, BOOKS, (15, 80), 1000))
NAME = re.compile(r"\b[A-Z][a-z]{2,}(?: of)?(?: [A-Z][a-z]+){1,2}\b")
LONGEST_PASSAGE = 8000  # characters


def passages(text: str, words: tuple[int, int], chance: random.Random) -> Iterator[str]:
    """Passages of whole sentences or lines, endlessly, from random places."""
    while True:
        start = chance.randrange(max(len(text) - LONGEST_PASSAGE, 1))
        piece = text[start : start + LONGEST_PASSAGE]
        begin = re.search(r"(?<=[.!?])\s+(?=[A-Z\"'])|\n\n", piece)
        if begin is None:
            continue
        target, found = chance.randint(*words), []
        for sentence in re.split(r"(?<=[.!?])(?=\s)", piece[begin.end() :]):
            found.append(sentence)
            if len(" ".join(found).split()) >= target:
                break
        passage = "".join(found).strip()
        letters = sum(c.isalpha() or c.isspace() for c in passage)
        if words[0] <= len(passage.split()) <= 1.5 * words[1] + 10 and letters > 0.75 * len(passage):
            yield passage


def shingles(text: str, size: int = SHARED_WORDS) -> set[tuple[str, ...]]:
    """Every run of `size` words; the whole text where it is shorter."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(max(len(words) - size + 1, 1))}


def evaluation_prompts(data: Path) -> Iterator[str]:
    """Every prompt and every turn of the sets that drafters are evaluated on."""
    for line in (data / "eval/gsm8k/test.jsonl").read_text().splitlines():
        yield json.loads(line)["question"]
    for name in ("spec_bench", "mt_bench"):
        for line in (data / f"eval/{name}/question.jsonl").read_text().splitlines():
            yield from json.loads(line)["turns"]


class Unseen:
    """Whether a prompt has nothing in common with the evaluation sets."""

    def __init__(self, evaluated: Iterable[str]):
        self._taken = set().union(*(shingles(text) for text in evaluated))

    def __call__(self, prompt: str) -> bool:
        return self._taken.isdisjoint(shingles(prompt))


def instructions(corpora: Callable[[str], str], recipe: Recipe, chance: random.Random) -> Iterator[str]:
    sources = [passages(corpora(name), recipe.words, chance) for name in recipe.corpora]
    for _ in range(recipe.count):
        text, template = next(chance.choice(sources)), chance.choice(recipe.templates)
        names = NAME.findall(text)
        ask = chance.choice(NAMED).format(name=chance.choice(names)) if names and chance.random() < 0.5 else None
        if recipe.chunks > 1:
            text = "\n".join(chunked(text, recipe.chunks, chance))
        yield template.format(text=text, question=ask or chance.choice(QUESTIONS))


def chunked(text: str, count: int, chance: random.Random) -> list[str]:
    """Runs of words of equal length, in any order, headed by a name, as an index of articles gives them."""
    words = text.split()
    size = len(words) // count
    chunks = [" ".join(words[i * size : (i + 1) * size]) for i in range(count)]
    chance.shuffle(chunks)
    return [f"{NAME.findall(chunk)[0]} {chunk}" if NAME.search(chunk) else chunk for chunk in chunks]


def named(text: str, count: int, chance: random.Random) -> Iterator[str]:
    """Short questions about names that the text mentions."""
    names = sorted(set(NAME.findall(text)))
    for _ in range(count):
        question = chance.choice(NAMED).format(name=chance.choice(names))
        yield question.lower().capitalize() if chance.random() < 0.5 else question


def varied(question: str, chance: random.Random) -> str:
    """A word problem with other numbers of about the same size."""
    def other(found: re.Match) -> str:
        number = int(found[0])
        return str(chance.randint(max(2, number // 2), max(3, 2 * number)))

    return re.sub(r"(?<![\d.,/])\d{1,4}(?![\d/]|[.,]\d)", other, question)


def plain(text: str) -> str:
    """WikiText without the marks of its tokenisation."""
    text = re.sub(r" @([-.,])@ ", r"\1", text).replace(" <unk>", "").replace("<unk>", "")
    text = re.sub(r"^ ?=.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r' " ([^"]*) "', r' "\1"', text)
    return re.sub(r" ([.,;:!?)'])", r"\1", text).replace("( ", "(").replace("\n \n", "\n\n")


def read_corpus(data: Path, name: str) -> str:
    if name.startswith("wikitext"):
        return plain((data / f"corpora/{name}.txt").read_text(encoding="utf-8"))
    return lzma.decompress((data / f"corpora/{name}.txt.xz").read_bytes()).decode("utf-8")


def build(data: Path, seed: int = 0) -> list[str]:
    """All prompts, shuffled. `data` holds `corpora/` and `eval/`."""
    chance, unseen = random.Random(seed), Unseen(evaluation_prompts(data))
    corpus = functools.cache(lambda name: read_corpus(data, name))
    train = (data / "eval/gsm8k/train.jsonl").read_text().splitlines()
    problems = [json.loads(line)["question"] for line in train]
    found = problems + [varied(problem, chance) for problem in problems for _ in range(VARIED)]
    found += [question for name in FACTS for question in named(corpus(name), NAMES // len(FACTS), chance)]
    for recipe in RECIPES:
        found += instructions(corpus, recipe, chance)
    found = [prompt for prompt in dict.fromkeys(found) if unseen(prompt)]
    chance.shuffle(found)
    return found


def load(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main(data: Path, output: Path, *, seed: int = 0) -> None:
    """Writes the prompts, one JSON string a line.

    data: the folder with corpora/ and eval/.  output: a file that ends in .jsonl.xz."""
    found = build(data, seed)
    with lzma.open(output, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in found)
    print(f"{len(found)} prompts, {output.stat().st_size / 1e6:.1f} MB: {output}")


if __name__ == "__main__":
    cyclopts.run(main)
