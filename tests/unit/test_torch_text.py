"""Text in and out: bytes without a file, a model's own tokenizer, pieces that never cut a character, chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine_probe.engine.torch_executor.chat_template import ChatTemplate, load_chat_template
from engine_probe.engine.torch_executor.detokenizer import Detokenizer
from engine_probe.engine.torch_executor.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from engine_probe.errors import ModelUnreadable, PromptRefused

BYTES = ByteTokenizer()
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    """A small byte-level BPE, saved and loaded: its tokens cut characters where they like."""
    made = Trained(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat", "der Käse ist größer", "日本語の文"] * 5, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder, None, frozenset({0}))
    assert isinstance(loaded, FileTokenizer)
    return loaded


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """What is said token by token, and at the end."""
    said = Detokenizer(tokenizer)
    return [*(said.add(token) for token in token_ids), said.finish()]


@given(st.text())
def test_bytes_go_there_and_back(text: str) -> None:
    """Any text, with and without bos; a lone surrogate, which no UTF-8 has, becomes a question mark."""
    assert BYTES.decode(BYTES.encode(text)) == text.encode("utf-8", "replace").decode()
    assert BYTES.encode(text) == [256, *BYTES.encode(text, begins=False)]


def test_bytes_are_known_by_hand() -> None:
    """'aé' is a 97, then the two bytes of é."""
    assert BYTES.encode("aé") == [256, 97, 0xC3, 0xA9]
    assert BYTES.decode([257, 97, 256, 300]) == "a"
    assert (BYTES.vocab_size, BYTES.eos_token_ids) == (258, {257})


@given(st.lists(st.integers(0, 257)))
def test_pieces_of_any_bytes_join_to_the_text(token_ids: list[int]) -> None:
    """Valid or not, what is said piece by piece is what all tokens say together."""
    assert "".join(pieces(BYTES, token_ids)) == BYTES.decode(token_ids)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 299)))
def test_pieces_of_a_model_join_to_the_text(trained: FileTokenizer, text: str, more: list[int]) -> None:
    """For the tokens of a text, and for tokens in any order."""
    assert "".join(pieces(trained, trained.encode(text))) == text
    assert "".join(pieces(trained, more)) == trained.decode(more)


def test_character_is_never_cut() -> None:
    """The four bytes of an emoji are said at the fourth; bytes that cannot begin one are said as they come to be sure."""
    assert pieces(BYTES, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]
    assert pieces(BYTES, [0xF0, 0x9F]) == ["", "", "\ufffd"]
    assert pieces(BYTES, [0x80, 0x80, 0x80, 0xF0, *"😀".encode()[1:]]) == [
        "",
        "",
        "",
        "\ufffd",
        "",
        "",
        "\ufffd\ufffd😀",
        "",
    ]


def test_special_tokens_say_nothing(trained: FileTokenizer) -> None:
    """End tokens are no text."""
    assert pieces(trained, [*trained.encode("on"), 0])[-2:] == ["", ""]
    assert trained.eos_token_ids == {0}
    assert trained.vocab_size == 300


def test_folder_without_a_tokenizer_speaks_bytes(tmp_path: Path) -> None:
    """So a seeded model, and a checkpoint that lacks the file, still read and write."""
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelUnreadable, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)


def test_built_in_template_is_plain() -> None:
    """Role lines and an open answer; a list of text parts is joined."""
    template = ChatTemplate()
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    assert template.render(messages) == "<|system|>\nBe short.\n<|user|>\nHello\nthere\n<|assistant|>\n"
    assert not template.render(messages, add_generation_prompt=False).endswith("<|assistant|>\n")
    assert template.version.startswith("builtin-")


def test_models_own_template_is_used(tmp_path: Path) -> None:
    """From tokenizer_config.json, with the tokens it names there; chat_template.jinja goes before."""
    config = {"chat_template": "{{ bos_token }}" + CHATML, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    said = template.render([{"role": "user", "content": "Hi"}])
    assert said == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.version != ChatTemplate().version != ChatTemplate(CHATML).version
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}{{ bos_token }}")
    assert load_chat_template(tmp_path).render([{"role": "user", "content": "Hi"}]) == "1<s>"
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "chat_template.jinja").unlink()
    assert load_chat_template(tmp_path).render([{"role": "user", "content": "Hi"}]) == "y"


def test_folder_without_a_template_has_the_built_in_one(tmp_path: Path) -> None:
    """And no folder as well."""
    assert load_chat_template(tmp_path).version == load_chat_template(None).version == ChatTemplate().version


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "at least one message"),
        ([{"content": "x"}], "message 0 has no role"),
        (["x"], "message 0 has no role"),
        ([{"role": "user", "content": 3}], "content of message 0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "reads text alone"),
    ],
)
def test_messages_that_are_none_are_refused(messages: list[dict[str, object]], named: str) -> None:
    """With the message that is meant."""
    with pytest.raises(PromptRefused, match=named):
        ChatTemplate().render(messages)


def test_template_may_refuse_messages() -> None:
    """`raise_exception`, which templates call for roles they do not know, ends in PromptRefused with its words."""
    template = ChatTemplate("{{ raise_exception('no system role') }}")
    with pytest.raises(PromptRefused, match="no system role"):
        template.render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize("source", ["{% for %}", "{{ unclosed"])
def test_template_that_is_none_is_refused(source: str) -> None:
    """When the model is loaded, not at the first request."""
    with pytest.raises(ModelUnreadable, match="no Jinja template"):
        ChatTemplate(source)


def test_template_cannot_leave_its_sandbox() -> None:
    """A template of a downloaded model reads no attributes of Python."""
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PromptRefused):
        template.render([{"role": "user", "content": "x"}])
