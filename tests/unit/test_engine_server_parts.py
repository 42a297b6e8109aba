"""Parts of the embedded engine's server, each alone: bodies, stop strings, endpoints, addresses, errors, the command's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from collector.cli import build
from engine_probe.chain_hash import ROOT
from engine_probe.digits import port_number
from engine_probe.engine.block_pool import Evicted
from engine_probe.engine.name_book import Names
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.server import error_answer
from engine_probe.engine.server.fields import NEUTRAL, WITHOUT_EFFECT, acted_on
from engine_probe.engine.server.guard import check_address, is_loopback
from engine_probe.engine.server.kv_publisher import KvPublisher, is_reached_by_others
from engine_probe.engine.server.metrics_page import one_two_five
from engine_probe.engine.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from engine_probe.engine.server.stops import StopStrings
from engine_probe.errors import (
    BadRequest,
    CannotListen,
    DeviceMissing,
    EngineNotReady,
    KvscopeError,
    PromptRefused,
    Unauthorized,
    UsageError,
)

REQUESTS = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({name for one in REQUESTS for name in one.__struct_fields__} | set(NEUTRAL)))


# Bodies


@given(body=st.binary(max_size=60), into=st.sampled_from(REQUESTS))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes, into: Any) -> None:
    """Nothing but the two errors of a body comes out."""
    with pytest.raises((BadRequest, PromptRefused)):
        parse(body, into)


@given(document=st.dictionaries(FIELDS | st.text(max_size=6), VALUES, max_size=6), into=st.sampled_from(REQUESTS))
def test_any_object_is_a_request_or_a_refusal_that_names_a_field(document: dict[str, Any], into: Any) -> None:
    """Every refusal of a field carries its name; what passes has its prompts checked too."""
    refused: PromptRefused | None = None
    try:
        request = parse(json.dumps(document).encode(), into)
        if isinstance(request, CompletionRequest):
            assert request.prompts()
    except BadRequest:
        return  # a number beyond 64 bits
    except PromptRefused as error:
        refused = error
    assert refused is None or refused.field is not None


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_field_that_is_not_acted_on_passes_only_with_its_neutral_values(name: str) -> None:
    """With them it changes nothing; with another it is refused by name."""
    for value in NEUTRAL[name]:
        assert acted_on({name: value}, frozenset()) == {}
    with pytest.raises(PromptRefused) as refused:
        acted_on({name: {"something": "else"}}, frozenset())
    assert refused.value.field == name


def test_zero_is_no_false_and_one_is_no_true() -> None:
    """`logprobs: 0` asks for the chosen token's probability; `false` asks for nothing."""
    assert acted_on({"logprobs": False}, frozenset()) == {}
    for name, value in (("logprobs", 0), ("top_k", True), ("best_of", True)):
        with pytest.raises(PromptRefused):
            acted_on({name: value}, frozenset())


def test_no_field_is_both_acted_on_and_left_out() -> None:
    """A field that a request has is never in the tables of what is not done."""
    for into in (CompletionRequest, ChatRequest):
        assert not set(into.__struct_fields__) & (set(NEUTRAL) | WITHOUT_EFFECT)


# Stop strings


