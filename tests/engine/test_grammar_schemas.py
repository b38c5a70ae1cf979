"""What a random model writes under the schemas of tests/text/schemas.json: always valid, and with drafts as without.

Single bytes are the tokens, and those that end strings, lists and numbers are likelier than others, so that most
answers come to their end. One that the limit cuts must be the beginning of a valid one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from stretto.engine.core import EngineCore
from stretto.params import Grammar, SamplingParams
from stretto.spec.ngram import NgramDrafter
from stretto.text.grammar import LIMITS, definition
from tests.engine.small import Oracle, Run
from tests.engine.test_grammar import engine, text
from tests.serve.fakes import EOS
from tests.text.test_schemas import ACCEPTED, judge, tokens

SCHEMAS = [schema for cases in ACCEPTED.values() for schema, _, _ in cases]
CLOSING = {ord('"'): 6.0, ord("}"): 4.0, ord("]"): 4.0, EOS: 6.0, ord("\\"): -4.0, ord("{"): -3.0, ord("["): -3.0}
SLOTS = 33


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle.make(tmp_path_factory.mktemp("model"), "llama", sharpness=0.7)


def core(oracle: Oracle, **options) -> EngineCore:
    return engine(oracle, slots=SLOTS, pool_tokens=SLOTS * 160, page_size=8, chunk=8, budget=256, **options)


def written(oracle: Oracle, schemas: list[Any], **options) -> tuple[Run, list[tuple[list[int], str | None]]]:
    run = Run(core(oracle, **options))
    for i, schema in enumerate(schemas):
        run.submit(f"r{i}", [i % 256, 5, 9], SamplingParams(
            temperature=1.0, seed=i, max_tokens=120, logit_bias=CLOSING,
            grammar=Grammar("json_schema", json.dumps(schema), whitespace=False)))
    run.finish()
    run.core.close()
    return run, [(run.ids(f"r{i}"), run.reason(f"r{i}")) for i in range(len(schemas))]


def check(oracle: Oracle, schemas: list[Any]) -> None:
    run, answers = written(oracle, schemas, overlap=False)
    drafted, again = written(oracle, schemas, overlap=True, drafter=NgramDrafter(4))
    assert again == answers
    for i, (schema, (ids, reason)) in enumerate(zip(schemas, answers)):
        said = text(run, f"r{i}")
        if reason == "stop":
            assert judge(schema).is_valid(json.loads(said)), (schema, said)
        else:
            matcher = LLMatcher(tokens(), definition(Grammar("json_schema", json.dumps(schema), whitespace=False)),
                                log_level=0, limits=LIMITS)
            assert reason == "length" and matcher.try_consume_tokens(ids) == len(ids), (schema, said, reason)
    ended = sum(reason == "stop" for _, reason in answers)
    assert ended >= 0.9 * len(schemas), f"{ended} of {len(schemas)} answers came to their end"
    counters = drafted.core.stats().counters
    assert counters["drafted"] > len(schemas) and counters["forced_drafts"] > 0 and counters["mixed_steps"] > 0
    assert counters["late_masks"] - counters["late_masks_overlapped"] <= 2


def test_a_random_model_writes_what_is_valid(oracle: Oracle):
    check(oracle, SCHEMAS[::4])


@pytest.mark.full
@pytest.mark.parametrize("part", range(6))
def test_a_random_model_writes_what_is_valid_under_any_schema(oracle: Oracle, part: int):
    check(oracle, SCHEMAS[part::6])
