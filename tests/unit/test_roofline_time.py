"""Virtual time: the arithmetic of steps, worked by hand, and models and hardware that it is made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_probe.engine.executor import Chunk, StepPlan
from engine_probe.engine.roofline.executor import RooflineExecutor
from engine_probe.engine.roofline.hardware import HARDWARE, Hardware, find_hardware, from_fields
from engine_probe.engine.roofline.memory import plan_memory
from engine_probe.engine.roofline.model_shape import find_shape, model_shape
from engine_probe.engine.roofline.step_time import StepTime, causal_pairs
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.virtual_clock import VirtualClock
from engine_probe.errors import DeviceMissing, UsageError

GIB = 1 << 30
IDEAL = Hardware(
    "ideal",
    peak_flops=1e15,
    peak_fp8_flops=2e15,
    memory_bandwidth=2e12,
    memory_bytes=80 * GIB,
    host_bandwidth=32e9,
    link_bandwidth=100e9,
    compute_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
    link_latency_s=0.0,
    host_overhead_s=0.0,
)
# Published parameter counts.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "phi-4": 14_659_507_200,
    "gemma-3-1b": 999_885_952,
    "smollm2-135m": 134_515_008,
}


def decoding(context: int, number: int = 1) -> list[Sequence]:
    """Sequences that decode: `context` tokens have their KV, the next one is pending."""
    return [
        Sequence(f"r{i}", context, SamplingParams(max_tokens=10_000), 0, num_computed=context, num_output=1)
        for i in range(number)
    ]


def prefill(tokens: int, start: int = 0) -> Chunk:
    return Chunk(Sequence("p", start + tokens, SamplingParams(), 0), start, tokens, emits=True)


def executor(hardware: Hardware = IDEAL, model: str = "llama-2-7b", **more: Any) -> RooflineExecutor:
    return RooflineExecutor(find_shape(model), hardware, VirtualClock(), **more)


def seconds(running: RooflineExecutor, plan: StepPlan, **more: Any) -> float:
    """By how much the clock moves."""
    before = running.clock.monotonic_ns()
    running.execute(plan, **more)
    return (running.clock.monotonic_ns() - before) / 1e9


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_count(name: str) -> None:
    """To the last one: embeddings, biases of Qwen2.5, head norms of Qwen3, routers of the mixtures."""
    assert find_shape(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("llama-3-8b", 131_072),
        ("llama-3-70b", 327_680),
        ("qwen2.5-7b", 57_344),
        ("qwen3-8b", 147_456),
        ("qwen3-30b-a3b", 98_304),
        ("mistral-7b", 131_072),
        ("mistral-7b-v0.1", 131_072),
        ("gemma-3-27b", 81_920),
    ],
)
def test_kv_bytes_per_token_are_those_of_kv_size(name: str, per_token: int) -> None:
    """2 * layers * kv_heads * head_dim * 2 bytes; of Gemma-3-27B the 10 of 62 layers that keep every token."""
    assert find_shape(name).kv_bytes_per_token == per_token


def test_a_mixture_multiplies_a_token_with_its_active_experts_alone() -> None:
    """Qwen3-30B-A3B: 3.3 G of 30.5 G parameters are active, less the embedding table (151,936 * 2,048 = 0.31 G): 3.04 G."""
    assert find_shape("qwen3-30b-a3b").active_parameters == pytest.approx(3.04e9, rel=0.01)


def test_decode_of_7b_at_16_bit_and_2_tb_s_has_its_floor_at_7_ms() -> None:
    """7e9 * 2 bytes / 2e12 bytes/s = 7 ms. Llama-2-7B reads 6.738 G less its embedding table of 0.131 G: 6.61 ms."""
    seven = replace(find_shape("llama-2-7b"), layers=1, hidden=1000, heads=1, kv_heads=1, head_dim=1, vocab=1000)
    # 4,000 of attention, 3,000 a unit of width, 1,000,000 of the head; norms 0: width 2,333,000 makes 7e9 with the rest.
    seven = replace(seven, intermediate=2_333_000, layer_extra=0)
    assert seven.attention_parameters + seven.expert_parameters + seven.head_parameters == 7_000_004_000
    assert StepTime(seven, IDEAL).decode_floor_s == pytest.approx(7e-3, rel=1e-6)
    assert StepTime(find_shape("llama-2-7b"), IDEAL).decode_floor_s == pytest.approx(6.607e-3, abs=1e-6)
    # One sequence with a short context is at the floor: its KV (11 tokens of 512 KiB, and one written) adds 3 us.
    assert seconds(executor(), StepPlan(decodes=decoding(10))) == pytest.approx(
        6.607e-3 + 12 * 524_288 / 2e12, abs=1e-6
    )


def test_32_sequences_of_4096_tokens_read_64_gib_of_kv_a_step() -> None:
    """2 * 32 layers * 32 heads * 128 * 2 bytes = 524,288 a token; times 131,072 tokens is 64 GiB: 34.4 ms at 2 TB/s."""
    shape = find_shape("llama-2-7b")
    assert shape.kv_bytes_per_token * 32 * 4096 == 64 * GIB
    parts = StepTime(shape, IDEAL).parts(32, 32, decode_keys=32 * 4096)
    assert parts.decode_s == pytest.approx(64 * GIB / 2e12, rel=1e-12)
    step_s = seconds(executor(), StepPlan(decodes=decoding(4095, 32)))
    assert step_s == pytest.approx(parts.total_s, abs=1e-9)
    assert step_s == pytest.approx(34.36e-3 + 6.61e-3, abs=0.1e-3)


def test_attention_work_of_prefill_grows_64_fold_from_512_to_4096_tokens() -> None:
    """Pairs n (n + 1) / 2: 131,328 and 8,390,656, 63.9 times; linear work grows 8-fold. So does time, where FLOPs bind."""
    assert (causal_pairs(0, 512), causal_pairs(0, 4096)) == (131_328, 8_390_656)
    # (At 2 TB/s the 512 tokens are still bound by reading their keys and values, and the time grows 33-fold.)
    times = StepTime(find_shape("llama-2-7b"), replace(IDEAL, memory_bandwidth=2e13))
    short, long = (
        times.parts(tokens, 1, prefill_pairs=causal_pairs(0, tokens), prefill_keys=tokens) for tokens in (512, 4096)
    )
    assert long.prefill_s / short.prefill_s == pytest.approx(64, rel=0.002)
    assert long.linears_s / short.linears_s == pytest.approx(8, rel=1e-9)
    # 4 * 4096 FLOPs a pair and layer, 32 layers, 1e15 FLOP/s.
    assert long.prefill_s == pytest.approx(8_390_656 * 4 * 4096 * 32 / 1e15, rel=1e-9)


def test_a_batch_of_32_multiplies_decode_throughput() -> None:
    """Weights are read once for all: at 128 tokens of context 32 sequences take 17 % longer than one, so 27 times as many tokens."""
    one, many = (seconds(executor(), StepPlan(decodes=decoding(127, number))) for number in (1, 32))
    # 32 * 128 keys and 32 new ones of 512 KiB at 2 TB/s: 1.08 ms beside 6.61.
    assert many == pytest.approx(6.607e-3 + 32 * 129 * 524_288 / 2e12, abs=2e-6)
    assert 32 * one / many == pytest.approx(27.6, abs=0.2)


def test_prefill_is_bound_by_flops_and_decode_by_bytes() -> None:
    """8k tokens of Llama-3-8B on an H100: 2 * 7.5 G * 8,192 FLOPs are 0.19 s at 643 TFLOP/s; weights alone are 5 ms."""
    shape = find_shape("llama-3-8b")
    parts = StepTime(shape, HARDWARE["h100"]).parts(8192, 1, prefill_pairs=causal_pairs(0, 8192), prefill_keys=8192)
    assert parts.linears_s == pytest.approx(2 * 6.9796e9 * 8192 / (989.4e12 * 0.65), rel=0.001)
    one = StepTime(shape, HARDWARE["h100"]).parts(1, 1, decode_keys=8192)
    assert one.linears_s == pytest.approx(6.9796e9 * 2 / (3.35e12 * 0.83), rel=0.001)


def test_chunks_do_the_attention_of_the_whole_prefill() -> None:
    """4,096 tokens at once or as 8 chunks of 512: the same pairs; each chunk reads the keys before it again."""
    assert sum(causal_pairs(512 * i, 512) for i in range(8)) == causal_pairs(0, 4096)


def test_pairs_stop_growing_at_the_window() -> None:
    """Window 3, 5 tokens: 1 + 2 + 3 + 3 + 3."""
    assert causal_pairs(0, 5, window=3) == 12
    assert causal_pairs(2, 3, window=3) == 9
    assert causal_pairs(0, 5, window=100) == 15


def test_a_mixed_step_adds_its_parts() -> None:
    """A decode at context 100 and a chunk [64, 192): 129 tokens, two emitted, pairs sum of 65..192."""
    running = executor()
    plan = StepPlan(decodes=decoding(99), prefills=[prefill(128, start=64)])
    expected = running.times.parts(129, 2, decode_keys=100, prefill_pairs=sum(range(65, 193)), prefill_keys=192).total_s
    assert seconds(running, plan) == pytest.approx(expected, abs=1e-9)


def test_a_chunk_that_does_not_emit_needs_no_head() -> None:
    """The head is read for sequences that get a token: 32,000 * 4,096 * 2 bytes are 0.13 ms."""
    whole = seconds(executor(), StepPlan(prefills=[prefill(16)]))
    part = seconds(executor(), StepPlan(prefills=[replace(prefill(16), emits=False)]))
    assert whole - part == pytest.approx(32_000 * 4096 * 2 / 2e12, abs=2e-9)


def test_experts_are_read_as_far_as_the_step_hits_them() -> None:
    """Mixtral, 2 of 8: one token reads 2 experts a layer; with 64 tokens all 8 (but for 1e-8) are read."""
    shape = find_shape("mixtral-8x7b")
    expert_s = 3 * 4096 * 14_336 * 2 * 32 / 2e12
    times = StepTime(shape, IDEAL)
    one, many = times.parts(1, 1).linears_s, times.parts(64, 64).linears_s
    new_kv_s = 63 * shape.kv_bytes_per_token / 2e12
    assert many - one - new_kv_s == pytest.approx(6 * expert_s, rel=1e-6)


def test_tensor_parallelism_divides_the_work_and_pays_for_the_links() -> None:
    """tp 4: a quarter of the bytes, and 2 * 80 all-reduces of 8,192 * 2 bytes * 2 * 3/4 at 100 GB/s and 10 us each."""
    shape = find_shape("llama-3-70b")
    hardware = replace(IDEAL, link_latency_s=10e-6)
    alone, four = StepTime(shape, hardware), StepTime(shape, hardware, tp=4)
    assert four.decode_floor_s == pytest.approx(alone.decode_floor_s / 4, rel=1e-12)
    parts = four.parts(1, 1)
    assert parts.links_s == pytest.approx(160 * (10e-6 + 8192 * 2 * 1.5 / 100e9), rel=1e-9)
    assert alone.parts(1, 1).links_s == 0.0
    # 16 ranks for 8 KV heads: each holds one, so KV bytes fall 8-fold, not 16-fold.
    assert StepTime(shape, hardware, tp=16).decode_key_s == pytest.approx(alone.decode_key_s / 8, rel=1e-12)
    for tp in (0, 3, 128):
        with pytest.raises(UsageError, match="does not divide"):
            StepTime(shape, hardware, tp=tp)


def test_fp8_weights_are_half_the_bytes_and_twice_the_flops_where_the_hardware_has_them() -> None:
    """An A100 has no fp8 arithmetic: bytes are halved, FLOP/s stay."""
    half, full = find_shape("llama-3-8b", dtype="fp8"), find_shape("llama-3-8b")
    assert half.weights_bytes * 2 == full.weights_bytes
    assert StepTime(half, IDEAL).parts(8192, 0).linears_s == StepTime(full, IDEAL).parts(8192, 0).linears_s / 2
    a100 = HARDWARE["a100"]
    assert StepTime(half, a100).parts(8192, 0).linears_s == StepTime(full, a100).parts(8192, 0).linears_s
    assert find_shape("llama-3-8b", kv_dtype="fp8").kv_bytes_per_token == 65_536


@pytest.mark.parametrize(
    ("model", "tp", "published"),
    [("llama-2-7b", 1, 104.9), ("llama-2-7b", 2, 168.84), ("llama-2-70b", 2, 21.32), ("llama-2-70b", 8, 62.50)],
)
def test_published_decode_rates_of_an_a100_are_met_within_a_third(model: str, tp: int, published: float) -> None:
    """gpt-fast's README: tokens/s of one sequence, 16 bit, A100 held to 330 W. A roofline is a bound: it is the faster one."""
    rate = 1 / StepTime(find_shape(model), HARDWARE["a100"], tp=tp).parts(1, 1, decode_keys=100).total_s
    assert published < rate < published * 4 / 3


