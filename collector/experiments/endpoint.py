"""Runs against an OpenAI endpoint, one after the other: warm-up, a cold start where one is asked for, then the calls that count.

Cold is reached through `/reset_prefix_cache` where the engine has it, else by a new word in front of every prompt, which shares
nothing with what came before. Without a second endpoint whose cache is off, off is imitated in the same way, a new word a call:
nothing can be reused, but looking up and evicting still take place. Which it was stands in the notes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from collector.experiments.arm_settings import NO, YES
from collector.experiments.engine_side import EngineSide
from collector.experiments.judging import common_facts
from collector.experiments.runner import Folder, Ran, counting_begins
from collector.experiments.workload import Asked, Workload, asked, counted_s
from diagnosis.experiments.design import Arm, Trial
from diagnosis.experiments.observed import CALL, REUSABLE
from diagnosis.telling.wording import percent, seconds
from engine_probe.clock import Clock
from engine_probe.engine.traffic.call import Call
from engine_probe.errors import EngineUnreachable, UsageError
from engine_probe.load.generator import Ask, closed_loop, open_loop
from engine_probe.load.openai_client import Endpoint, OpenAiClient, path_of, sampling
from engine_probe.load.prompts import PromptWriter
from engine_probe.schema import table_from_rows
from engine_probe.sending.sink import FileSink

KEYS = ("endpoint", "model", "cache", "temperature", "version", "note")
CALIBRATION_TOKENS = 64
TELL_EVERY_S = 5.0
WORTH_SAYING_S = 30.0
NOT_EMPTY = 0.1
"""Share of a prompt that a call which shares nothing may find cached: an instant of a template, never its own words."""


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint, and the one of arms without a cache (None: imitated)."""

    url: str
    off_url: str | None = None
    model: str | None = None
    key: str | None = None
    verify: bool | ssl.SSLContext = True
    timeout_s: float = 300.0
    writer: PromptWriter = field(default_factory=PromptWriter)


