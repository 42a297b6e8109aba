"""Do the pieces of an answer belong to it, and do they come in order? Judged by ids, indices and numbers alone.

Only what the protocol forbids is a finding: an id that changes in mid-stream, or is another open answer's; a model that
changes; a sequence number that comes twice or too late; a content block that is begun again or goes on after its end; tokens
after a choice's end; a running count that falls. A server that makes up an id a chunk (some do), or gives all answers the
same, has ids that tell nothing, and is not judged by them. Repeated bytes are no finding: a token may come twice.
"""

from __future__ import annotations

from typing import Final

from engine_probe.adapters.vllm import normalise_request_id

STABLE: Final = 2
"""Times an id or a model must have been seen before its change means something."""
MAX_FINDINGS: Final = 8
MAX_ID_CHARS: Final = 256


class OpenAnswers:
    """The answers that are open now, by the id that they give themselves; and the requests whose ids the proxy made."""

    def __init__(self) -> None:
        self._by_id: dict[str, Order] = {}
        self._made: dict[str, Order] = {}

    def expect(self, order: Order) -> None:
        """A request with an id of the proxy's own making is open."""
        self._made[order.request_id] = order

    def asked_by_other(self, order: Order, answer_id: str) -> Order | None:
        """The other open request whose id (of our making, so no chance meeting) an answer's id is made from."""
        found = self._made.get(normalise_request_id(answer_id))
        return found if found is not order else None

    def enter(self, order: Order, answer_id: str) -> bool:
        """Take note; False where another open answer has the same id."""
        other = self._by_id.setdefault(answer_id, order)
        if other is order:
            return True
        other.ids_tell = False
        return False

    def leave(self, order: Order) -> None:
        """It ended, or its ids tell nothing."""
        if order.answer_id is not None and self._by_id.get(order.answer_id) is order:
            del self._by_id[order.answer_id]
        if self._made.get(order.request_id) is order:
            del self._made[order.request_id]

    def other(self, order: Order, answer_id: str) -> Order | None:
        """Another open answer that has this id."""
        found = self._by_id.get(answer_id)
        return found if found is not None and found is not order and found.ids_tell else None


class Order:
    """The judge of one answer. `findings`: (check, what, request id of the other answer or None), one of each kind."""

    __slots__ = (
        "_begun_blocks",
        "_ended_blocks",
        "_ended_choices",
        "_id_seen",
        "_kinds",
        "_last_block",
        "_model",
        "_model_seen",
        "_open",
        "_sequence",
        "answer_id",
        "findings",
        "ids_tell",
        "request_id",
    )

    def __init__(self, request_id: str, open_answers: OpenAnswers) -> None:
        self.request_id = request_id
        self.answer_id: str | None = None
        self.ids_tell = True
        self.findings: list[tuple[str, str, str | None]] = []
        self._open = open_answers
        self._kinds: set[str] = set()
        self._id_seen = 0
        self._model: str | None = None
        self._model_seen = 0
        self._sequence: int | None = None
        self._ended_choices: set[int] = set()
        self._begun_blocks: set[int] = set()
        self._ended_blocks: set[int] = set()
        self._last_block = -1

    def found(self, check: str, what: str, other: str | None = None, kind: str | None = None) -> None:
        """A finding; of each kind the first is kept."""
        kind = kind or what.rstrip("0123456789")
        if kind not in self._kinds and len(self.findings) < MAX_FINDINGS:
            self._kinds.add(kind)
            self.findings.append((check, what, other))

    def close(self) -> None:
        """The answer ended."""
        self._open.leave(self)

    def see_id(self, answer_id: str | None, *, has_tokens: bool) -> None:
        """A chunk names the answer that it belongs to."""
        if answer_id is None or len(answer_id) > MAX_ID_CHARS or answer_id in ("", self.answer_id):
            self._id_seen += bool(answer_id)
            return
        if self.answer_id is None:
            self.answer_id, self._id_seen = answer_id, 1
            self.ids_tell = self._open.enter(self, answer_id)
            asked = self._open.asked_by_other(self, answer_id)
            if asked is not None:
                text = "the answer's id is made from the id of another open request"
                self.found("leakage", text, asked.request_id, kind="id")
            return
        if not has_tokens or not self.ids_tell:
            return
        other = self._open.other(self, answer_id)
        if other is not None:
            text = "a chunk carries the id of another open answer"
            self.found("leakage", text, other.request_id, kind="id")
        elif self._id_seen >= STABLE:
            self.found("leakage", "the answer's id changes in mid-stream", kind="id")
        else:
            self.ids_tell = False
            self._open.leave(self)

    def see_same(self, times: int) -> None:
        """So many chunks came that named the same answer and model as the one before them."""
        self._id_seen += times
        self._model_seen += times

    def see_model(self, model: str | None, *, has_tokens: bool) -> None:
        """A chunk names the model that it comes from."""
        if not model or model == self._model:
            self._model_seen += bool(model)
        elif self._model is None or self._model_seen < STABLE:
            self._model, self._model_seen = model, 1
        elif has_tokens:
            self.found("leakage", "the answer's model changes in mid-stream", kind="model")

    def see_sequence(self, number: int | None) -> None:
        """An event has a number (OpenAI responses): each is higher than the one before."""
        if number is None:
            return
        before = self._sequence
        if before is None or number > before:
            self._sequence = number
        elif number == before:
            self.found("position", f"event {number} comes twice", kind="sequence")
        else:
            self.found("position", f"event {number} comes after event {before}", kind="sequence")

    def choice_tokens(self, choice: int) -> None:
        """Tokens of a choice: none may come after its end."""
        if choice in self._ended_choices:
            self.found("position", f"tokens come after the end of choice {choice}", kind="choice")

    def choice_end(self, choice: int) -> None:
        if len(self._ended_choices) < 1024:
            self._ended_choices.add(choice)

    def block_begins(self, index: int) -> None:
        """A content block (Anthropic messages): they are begun in order, each once."""
        if index <= self._last_block:
            self.found("position", f"content block {index} begins after block {self._last_block}", kind="block")
        else:
            self._last_block = index
            self._begun_blocks.add(index)

    def block_goes_on(self, index: int) -> None:
        """A piece of a content block: between its begin and its end."""
        if index in self._ended_blocks:
            self.found("position", f"content block {index} goes on after its end", kind="block")
        elif self._begun_blocks and index not in self._begun_blocks:
            self.found("position", f"content block {index} goes on without a begin", kind="block")

    def block_ends(self, index: int) -> None:
        self.block_goes_on(index)
        if len(self._ended_blocks) < 1024:
            self._ended_blocks.add(index)