@pytest.mark.parametrize("model", ["llama-2-7b", "mistral-7b-v0.1"])
def test_steps_that_are_foreseen_take_what_they_take_one_by_one(model: str) -> None:
    """Three sequences, 50 steps, across the window of Mistral: to the nanosecond; what the host adds is not forward."""
    ahead, single = executor(HARDWARE["h100"], model), executor(HARDWARE["h100"], model)
    ahead.slow_factor = single.slow_factor = 1.7
    sequences = decoding(4070, 3)
    foreseen = ahead.foresee(sequences, 50)
    assert foreseen is not None
    assert ahead.clock.now == 0
    for taken_ns, forward_s in zip(*foreseen, strict=True):
        before = single.clock.now
        assert single.execute(StepPlan(decodes=sequences)).forward_s == forward_s
        assert single.clock.now - before == taken_ns
        for sequence in sequences:
            sequence.num_computed += 1
    # 50 times the host's 0.5 ms, at that pace.
    assert single.clock.now / 1e9 - sum(foreseen[1]) == pytest.approx(50 * 0.5e-3 * 1.7, abs=1e-7)


def test_a_windowed_context_stops_to_cost_more() -> None:
    """Mistral-7B v0.1 keeps 4,096 tokens: step times grow to there and stay."""
    running = executor(model="mistral-7b-v0.1")
    at = {c: seconds(running, StepPlan(decodes=decoding(c))) for c in (4000, 4095, 4096, 30_000)}
    assert at[4000] < at[4095]
    assert at[4095] == at[4096] == at[30_000]


