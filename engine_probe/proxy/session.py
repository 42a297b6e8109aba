"""One run of the proxy: event loop, recorder, optional tokenizer, and their orderly end.

The loop's thread moves bytes; rows are made and written by the recorder's thread, and where the sink is a store, by one more
that tries again while the store is busy. Invariant: at the end every request that was recorded is written, spooled, or named
in the summary as lost.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from engine_probe.errors import UsageError
from engine_probe.proxy.context import Context
from engine_probe.proxy.recording import Recording
from engine_probe.proxy.server import ProxyServer
from engine_probe.proxy.tags import parse_tags
from engine_probe.proxy.tokenizer import Tokenizer
from engine_probe.proxy.tokenizing import Tokenizing
from engine_probe.proxy.upstreams import Balancer, Policy, parse_upstream
from engine_probe.recording.recorder import Recorder
from engine_probe.sampling import Sampling

if TYPE_CHECKING:
    from engine_probe.sending.sink import Sink

VANTAGES: Final = ("client", "router")
SPARE_FILES: Final = 200
FILES_A_STREAM: Final = 2
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """What the user asked for.

    tokenize_salt   the secret of block hashes; None: prompts' blocks are not named
    block_size      tokens in a block; None: the engine's own
    """

    upstreams: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 0
    policy: Policy = "least_outstanding"
    vantage: str = "client"
    name: str | None = None
    engine: str | None = None
    tags: Sequence[str] = ()
    sample: float = 1.0
    tokenize_salt: bytes | None = None
    block_size: int | None = None
    repeats_posts: bool = False
    connect_timeout_s: float = 5.0
    drain_s: float = 30.0
    duration_s: float | None = None
    max_open: int | None = None
    verify: bool | ssl.SSLContext = True


@dataclass(slots=True)
class Summary:
    """What a run saw. `not_named`: prompts without block names, by reason; `lost_rows`: by kind."""

    url: str
    seconds: float
    requests: int
    recorded: int
    left_out_by_sampling: int
    states: Mapping[str, int]
    misplaced: int
    refused: int
    unobserved: int
    broken_off: int
    named_prompts: int = 0
    not_named: Mapping[str, int] = field(default_factory=dict)
    lost_rows: Mapping[str, int] = field(default_factory=dict)


class ProxySession:
    """`run` once. Raises UsageError for options that make no sense, before anything is opened."""

    def __init__(self, options: ProxyOptions) -> None:
        if options.vantage not in VANTAGES:
            raise UsageError(f"--vantage is {options.vantage!r}; expected client or router.")
        self._options = options
        self._balancer = Balancer([parse_upstream(text, options.verify) for text in options.upstreams], options.policy)
        self._tags = parse_tags(options.tags)
        self._sampling = Sampling(options.sample)
        if options.block_size is not None and not 1 <= options.block_size <= 65536:
            raise UsageError(f"--block-size is {options.block_size}; expected 1 to 65536 tokens.")
        self._files = _open_files()

    def run(self, sink: Sink, stop: threading.Event, ready: Callable[[str], None] = lambda url: None) -> Summary:
        """Serve until `stop` or the duration's end, then drain and close the sink. `ready` is called with the address.

        Raises UsageError where the address cannot be listened on.
        """
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(self._serve(sink, stop, ready))

    async def _serve(self, sink: Sink, stop: threading.Event, ready: Callable[[str], None]) -> Summary:
        options = self._options
        recorder = Recorder(sink, constants={"request": self._constants()}, sampling=self._sampling)
        try:
            tokenizing = self._tokenizing()
            recording = Recording(
                recorder,
                router=options.name or f"proxy:{options.host}:{options.port}",
                policy=options.policy,
                tags=self._tags,
                tokenizing=tokenizing,
            )
            context = Context(
                self._balancer,
                recording,
                loop=asyncio.get_running_loop(),
                connect_timeout_s=options.connect_timeout_s,
                repeats_posts=options.repeats_posts,
                max_open=options.max_open or max((self._files - SPARE_FILES) // FILES_A_STREAM, 16),
            )
            server = ProxyServer(context, options.host, options.port)
            await server.start()
            host, port = server.address
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            ready(url)
            begun = time.monotonic()
            # What is there now stays: thousands of open streams would have it walked through again and again.
            gc.freeze()
            gc.set_threshold(50_000, 20, 20)
            while not stop.is_set() and (options.duration_s is None or time.monotonic() - begun < options.duration_s):
                await asyncio.sleep(_LOOK_S)
            broken_off = await server.drain(options.drain_s)
            if tokenizing is not None:
                await asyncio.to_thread(tokenizing.close)
        finally:
            await asyncio.to_thread(recorder.close)
        return Summary(
            url=url,
            seconds=time.monotonic() - begun,
            requests=context.num_requests,
            recorded=recording.num_recorded,
            left_out_by_sampling=recording.num_left_out,
            states=dict(sorted(recording.states.items())),
            misplaced=recording.num_misplaced,
            refused=context.num_refused,
            unobserved=context.num_observer_failures,
            broken_off=broken_off,
            named_prompts=0 if tokenizing is None else tokenizing.num_named,
            not_named={} if tokenizing is None else dict(tokenizing.left_out),
            lost_rows=_sum(recorder.lost, getattr(sink, "lost", {})),
        )

    def _constants(self) -> dict[str, Any]:
        return {"vantage": self._options.vantage, "engine": self._options.engine}

    def _tokenizing(self) -> Tokenizing | None:
        salt, block_size = self._options.tokenize_salt, self._options.block_size
        if salt is None:
            return None
        return Tokenizing(salt, lambda upstream: Tokenizer(upstream, block_size))


def _sum(*counts: Mapping[str, int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: half the CPU a chunk."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _open_files() -> int:
    """Lets the process have as many files as the system allows, since a stream is two; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):
            pass
    return soft
