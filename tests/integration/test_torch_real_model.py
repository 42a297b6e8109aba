"""A real small model (SmolLM2, 135 M parameters), converted from the file beside llama-server, says what llama-server says."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_probe.engine.torch_executor.chat_template import load_chat_template
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
from engine_probe.engine.torch_executor.tokenizer import Tokenizer, load_tokenizer
from tests.gguf_model import convert
from tests.servers import llama_model, require, running_llama_server
from tests.torch_models import alone

pytestmark = pytest.mark.server
SENTENCES = ("The sun rises in the", "My name is John and I live in")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as Hugging Face publishes it: config.json, safetensors, tokenizer.json."""
    require("llama-server")
    return convert(llama_model(), tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def executor(folder: Path) -> TorchExecutor:
    """In float32: llama-server multiplies its 4-bit weights with wider numbers as well."""
    return TorchExecutor.from_folder(folder, TorchOptions(device="cpu", num_blocks=64, dtype="float32"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    """llama-server on the same file."""
    with running_llama_server() as url:
        yield url


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A JSON answer to a JSON question."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.parametrize("sentence", SENTENCES)
def test_greedy_answer_is_llama_servers(
    executor: TorchExecutor, tokenizer: Tokenizer, llama: str, sentence: str
) -> None:
    """Twelve tokens one for one, where no two candidates are close; llama-server also rounds its activations to 8 bits."""
    prompt = tokenizer.encode(sentence)
    asked = {"prompt": prompt, "n_predict": 12, "temperature": 0, "top_k": 1, "return_tokens": True}
    theirs = post(f"{llama}/completion", asked)["tokens"]
    assert alone(executor, prompt, 12) == theirs


def test_words_are_cut_as_llama_server_cuts_them(tokenizer: Tokenizer, llama: str) -> None:
    """Digits one by one, umlauts, spaces, code: the same ids, and back to the same text."""
    for text in ("It costs 12345 EUR,  more or less.", "Käse schließt den Magen\n\n\tdef f(x): return x", "日本語 😀"):
        ids = tokenizer.encode(text)
        assert ids == post(f"{llama}/tokenize", {"content": text})["tokens"]
        assert tokenizer.decode(ids) == text


def test_chat_template_of_the_model_is_used(executor: TorchExecutor, tokenizer: Tokenizer, folder: Path) -> None:
    """A question in the words the model was trained on gets an answer that ends by itself."""
    text = load_chat_template(folder).render([{"role": "user", "content": "What is the capital of France?"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    answer = alone(executor, tokenizer.encode(text), 9)
    assert "Paris" in tokenizer.decode(answer)
    assert executor.eos_token_ids == {2}
