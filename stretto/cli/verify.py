"""`stretto parity` and `stretto soak`: does the engine do what it promises, on this machine and with this model?"""

from __future__ import annotations

import importlib.util
import json
import shlex
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Group, Parameter
from cyclopts.config import Dict
from rich.console import Console

from stretto.bench.parity import Parity, compare
from stretto.bench.rounding import TOLERANCE
from stretto.bench.soak import ACTIONS, Soak, SoakResult, Subject
from stretto.bench.tiny import write_tiny
from stretto.cli.failures import CommandFailed
from stretto.cli.options import ENGINE, MODEL, EngineOptions, EngineSections, Json, ModelOptions
from stretto.cli.screen import screen
from stretto.cli.sources import gather, read_units
from stretto.cli.starting import expected_failures, prepare_or_fail
from stretto.config import Config
from stretto.model.load import load_model
from stretto.protocol import RequestError
from stretto.testing import target_of

PROMPTS = ("Once upon a time", "The three laws of robotics are", "def fibonacci(n):\n    ",
           "Question: why is the sky blue?\nAnswer:", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
           "Dear Sir or Madam,\n\nI am writing to", "SELECT name, count(*) FROM", "In 1905 Albert Einstein " * 6)
DIFFERENT = 4  # exit code, apart from those of failures.py


# ------------------------------------------------------------------------------------------------------------- parity
def parity(a: str, b: str, /, *, prompts: Path | None = None, output_tokens: int = 64, as_json: Json = False) -> int:
    """Do two configurations give the same text? Exit code 4 where rounding does not explain a difference.

    Parameters
    ----------
    a
        A YAML file with settings, or the settings as for `serve`, in quotes: "MODEL --speculation ngram".
    b
        The other configuration.
    prompts
        File with one prompt a line. Default: a few texts of different kinds.
    output_tokens
        Tokens of each answer, at most.
    as_json
        Print the findings as JSON.
    """
    texts = list(PROMPTS) if prompts is None else [line for line in _read(prompts).splitlines() if line.strip()]
    if not texts or output_tokens < 1:
        raise CommandFailed("parity needs a prompt and at least 1 output token")
    with expected_failures():
        try:
            found = compare(read_config(a), read_config(b), texts, output_tokens)
        except (ValueError, RequestError) as e:
            raise CommandFailed(str(e)) from e
    if as_json:
        print(json.dumps(asdict(found) | {"explained": found.explained}, indent=2))
    else:
        _print_parity(found, texts, screen())
    return 0 if found.explained else DIFFERENT


def read_config(text: str) -> Config:
    """A file with settings, or settings as on the command line. Raises UsageError and CommandFailed."""
    path = Path(text)
    is_file = path.suffix in (".yaml", ".yml")
    settings = gather(["explain"] if is_file else ["explain", *shlex.split(text)], {}, path if is_file else None)
    app = App(result_action="return_value", exit_on_error=False, print_error=False, help_flags=[], version_flags=[])

    @app.default
    def configure(engine: EngineOptions = ENGINE) -> Config:
        return engine.config()

    app.config = [Dict(settings.file, source=settings.file_name, use_commands_as_keys=False), read_units]
    try:
        return app(settings.tokens[1:])
    except Exception as e:  # cyclopts' errors have no base that is exported for it
        raise CommandFailed(f"{text!r} is no configuration: {e}") from e


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise CommandFailed(f"cannot read the prompts: {e}") from e


