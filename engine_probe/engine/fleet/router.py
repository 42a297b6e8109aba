"""One router: asks its index and its load board, lets a policy choose, and writes down what it believed.

Every decision is a `route` row with all candidates, so that it can be judged later by what was known then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine_probe.engine.fleet.load_board import LoadBoard
from engine_probe.engine.fleet.policies import Candidates, Policy, prefix_key
from engine_probe.engine.fleet.prefix_index import EventFeed
from engine_probe.engine.traffic.call import Call
from engine_probe.recording.recorder import Recorder

USES_INDEX = frozenset({"prefix_affinity", "affinity_with_load"})


class Router:
    """Chooses a worker for each call.

    decision_s   what a decision takes, s: it delays the request
    """

    def __init__(
        self,
        policy: Policy,
        workers: Sequence[str],
        board: LoadBoard,
        feed: EventFeed,
        recorder: Recorder,
        *,
        block_size: int,
        name: str = "router",
        decision_s: float = 50e-6,
    ) -> None:
        self.policy = policy
        self.board = board
        self.feed = feed
        self.recorder = recorder
        self.decision_s = decision_s
        self._workers = list(workers)
        self._block_size = block_size
        self._name = name
        self.looks_up = policy.name in USES_INDEX

    def route(self, call: Call, now_ns: int, names: Any = None) -> int:
        """The worker that gets it. names: what the index knows its blocks by, where that is not their hashes."""
        if self.looks_up:
            self.feed.advance(now_ns)
            matched = self.feed.index.match(call.blocks if names is None else names)
        else:
            matched = None
        load, queue = self.board.read(now_ns)
        choice = self.policy.choose(
            Candidates(
                matched if matched is not None else [0.0] * len(load),
                load,
                queue,
                len(call.blocks),
                call.session_id or call.tenant or prefix_key(call.blocks, self._block_size),
            )
        )
        self.board.assigned(choice.index)
        self.recorder.row(
            "route",
            now_ns,
            request_id=call.request_id,
            router=self._name,
            policy=self.policy.name,
            chosen=self._workers[choice.index],
            prefix_hash=call.prefix_hash,
            decision_s=self.decision_s,
            candidates=[
                {
                    "worker": worker,
                    "matched_tokens": None if matched is None else matched[index] * self._block_size,
                    "load": load[index],
                    "queue": queue[index],
                    "score": choice.scores[index],
                }
                for index, worker in enumerate(self._workers)
            ],
        )
        return choice.index
