"""The middle of a diagnosis by hand: significance, attribution, case, causes, and a whole verdict to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diagnosis.attribution.shapley import Attribution, Row
from diagnosis.attribution.traffic import Traffic
from diagnosis.cause import Case
from diagnosis.ledger.ledger import Ledger
from diagnosis.statistics.comparability import Mix
from diagnosis.statistics.judged import Judged
from diagnosis.statistics.significance import Significance
from diagnosis.telling.verdict import Change, CompositionRow, LedgerRow, NamedCause, Verdict
from store.interface import Window
from tests.factories import facts, request_facts, work_model


def significance(**known: Any) -> Significance:
    """400 requests a window, P99 went from 0.1 to 0.3 s, and that is real; changed by keyword."""
    plain: dict[str, Any] = {
        "n": (400, 400),
        "n_effective": (400.0, 400.0),
        "extremal": (1.0, 1.0),
        "episodes": (12, 12),
        "enough": True,
        "one_sided": False,
        "reason": None,
        "n_needed": 1000,
        "delta_s": 0.2,
        "interval_95": (0.15, 0.25),
        "delta_mean_s": 0.1,
        "mean_interval_95": (0.05, 0.15),
        "changed": True,
        "changed_mean": True,
        "p_quantile": 1e-6,
        "p_mean": 1e-4,
    }
    return Significance(**(plain | known))


def judged(quantile: str = "0.99", asked: str = "0.99", raw: Significance | None = None, **known: Any) -> Judged:
    """That significance as the one that carries the verdict, and as the one that was asked for where nothing else is said."""
    requested = known.pop("requested", None)
    found = significance(**known)
    return Judged(quantile, asked, requested or found, found, [], raw)


def change(**known: Any) -> Change:
    """P99 0.1 -> 0.3 s, mean 0.05 -> 0.15 s."""
    plain: dict[str, Any] = {
        "mean_s": 0.1,
        "p99_s": 0.2,
        "judged_s": 0.2,
        "mean_interval_95": (0.05, 0.15),
        "interval_95": (0.15, 0.25),
        "p99_interval_95": (0.15, 0.25),
        "base_p99_s": 0.1,
        "suspect_p99_s": 0.3,
        "base_mean_s": 0.05,
        "suspect_mean_s": 0.15,
        "base_judged_s": 0.1,
        "suspect_judged_s": 0.3,
    }
    return Change(**(plain | known))


def attribution(
    rows: Mapping[str, tuple[float, float]], *, draws: int = 100, spread: float = 0.0, dependence: float = 0.0
) -> Attribution:
    """Rows by name: (mean s, quantile s). Each replicate is the rows themselves, give or take `spread` in turn."""
    table = [Row(name, mean_s, quantile_s, quantile_s) for name, (mean_s, quantile_s) in rows.items()]
    wave = spread * np.where(np.arange(draws) % 2, 1.0, -1.0)[:, None]
    return Attribution(
        rows=table,
        dependence=Row("dependence", 0.0, dependence, dependence),
        delta_mean_s=sum(row.mean_s for row in table),
        delta_quantile_s=sum(row.quantile_s for row in table) + dependence,
        delta_es_s=sum(row.es_s for row in table) + dependence,
        first_share={},
        material_share={},
        replicates=draws,
        draws=np.array([[row.quantile_s for row in table]] * draws) + wave,
        draws_mean=np.array([[row.mean_s for row in table]] * draws) + wave,
        draws_dependence=np.full(draws, dependence),
    )


def ledger(value: float, n: int = 400) -> Ledger:
    """All requests have the same latency, of which nothing is known."""
    values = np.full(n, value)
    return Ledger(
        "ttft", ("unexplained",), values[:, None], np.zeros(n), values, np.arange(n), np.zeros(n, dtype=np.bool_)
    )


def case(
    rows: Mapping[str, tuple[float, float]] | None = None,
    *,
    base_s: float = 0.05,
    suspect_s: float = 0.15,
    n: int = 400,
    metric: str = "ttft",
    traffic: Traffic | None = None,
    mix: Mix | None = None,
    **attributed: Any,
) -> Case:
    """A case whose attribution has these rows."""
    found = attribution(rows if rows is not None else {"premature_eviction": (0.1, 0.2)}, **attributed)
    sides = [facts(request_facts(np.arange(n) * 1.0), name=name) for name in ("baseline", "suspect")]
    return Case(
        base=sides[0],
        suspect=sides[1],
        base_window=Window(run_id="a"),
        suspect_window=Window(run_id="b"),
        base_ledger=ledger(base_s, n),
        suspect_ledger=ledger(suspect_s, n),
        attribution=found,
        model=work_model(),
        metric=metric,
        quantile="0.99",
        mix=mix,
        traffic=traffic,
    )


def named(cause: str, rows: Sequence[str] | None = None, **known: Any) -> NamedCause:
    """A cause as it stands in a verdict."""
    plain: dict[str, Any] = {
        "cause": cause,
        "rows": rows or [cause],
        "summary": f"What {cause} is.",
        "subject": {"kind": "fleet", "id": None},
        "interval": None,
        "share_p99": 0.8,
        "mean_s": 0.08,
        "p99_s": 0.16,
        "confidence": 0.9,
        "confidence_word": "high",
        "evidence": [],
        "refuted_by": "the opposite",
        "remedy": ["vLLM: change something"],
    }
    return NamedCause(**(plain | known))


def verdict(**known: Any) -> Verdict:
    """A verdict with something in every part: long ids, an unknown number, a missing interval, an open quantile."""
    nan = float("nan")
    plain: dict[str, Any] = {
        "status": "explained",
        "verdict": "P99 TTFT rose from 100 ms to 300 ms or more (mean 50.0 ms -> 150 ms): premature_eviction owns 80 % of the change.",
        "metric": "ttft",
        "quantile": "0.99",
        "requested_quantile": "0.99",
        "carried_by": "quantile",
        "vantage": "client",
        "windows": {
            "baseline": _side("before", 1_780_000_000, 600),
            "suspect": _side(None, 1_780_086_400, 600),
            "why": "both windows were given",
        },
        "n": {"baseline": 1200, "suspect": 1180},
        "n_effective": {"baseline": 900.4, "suspect": 850.0},
        "delta": change(suspect_p99_range=(0.3, None), suspect_judged_range=(0.3, None)),
        "composition": [
            CompositionRow("own_prefill", "computing its own prompt", 0.06, 0.12),
            CompositionRow("premature_eviction", "computing evicted prompt blocks again, own and others'", 0.0, 0.18),
            CompositionRow("smoothing", "exact order statistic less the smoothed parts", 1e-9, nan),
        ],
        "attribution": [
            LedgerRow("premature_eviction", "evicted prompt blocks", 0.08, 0.16, 0.2, 0.16, (0.1, 0.2), (0.05, 0.1)),
            LedgerRow("unexplained", "time that no phase owns", nan, 0.03, 0.0, 0.03),
            LedgerRow("dependence", "how the parts coincide", 0.0, 0.01, 0.0, 0.01, (-0.01, 0.02)),
        ],
        "causes": [
            named(
                "premature_eviction",
                summary="Prompt blocks were computed, pushed out of the cache, and asked for again: their prefill was paid twice.",
                subject={"kind": "worker", "id": "w0"},
                interval={"start_ns": 1_780_086_400_000_000_000, "end_ns": 1_780_086_460_000_000_000},
                evidence=[
                    {
                        "statement": "20,000 prompt tokens were computed again",
                        "value": 20000.0,
                        "unit": "tokens",
                        "sql": "SELECT count(*) * 16 AS tokens FROM block WHERE run_id = 'before' AND change = 'evicted'",
                        "request_ids": ["cmpl-" + "0123456789abcdef" * 6, "r|2", "r`3"],
                        "computed_by": None,
                    },
                    {
                        "statement": "an unknown number",
                        "value": nan,
                        "unit": "s",
                        "sql": None,
                        "request_ids": [],
                        "computed_by": "the ledger, from its seconds of each request",
                    },
                ],
                remedy=["vLLM: more KV blocks (--num-gpu-blocks-override)", "application: shorter <prompts>"],
            ),
            named("slow_steps", share_p99=None, confidence=0.3, confidence_word="low"),
        ],
        "side_effects": [
            _effect("tpot_mean_s", 0.01, 0.012, (0.001, 0.003), 0.001, changed=True),
            _effect("requests_per_s", 2.0, 1.97, None, None, changed=None),
            _effect("unfinished_ratio", 0.0, nan, (nan, nan), 0.5, changed=False),
        ],
        "unexplained": {"mean_s": 0.02, "p99_s": 0.04, "judged_s": 0.04, "share_p99": 0.2},
        "excluded": [{"cause": "load_step", "because": "the offered load did not grow: 2 requests/s"}],
        "not_observable": [
            {
                "cause": "cold_start",
                "missing": ["request.cached_tokens"],
                "because": "not observable here: x was not seen",
            }
        ],
        "quality": [
            {"check": "gaps", "status": "ok", "statement": "baseline: no gap in the telemetry is known"},
            {"check": "kv_usage", "status": "contradiction", "statement": "suspect: KV usage runs from -1 to 2"},
        ],
        "notes": ["both windows were given", "suspect: 30 of 1,180 requests ended without a first token"],
        "next_experiment": {
            "separates": ["premature_eviction", "slow_steps"],
            "experiment": "more_blocks",
            "statement": "replay the trace with more blocks; if it is slow_steps, it stays",
            "command": "kvscope experiment run --rate 4 --arm control:num_blocks=100 --arm more:num_blocks=150",
            "engine_command": "kvscope experiment run --rate 4 --endpoint http://127.0.0.1:8000 --arm control: --arm more:note=x",
            "reads_store": False,
            "requests_per_window": 1234,
            "minutes": 2.0,
        },
        "side": {
            "side": "prefill",
            "statement": "Prefill side: TTFT rose (+30 ms) and TPOT is as before; of TTFT +30 ms in prefill.",
            "ttft_s": 0.03,
            "tpot_s": 0.0,
            "before_engine_s": 0.0,
            "behind_engine_s": 0.0,
            "either_way_s": 0.0,
            "prefill_queue_s": 0.0,
            "prefill_s": 0.03,
            "prefill_queue": [None, None],
            "decode_queue": [None, None],
        },
        "calibration": {"prefill_s_per_token": 0.0002, "slow_factor": 1.02, "compared": 500, "source": "steps"},
    }
    return Verdict(**(plain | known))


def _effect(
    metric: str,
    base: float,
    suspect: float,
    interval: tuple[float, float] | None,
    p_value: float | None,
    *,
    changed: bool | None,
) -> dict[str, Any]:
    values = {"metric": metric, "baseline": base, "suspect": suspect}
    return values | {"interval_95": interval, "p_value": p_value, "changed": changed}


def _side(run: str | None, start_s: int, length_s: int) -> dict[str, Any]:
    return {
        "run": run,
        "start_ns": start_s * 1_000_000_000,
        "end_ns": (start_s + length_s) * 1_000_000_000,
        "requests": 1200,
        "warmup_left_out": 0,
        "workers": ["w0"],
    }