def _print_parity(found: Parity, prompts: list[str], console: Console) -> None:
    equal = found.prompts - len(found.differences)
    console.print(f"{equal} of {found.prompts} answers are equal ({' and '.join(found.dtypes)}; up to {found.tokens}"
                  f" tokens; {found.drafted[0]} and {found.drafted[1]} drafts verified)", highlight=False)
    for d in found.differences:
        why = "rounding explains it" if d.rounding else "NOT explained by rounding"
        console.print(f"prompt {d.prompt} {prompts[d.prompt][:40]!r}: token {d.at} is {d.texts[0]!r} and"
                      f" {d.texts[1]!r}, top-2 gaps {d.gaps[0]:.4f} and {d.gaps[1]:.4f}: {why}",
                      highlight=False, markup=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------------------------- soak
@dataclass(frozen=True)
class SoakOptions:
    """How long, and beside which drafters."""

    minutes: float = 1.0
    """How long."""
    rounds: int | None = None
    """How many rounds, instead of a time."""
    actions: int = ACTIONS
    """What clients do in a round: requests, aborts, branches and so on."""
    drafter: tuple[str, ...] = ()
    """Drafters that rounds choose from, as after --speculation; may be given several times. Default: of the tiny models
    all, of others off and ngram."""


Options = Annotated[SoakOptions, Parameter(name="*", group=Group("Soak", sort_key=0), negative_iterable=())]
SOAK = SoakOptions()
WINDOW = 16  # of one of the two tiny models
SOAK_CONTEXT = 256


def soak(model: ModelOptions = MODEL, *, soak: Options = SOAK, as_json: Json = False) -> int:
    """Random prompts, sessions and aborts on a small pool; every answer is checked by replay. The first round has
    --seed, the next ones count up; a failure names the seed of its round. Without a model two random tiny ones are
    used, one of them with a sliding window, and every kind of drafter.

    Parameters
    ----------
    as_json
        Print the findings as JSON.
    """
    with tempfile.TemporaryDirectory() as folder, expected_failures():  # of drafters: when a round makes them
        run = _tiny_soak(Path(folder), model, soak.drafter) if model.model is None else _soak_of(model, soak.drafter)
        first = seed = model.seed or 0
        ends = time.monotonic() + 60 * soak.minutes
        while (time.monotonic() < ends) if soak.rounds is None else (seed < first + soak.rounds):
            if not run.round(seed, soak.actions):
                break
            seed += 1
    if as_json:
        print(json.dumps(vars(run.result), indent=2))
    else:
        _print_soak(run.result, run.dtype, screen())
    return DIFFERENT if run.result.wrong else 0


def _soak_of(model: ModelOptions, drafters: tuple[str, ...]) -> Soak:
    prepared = prepare_or_fail(EngineSections(model).config())
    resolved = prepared.resolved
    loaded = load_model(prepared.path, dtype=getattr(torch, resolved.dtype), device=torch.device(resolved.device))
    subject = Subject(prepared.target.name, loaded, prepared.target, drafters or ("off", "ngram"))
    return Soak([subject], resolved.dtype, min(SOAK_CONTEXT, resolved.max_model_len))


def _tiny_soak(folder: Path, model: ModelOptions, drafters: tuple[str, ...]) -> Soak:
    """Raises CommandFailed for settings that would mean nothing here."""
    dtype = "float32" if model.dtype == "auto" else model.dtype
    if model != replace(MODEL, dtype=model.dtype, seed=model.seed):
        raise CommandFailed("without a model, tiny ones are made, which take --dtype and --seed alone: name a model for"
                            " other settings")
    subjects = []
    for name, window in (("tiny", None), ("tiny with a window", WINDOW)):
        tiny = write_tiny(folder / name, window)
        loaded = load_model(tiny.path, dtype=getattr(torch, dtype), device=torch.device("cpu"))
        known = {"off": "off", **tiny.drafters}
        if importlib.util.find_spec("arctic_inference") is not None:
            known["suffix"] = "suffix"
        chosen = tuple(known.get(asked, asked) for asked in drafters or known)
        subjects.append(Subject(name, loaded, target_of(loaded, tiny.path, name), chosen))
    return Soak(subjects, dtype, SOAK_CONTEXT)


def _print_soak(found: SoakResult, dtype: str, console: Console) -> None:
    seen = found.seen
    shown = ("answers", "steps", "mixed_steps", "session_turns", "in_place_turns", "branches", "aborts", "retractions",
             "reclaimed", "recomputed_tokens", "drafted", "accepted", "rounding")
    drafters = ", ".join(f"{name} {n}" for name, n in sorted(found.with_drafter.items()))
    console.print(f"{found.rounds} rounds ({drafters}): "
                  + ", ".join(f"{name.replace('_', ' ')} {seen[name]}" for name in shown), highlight=False)
    if seen["rounding"]:
        console.print(f"{seen['rounding']} answers differ where two tokens lie within {TOLERANCE[dtype]} of each other"
                      f" ({dtype}); with --dtype float32 there should be none", highlight=False)
    if found.wrong:
        console.print(f"WRONG in the round of --seed {found.seed} ({found.setting}):\n{found.wrong}", highlight=False,
                      markup=False, soft_wrap=True, style="red")
