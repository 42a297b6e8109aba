"""One HTTP call: one or more sequences, and what has come of them so far.

Several choices of one prompt are several sequences. The first goes ahead; the others follow with its first token and find
the prompt's blocks in the cache, so that the prompt is computed once. Invariant: whatever happens to the client, `leave`
leaves nothing of the call in the engine. All verbs are the event loop's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine_probe.engine.server.engine_thread import EngineThread
from engine_probe.engine.server.ticket import Piece, Ticket
from engine_probe.errors import KvscopeError


@dataclass(frozen=True, slots=True)
class Usage:
    """prompt_tokens: each prompt once, however many choices; cached_tokens: of those, as the first choice found them."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Call:
    """groups   tickets by prompt, in the order of their choices; index of a ticket: its place in the answer
    has_prefix  of each group: its prompt fills a block, so that the other choices have something to find
    on_end      called once, when nothing of it is under way any more
    """

    def __init__(
        self,
        request_id: str,
        thread: EngineThread,
        groups: Items[Items[Ticket]],
        has_prefix: Items[bool],
        queued_ns: int,
        on_end: Callable[[Call], None],
    ) -> None:
        self.request_id = request_id
        self.created = int(time.time())
        self._thread = thread
        self._groups = groups
        self._has_prefix = has_prefix
        self._queued_ns = queued_ns
        self._on_end = on_end
        self._open = {ticket.index: ticket for group in groups for ticket in group}
        self._held: dict[int, list[Ticket]] = {}
        self._num_tokens = 0
        self._pending: list[tuple[int, Piece]] = []
        self._news = asyncio.Event()
        self._error: KvscopeError | None = None
        self.is_gone = False
        for group, waits in zip(groups, has_prefix, strict=True):
            if waits and len(group) > 1:
                self._held[group[0].index] = list(group[1:])

    @property
    def num_choices(self) -> int:
        return sum(len(group) for group in self._groups)

    @property
    def request_ids(self) -> list[str]:
        """Ids of its sequences in the engine."""
        return [ticket.sequence.request_id for group in self._groups for ticket in group]

    @property
    def is_done(self) -> bool:
        """Every choice ended."""
        return not self._open

    @property
    def has_news(self) -> bool:
        """`news` would not wait."""
        return bool(self._pending) or self._error is not None

    @property
    def usage(self) -> Usage:
        """So far."""
        firsts = [group[0].sequence for group in self._groups]
        return Usage(
            sum(sequence.num_prompt for sequence in firsts),
            sum(sequence.num_cached for sequence in firsts),
            self._num_tokens,
        )

    def start(self) -> None:
        """Its sequences wait for the scheduler."""
        held = {ticket.index for tickets in self._held.values() for ticket in tickets}
        for ticket in list(self._open.values()):
            if ticket.index not in held:
                self._thread.submit(ticket, self._queued_ns)

    async def accepted(self) -> None:
        """Wait until the engine took it. Raises why it did not."""
        while not self.has_news and not self.is_gone:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            await self.news()

    async def news(self) -> list[tuple[int, Piece]]:
        """(index, piece) of all that came since the last time; waits until something did. Empty: the client is gone.

        Raises what went wrong, after ending the rest.
        """
        while not self._pending and self._error is None and not self.is_gone:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            self._end("error")
            raise self._error
        pieces, self._pending = self._pending, []
        return pieces

    def leave(self) -> None:
        """Its client is gone, or has all it wants: nothing of it stays in the engine."""
        self.is_gone = True
        self._end("abort")

    def fail(self, error: KvscopeError, reason: str) -> None:
        """It ends with this error."""
        self._error = self._error or error
        self._end(reason)

    def _end(self, reason: str) -> None:
        self._news.set()
        self._held.clear()
        for ticket in self._open.values():
            self._thread.abort(ticket.sequence.request_id, reason)
        if self._open:
            self._open.clear()
            self._on_end(self)

    def deliver(self, ticket: Ticket, piece: Piece) -> None:
        """From the engine: one step's news of one sequence."""
        if ticket.index not in self._open:
            return
        for follower in self._held.pop(ticket.index, ()) if piece.num_tokens and piece.error is None else ():
            self._thread.submit(follower, self._queued_ns)
        self._num_tokens += piece.num_tokens
        if piece.error is not None:
            self._error = piece.error
        self._pending.append((ticket.index, piece))
        self._news.set()
        if piece.is_last:
            del self._open[ticket.index]
            if not self._open:
                self._on_end(self)
