"""A conversation to the one text that a model was trained on: its own Jinja template, or a plain built-in one.

A template is somebody else's program: it runs in Jinja's sandbox, without attributes, imports or files, and what it raises
becomes PromptRefused. `version` tells templates apart: another template makes other KV of the same messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine_probe.engine.torch_executor.json_file import read_json
from engine_probe.errors import ModelUnreadable, PromptRefused

BUILT_IN = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""Said in Jinja for the record; rendered without it, so that a model without a template needs no Jinja."""

Message = Mapping[str, Any]


class ChatTemplate:
    """One template. source: Jinja; None: the built-in one. special: values of bos_token and the like."""

    def __init__(self, source: str | None = None, special: Mapping[str, str] | None = None) -> None:
        """Raises ModelUnreadable where the source is no template."""
        self.version = "builtin-" if source is None else ""
        self.version += blake2b((source or BUILT_IN).encode(), digest_size=6).hexdigest()
        self._special = dict(special or {})
        self._template: Any = None if source is None else _compile(source)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of the conversation, open for the assistant's answer. Raises PromptRefused."""
        for at, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise PromptRefused(f"message {at} has no role", field="messages")
        if not messages:
            raise PromptRefused("a conversation needs at least one message", field="messages")
        plain = [{**message, "content": _text(message.get("content"), at)} for at, message in enumerate(messages)]
        if self._template is None:
            said = "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in plain)
            return said + ("<|assistant|>\n" if add_generation_prompt else "")
        try:
            return str(
                self._template.render(messages=plain, add_generation_prompt=add_generation_prompt, **self._special)
            )
        except Exception as error:  # whatever the template's own code runs into
            raise PromptRefused(f"the model's chat template refused the messages: {error}", field="messages") from error


def load_chat_template(folder: Path | None) -> ChatTemplate:
    """That of chat_template.jinja or tokenizer_config.json, else the built-in one. Raises ModelUnreadable."""
    if folder is None:
        return ChatTemplate()
    said = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    if not isinstance(said, dict):
        raise ModelUnreadable(f"tokenizer_config.json in {folder} is no JSON object", path=str(folder))
    beside = folder / "chat_template.jinja"
    source = beside.read_text(encoding="utf-8") if beside.exists() else said.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise ModelUnreadable(f"chat_template in {folder} is no text", path=str(folder))
    return ChatTemplate(source, {name: text for name in _SPECIAL if (text := _special_text(said.get(name)))})


_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def _special_text(value: Any) -> str | None:
    """tokenizer_config.json writes a token as a text, or as an object with its `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _text(content: Any, at: int) -> str:
    """OpenAI's content: a text, or a list of parts of which the texts are joined; None (a tool call) is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptRefused(f"content of message {at} is neither a text nor a list of parts", field="messages")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PromptRefused(
                f"message {at} has a part that is no text; this engine reads text alone", field="messages"
            )
    return "\n".join(part["text"] for part in content)


def _compile(source: str) -> Any:
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ModelUnreadable("the model's chat template needs the package jinja2; install kvscope[engine]") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelUnreadable(f"the model's chat template is no Jinja template: {error}") from error


def _raise(message: str) -> None:
    raise ValueError(message)
