"""`stretto run-batch`: a file of requests, answered by an engine of its own or by a running server. Loads no torch: the
engine has a process of its own, and is asked through the same API as over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stretto.batch import BatchError, Tally, check_items, read_items, run_batch, take_up
from stretto.cli.failures import EXIT_FAILED, CommandFailed
from stretto.cli.options import ENGINE, EngineOptions
from stretto.cli.remote import check_answers, key_of, server_address
from stretto.cli.screen import error_screen
from stretto.cli.server import START_CORE
from stretto.config import Config
from stretto.engine.client import EngineClient
from stretto.engine.locate import Deferred, locate
from stretto.model.hub import DEFAULT_NAME, ModelNotFound
from stretto.protocol import EngineDead
from stretto.resolve import check_values
from stretto.serve.app import build_app
from stretto.serve.settings import ServeSettings
from stretto.text.gguf_file import GGUFError
from stretto.text.tokenizer import TokenizerError, load_tokenizer


@dataclass(frozen=True)
class BatchOptions:
    """What is run, and by whom."""

    _: KW_ONLY
    input_file: Annotated[Path, Parameter(alias="-i")]
    """Requests in OpenAI's batch format, one JSON object a line."""
    output_file: Annotated[Path, Parameter(alias="-o")]
    """Answers, one a line, as they come. What it holds already is not asked again."""
    base_url: str | None = None
    """A running server with OpenAI's API. Default: an engine of this command's own, with the settings below."""
    api_key: str | None = None
    """Key of that server. Default: the variable STRETTO_API_KEY, then OPENAI_API_KEY."""
    max_concurrency: int = 64
    """Requests in flight."""
    served_model_name: tuple[str, ...] = ()
    """Names by which the file's requests call the engine's model. Default: the last part of the model's path."""


Options = Annotated[BatchOptions, Parameter(name="*", group=Group("Batch", sort_key=0), negative_iterable=())]


def run(engine: EngineOptions = ENGINE, *, batch: Options) -> int:
    """Answer a file of requests in OpenAI's batch format. Started again with the same files, it goes on where it was.

    Exits with 1 if a request was not answered as asked.
    """
    notes = error_screen()
    config = engine.config()
    if batch.max_concurrency < 1:
        raise CommandFailed(f"--max-concurrency is {batch.max_concurrency}; it must be 1 or more")
    if batch.base_url is not None and (config != Config() or batch.served_model_name):
        raise CommandFailed("--base-url asks a server that runs: settings of an engine, its model included, are that"
                            " server's")
    try:
        count = check_items(batch.input_file)
        done = take_up(batch.output_file)
    except BatchError as e:
        raise CommandFailed(str(e)) from e
    if len(done) >= count:
        notes.print(f"all {count} requests have their answers in {batch.output_file}")
        return 0
    if batch.base_url is not None:
        check_answers(server_address(batch.base_url), "another --base-url")  # one that goes away later is waited for
    try:
        tally = asyncio.run(_run(batch, config, count, done, notes))
    except (ModelNotFound, TokenizerError, GGUFError, EngineDead, OSError) as e:
        raise CommandFailed(str(e)) from e
    notes.print(f"{tally.answered} answered ({tally.prompt_tokens} prompt and {tally.completion_tokens} generated"
                f" tokens), {tally.failed} failed, {len(done)} were there")
    if tally.failed:
        notes.print(f"the first failure: {tally.first_failure}", style="red", soft_wrap=True)
    return EXIT_FAILED if tally.failed else 0


async def _run(batch: BatchOptions, config: Config, count: int, done: set[str], notes: Console) -> Tally:
    left = (item for item in read_items(batch.input_file) if item.custom_id not in done)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                   console=notes)
    async with _client(batch, config, notes) as (http, engine):
        with bar, batch.output_file.open("a", encoding="utf-8") as output:
            task = bar.add_task("requests", total=count, completed=len(done))
            work = run_batch(http, left, output, batch.max_concurrency, lambda tally: bar.advance(task))
            return await (work if engine is None else _while_alive(engine, work))


async def _while_alive(engine: EngineClient, work: Coroutine[Any, Any, Tally]) -> Tally:
    """The work's result. Raises EngineDead when the engine dies first: nobody would start it again."""
    running, dying = asyncio.create_task(work), asyncio.create_task(engine.dead())
    try:
        await asyncio.wait((running, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            raise EngineDead(f"{dying.result()}; run the same command again for what has no answer yet")
        return running.result()
    finally:
        running.cancel()
        dying.cancel()
        await asyncio.gather(running, dying, return_exceptions=True)


@contextlib.asynccontextmanager
async def _client(batch: BatchOptions, config: Config, notes: Console
                  ) -> AsyncIterator[tuple[httpx.AsyncClient, EngineClient | None]]:
    """Of the server that was named, or of an app in this process with an engine behind it."""
    if batch.base_url is not None:
        key = key_of(batch.api_key)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=server_address(batch.base_url), headers=headers, timeout=None,
                                     limits=httpx.Limits(max_connections=None), trust_env=False) as http:
            yield http, None
        return
    check_values(config)
    with notes.status("starting the engine"):
        located = await asyncio.to_thread(locate, config)
        tokenizer = await asyncio.to_thread(load_tokenizer, located.tokenizer_path)
        engine = await EngineClient.start(Deferred(START_CORE, located))
    names = batch.served_model_name or ((DEFAULT_NAME,) if config.model.model is None else ())
    try:
        app = build_app(engine, tokenizer, ServeSettings(served_model_names=names))
        async with (app.router.lifespan_context(app),
                    httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                                      base_url="http://engine", timeout=None) as http):
            yield http, engine
    finally:
        await engine.close()
