"""A real vLLM CPU server for tests: a tiny random Llama, started from the environment that `.ci/setup-vllm` makes.

The model has 2 layers, 2 KV heads of 32, a vocabulary of 512 and random weights, so answers are noise: only counts and
times matter. `ignore_eos` makes every request run to its `max_tokens`. A prompt is a list of token ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / ".ci" / "setup-vllm"
MODEL_NAME = "tiny"
BLOCK_SIZE = 32
VOCABULARY = 512
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

_MAKE_MODEL = """
import sys
from pathlib import Path
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: 3 + i for i, c in enumerate(alphabet)}
while len(vocabulary) < 512:
    vocabulary[f"<extra{len(vocabulary)}>"] = len(vocabulary)
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
out = Path(sys.argv[1])
special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(out)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
"""


def home() -> Path:
    """Folder of the environment, whether it exists or not."""
    return Path(subprocess.run([SETUP, "--path"], check=True, capture_output=True, text=True).stdout.strip())


def available() -> bool:
    """True where the environment is complete."""
    return (home() / "kvscope-engine.txt").exists()


def refresh_probe() -> None:
    """Bring kvscope's probe inside the environment up to this source tree (does nothing when it is)."""
    subprocess.run([SETUP, "--refresh"], check=True, capture_output=True, text=True, timeout=300)


def model_folder() -> Path:
    """Folder of the tiny model, made once per environment."""
    folder = home() / "kvscope-tiny-model"
    if not (folder / "model.safetensors").exists():
        subprocess.run(
            [home() / "bin" / "python", "-c", _MAKE_MODEL, folder],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    return folder


def free_port(count: int = 1) -> int:
    """A port that is free now, as are the `count` - 1 after it."""
    for _ in range(50):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                for offset in range(1, count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no run of {count} free ports found")


@dataclass
class VllmServer:
    """One vLLM server at a fixed address; may be started again after it was stopped or killed."""

    log_path: Path
    num_blocks: int = 40
    max_num_seqs: int = 8
    flags: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, timeout_s: float = 300.0) -> None:
        """Start and wait until it answers. Raises RuntimeError with the end of its log where it does not."""
        command = [
            str(home() / "bin" / "python"),
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_folder()), "--served-model-name", MODEL_NAME),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "bfloat16", "--max-model-len", "1024", "--enforce-eager"),
            *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(self.num_blocks)),
            *("--max-num-seqs", str(self.max_num_seqs), "--max-num-batched-tokens", "1024"),
            *("--enable-prompt-tokens-details", "--enable-request-id-headers"),
            # One process fewer to start: a third of the start-up time on two cores.
            *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
            *self.flags,
        ]
        env = os.environ | ENVIRONMENT | self.env
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
            env.pop(name, None)
        with self.log_path.open("ab") as log:
            # Its own session: kill -9 must take the engine core with the API server.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True, cwd=home()
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"vLLM ended with {self.process.returncode}:\n{self.log_tail()}")
            if self.is_healthy():
                return
            time.sleep(0.25)
        self.kill()
        raise RuntimeError(f"vLLM did not answer within {timeout_s:.0f} s:\n{self.log_tail()}")

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9 to the whole server: nothing is flushed, no socket is closed politely."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to stop; kill it where it does not within 20 s."""
        self._signal(signal.SIGTERM, grace_s=20.0)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int, grace_s: float = 20.0) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)

    def log_tail(self, lines: int = 40) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def metrics_text(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            text: str = response.read().decode()
        return text

    def counter(self, name: str) -> float:
        """Sum over all label sets of one wire name; the tests' own reading, not kvscope's parser."""
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in self.metrics_text().splitlines()
            if line.startswith((name + "{", name + " "))
        ]
        if not values:
            raise KeyError(f"{name} is not on the page")
        return sum(values)


def kv_events_config(endpoint: str, replay_endpoint: str | None = None, buffer_steps: int = 10_000) -> str:
    """Value of `--kv-events-config`."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv@worker-0@tiny"}
    config |= {"buffer_steps": buffer_steps} | ({"replay_endpoint": replay_endpoint} if replay_endpoint else {})
    return json.dumps(config)
