"""What a chat template tells of the answers of its model: the form of their calls, or of all of them.

No torch in this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.text.call_forms import ARGS, CALL, HERMES, PYTHON_TAG, TOOL_CALLS, CallForm, Llama, Mistral
from stretto.text.reply import THINK
from stretto.text.reply_template import HARMONY, REASONING
from stretto.text.tag_forms import TagForm
from stretto.text.tags import ARGUMENT, FUNCTION


def form_of(template: str) -> CallForm | None:
    """The form of calls that a chat template shows to its model; None if it is none of those that are known."""
    if CALL in template:
        tags = FUNCTION if "<function=" in template else ARGUMENT if "<arg_key>" in template else None
        return HERMES if tags is None else TagForm(tags)
    if TOOL_CALLS in template:
        return Mistral(ARGS in template)
    if PYTHON_TAG in template or ('"name": "' in template and '"parameters": ' in template):
        return Llama()
    return None


def response_template_of(template: str, declared: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """The form of whole answers, for transformers' parser. None where the form of calls says enough, which is read with
    arguments as they grow. `declared`: by the model's files."""
    if declared is not None:
        known = form_of(template) is not None and all(
            field.get("open") == THINK for name, field in declared.get("fields", {}).items() if name in REASONING)
        return None if known else declared
    return HARMONY if "<|channel|>" in template and "<|message|>" in template else None
