"""Small real tokenizers, trained on a few lines when a test asks for them."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = (
    "the quick brown fox jumps over the lazy dog and the end of the story is the end",
    "don't we'll I'm 3.14159 and 2718 items; $x_1 = y**2 # comment\n\tindented\n\n  two",
    "삼겹살 맛있다 ďábelské ódy 世界 世a世b 🙂🙂 👩‍👩‍👧 नमस्ते мир привет שלום",
    "Once upon a time there was a little girl named Lily. She loved to play outside. ### END",
) * 3
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level(size: int = 500) -> Tokenizer:
    """GPT-2's kind: tokens are bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return tokenizer


@cache
def byte_fallback(size: int = 440, prefix: bool = True) -> Tokenizer:
    """SentencePiece's kind: tokens are text, and a character without a token becomes byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces] if prefix else [spaces])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    single_bytes = [f"<0x{b:02X}>" for b in range(256)]
    latin = [line for line in LINES if line.isascii()]
    tokenizer.train_from_iterator(latin, trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, *single_bytes], show_progress=False))
    state = json.loads(tokenizer.to_str())  # the trainer can only reserve byte tokens as special ones: undo that
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in single_bytes]
    return Tokenizer.from_str(json.dumps(state))


@cache
def metaspace() -> Tokenizer:
    """A decoder of neither kind."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, special_tokens=list(SPECIAL),
                                                             show_progress=False))
    return tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that puts <s> in front of a text."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return copy


ALL = {"byte_level": byte_level, "byte_fallback": byte_fallback, "byte_fallback_no_prefix":
       lambda: byte_fallback(prefix=False), "metaspace": metaspace}
