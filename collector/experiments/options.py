"""What `experiment run` and `experiment sweep` may be told: options, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from engine_probe.errors import UsageError

ScenarioArgument = Annotated[
    str | None,
    typer.Argument(help="founding or founding-capacity; without: what the options say.", show_default=False),
]
RequestsOption = Annotated[
    int | None, typer.Option("--requests", help="Calls that count, in each run.", show_default=False)
]
WarmupOption = Annotated[int | None, typer.Option("--warmup", help="Calls before, that do not.", show_default=False)]
RepeatsOption = Annotated[
    int | None, typer.Option("--repeats", help="Runs of each arm, 3 or more.", show_default=False)
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of calls, order and routing.")]
RateOption = Annotated[str | None, typer.Option("--rate", help="Calls a second (open loop).", show_default=False)]
ConcurrencyOption = Annotated[
    str | None, typer.Option("--concurrency", help="Calls in flight (closed loop).", show_default=False)
]
RatesOption = Annotated[
    str | None, typer.Option("--rate", help="Calls a second: 2,4,8 (open loop).", show_default=False)
]
ConcurrenciesOption = Annotated[
    str | None, typer.Option("--concurrency", help="Calls in flight: 1,2,4 (closed loop).", show_default=False)
]
ArrivalsOption = Annotated[str | None, typer.Option("--arrivals", help="poisson, even or bursty.", show_default=False)]
GroupsOption = Annotated[int | None, typer.Option("--groups", help="Shared prefixes.", show_default=False)]
SkewOption = Annotated[
    float | None, typer.Option("--skew", help="How uneven their popularity (Zipf).", show_default=False)
]
SharedTokensOption = Annotated[
    int | None, typer.Option("--shared-tokens", help="Of a shared prefix.", show_default=False)
]
SharedRatioOption = Annotated[
    float | None, typer.Option("--shared-ratio", help="Share of calls with one.", show_default=False)
]
OwnTokensOption = Annotated[
    str | None, typer.Option("--own-tokens", help="Of the rest of a prompt: N or LOW-HIGH.", show_default=False)
]
OutputTokensOption = Annotated[
    str | None, typer.Option("--output-tokens", help="Of an answer: N or LOW-HIGH.", show_default=False)
]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Mooncake trace, one part of it a repeat.", show_default=False)
]
SpeedOption = Annotated[float, typer.Option("--speed", help="Plays the trace so many times as fast.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE of every arm. Repeatable.", show_default=False)
]
SloTtftOption = Annotated[float | None, typer.Option("--slo-ttft", help="Longest good TTFT, s.", show_default=False)]
SloTpotOption = Annotated[float | None, typer.Option("--slo-tpot", help="Longest good TPOT, s.", show_default=False)]
OutOption = Annotated[Path, typer.Option("--out", help="Folder of the rows (Parquet) and the report.")]
BlocksOption = Annotated[bool, typer.Option("--blocks/--no-blocks", help="Keep the life of every KV block too.")]
JobsOption = Annotated[int | None, typer.Option("--jobs", help="Processes (virtual time).", show_default="cores")]
EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", help="OpenAI endpoint in place of the embedded engine.", show_default=False)
]
OffOption = Annotated[
    str | None,
    typer.Option("--endpoint-off", help="The same with its cache off, for arms A and B.", show_default=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Served model; of the embedded engine the one it imitates.", show_default=False),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", envvar="KVSCOPE_ENGINE_KEY", help="Bearer token of the endpoint.", show_default=False),
]
CaOption = Annotated[
    Path | None, typer.Option("--ca", help="Authority of the endpoint's TLS (PEM).", show_default=False)
]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Do not check the endpoint's certificate.")]
PromptOption = Annotated[str, typer.Option("--prompt", help="Prompts to the endpoint: words, tokens (ids) or chat.")]
VocabOption = Annotated[int, typer.Option("--vocab", help="With --prompt tokens: ids below this.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Longest an endpoint's answer may take, s.")]


@dataclass(frozen=True)
class Shared:
    """What both verbs may be told, each field an option; None: as the experiment has it."""

    settings: SetOption = None
    repeats: RepeatsOption = None
    requests: RequestsOption = None
    warmup: WarmupOption = None
    arrivals: ArrivalsOption = None
    groups: GroupsOption = None
    skew: SkewOption = None
    shared_tokens: SharedTokensOption = None
    shared_ratio: SharedRatioOption = None
    own_tokens: OwnTokensOption = None
    output_tokens: OutputTokensOption = None
    trace: TraceOption = None
    speed: SpeedOption = 1.0
    seed: SeedOption = 0
    slo_ttft: SloTtftOption = None
    slo_tpot: SloTpotOption = None
    jobs: JobsOption = None
    endpoint: EndpointOption = None
    model: ModelOption = None
    key: KeyOption = None
    ca: CaOption = None
    insecure: InsecureOption = False
    prompt: PromptOption = "words"
    vocab: VocabOption = 1000
    timeout: TimeoutOption = 300.0

    def over(self, workload: Any, *, rate: float | None = None, concurrency: int | None = None) -> Any:
        """The workload with what is asked in place. Raises UsageError where it makes no sense together."""
        if rate is not None and concurrency is not None:
            raise UsageError("--rate is an open loop, --concurrency a closed one: give one of them")
        if self.trace is None and self.speed != 1.0:
            raise UsageError("--speed is of a --trace; without one give --rate")
        told = {name: getattr(self, name) for name in OF_TRAFFIC if getattr(self, name) is not None}
        told |= {} if rate is None else {"rate": rate}
        if self.trace is not None and told:
            names = ", ".join("--" + name.replace("_", "-") for name in told)
            raise UsageError(f"a --trace has its own arrivals and lengths; leave {names} out")
        if self.trace is not None and not self.trace.is_file():
            raise UsageError(f"there is no file {self.trace}; --trace takes a Mooncake trace", path=str(self.trace))
        for name in ("own_tokens", "output_tokens"):
            if name in told:
                told[name] = lengths(told[name], "--" + name.replace("_", "-"))
        changed: dict[str, Any] = {"seed": self.seed, "speed": self.speed, "trace": self.trace}
        changed |= {} if self.requests is None else {"num_requests": self.requests}
        changed |= {} if self.warmup is None else {"num_warmup": self.warmup}
        changed |= {} if concurrency is None else {"in_flight": concurrency}
        return replace(workload, traffic=replace(workload.traffic, **told), **changed)

    @property
    def slo(self) -> Any:
        """What a good request keeps."""
        return slo_of(self.slo_ttft, self.slo_tpot)


OF_TRAFFIC = (
    "arrivals",
    "groups",
    "skew",
    "shared_tokens",
    "shared_ratio",
    "own_tokens",
    "output_tokens",
)


def sharing(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with every option of `Shared` between its own and --json; it gets them as one, `shared`."""
    names = [field.name for field in fields(Shared)]

    @wraps(verb)
    def command(**given: Any) -> None:
        verb(shared=Shared(**{name: given.pop(name) for name in names}), **given)

    own = [one for one in signature(verb, eval_str=True).parameters.values() if one.name != "shared"]
    kinds = get_type_hints(Shared, include_extras=True)
    both = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
        for one in fields(Shared)
    ]
    first = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in own]
    told = [*(one for one in first if one.name != "json"), *both, *(one for one in first if one.name == "json")]
    command.__signature__ = Signature(told)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {one.name: one.annotation for one in told}
    return command