def test_layers_with_and_without_a_window_share_the_cost() -> None:
    """Gemma-3-1B: 22 of 26 layers keep 512 tokens. From 10,000 to 20,000 tokens the 4 others alone read more."""
    running = executor(model="gemma-3-1b")
    one, two = (seconds(running, StepPlan(decodes=decoding(context))) for context in (9_999, 19_999))
    # 2 * 1 KV head * 256 * 2 bytes = 1,024 bytes a token and layer, 4 layers, 10,000 tokens, 2 TB/s: 20.48 us.
    assert two - one == pytest.approx(4 * 1024 * 10_000 / 2e12, abs=2e-9)


def test_blocks_swapped_and_copied_cost_their_bytes() -> None:
    """A block of 16 tokens is 8 MiB: two moves at 32 GB/s are 0.524 ms; a copy reads and writes 8 MiB at 2 TB/s."""
    running = executor()
    plain = StepPlan(decodes=decoding(10))
    base_s = seconds(running, plain)
    moving = StepPlan(decodes=decoding(10), swap_out=[(1, 0)], swap_in=[(2, 1)])
    assert seconds(running, moving) - base_s == pytest.approx(2 * 8 * 2**20 / 32e9, abs=2e-9)
    assert running.execute(moving).load_s == pytest.approx(2 * 8 * 2**20 / 32e9)
    copying = StepPlan(decodes=decoding(10), copies=[(1, 2)])
    assert seconds(running, copying) - base_s == pytest.approx(2 * 8 * 2**20 / 2e12, abs=2e-9)
    assert seconds(running, StepPlan(swap_out=[(1, 0)])) == pytest.approx(8 * 2**20 / 32e9, abs=2e-9)