def plainly(text: str, stops: list[str], *, include: bool) -> tuple[str, bool]:
    """The oracle: the first complete stop string of the whole text."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], True
    return text, False


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=1),
    include=st.booleans(),
)
def test_text_ends_at_the_stop_string_however_it_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    """Pieces of any cut give the text up to the first stop string, and nothing is said that had to be taken back."""
    watch = StopStrings(stops, include=include)
    said, is_stopped = "", False
    for piece in pieces:
        out, is_stopped = watch.take(piece)
        said += out
        if is_stopped:
            break
    if not is_stopped:
        said += watch.finish()
    assert (said, is_stopped) == plainly("".join(pieces), stops, include=include)


@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=3), max_size=10),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=4),
)
def test_with_several_stop_strings_none_is_in_the_text(pieces: list[str], stops: list[str]) -> None:
    """What is said is a beginning of the text, ends before a stop string, and has none inside."""
    watch = StopStrings(stops)
    said, whole, is_stopped = "", "".join(pieces), False
    for piece in pieces:
        out, is_stopped = watch.take(piece)
        said += out
        if is_stopped:
            break
    if not is_stopped:
        said += watch.finish()
    assert whole.startswith(said)
    assert not any(stop in said for stop in stops)
    assert is_stopped == any(stop in whole for stop in stops)


def test_text_that_cannot_become_a_stop_string_goes_out_at_once() -> None:
    """Only the overlap is held: 'x EN' may become ' END', 'x ' may not be kept for 'END'."""
    watch = StopStrings(["END"])
    assert watch.take("x ") == ("x ", False)
    assert watch.take("EN") == ("", False)
    assert watch.take("E") == ("EN", False)
    assert watch.take("ND!") == ("", True)


# KV events


def names(*hashes: int) -> Names:
    return np.array(hashes, dtype=np.uint64)


def sequence(tokens: int, hashes: list[int]) -> Sequence:
    """With these blocks of 4 tokens."""
    return Sequence("r", tokens, SamplingParams(), 0, token_ids=list(range(tokens)), root=99, hashes=hashes)


def test_a_chain_with_a_block_that_was_there_already_becomes_two_events() -> None:
    """Blocks 1 and 3 of three are new: each names its own parent and its own tokens."""
    publisher = KvPublisher(4, "0", lambda: 1.0)
    try:
        publisher.stored(sequence(12, [11, 12, 13]), names(11, 13), names(ROOT, 12), 0, 0)
        first, second = publisher._events
        assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([11], None, [0, 1, 2, 3])  # type: ignore[union-attr]
        assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([13], 12, [8, 9, 10, 11])  # type: ignore[union-attr]
        assert publisher.num_stored == 2
    finally:
        publisher.close()


def test_a_queue_that_is_full_drops_counts_and_leaves_a_hole() -> None:
    """A queue of one with nobody to empty it: the second batch is dropped, and its number stays used."""
    publisher = KvPublisher(4, "0", lambda: 1.0, max_queue_size=1)
    publisher.close()
    for _ in range(3):
        told = np.zeros(1)
        publisher.evicted(names(1), Evicted("capacity", np.zeros(1, dtype=np.int64), told, told, told), None, 0)
        publisher.flush()
    assert publisher.num_dropped == 2
    assert publisher._next_seq == 3


def test_endpoints_that_cannot_be_are_refused_by_name() -> None:
    """No endpoint, somebody else's address, one that is taken."""
    for text in ("nonsense", "tcp://192.0.2.1:5557", "tcp://127.0.0.1:notaport", "http://127.0.0.1:5"):
        with pytest.raises(UsageError, match="endpoint for KV events"):
            KvPublisher(4, text, lambda: 1.0)
    first = KvPublisher(4, "0", lambda: 1.0)
    port = first.endpoint.rsplit(":", 1)[1]
    try:
        assert port_number(port) is not None
        with pytest.raises(CannotListen, match="cannot be published"):
            KvPublisher(4, port, lambda: 1.0)
    finally:
        first.close()
        first.close()