def lengths(text: str, option: str) -> Any:
    """`64` or `64-512` -> lengths in tokens. Raises UsageError."""
    from engine_probe.engine.traffic.synthetic import Lengths

    low, dash, high = text.partition("-")
    numbers = [low, high if dash else low]
    if not all(number.strip().isascii() and number.strip().isdigit() for number in numbers):
        raise UsageError(f"{option} is {text!r}; expected tokens, N or LOW-HIGH")
    return Lengths(int(numbers[0]), int(numbers[1]))


def one_load(text: str | None, option: str, *, whole: bool) -> float | None:
    """The one number of `--rate` or `--concurrency`. Raises UsageError."""
    found = loads(text, option, whole=whole)
    if found is not None and len(found) != 1:
        raise UsageError(f"{option} is {text!r}; a run has one load (several are for `experiment sweep`)")
    return None if found is None else found[0]


def loads(text: str | None, option: str, *, whole: bool) -> list[float] | None:
    """Numbers above 0 with commas between, rising. Raises UsageError."""
    if text is None:
        return None
    found = []
    for word in text.split(","):
        try:
            number = float(int(word) if whole else word)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise UsageError(
                f"{option} is {text!r}; expected {'whole ' if whole else ''}numbers above 0, with commas between"
            )
        found.append(number)
    return sorted(set(found))


def slo_of(ttft_s: float | None, tpot_s: float | None) -> Any:
    """What a good request keeps: these limits, else those of interactive traffic. Raises UsageError for one that is not above 0."""
    from store.metrics import PRESET_SLOS, Slo

    for option, limit in (("--slo-ttft", ttft_s), ("--slo-tpot", tpot_s)):
        if limit is not None and not 0 < limit < float("inf"):
            raise UsageError(f"{option} is {limit}; expected seconds above 0")
    if ttft_s is None and tpot_s is None:
        return PRESET_SLOS["interactive"]
    return Slo(ttft_s=ttft_s, tpot_s=tpot_s)


def release() -> str:
    """This kvscope's version."""
    from importlib.metadata import version

    return version("kvscope")