def test_a_straggler_takes_a_multiple() -> None:
    """slow_factor 2, set while it runs: twice the time."""
    running = executor()
    once_s = seconds(running, StepPlan(decodes=decoding(10)))
    running.slow_factor = 2.0
    assert seconds(running, StepPlan(decodes=decoding(10))) == pytest.approx(2 * once_s, abs=2e-9)


def test_nothing_is_computed_and_nothing_ends_by_itself() -> None:
    """tokens is None, there is no end token, and closing costs nothing."""
    running = executor()
    assert running.execute(StepPlan(decodes=decoding(10))).tokens is None
    assert running.eos_token_ids == frozenset()
    running.close()


def test_a_worker_row_tells_what_is_modelled() -> None:
    """Llama-3-70B on four H100: a quarter of its 141,107,412,992 bytes each; blocks of 16 tokens are 16 * 327,680 / 4 bytes."""
    facts = executor(HARDWARE["h100"], "llama-3-70b", tp=4).worker_facts
    assert facts["weights_bytes"] == 35_276_853_248
    assert facts["kv_bytes_per_block"] == 1_310_720
    named = [facts[name] for name in ("model", "dtype", "kv_dtype", "tp", "gpu_id")]
    assert named == ["llama-3-70b", "bfloat16", "bfloat16", 4, "virtual-h100"]


