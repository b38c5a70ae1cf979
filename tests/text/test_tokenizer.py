"""Tokenizers from Hugging Face folders; transformers is the oracle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stretto.text.tokenizer import TokenizerError, load_tokenizer
from tests.text.vocabularies import ALL, byte_fallback, byte_level, with_bos

STORIES = Path(__file__).resolve().parents[2] / "../shared/data/models/stories260k"
TEXTS = ("Once upon a time", "  two  spaces \n\n", "don't 3.14 삼겹살 🙂 ďábelské", "",
         "<|im_start|>user\nhi<|im_end|> </s>x")
TEMPLATE = ("{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def save(folder: Path, backend, tokenizer_config: dict | None = None, **files) -> Path:
    """A model folder with a tokenizer; each keyword becomes a JSON file, or a .jinja file for text."""
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
             "eos_token": "</s>"}
    files = {"tokenizer_config": named | (tokenizer_config or {}), **files}
    for name, content in files.items():
        if isinstance(content, str):
            file = folder / f"{name.replace('__', '/')}.jinja"
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def oracle(folder: Path):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}],
                         ids=["plain", "flags_on", "flags_off"])
@pytest.mark.parametrize("frame", [with_bos, lambda backend: backend], ids=["bos", "no_bos"])
@pytest.mark.parametrize("name", ALL)
def test_ids_and_text_equal_transformers(tmp_path, name, frame, config):
    folder = save(tmp_path, frame(ALL[name]()), config)
    mine, theirs = load_tokenizer(folder), oracle(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = mine.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert mine.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert (mine.bos_token_id, mine.eos_token_id, mine.pad_token_id) == (1, 2, None)
    assert mine.vocab_size == len(theirs)


@pytest.mark.skipif(not STORIES.is_dir(), reason="shared/data/models/stories260k is absent")
def test_stories260k_equals_transformers():
    mine, theirs = load_tokenizer(STORIES), oracle(STORIES)
    for text in TEXTS:
        ids = mine.encode(text)
        assert ids == theirs.encode(text)
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_tokens_declared_in_the_configuration_only(tmp_path):
    entry = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
             "special": True}
    size = byte_level().get_vocab_size()
    config = {"added_tokens_decoder": {str(size): entry, "0": entry | {"content": "<unk>"}}, "pad_token": "<|im_end|>",
              "additional_special_tokens": ["<|im_start|>"]}
    mine = load_tokenizer(save(tmp_path, byte_level(), config))
    assert mine.encode("a<tool>b")[1] == size and size in mine.special_ids
    assert mine.decode(mine.encode("a<tool>b")) == "ab"
    assert mine.pad_token_id == mine.backend.token_to_id("<|im_end|>")
    assert mine.vocab_size == len(oracle(tmp_path)) == size + 1


def test_token_bytes():
    for tokenizer in (byte_level(), byte_fallback()):
        mine = load_via(tokenizer)
        ids = mine.encode("the 世🙂 end", add_special_tokens=False)
        assert b"".join(mine.token_bytes(i) for i in ids).decode().strip() == "the 世🙂 end"
        assert mine.token_bytes(10**6) == b""


def load_via(backend):
    from stretto.text.tokenizer import Tokenizer, TokenizerParts

    return Tokenizer(TokenizerParts(backend))


def test_saved_truncation_and_padding_do_not_touch_prompts(tmp_path):
    backend = type(byte_level()).from_str(byte_level().to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert load_tokenizer(save(tmp_path, backend)).encode("the quick brown fox jumps") == byte_level().encode(
        "the quick brown fox jumps").ids


def test_threads_share_a_tokenizer(tmp_path):
    mine = load_tokenizer(save(tmp_path, byte_level(), chat_template=TEMPLATE))
    chats = [[{"role": "user", "content": f"number {i} " * 50}] for i in range(40)]
    expected = [mine.apply_chat_template(c) for c in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(mine.apply_chat_template, chats)) == expected


# ------------------------------------------------------------------------------------------------------- end of answer
@pytest.mark.parametrize(("files", "expected"), [
    ({"generation_config": {"eos_token_id": [5, 9], "temperature": 0.1}, "config": {"eos_token_id": 7}}, (5, 9)),
    ({"generation_config": {"temperature": 0.1}, "config": {"eos_token_id": 7}}, (7,)),
    ({"config": {"eos_token_id": [7, 8]}}, (7, 8)),
    ({"config": {}}, (2,)),
], ids=["case_18_01_generation_config", "config", "config_list", "tokenizer"])
def test_end_of_answer_ids(tmp_path, files, expected):
    mine = load_tokenizer(save(tmp_path, byte_level(), **files))
    assert mine.eos_token_ids == expected
    assert mine.eos_token_id == 2


# ----------------------------------------------------------------------------------------------------- chat templates
def test_case_18_03_one_bos(tmp_path):
    """The template writes BOS and the tokenizer adds BOS: a chat has one, a plain text has one."""
    mine = load_tokenizer(save(tmp_path, with_bos(byte_level()), chat_template=TEMPLATE))
    assert mine.apply_chat_template([{"role": "user", "content": "hi"}]).count(1) == 1
    assert mine.encode("hi").count(1) == 1
    assert mine.encode("hi", add_special_tokens=False).count(1) == 0
    chat = [{"role": "user", "content": "hi"}]
    assert mine.apply_chat_template(chat) == oracle(tmp_path).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(("files", "config", "tools", "expected"), [
    ({"chat_template": "file"}, {"chat_template": "embedded"}, None, "file"),
    ({}, {"chat_template": "embedded"}, None, "embedded"),
    ({}, {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}, [{}], "t"),
    ({}, {"chat_template": [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]}, None, "d"),
    ({"chat_template": "d", "additional_chat_templates__tool_use": "t"}, {}, [{}], "t"),
], ids=["file_wins", "embedded", "list_tools", "list", "folder"])
def test_which_template_is_taken(tmp_path, files, config, tools, expected):
    folder = save(tmp_path, byte_level(), config, **files)
    chat = [{"role": "user", "content": "x"}]
    assert load_tokenizer(folder).render_chat_template(chat, tools) == expected
    assert oracle(folder).apply_chat_template(chat, tools=tools, tokenize=False) == expected


def test_template_can_be_replaced(tmp_path):
    folder = save(tmp_path, byte_level(), chat_template="old")
    assert load_tokenizer(folder, chat_template="new").render_chat_template([]) == "new"
    assert load_tokenizer(folder, chat_template="new").chat_template == "new"


# -------------------------------------------------------------------------------------------------------------- errors
def test_the_response_template_is_read_and_checked(tmp_path):
    declared = {"start_anchor": "<|im_start|>assistant\n", "fields": {"content": {}}}
    folder = save(tmp_path, byte_level(), {"response_template": declared})
    assert load_tokenizer(folder).response_template == oracle(folder).response_template == declared
    assert load_tokenizer(folder, "another chat template").response_template is None
    assert load_tokenizer(save(tmp_path, byte_level())).response_template is None
    for broken in ({"fields": {"content": {}}}, {"start_anchor": "x", "fields": {"content": {"closes": "y"}}}, [1]):
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json has a response_template that cannot be used"):
            load_tokenizer(save(tmp_path, byte_level(), {"response_template": broken}))


def test_missing_tokenizer_names_the_way_out(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json; it is part"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"only tokenizer\.model; convert it once"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer.json", "{", "tokenizer.json cannot be read"),
    ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
    ("chat_template.jinja", "{% for %}", "chat template 'default' is not valid, line 1"),
])
def test_damaged_files_are_named(tmp_path, name, content, message):
    save(tmp_path, byte_level())
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)
