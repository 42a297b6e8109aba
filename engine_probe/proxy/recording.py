"""Which requests are observed, and where their rows go: into a recorder, whose own thread makes tables of them.

A request is recorded where its path ends as that of an inference API; all else passes unrecorded. With sampling, what is not
kept is not looked at either, and costs its bytes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from engine_probe.proxy.heads import RequestHead
from engine_probe.proxy.order import OpenAnswers
from engine_probe.proxy.tags import request_columns
from engine_probe.proxy.upstreams import Choice, Upstream
from engine_probe.proxy.watch import Watch
from engine_probe.recording.recorder import Recorder

if TYPE_CHECKING:
    from engine_probe.proxy.tokenizing import Job, Tokenizing
    from engine_probe.recording.request_rows import RequestRow

APIS: Final[Mapping[bytes, str]] = {
    b"/chat/completions": "chat",
    b"/completions": "completions",
    b"/completion": "completion",
    b"/responses": "responses",
    b"/messages": "messages",
    b"/embeddings": "embeddings",
    b"/embedding": "embeddings",
    b"/generate": "generate",
    b"/generate_stream": "generate",
    b"/rerank": "other",
    b"/score": "other",
    b"/classify": "other",
    b"/pooling": "other",
}
"""End of a path -> what is asked there."""


class Recording:
    """Makes a watch for each request that is recorded.

    router       name of this proxy in `route` rows
    tags         lower-case header -> tag, beside X-Kvscope-*
    tokenizing   names the prompt's blocks, where asked for
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        router: str,
        policy: str,
        tags: Mapping[bytes, str] | None = None,
        tokenizing: Tokenizing | None = None,
    ) -> None:
        self.open_answers = OpenAnswers()
        self.num_recorded = 0
        self.num_left_out = 0
        self.states: dict[str, int] = {}
        self.num_misplaced = 0
        self._recorder = recorder
        self._router = router
        self._policy = policy
        self._tags = tags or {}
        self._tokenizing = tokenizing

    def observe(self, head: RequestHead, request_id: str, arrival_ns: int) -> Watch | None:
        api = api_of(head)
        if api is None or not self._recorder.sampling.keeps_request(request_id):
            self.num_left_out += api is not None
            return None
        columns = request_columns(head, self._tags)
        columns["labels"].setdefault("api", api)
        watch = Watch(self, head, request_id, arrival_ns, columns)
        if head.get(b"x-request-id") is None:
            self.open_answers.expect(watch.reading.order)
        return watch

    def upstream_changed(self, upstream: Upstream, reason: str | None, now_ns: int) -> None:
        text = f"The upstream does not answer: {reason}" if reason else "The upstream answers again."
        self.note(
            "mark",
            now_ns,
            {
                "worker": upstream.name,
                "mark": "worker_down" if reason else "worker_up",
                "subject": upstream.name,
                "text": text,
                "attrs": {"seen_by": "proxy", "router": self._router},
            },
        )

    def route(self, request_id: str, choice: Choice, begun_ns: int, now_ns: int) -> None:
        """A routing decision."""
        self.note(
            "route",
            now_ns,
            {
                "request_id": request_id,
                "worker": choice.upstream.name,
                "router": self._router,
                "policy": self._policy,
                "chosen": choice.upstream.name,
                "decision_s": (now_ns - begun_ns) / 1e9,
                "candidates": choice.candidates,
            },
        )

    def note(self, kind: str, at_ns: int, columns: Mapping[str, Any]) -> None:
        """A row of a rare kind."""
        self._recorder.row(kind, at_ns, **columns)

    def new_job(self, head: RequestHead) -> Job | None:
        """What keeps the request's body for the tokenizer, where there is one."""
        return None if self._tokenizing is None else self._tokenizing.new_job(head)

    def submit(self, job: Job, upstream: Upstream) -> None:
        """The upstream took the request: its prompt may be named."""
        if self._tokenizing is not None:
            self._tokenizing.submit(job, upstream)

    def finish(self, row: RequestRow, job: Job | None) -> None:
        """A request ended. Its row waits for the names of its blocks where these are under way."""
        self.num_recorded += 1
        state = str(row.columns["state"])
        self.states[state] = self.states.get(state, 0) + 1
        self.num_misplaced += "misplaced" in row.columns["labels"]
        if job is None or self._tokenizing is None:
            self._recorder.add(row)
        else:
            self._tokenizing.complete(job, row, self._recorder.add)


def api_of(head: RequestHead) -> str | None:
    """What API a request asks; None for all that is not recorded."""
    if head.method != b"POST":
        return None
    path = head.path.rstrip(b"/")
    return APIS.get(path[path.rfind(b"/") :]) if not path.endswith(b"/chat/completions") else "chat"
