"""The whole engine on real tensors: whatever it does to a request under pressure, the request's tokens are its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine_probe.clock import Clock
from engine_probe.engine.config import EngineConfig
from engine_probe.engine.engine import Engine
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.scheduler import SchedulerConfig
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.torch_executor.executor import TorchExecutor
from engine_probe.errors import PromptRefused, UsageError
from engine_probe.recording.recorder import Recorder
from engine_probe.sending.sink import MemorySink
from tests.torch_models import TINY, alone, tiny_executor

SHARED = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]
PROMPTS = [[*SHARED, at, at + 1] for at in range(4)] + [[200] * 30, [5], [*SHARED, 3, 3, 3, 3, 3, 3]]


class Running:
    """An engine on `executor`, and what came out of it."""

    def __init__(self, executor: TorchExecutor, scheduler: dict[str, Any], **config: Any) -> None:
        self.sink = MemorySink()
        settings = EngineConfig(block_size=4, scheduler=SchedulerConfig(**scheduler), **config)
        self.recorder = Recorder(self.sink, worker="w0", clock=Clock(), flush_s=0)
        self.engine = Engine(settings, executor, self.recorder)

    def submit(self, name: str, prompt: list[int], **params: Any) -> Sequence:
        """A request under way."""
        wanted = SamplingParams(**{"max_tokens": 12, **params})
        sequence = Sequence(name, len(prompt), wanted, self.engine.clock.monotonic_ns(), token_ids=list(prompt))
        self.engine.submit(sequence)
        return sequence

    def finish(self) -> None:
        """Until nothing is under way; blocks add up after every step."""
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.engine.step()
            self.engine.check_integrity()
        raise AssertionError("requests starve")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """What was recorded."""
        self.recorder.flush()
        found: list[dict[str, Any]] = self.sink.table(kind).to_pylist()
        return found


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_every_request_gets_its_own_tokens(preemption: str, chunked: bool, caching: bool) -> None:
    """Seven requests over blocks for three: preempted, swapped, chunked, with shared prefixes; all as if alone."""
    scheduler = {"preemption": preemption, "chunked_prefill": chunked, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    executor = tiny_executor(num_blocks=18, num_host_blocks=40, check_every=3)
    running = Running(executor, scheduler, prefix_caching=caching, swap_blocks=40)
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 4}
    params = [{}, sampled, {}, sampled, {}, {}, {}]
    sent = [running.submit(f"r{at}", prompt, **params[at]) for at, prompt in enumerate(PROMPTS)]
    running.finish()
    undisturbed = tiny_executor(num_blocks=64)
    for at, (sequence, prompt) in enumerate(zip(sent, PROMPTS, strict=True)):
        assert sequence.token_ids[len(prompt) :] == alone(undisturbed, prompt, 12, **params[at])
    assert sum(sequence.num_preemptions for sequence in sent) > 0
    checks = running.rows("check")
    assert {row["outcome"] for row in checks} == {"passed"}
    assert {row["check"] for row in checks} == {"sample_boundary", "position", "mask", "leakage"}
    steps = running.rows("step")
    assert all(row["forward_s"] > 0 for row in steps if row["batch_size"])


def test_end_token_of_the_model_ends_the_text() -> None:
    """The fourth token that it would say, named as its end token, is the last; ignoring it goes on."""
    fourth = alone(tiny_executor(), [9, 9, 9], 4)
    assert fourth[3] not in fourth[:3]
    ending = replace(TINY, eos_token_ids=frozenset({fourth[3]}))
    running = Running(tiny_executor(ending), {})
    stopped = running.submit("stops", [9, 9, 9])
    going_on = running.submit("goes on", [9, 9, 9], ignore_eos=True)
    running.finish()
    assert (stopped.token_ids[3:], stopped.finish_reason) == (fourth, "stop")
    assert (going_on.num_output, going_on.finish_reason) == (12, "length")


def test_prompt_whose_activations_do_not_fit_is_refused_at_the_door() -> None:
    """With the bytes it would need, and no block is held; chunked, the same prompt runs."""
    prompt = [1] * 200
    whole = Running(tiny_executor(activation_limit_bytes=300_000), {"chunked_prefill": False})
    with pytest.raises(
        PromptRefused, match=r"200 tokens of a prompt in one step needs .* bytes of activations, 300000"
    ):
        whole.submit("large", prompt)
    whole.engine.check_integrity()
    assert [row["state"] for row in whole.rows("request")] == ["rejected"]
    chunked = Running(tiny_executor(activation_limit_bytes=300_000), {"max_num_batched_tokens": 32, "max_num_seqs": 32})
    sent = chunked.submit("large", prompt)
    chunked.finish()
    assert sent.num_output == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_size": 8}, "the engine's blocks have 4 tokens, the executor's 8"),
        ({"num_host_blocks": 2}, "swap_blocks is 3, and the executor has 2 host blocks"),
    ],
)
def test_engine_and_executor_must_agree_on_blocks(options: dict[str, Any], says: str) -> None:
    """Otherwise KV would land where nobody looks for it."""
    with pytest.raises(UsageError, match=says):
        Running(tiny_executor(**options), {}, swap_blocks=3)


def test_hits_and_steps_of_real_tensors_tell_idle_time_and_time_of_making_room() -> None:
    """A prefix found again after it lay unused; time on blocks is measured within the scheduler's, what no clock tells is null."""
    running = Running(tiny_executor(num_blocks=8), {}, prefix_caching=True)
    running.submit("a", [*SHARED, 1], max_tokens=1)
    running.finish()
    released_ns = running.engine.clock.monotonic_ns()
    while running.engine.clock.monotonic_ns() < released_ns + 20_000_000:
        pass
    running.submit("b", [*SHARED, 2], max_tokens=1)
    running.submit("c", [200] * 24, max_tokens=1)
    running.finish()
    hits = [row for row in running.rows("block") if row["change"] == "hit"]
    assert [row["request_id"] for row in hits] == ["b"] * 3
    assert all(0.020 <= row["idle_s"] < 10 for row in hits)
    steps = running.rows("step")
    assert sum(row["blocks_evicted"] for row in steps) > 0
    for row in steps:
        assert 0 < row["alloc_s"] <= row["schedule_s"]
        assert row["gpu_util"] is None
    # 13 tokens in blocks of 4 leave 3 slots; 24 fill theirs.
    assert steps[0]["wasted_slots"] == 3
