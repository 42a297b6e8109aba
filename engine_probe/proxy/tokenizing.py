"""Names the blocks of prompts by asking the engine to tokenize them, off the critical path.

A request's body is kept (bounded) until its answer begins, then a thread of its own asks the engine that serves it, with
the request's own key, makes our salted chain hash of every full block, and forgets text and tokens at once. What comes too
fast is left out and counted: the row then has no `prompt_blocks`, which says the same.
Invariant: at most `MAX_BODY_BYTES` a request and `MAX_QUEUE_BYTES` together are held; nothing of it is logged.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine_probe.chain_hash import chain
from engine_probe.proxy import chat_form
from engine_probe.proxy.heads import RequestHead
from engine_probe.proxy.tokenizer import NoTokens, Tokenizer
from engine_probe.proxy.upstreams import Upstream

if TYPE_CHECKING:
    from engine_probe.recording.request_rows import RequestRow

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 4 << 20
MAX_QUEUE_BYTES: Final = 64 << 20
MAX_JOBS: Final = 4096
PATHS: Final = (b"/chat/completions", b"/completions", b"/completion", b"/generate", *chat_form.PATHS)

Emit = Callable[["RequestRow"], None]


class Job:
    """One prompt on its way. `keep` the body's pieces; later it has `blocks`, or never."""

    __slots__ = ("blocks", "body", "emit", "head", "is_done", "is_too_large", "num_tokens", "row", "size", "upstream")

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.body: list[bytes] = []
        self.size = 0
        self.is_too_large = False
        self.upstream: Upstream | None = None
        self.blocks: list[int] | None = None
        self.num_tokens = 0
        self.is_done = False
        self.row: RequestRow | None = None
        self.emit: Emit | None = None

    def keep(self, piece: bytes) -> None:
        """A piece of the request's body."""
        self.size += len(piece)
        if self.size > MAX_BODY_BYTES:
            self.is_too_large = True
            self.body.clear()
        elif not self.is_too_large:
            self.body.append(piece)


class Tokenizing:
    """One thread that asks. `left_out`: prompts not named, by reason.

    make_tokenizer   for an upstream, called in the thread
    """

    def __init__(self, salt: bytes, make_tokenizer: Callable[[Upstream], Tokenizer]) -> None:
        self.left_out: Counter[str] = Counter()
        self.num_named = 0
        self._salt = salt
        self._make_tokenizer = make_tokenizer
        self._tokenizers: dict[str, Tokenizer] = {}
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_jobs = 0
        self._held_bytes = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvscope-tokenize", daemon=True)
        self._thread.start()

    def new_job(self, head: RequestHead) -> Job | None:
        """For a request whose prompt can be named; None for others."""
        return Job(head) if head.path.rstrip(b"/").endswith(PATHS) and head.get(b"content-encoding") is None else None

    def submit(self, job: Job, upstream: Upstream) -> None:
        """Its answer has begun: the body is whole."""
        job.upstream = upstream
        with self._lock:
            is_full = self._num_jobs >= MAX_JOBS or self._held_bytes + job.size > MAX_QUEUE_BYTES
            if job.is_too_large or is_full or self._is_closed:
                self.left_out["too large" if job.is_too_large else "too many at once"] += 1
                job.body.clear()
                job.is_done = True
                return
            self._num_jobs += 1
            self._held_bytes += job.size
        self._queue.put(job)

    def complete(self, job: Job, row: RequestRow, emit: Emit) -> None:
        """The request ended: `emit` its row once the blocks are known, or are known not to come."""
        with self._lock:
            if job.upstream is not None and not job.is_done:
                job.row, job.emit = row, emit
                return
        self._emit(job, row, emit)

    def close(self, timeout_s: float = 5.0) -> None:
        """Name what waits, for at most so long; rows of the rest go without."""
        with self._lock:
            self._is_closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                self.left_out["stopped"] += 1
                self._done(job)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                job.blocks = self._name(job)
            except NoTokens as error:
                self._leave_out(str(error))
            except Exception as error:
                # Neither text nor traceback: their values are a prompt.
                self._leave_out(type(error).__name__)
            self._done(job)

    def _name(self, job: Job) -> list[int]:
        assert job.upstream is not None, "submitted without its upstream"
        body, job.body = b"".join(job.body), []
        tokenizer = self._tokenizers.get(job.upstream.name)
        if tokenizer is None:
            tokenizer = self._tokenizers[job.upstream.name] = self._make_tokenizer(job.upstream)
        tokens = tokenizer.tokens(job.head, body)
        job.num_tokens = len(tokens)
        return chain(tokens, tokenizer.block_size, self._salt)

    def _leave_out(self, reason: str) -> None:
        self.left_out[reason] += 1
        if self.left_out[reason] == 1:
            log.warning("a prompt's blocks could not be named", extra={"reason": reason})

    def _done(self, job: Job) -> None:
        with self._lock:
            self._num_jobs -= 1
            self._held_bytes -= job.size
            job.is_done = True
            job.body.clear()
            row, emit, job.row, job.emit = job.row, job.emit, None, None
        if row is not None and emit is not None:
            self._emit(job, row, emit)

    def _emit(self, job: Job, row: RequestRow, emit: Emit) -> None:
        """The row with its blocks. Where the engine counted other tokens than it told us, they are not this prompt's.

        A prompt that was brought into another form is named only where the engine told its count.
        """
        if job.blocks is not None:
            assumed = None if job.head.path.rstrip(b"/").endswith(chat_form.PATHS) else job.num_tokens
            if row.columns.get("prompt_tokens", assumed) == job.num_tokens:
                row.columns["prompt_blocks"] = job.blocks
                self.num_named += 1
            else:
                self._leave_out("the engine counted other tokens")
        emit(row)