def test_a_subscriber_that_binds_is_connected_to() -> None:
    """vLLM's other way round, as some routers want it."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.LINGER, 0)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = KvPublisher(4, f"connect:tcp://127.0.0.1:{port}", lambda: 1.0)
    try:
        assert publisher.sources["bind"] is False
        for _ in range(100):
            publisher.cleared(0)
            publisher.flush()
            if sub.poll(50):
                break
        assert sub.recv_multipart()[0] == b""
    finally:
        publisher.close()
        sub.close()
        context.term()


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("5557", False),
        ("0", False),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://[::1]:5557", False),
        ("ipc://events", False),
        ("connect:tcp://10.0.0.1:5557", False),
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("bind:tcp://10.0.0.1:5557", True),
    ],
)
def test_endpoints_that_other_machines_reach_are_known(endpoint: str, expected: bool) -> None:
    """Token ids are read there."""
    assert is_reached_by_others(endpoint) is expected


# Addresses and errors


def test_an_address_beyond_this_machine_needs_a_token_or_a_word() -> None:
    """As `kvscope serve` has it."""
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.5"):
        assert is_loopback(host)
        check_address(host, has_token=False, allow_unauthenticated=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "engine.example"):
        with pytest.raises(UsageError, match="--allow-unauthenticated"):
            check_address(host, has_token=False, allow_unauthenticated=False)
        check_address(host, has_token=True, allow_unauthenticated=False)
        check_address(host, has_token=False, allow_unauthenticated=True)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptRefused("x", field="n"), 400, "invalid_request_error", None),
        (Unauthorized("x"), 401, "authentication_error", "invalid_api_key"),
        (EngineNotReady("x"), 503, "server_error", "engine_not_ready"),
        (DeviceMissing("x"), 503, "server_error", "engine_not_ready"),
        (KvscopeError("x"), 500, "server_error", None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_have_openais_shape(error: KvscopeError, status: int, kind: str, code: str | None) -> None:
    """Message, type, param and code; 503 says when to come again, 401 how to be let in."""
    answer = error_answer.response(error)
    body = json.loads(bytes(answer.body))["error"]
    assert answer.status_code == status
    assert body == {"message": "x", "type": kind, "param": error.facts.get("field"), "code": code}
    assert ("retry-after" in answer.headers) == (status == 503)
    assert ("www-authenticate" in answer.headers) == (status == 401)


def test_token_histograms_have_vllms_bounds() -> None:
    """1, 2, 5, 10, ... as far as the context goes."""
    assert one_two_five(300) == [1, 2, 5, 10, 20, 50, 100, 200]
    assert one_two_five(1) == [1]


# The command


def run(*arguments: str) -> Any:
    """`kvscope engine serve ...`, which must not get as far as to serve."""
    return CliRunner().invoke(build(), ["engine", "serve", "--port", "0", *arguments])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "0.0.0.0"), "--allow-unauthenticated"),
        (("--kv-events", "tcp://*:5557"), "token ids"),
        (("--kv-replay", "5558"), "--kv-events"),
        (("--model", "no-such-folder"), "no model folder"),
        (("--device", "warp"), "no device 'warp'"),
        (("--dtype", "int3"), "no dtype 'int3'"),
        (("--eviction", "random"), "random"),
        (("--scheduling-policy", "lottery"), "lottery"),
        (("--preemption", "never"), "never"),
        (("--max-num-seqs", "0"), "max_num_seqs"),
        (("--max-num-batched-tokens", "10"), "max_num_batched_tokens"),
        (("--drain", "soon"), "--drain"),
        (("--ttl", "-1s"), "--ttl"),
        (("--token-file", "no-such-file"), "token file"),
        (("--collector", "http://127.0.0.1:1", "--record", "rows"), "one of --collector"),
        (("--host", "no.such.host.invalid", "--allow-unauthenticated"), "no address of this machine"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_by_name(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KvscopeError that says which, before anything is served."""
    monkeypatch.chdir(tmp_path)
    ended = run("--salt-file", str(tmp_path / "salt"), "--num-blocks", "8", *arguments)
    assert isinstance(ended.exception, KvscopeError), ended.output
    assert says in ended.exception.message
    assert ended.exception.exit_code == 2


def test_cuda_that_is_missing_ends_the_command_with_3(tmp_path: Path) -> None:
    """The device that was asked for is not there: said at the start, not at the first request."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    ended = run("--salt-file", str(tmp_path / "salt"), "--device", "cuda")
    assert isinstance(ended.exception, DeviceMissing)
    assert ended.exception.exit_code == 3


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Nobody waits minutes for a model to hear that."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run("--port", port, "--salt-file", str(tmp_path / "salt"), "--model", "no-such-folder")
    assert isinstance(ended.exception, CannotListen)
    assert "another process" in ended.exception.message


def test_the_group_finds_its_verbs_by_itself() -> None:
    """A file in `collector/engine_verbs/` is a verb."""
    ended = CliRunner().invoke(build(), ["engine", "--help"])
    assert "serve" in ended.output


def test_without_torch_the_command_says_what_to_install(tmp_path: Path) -> None:
    """In an environment of the service alone: one sentence, and 2."""
    import subprocess
    import sys

    script = "import sys; sys.modules['torch'] = None; from collector.cli import main; main(sys.argv[1:])"
    ended = subprocess.run(
        [sys.executable, "-c", script, "engine", "serve", "--salt-file", str(tmp_path / "salt")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2, ended.stderr
    assert "pip install '.[service,engine]'" in ended.stderr