def test_blocks_are_what_the_memory_leaves() -> None:
    """H100 at 0.9: 71.68 GiB less 14.96 of weights, 0.9 of activations, 1 of runtime: 54.8 GiB of 2 MiB blocks."""
    plan = plan_memory(find_shape("llama-3.1-8b"), HARDWARE["h100"])
    # 8,192 * (2 * 4,096 + 3 * 14,336) * 2 bytes and 256 * 128,256 * 4 bytes.
    assert plan.activation_bytes == 8192 * 51_200 * 2 + 256 * 128_256 * 4
    assert plan.kv_bytes == plan.usable_bytes - plan.weights_bytes - plan.activation_bytes - GIB
    assert (plan.block_bytes, plan.num_blocks) == (2 << 20, plan.kv_bytes >> 21)
    assert plan.kv_bytes / GIB == pytest.approx(54.8, abs=0.1)
    running = executor(HARDWARE["h100"], "llama-3.1-8b")
    assert (running.num_blocks, running.max_context) == (plan.num_blocks, plan.num_blocks * 16)
    small = executor(num_blocks=10, block_size=32, max_context=1000)
    assert (small.num_blocks, small.max_context) == (10, 320)


def test_a_model_that_does_not_fit_is_refused_with_its_figures() -> None:
    """Llama-3-70B is 131.4 GiB; one H100 has 71.7 to give, four have room."""
    with pytest.raises(DeviceMissing, match=r"131\.4 GiB of weights.*in 71\.7 GiB"):
        plan_memory(find_shape("llama-3-70b"), HARDWARE["h100"])
    assert plan_memory(find_shape("llama-3-70b"), HARDWARE["h100"], tp=4).num_blocks > 10_000


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
        ({"block_size": 0}, "block size is 0"),
        ({"num_blocks": 0}, "can hold no token"),
    ],
)
def test_an_engine_that_makes_no_sense_is_refused(more: dict[str, Any], words: str) -> None:
    """Each number is named."""
    with pytest.raises(UsageError, match=words):
        executor(HARDWARE["h100"], **more)


