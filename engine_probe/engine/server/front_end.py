"""From a request's body to sequences in the engine: text to tokens, limits checked, ids and labels given.

A prompt that can never run is refused here with its numbers and recorded as rejected, like one that the engine refuses.
What was spent is told as phases: `frontend` until the text is there, `tokenize` until the tokens are; from then on it
queues, also while the engine is in the middle of a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import uuid4

from engine_probe.engine.engine import Engine
from engine_probe.engine.sampling_params import SamplingParams
from engine_probe.engine.sequence import Sequence
from engine_probe.engine.server.call import Call
from engine_probe.engine.server.engine_thread import EngineThread
from engine_probe.engine.server.metrics_page import MetricsPage
from engine_probe.engine.server.model import ServedModel
from engine_probe.engine.server.requests import ChatRequest, CompletionRequest, GenerateRequest
from engine_probe.engine.server.stops import StopStrings
from engine_probe.engine.server.ticket import Ticket
from engine_probe.errors import EngineNotReady, PromptRefused, UnknownModel

LONG_TEXT: Final = 4096
"""Characters from which on a text is tokenized beside the event loop."""
DEFAULT_TOKENS: Final = 16
MAX_TENANT: Final = 200


@dataclass(slots=True)
class Asked:
    """What is known of a request beside its body. columns: of its `request` row."""

    request_id: str
    arrival_ns: int
    columns: dict[str, Any] = field(default_factory=dict)


class FrontEnd:
    """Makes calls. accepts: False while it drains."""

    def __init__(self, model: ServedModel, engine: Engine, thread: EngineThread, page: MetricsPage) -> None:
        self.model = model
        self.thread = thread
        self.page = page
        self.max_context = engine.max_context
        self.accepts = True
        self.num_calls = 0
        self._config = engine.config
        self._monotonic_ns = engine.clock.monotonic_ns
        self._root = model.identity.root(engine.config.salt)
        self._open_ids: set[str] = set()
        self._calls: set[Call] = set()

    def now_ns(self) -> int:
        """The engine's clock."""
        return self._monotonic_ns()

    def check(self, model: str | None) -> None:
        """Raises EngineNotReady, UnknownModel."""
        if not self.accepts:
            raise EngineNotReady("the engine is draining before it stops; ask another, or later", retry_after_s=5)
        if not self.thread.is_alive:
            raise EngineNotReady(f"the engine ended: {self.thread.dead}")
        if model is not None and model not in self.model.names:
            raise UnknownModel(
                f"there is no model '{model[:200]}' here; served: {', '.join(self.model.names)}", model=model
            )

    async def complete(self, request: CompletionRequest, asked: Asked) -> Call:
        """Raises PromptRefused, EngineNotReady, UnknownModel; nothing is left in the engine then."""
        self.check(request.model)
        begins = request.add_special_tokens is not False
        began_ns = self.now_ns()
        prompts = [
            self.checked(prompt) if isinstance(prompt, list) else await self.tokenize(prompt, begins=begins)
            for prompt in request.prompts()
        ]
        return self._call(request, prompts, asked, began_ns, request.max_tokens, DEFAULT_TOKENS, "prompt")

    async def chat(self, request: ChatRequest, asked: Asked) -> Call:
        """As `complete`, of a conversation; without a limit the answer may be as long as the model's context allows."""
        self.check(request.model)
        text = self.model.template.render(request.messages)
        began_ns = self.now_ns()
        prompt = await self.tokenize(text, begins=bool(request.add_special_tokens))
        limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        return self._call(request, [prompt], asked, began_ns, limit, self.max_context, "messages")

    async def tokenize(self, text: str, *, begins: bool) -> list[int]:
        """Token ids of a text; a long one does not hold up the event loop. Raises PromptRefused."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptRefused(f"the text has a lone surrogate at character {error.start}", field="prompt") from error
        encode = self.model.tokenizer.encode
        if len(text) < LONG_TEXT:
            return encode(text, begins=begins)
        return await asyncio.to_thread(encode, text, begins=begins)

    def checked(self, token_ids: list[int], field: str = "prompt") -> list[int]:
        """The ids, all of them of the vocabulary. Raises PromptRefused naming `field`."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.model.vocab_size):
            odd = next(one for one in token_ids if not 0 <= one < self.model.vocab_size)
            raise PromptRefused(
                f"token id {odd} is not of the vocabulary; expected 0 to {self.model.vocab_size - 1}", field=field
            )
        return list(token_ids)

    def end_all(self) -> None:
        """What is under way ends with an error that says so."""
        for call in list(self._calls):
            call.fail(EngineNotReady("the engine stopped before the request was done"), "shutdown")

    @property
    def num_open(self) -> int:
        """Calls that are under way."""
        return len(self._calls)

    def _call(
        self,
        request: GenerateRequest,
        prompts: Items[list[int]],
        asked: Asked,
        tokenize_ns: int,
        limit: int | None,
        default_limit: int,
        source: str,
    ) -> Call:
        """Every sequence is made before the first is submitted: one that is refused leaves none of the others behind."""
        queued_ns = self.now_ns()
        spans = (("frontend", asked.arrival_ns, tokenize_ns), ("tokenize", tokenize_ns, queued_ns))
        columns = dict(asked.columns)
        if request.user and "tenant" not in columns:
            columns["tenant"] = request.user[:MAX_TENANT]
        if request.priority is not None and "priority_class" not in columns:
            columns["priority_class"] = str(request.priority)
        tenant = columns.pop("tenant", None)
        priority = self._priority(request)
        salt = request.cache_salt
        root = self._root if salt is None else self.model.identity.root(self._config.salt, cache_salt=salt)
        num_choices = request.n or 1
        groups: list[list[Ticket]] = []
        call: Call | None = None

        def deliver(ticket: Ticket, piece: Any) -> None:
            if call is not None:
                call.deliver(ticket, piece)

        for prompt in prompts:
            made = Sequence(
                asked.request_id, len(prompt), SamplingParams(), asked.arrival_ns, tenant=tenant, columns=dict(columns)
            )
            params = self._params(request, made, limit, default_limit, source)
            group = []
            for choice in range(num_choices):
                index = len(groups) * num_choices + choice
                own = {**columns, "labels": dict(columns.get("labels", {}))}
                if len(prompts) * num_choices > 1:
                    own["labels"] |= {"call": asked.request_id, "choice": str(index)}
                seed = None if params.seed is None else params.seed + choice
                sequence = Sequence(
                    self._own_id(asked.request_id, index),
                    len(prompt),
                    replace(params, seed=seed),
                    asked.arrival_ns,
                    token_ids=list(prompt),
                    root=root,
                    cache_salt=salt,
                    priority=priority,
                    tenant=tenant,
                    columns=own,
                    early_spans=spans,
                )
                stops = StopStrings(request.stops, include=bool(request.include_stop_str_in_output))
                group.append(Ticket(sequence, self.model.tokenizer, stops, deliver, index))
            groups.append(group)
        size = self._config.block_size
        has_prefix = [self._config.prefix_caching and len(prompt) > size for prompt in prompts]
        call = Call(asked.request_id, self.thread, groups, has_prefix, queued_ns, self._ended)
        self._open_ids.update(call.request_ids)
        self._calls.add(call)
        self.num_calls += 1
        self.page.called(num_choices)
        call.start()
        return call

    def _params(
        self, request: GenerateRequest, sequence: Sequence, limit: int | None, default_limit: int, source: str
    ) -> SamplingParams:
        """How its tokens are chosen. What cannot run is recorded as rejected, and raised."""
        room = self.max_context - sequence.num_prompt
        reason = None
        if sequence.num_prompt < 1:
            reason = "the prompt has no token; give at least one"
        elif room < 1:
            reason = (
                f"this engine's maximum context length is {self.max_context} tokens, and the prompt has "
                f"{sequence.num_prompt} of them; shorten it to {self.max_context - 1}, so that there is room for one more"
            )
        if reason is not None:
            sequence.columns["http_status"] = 400
            self.thread.refuse(sequence, reason)
            code = None if sequence.num_prompt < 1 else "context_length_exceeded"
            raise PromptRefused(reason, field=source, code=code)
        return SamplingParams(
            max_tokens=min(default_limit if limit is None else limit, room),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=request.seed,
            stop_token_ids=frozenset(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
        )

    def _priority(self, request: GenerateRequest) -> int:
        """The engine's: larger goes first; on the wire, as in vLLM, smaller does."""
        if not request.priority:
            return 0
        if self._config.scheduler.policy != "priority":
            raise PromptRefused(
                f"priority is {request.priority}, and this engine goes by {self._config.scheduler.policy}; start it with "
                "--scheduling-policy priority",
                field="priority",
            )
        return -request.priority

    def _own_id(self, request_id: str, index: int) -> str:
        """Of one sequence: the client's id, which a second request may bring while the first is under way."""
        own = request_id if index == 0 else f"{request_id}-{index}"
        return f"{own}-{uuid4().hex[:8]}" if own in self._open_ids else own

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        self._open_ids.difference_update(call.request_ids)