class EndpointRunner:
    """Sends the calls of every run to the endpoint of its arm."""

    def __init__(self, target: Target, seed: int = 0, say: Callable[[str], None] = lambda text: None) -> None:
        self._target = target
        self._seed = seed
        self._say = say
        self._told: dict[str, dict[str, Any]] = {}
        self._writers: dict[str, PromptWriter] = {}
        self._sides: dict[str, EngineSide] = {}
        self._notes: list[str] = []

    def check(self, arms: Sequence[Arm]) -> None:
        """Every arm's endpoint answers, serves the model, and completes a prompt."""
        for arm in arms:
            unknown = sorted(set(arm.settings) - set(KEYS))
            if unknown:
                raise UsageError(
                    f"arm {arm.name}: {', '.join(unknown)} cannot be set at an endpoint from here; known: {', '.join(KEYS)}. "
                    "Start the engine with it, and give each arm its endpoint"
                )
            _flag(arm)
            _temperature(arm)
            endpoint = self._endpoint(arm)
            if endpoint.url not in self._told:
                self._told[endpoint.url], self._writers[endpoint.url] = asyncio.run(self._first_look(endpoint))
                side = self._sides[endpoint.url] = EngineSide(endpoint)
                if side.why is not None:
                    self._note(f"the engine's own counters are not known: {side.why}")
            self._check_cache(arm, endpoint.url)
        if any(self._imitates_off(arm) for arm in arms):
            self._note(
                "off is imitated: every call begins with a word of its own, so nothing can be reused; looking up and evicting still "
                "take place (give --endpoint-off for a server whose cache is off)"
            )

    def _check_cache(self, arm: Arm, url: str) -> None:
        """An arm whose cache is said to be on or off is served by an engine that says the same. Raises UsageError."""
        is_on = self._sides[url].fact("prefix_caching")
        if "cache" not in arm.settings or is_on is None or is_on == _flag(arm) or self._imitates_off(arm):
            return
        raise UsageError(
            f"arm {arm.name} is to have its prefix cache {'on' if _flag(arm) else 'off'}, and the engine at {url} says that it is "
            f"{'on' if is_on else 'off'}. Start it {'with' if _flag(arm) else 'without'} prefix caching, or give another endpoint",
            url=url,
        )

    def run(
        self, trials: Sequence[Trial], workload: Workload, folder: Folder, tell: Callable[[int], None]
    ) -> list[Ran]:
        """One after the other: two at a time would be each other's load."""
        if workload.in_flight is None:
            takes_s = sum(counted_s(workload, trial.repeat) for trial in trials)
            if takes_s >= WORTH_SAYING_S:
                self._say(
                    f"the calls of {len(trials)} runs come within {seconds(takes_s)}; warm-up and slow answers take more"
                )
        ran = []
        for trial in trials:
            rows, engine, facts = asyncio.run(self._run_one(trial, workload))
            ran.append(_ran(trial, rows, engine, facts, folder(trial)))
            tell(len(ran))
        return ran

    def facts(self, arms: Sequence[Arm], workload: Workload) -> dict[str, Any]:
        """As far as the endpoint tells them."""
        told = {}
        for arm in arms:
            endpoint = self._endpoint(arm)
            found, side = self._told.get(endpoint.url, {}), self._sides.get(endpoint.url)
            fact = (lambda name: None) if side is None else side.fact
            told[arm.name] = {
                "endpoint": endpoint.url,
                "engine": fact("engine") or found.get("served_by"),
                "engine_version": arm.settings.get("version") or found.get("engine_version"),
                "model": found.get("model"),
                "weights": fact("dtype"),
                "kv_dtype": fact("kv_dtype"),
                "tokenizer": None,
                "template": fact("chat_template_version"),
                "hardware": None,
                "workers": len(side.facts) or None if side is not None else None,
                "blocks_per_worker": fact("num_blocks"),
                "block_size": fact("block_size"),
                "prefix_caching": fact("prefix_caching"),
                "max_context": fact("max_context"),
                "routing": None,
                "admission_limit": None,
                "engine_flags": fact("flags") or None,
                "sampling": f"temperature {_temperature(arm):g}, seed {self._seed}",
                "stop": "max_tokens of each call, ignore_eos where the endpoint knows it",
                "prompts": self._target.writer.kind,
            }
        return {**common_facts(told), **workload.facts()}

    def notes(self, workload: Workload, ran: Sequence[Ran]) -> list[str]:
        failed = sum(run.facts["failed"] for run in ran)
        notes = list(self._notes)
        if failed:
            first = next(run.facts["problem"] for run in ran if run.facts["problem"])
            notes.append(f"{failed:,} calls failed; most say: {first}")
        wanted, got = sum(run.facts["wanted_tokens"] for run in ran), sum(run.facts["prompt_tokens"] for run in ran)
        if wanted and got and not 0.8 <= got / wanted <= 1.25:
            notes.append(
                f"prompts came out {got / wanted:.2f} times as long as asked for, in the endpoint's own tokens"
            )
        notes += _cache_notes(ran)
        if workload.in_flight is None:
            notes.append(
                "calls were sent when they were due, whatever had become of those before (no coordinated omission)"
            )
        return notes

    async def _first_look(self, endpoint: Endpoint) -> tuple[dict[str, Any], PromptWriter]:
        """What it says of itself, and how many words it takes for a token."""
        writer = self._target.writer
        async with OpenAiClient(endpoint, Clock()) as client:
            told = await client.check()
            call = Call("calibration", 0, CALIBRATION_TOKENS, 1)
            body = {**writer.body(call, salt=self._salt("calibration")), **sampling(1, seed=self._seed)}
            answered = await client.ask(path_of(writer.kind), body, "kvscope-calibration")
            if answered.error is not None:
                text = f"{endpoint.url} serves {client.model}, but did not complete a first prompt: {answered.error}"
                if answered.status is not None and 400 <= answered.status < 500 and answered.status != 429:
                    raise UsageError(
                        f"{text}. Its context may be shorter than {CALIBRATION_TOKENS} tokens, or --prompt of another kind is what it takes",
                        url=endpoint.url,
                    )
                raise EngineUnreachable(text, url=endpoint.url)
            found = answered.reading.columns.get("prompt_tokens")
            if writer.kind != "tokens":
                if found:
                    writer = replace(writer, words_per_token=CALIBRATION_TOKENS / found)
                else:
                    self._note(
                        "the endpoint tells no usage: one word is taken for one token, and hits and misses are not known"
                    )
            return told, writer

    async def _run_one(
        self, trial: Trial, workload: Workload
    ) -> tuple[list[dict[str, Any]], Mapping[str, pa.Table], dict[str, Any]]:
        work = asked(workload, trial.repeat, is_warm=trial.arm.is_warm)
        endpoint = self._endpoint(trial.arm)
        side = self._sides[endpoint.url]
        async with OpenAiClient(endpoint, Clock()) as client:
            client.model = self._told[endpoint.url]["model"]
            is_reset = await client.reset_prefix_cache()
            asks = self._asks(trial, work, endpoint.url, is_reset=is_reset)
            tell = self._progress(trial.run_id, len(asks))
            rows = await closed_loop(client, asks[: work.num_warmup], 1, tell)
            if not trial.arm.is_warm and is_reset:
                await client.reset_prefix_cache()
            counted, before = asks[work.num_warmup :], await side.look()
            if workload.in_flight is None:
                rows += await open_loop(client, counted, tell)
            else:
                rows += await closed_loop(client, counted, workload.in_flight, tell)
            engine = side.tables(before, await side.look())
        self._note(
            "caches are emptied through /reset_prefix_cache before each run, and once more where a cold arm begins to count"
            if is_reset
            else "the endpoint has no /reset_prefix_cache (vLLM: VLLM_SERVER_DEV_MODE=1): runs, and cold starts, are kept apart by a "
            "new word in front of every prompt"
        )
        good = [row for row in rows if row["state"] == "finished"]
        problem = next((row["error"] for row in rows if row["error"]), None)
        # A server that turns all away is past its knee, which a sweep wants to know; whatever else fails all is a mistake.
        if not good and not all(row["state"] == "rejected" for row in rows):
            raise EngineUnreachable(
                f"{endpoint.url}: of {len(rows):,} calls none was answered; {problem}", url=endpoint.url
            )
        told = [(row.get("prompt_tokens"), ask.call.prompt_tokens) for row, ask in zip(rows, asks, strict=True)]
        facts = {
            "failed": len(rows) - len(good),
            "problem": problem,
            **_cache_facts(rows[work.num_warmup :]),
            "wanted_tokens": sum(wanted for got, wanted in told if got),
            "prompt_tokens": sum(got for got, _ in told if got),
        }
        return rows, engine, facts

    def _progress(self, run_id: str, total: int) -> Callable[[int], None]:
        """Counts answers, and says every few seconds how far a run is."""
        done, told_s = 0, time.monotonic()

        def tell(count: int) -> None:
            nonlocal done, told_s
            done += count
            if time.monotonic() - told_s >= TELL_EVERY_S:
                told_s = time.monotonic()
                self._say(f"{run_id}: {done:,} of {total:,} calls answered")

        return tell

    def _asks(self, trial: Trial, work: Asked, url: str, *, is_reset: bool) -> list[Ask]:
        writer = self._writers[url]
        imitates_off = self._imitates_off(trial.arm)
        asks = []
        for number, call in enumerate(work.calls):
            salt = "" if is_reset else self._salt(trial.run_id)
            if not is_reset and not trial.arm.is_warm and number >= work.num_warmup:
                salt = self._salt(trial.run_id, "cold")
            if imitates_off:
                salt = self._salt(trial.run_id, str(number))
            body = {
                **writer.body(call, salt),
                **sampling(call.output_tokens, seed=self._seed, temperature=_temperature(trial.arm)),
            }
            labels = {"arm": trial.arm.name, CALL: call.request_id, **({REUSABLE: "0"} if imitates_off else {})}
            # The id that the engine is told says the arm too, so that the engine's own rows of it join this run's alone.
            named = replace(call, request_id=f"{trial.arm.name}-{call.request_id}")
            asks.append(Ask(named, path_of(writer.kind), body, labels))
        return asks

    def _endpoint(self, arm: Arm) -> Endpoint:
        target = self._target
        url = arm.settings.get("endpoint") or (target.off_url if not _flag(arm) and target.off_url else target.url)
        return Endpoint(url, arm.settings.get("model", target.model), target.key, target.verify, target.timeout_s)

    def _imitates_off(self, arm: Arm) -> bool:
        return not _flag(arm) and self._target.off_url is None and "endpoint" not in arm.settings

    def _salt(self, *parts: str) -> str:
        text = "/".join((str(self._seed), *parts))
        return "x" + hashlib.blake2b(text.encode(), digest_size=6, key=_PROCESS).hexdigest()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