def test_every_hardware_says_where_its_figures_are_from() -> None:
    """Peaks name a datasheet, efficiencies a paper or that there is none; names are found in any case."""
    assert list(HARDWARE) == ["a100", "h100", "h200", "b200", "l40s"]
    for hardware in HARDWARE.values():
        assert "datasheet" in hardware.source
        assert hardware.measured != "the user"
    assert find_hardware("NVIDIA H100") is HARDWARE["h100"]
    with pytest.raises(UsageError, match="no hardware 'v100' here; known: a100, h100"):
        find_hardware("v100")


def test_own_hardware_from_a_known_one_or_from_nothing() -> None:
    """Changed figures replace the base's, and the source says so; without a base the needed ones are asked for."""
    mine = from_fields({"base": "h100", "name": "h100-pcie", "memory_bandwidth": 2e12})
    assert (mine.name, mine.memory_bandwidth, mine.peak_flops) == ("h100-pcie", 2e12, 989.4e12)
    assert mine.source == "h100, changed: memory_bandwidth, name"
    with pytest.raises(UsageError, match="needs host_bandwidth, memory_bandwidth, memory_bytes, or a base"):
        from_fields({"name": "x", "peak_flops": 1e12})
    with pytest.raises(UsageError, match="hardware has no bandwith"):
        from_fields({"base": "h100", "bandwith": 1})
    for field, value in (
        ("memory_bandwidth", 0),
        ("compute_efficiency", 1.2),
        ("peak_flops", "fast"),
        ("memory_bytes", True),
        ("memory_bandwidth", float("nan")),
        ("host_overhead_s", 10**400),
    ):
        with pytest.raises(UsageError, match=f"hardware {field} is"):
            from_fields({"base": "h100", field: value})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": None}, "has no vocab_size"),
        ({"intermediate_size": 1.5}, "intermediate_size is 1.5"),
        ({"vocab_size": 10**400}, "vocab_size is a number of many digits"),
        ({"num_experts": 4, "num_experts_per_tok": 9}, "9 of 4 experts"),
        ({"n_shared_experts": 1}, "has n_shared_experts"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "has kv_lora_rank"),
        ({"num_key_value_heads": [2, 4]}, "different numbers of KV heads"),
    ],
)
def test_a_config_whose_time_is_not_known_is_refused(change: dict[str, Any], words: str) -> None:
    """The field is named; nothing is guessed."""
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 100,
        "torch_dtype": "bfloat16",
    }
    assert model_shape(config).layers == 2
    with pytest.raises(UsageError, match=words):
        model_shape(config | change)


def test_models_and_hardware_of_your_own_are_read_from_files(tmp_path: Path) -> None:
    """A config.json or its folder, and a JSON object of figures; a file that is neither says so."""
    fields = {"model_type": "mine", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({**fields, "intermediate_size": 64, "vocab_size": 100}))
    assert find_shape(str(tmp_path)).name == find_shape(str(tmp_path / "config.json")).name == "mine"
    described = tmp_path / "own.json"
    described.write_text('{"base": "l40s", "memory_bandwidth": 1e12}')
    own = find_hardware(str(described))
    assert (own.name, own.memory_bandwidth, own.peak_flops) == ("own", 1e12, 362.05e12)
    described.write_text(json.dumps({"base": str(described)}))
    with pytest.raises(UsageError, match="no hardware"):
        find_hardware(str(described))
    described.write_text("[]")
    with pytest.raises(UsageError, match="holds no JSON object, so it is no description of hardware"):
        find_hardware(str(described))
    with pytest.raises(UsageError, match=r"absent\.json cannot be read as JSON"):
        find_hardware(str(tmp_path / "absent.json"))


def test_models_and_dtypes_that_are_not_known_are_named() -> None:
    """An unknown name gets close ones; a KV-only entry of the catalogue says which field is missing."""
    with pytest.raises(UsageError, match="close to it: llama-3-8b"):
        find_shape("llama3-8b")
    with pytest.raises(UsageError, match="gpt-oss-20b has no intermediate_size"):
        find_shape("gpt-oss-20b")
    with pytest.raises(UsageError, match="dtype 'int3'"):
        find_shape("llama-3-8b", dtype="int3")
    with pytest.raises(UsageError, match="recurrent"):
        find_shape("qwen3-next")
