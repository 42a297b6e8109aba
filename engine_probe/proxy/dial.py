"""Finds an exchange a connection: chooses upstreams one after another until one can be connected to.

Invariant: an upstream counts the exchange as outstanding from its choice until it is released, whatever happens between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine_probe.proxy.upstream_side import UpstreamConnection
from engine_probe.proxy.upstreams import Choice, Upstream, now_s
from engine_probe.proxy.why import why_unreachable

if TYPE_CHECKING:
    from engine_probe.proxy.context import Context


class Dial:
    """`next` ends in `attach` (at once where an idle connection is there) or in `give_up` (nobody is left).

    connecting   called when a connection has to be waited for
    chosen       told of each choice, with the instants before and after it
    failed       told why an upstream that was chosen is not used
    """

    __slots__ = (
        "_attach",
        "_chosen",
        "_connecting",
        "_context",
        "_failed",
        "_give_up",
        "_task",
        "_tried",
        "problems",
        "upstream",
        "was_reused",
    )

    def __init__(
        self,
        context: Context,
        *,
        attach: Callable[[UpstreamConnection, Upstream], None],
        give_up: Callable[[], None],
        connecting: Callable[[], None],
        chosen: Callable[[Choice, int, int], None],
        failed: Callable[[str], None],
    ) -> None:
        self.upstream: Upstream | None = None
        self.problems: list[str] = []
        self.was_reused = False
        self._context = context
        self._attach = attach
        self._give_up = give_up
        self._connecting = connecting
        self._chosen = chosen
        self._failed = failed
        self._tried: list[Upstream] = []
        self._task: asyncio.Task[None] | None = None

    def next(self) -> None:
        """Choose among those not tried yet."""
        begun = self._context.now_ns()
        choice = self._context.balancer.choose(self._tried, now_s())
        if choice is None:
            self._give_up()
            return
        upstream = self.upstream = choice.upstream
        self._tried.append(upstream)
        upstream.outstanding += 1
        self._chosen(choice, begun, self._context.now_ns())
        connection = upstream.take_idle(now_s())
        self.was_reused = connection is not None
        if connection is not None:
            self._attach(connection, upstream)
        else:
            self._connecting()
            self._task = self._context.loop.create_task(self._open(upstream))

    def again(self, reason: str) -> None:
        """The upstream that was attached is of no use: go on with the next.

        Where its connection had been idle, it most likely closed just then: it is asked once more, on a new one.
        """
        if self.was_reused and self.upstream is not None:
            self._tried.remove(self.upstream)
        self._pass_over(reason)

    def release(self) -> None:
        """The exchange does not use its upstream any more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.upstream is not None:
            self.upstream.outstanding -= 1
            self.upstream = None

    def close(self) -> None:
        """The exchange is over: let go of it too, so that neither keeps the other alive."""
        self.release()
        self._attach = self._give_up = self._connecting = self._chosen = self._failed = _nothing

    async def _open(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(self._context.connect_timeout_s):
                _, connection = await self._context.loop.create_connection(
                    UpstreamConnection,
                    upstream.host,
                    upstream.port,
                    ssl=upstream.tls,
                    server_hostname=upstream.host if upstream.tls is not None else None,
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            self._task = None
            reason = why_unreachable(upstream.url, error, self._context.connect_timeout_s)
            self._context.upstream_failed(upstream, reason)
            self._pass_over(reason)
        else:
            self._task = None
            self._context.upstream_answered(upstream)
            self._attach(connection, upstream)

    def _pass_over(self, reason: str) -> None:
        self.release()
        self.problems.append(reason)
        self._failed(reason)
        self.next()


def _nothing(*_: object) -> None:
    """What an exchange that is over is told."""
