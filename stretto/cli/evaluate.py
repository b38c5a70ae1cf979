"""`stretto eval`: the accuracy of a model behind a running server. Loads no torch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
from cyclopts import Group, Parameter
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from rich.progress import Progress
from rich.table import Table

from stretto.cli.failures import EXIT_FAILED, CommandFailed
from stretto.cli.findings import at_least, tell
from stretto.cli.options import Json
from stretto.cli.remote import find_model, key_of, server_address
from stretto.cli.screen import error_screen
from stretto.evals.choices import Choices
from stretto.evals.gsm8k import Gsm8k
from stretto.evals.humaneval import HumanEval
from stretto.evals.run import Asking, choose, evaluate
from stretto.evals.tasks import DataError, Record, Task, checked, records_of

TASKS: Mapping[str, type[Gsm8k] | type[Choices] | type[HumanEval]] = {
    "gsm8k": Gsm8k, "mmlu": Choices, "humaneval": HumanEval}


@dataclass(frozen=True)
class EvalOptions:
    """What is asked, and how."""

    data: str
    """File with examples (.jsonl, .json, .csv, or .gz of them), or a file of a data set on the hub: OWNER/NAME:PATH."""
    url: Annotated[str, Parameter(alias="--base-url")] = "http://127.0.0.1:8000"
    """A server with OpenAI's API."""
    model: str | None = None
    """Name of the model. Default: the first that the server lists."""
    api_key: str | None = None
    """Key of the server. Default: the variable STRETTO_API_KEY, then OPENAI_API_KEY."""
    api: Literal["chat", "completions"] = "chat"
    """chat for models that follow instructions, completions for those that only go on with text."""
    num_examples: int | None = None
    """Examples that are asked, chosen by the seed. Default: all."""
    shots: int = 0
    """Examples with answers that are shown before each question."""
    shots_data: str | None = None
    """File of those, such as the training or development split; needed for --shots."""
    max_tokens: int | None = None
    """Longest answer. Default: 512 (gsm8k), 16 (mmlu), 768 (humaneval)."""
    temperature: float = 0.0
    """0: always the likeliest token."""
    max_concurrency: int = 16
    """Requests in flight."""
    seed: int = 0
    """Of the choice of examples, and of every request."""
    execute_code: bool = False
    """humaneval: run the code that the model writes on this machine, with limits, but with your rights."""
    output_json: Path | None = None
    """File for the figures and every answer."""


Options = Annotated[EvalOptions, Parameter(name="*", group=Group("Evaluation", sort_key=0), negative_bool=())]
LEAST = {"num_examples": 1, "shots": 0, "max_tokens": 1, "temperature": 0, "max_concurrency": 1}


def run(task: Literal["gsm8k", "mmlu", "humaneval"], /, *, options: Options, as_json: Json = False) -> int:
    """How often a model behind a running server is right, with the 95 % interval.

    Parameters
    ----------
    task
        gsm8k: word problems; mmlu: questions with lettered choices; humaneval: functions with tests.
    as_json
        Print the figures as JSON instead of a table.
    """
    at_least(options, LEAST)
    if task == "humaneval" and not options.execute_code:
        raise CommandFailed("humaneval runs the code that the model writes, on this machine and with your rights; say"
                            " --execute-code if you want that, best inside a container")
    made: Task = TASKS[task]()
    examples, shots = _examples(made, options)
    base, key = server_address(options.url), key_of(options.api_key)
    asking = Asking(options.model or find_model(base, options.api_key), options.api, options.max_tokens,
                    options.temperature, options.seed, options.max_concurrency)
    found = asyncio.run(_evaluate(base, key, made, examples, shots, asking))
    tell(found, options.output_json, as_json, _table)
    if found["failed"]:
        first = next(answer["error"] for answer in found["answers"] if answer["error"])
        print(f"{found['failed']} requests failed and count as wrong; the first: {first}", file=sys.stderr)
    return EXIT_FAILED if found["failed"] else 0


def _examples(task: Task, options: EvalOptions) -> tuple[list[Record], list[Record]]:
    """(those that are asked, those that are shown)."""
    if options.shots and task.name == "humaneval":
        raise CommandFailed("humaneval shows no examples before its questions: leave out --shots")
    if options.shots and options.shots_data is None:
        raise CommandFailed("--shots needs --shots-data: examples that are not among those asked")
    columns: Sequence[str] = TASKS[task.name].columns
    try:
        path = _file(options.data)
        asked = choose(checked(task, path, records_of(path, columns)), options.num_examples, options.seed)
        if options.shots_data is None or not options.shots:
            return asked, []
        path = _file(options.shots_data)
        return asked, checked(task, path, records_of(path, columns))[: options.shots]
    except DataError as e:
        raise CommandFailed(str(e)) from e


def _file(named: str) -> Path:
    """A file here, or one that the hub's client fetches."""
    repo, is_hub, name = named.partition(":")
    if Path(named).exists() or not is_hub or repo.count("/") != 1:
        return Path(named)
    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise DataError(f"{named} cannot be had from the hub: {str(e).splitlines()[0]}; give a file") from e


async def _evaluate(base: str, key: str | None, task: Task, examples: list[Record], shots: list[Record],
                    asking: Asking) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with Progress(console=error_screen()) as bar:
        counted = bar.add_task(task.name, total=len(examples))
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=None, trust_env=False,
                                     limits=httpx.Limits(max_connections=None)) as http:
            return await evaluate(http, task, examples, shots, asking, lambda: bar.advance(counted))


def _table(found: dict[str, Any]) -> Table:
    low, high = found["interval"]
    made = Table(title=f"{found['task']}: {found['model']}", title_justify="left", show_header=False)
    made.add_row("accuracy", f"{100 * found['accuracy']:.1f} % ({100 * low:.1f} .. {100 * high:.1f}, 95 % interval)")
    made.add_row("right", f"{found['correct']} of {found['examples']}")
    made.add_row("without a readable answer", str(found["unreadable"]))
    made.add_row("cut off by the limit", str(found["cut_off"]))
    made.add_row("generated", f"{found['completion_tokens']} tokens in {found['seconds']:.1f} s")
    return made