_PROCESS = os.urandom(16)
"""An endpoint remembers what an earlier experiment sent: its salts must not be this one's."""


def _flag(arm: Arm) -> bool:
    """Whether the arm's cache is on."""
    word = arm.settings.get("cache", "on").lower()
    if word not in YES + NO:
        raise UsageError(f"arm {arm.name}: cache is {word!r}; expected on or off")
    return word in YES


def _temperature(arm: Arm) -> float:
    text = arm.settings.get("temperature", "0")
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= 2.0:
        raise UsageError(f"arm {arm.name}: temperature is {text!r}; expected 0 to 2")
    return found


def _cache_facts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Of the counted calls that were answered: how many tell what was cached, share nothing with those before, and hit all the same."""
    told = [row for row in rows if row["state"] == "finished" and row.get("prompt_tokens")]
    known = [row for row in told if row.get("cached_tokens") is not None]
    new = [row for row in known if row["labels"].get(REUSABLE) == "0"]
    hit = [row for row in new if row["cached_tokens"] > NOT_EMPTY * row["prompt_tokens"]]
    return {"told": len(told), "known": len(known), "new": len(new), "new_hit": len(hit)}


def _cache_notes(ran: Sequence[Ran]) -> list[str]:
    """What does not fit what the cache is said to be."""
    told, known, new, hit = (sum(run.facts[name] for run in ran) for name in ("told", "known", "new", "new_hit"))
    notes = []
    if told and not known:
        notes.append(
            "which calls hit is not known: the endpoint's usage does not tell cached tokens (vLLM: --enable-prompt-tokens-details)"
        )
    if hit:
        notes.append(
            f"of {new:,} calls that share nothing with those before them {hit:,} found more than {percent(NOT_EMPTY)} of their prompt "
            "cached: the cache was not empty, somebody else uses it, or all prompts begin alike (a chat template)"
        )
    return notes


def _ran(
    trial: Trial,
    rows: Sequence[Mapping[str, Any]],
    engine: Mapping[str, pa.Table],
    facts: Mapping[str, Any],
    folder: Path | None,
) -> Ran:
    table = table_from_rows("request", [{**row, "run_id": trial.run_id} for row in rows])
    if folder is not None:
        first = min(row["arrival_ns"] for row in rows if row["labels"].get("phase") != "warmup")
        mark = table_from_rows("mark", [{"at_ns": first, "run_id": trial.run_id, **counting_begins(trial)}])
        sink = FileSink(folder)
        sink.write({"request": table, "mark": mark, **{kind: _named(found, trial) for kind, found in engine.items()}})
        sink.close()
    return Ran(trial.run_id, {"request": table, **engine}, facts)


def _named(table: pa.Table, trial: Trial) -> pa.Table:
    """The rows under the run's name."""
    at = table.schema.get_field_index("run_id")
    return table.set_column(at, table.schema.field(at), pa.array([trial.run_id] * table.num_rows, pa.string()))
