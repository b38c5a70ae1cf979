"""The command line. Commands live in modules of their own and are imported only when called, so that `stretto --help`
answers at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import (
    App,
    CycloptsError,
    CycloptsPanel,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.config import Dict
from rich.console import Console, RenderableType

from stretto.cli.failures import EXIT_PIPE, told
from stretto.cli.screen import error_screen
from stretto.cli.sources import REPEATED, Settings, gather, read_units

EPILOGUE = ("Every setting can also come from a variable (STRETTO_MAX_MODEL_LEN) or from the file named by --config or"
            " STRETTO_CONFIG (max-model-len: 8K). The command line wins over variables, variables over the file.")

def build_app() -> App:
    """The commands, without any source of settings but the command line."""
    app = App(name="stretto", version=f"stretto {version('stretto')}", help_epilogue=EPILOGUE,
              result_action="return_value", error_formatter=misunderstood,
              help="Serve language models: every feature works with every other, exactly.")
    app.command("stretto.cli.serve:serve", name="serve", help="Serve a model over HTTP, with OpenAI's API.")
    app.command("stretto.cli.chat:run", name="run", help="Chat with a model in the terminal, or answer one prompt.")
    app.command("stretto.cli.remote:chat", name="chat", help="Chat with a running server in the terminal.")
    app.command("stretto.cli.remote:ps", name="ps", help="Show what a running server does.")
    app.command("stretto.cli.evaluate:run", name="eval", help="How often is a model behind a server right?")
    app.command("stretto.cli.run_batch:run", name="run-batch",
                help="Answer a file of requests in OpenAI's batch format.")
    app.command("stretto.cli.explain:explain", name="explain",
                help="Show the configuration that `serve` would run, with the reason for every value.")
    app.command("stretto.cli.plan:run", name="plan", help="How many GPUs does a load need, and what will users see?")
    app.command("stretto.cli.doctor:doctor", name="doctor", help="Check this machine, and a model if one is named.")
    app.command("stretto.cli.verify:parity", name="parity", help="Do two configurations give the same text?")
    app.command("stretto.cli.matrix:matrix", name="matrix", help="What works with what, and which test shows it.")
    app.command("stretto.cli.verify:soak", name="soak",
                help="Random clients on a small pool, every answer checked by replay.")
    app.command("stretto.cli.completion:completion", name="completion", help="Make a shell complete the commands.")
    bench = App(name="bench", help="Measure speed, against other engines where asked.")
    bench.command("stretto.cli.bench:latency", name="latency", help="One request at a time: how fast is each token?")
    bench.command("stretto.cli.bench:throughput", name="throughput", help="Many requests at once: how many tokens?")
    bench.command("stretto.cli.bench_serve:serve", name="serve",
                  help="Load on a running server, or on several: what do its clients see?")
    bench.command("stretto.cli.bench_serve:sweep", name="sweep", help="The same under heavier and heavier load.")
    bench.command("stretto.cli.bench:startup", name="startup", help="From nothing to the first answer.")
    bench.command("stretto.cli.bench_results:plot", name="plot", help="Draw what benchmarks have written.")
    bench.command("stretto.cli.bench_results:compare", name="compare",
                  help="Compare what benchmarks have written, for people and for CI.")
    app.command(bench)
    return app


def misunderstood(error: CycloptsError) -> RenderableType:
    """What is said of a command line. vLLM's flags of lists take several values in a row, ours one each time."""
    if isinstance(error, UnusedCliTokensError) and (left := error.unused_tokens):
        given = error.root_input_tokens or []
        named = [token for token in given[:_place(given, left[0])] if token.startswith("--")]
        if named and (flag := named[-1].partition("=")[0]) in REPEATED:
            again = " ".join(f"{flag} {value}" for value in left)
            return CycloptsPanel(f"Unused: {' '.join(left)}. {flag} takes one value at a time; give it again: {again}")
    if isinstance(error, UnknownOptionError | MissingArgumentError):
        command = " ".join(["stretto", *(error.command_chain or ())])
        return CycloptsPanel(f"{error} `{command} --help` lists what there is.")
    return CycloptsPanel(error)


def _place(tokens: Sequence[str], token: str) -> int:
    """Of its last occurrence: the one that no argument took."""
    return max((i for i, one in enumerate(tokens) if one == token), default=len(tokens))


def run_app(tokens: Sequence[str], environment: dict[str, str], errors: Console) -> int:
    """Runs one command. Returns the exit code."""
    app = build_app()

    def meta(*tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
             config: Path | None = None) -> object:
        """
        Parameters
        ----------
        config
            YAML file with settings.
        """
        named = config or (Path(environment["STRETTO_CONFIG"]) if environment.get("STRETTO_CONFIG") else None)
        settings = gather(tokens, environment, named)
        for note in settings.notes:
            errors.print(f"note: {note}", soft_wrap=True)
        app.config = _sources(settings)
        return app(settings.tokens)

    app.meta.default(meta)
    return told(lambda: app.meta(list(tokens), result_action="return_value"), errors)


def _sources(settings: Settings) -> list:
    return [Dict(settings.variables, source="a STRETTO_ variable", use_commands_as_keys=False),
            Dict(settings.file, source=settings.file_name, use_commands_as_keys=False), read_units]


def main() -> None:
    """Entry point of the `stretto` command."""
    try:
        code = run_app(sys.argv[1:], dict(os.environ), error_screen())
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough: `stretto matrix | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to be written at the end
        code = EXIT_PIPE
    except KeyboardInterrupt:  # ends as Ctrl-C ends others, so that a script or a loop of the shell ends with it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(code)
