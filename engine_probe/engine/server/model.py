"""The model that is served: its executor, how it reads and writes text, and what its KV depends on.

A folder with config.json, safetensors and tokenizer files, or the seeded tiny model, which needs no file and says nothing
sensible, reproducibly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine_probe.engine.kv_identity import KvIdentity
from engine_probe.engine.torch_executor.chat_template import ChatTemplate, load_chat_template
from engine_probe.engine.torch_executor.executor import TorchExecutor, TorchOptions
from engine_probe.engine.torch_executor.model_config import ModelConfig
from engine_probe.engine.torch_executor.tokenizer import Tokenizer, load_tokenizer

TINY = ModelConfig(
    model_type="llama",
    num_layers=2,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=258,
    max_context=4096,
    bos_token_id=256,
    eos_token_ids=frozenset({257}),
)
"""Bytes in, bytes out: 0.1 M parameters, a step in milliseconds on any machine."""
TINY_NAME = "kvscope-tiny"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """names: under which clients may ask for it, the first is told in answers. root: where it came from."""

    names: tuple[str, ...]
    root: str
    executor: TorchExecutor
    tokenizer: Tokenizer
    template: ChatTemplate
    identity: KvIdentity
    vocab_size: int


def load_model(
    folder: Path | None, options: TorchOptions, *, names: tuple[str, ...] = (), seed: int = 0
) -> ServedModel:
    """Load it. folder: None is the seeded tiny model. Raises ModelUnreadable, DeviceMissing, UsageError."""
    if folder is None:
        executor = TorchExecutor.seeded(TINY, seed, options)
        executor.name = TINY_NAME if seed == 0 else f"{TINY_NAME}-{seed}"
    else:
        executor = TorchExecutor.from_folder(folder, replace(options, seed=seed))
    config = executor.config
    template = load_chat_template(folder)
    facts = executor.worker_facts
    identity = KvIdentity(
        model=executor.name,
        dtype=str(facts["dtype"]),
        kv_dtype=str(facts["kv_dtype"]),
        position=f"{config.rope.kind}/{config.rope.theta:g}/{config.rope.factor:g}",
        template=template.version,
    )
    return ServedModel(
        names=names or (executor.name,),
        root=executor.name if folder is None else str(folder),
        executor=executor,
        tokenizer=load_tokenizer(folder, config.bos_token_id, config.eos_token_ids),
        template=template,
        identity=identity,
        vocab_size=config.vocab_size,
    )
