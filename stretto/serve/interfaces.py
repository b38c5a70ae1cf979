"""What the server needs of a tokenizer; stretto.text.tokenizer provides it, and tests bring a small one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class ServeTokenizer(Protocol):
    """Used from several threads at once."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How the model's answers are taken apart, where its files say so: see stretto.text.reply_template."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that follows another one: nothing is put around it, and no space in front."""
        ...

    def begins_text(self, prompt: Sequence[int]) -> bool:
        """What stands behind these ids begins a text of its own."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for within a text; b"" for an id without a token."""
        ...

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
                            add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of the rendered conversation. Raises a ValueError with the template's own words where it refuses
        the messages. `continue_final_message` ends the prompt inside the last message; other keywords are variables
        of the template."""
        ...
