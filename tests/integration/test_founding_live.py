"""The founding case as `make demo` runs it: workers that compute, the cache off and on; short here."""

from __future__ import annotations

from pathlib import Path

import pytest

from collector import founding
from collector.commands.demo import render_founding


def test_cache_and_routing_by_prefix_do_what_the_case_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On: one worker serves all, 70 % find the shared prompt. Off: all serve, nobody finds anything. Every row is kept."""
    monkeypatch.setattr(founding, "REQUESTS", 8)
    monkeypatch.setattr(founding, "FEWEST", 8)
    monkeypatch.setattr(founding, "PROMPT_CPU", 256)
    monkeypatch.setattr(founding, "PROMPT_GPU", 256)
    document = founding.run_live(tmp_path / "rows", lambda _: None, repeats=3)
    off, on = document["arms"]
    assert (off["arm"], on["arm"]) == ("off", "on")
    assert off["num_requests"] == on["num_requests"] == 24
    assert {row["worker"] for row in on["workers"] if row["num_requests"]} == {"w0"}
    assert {row["worker"] for row in off["workers"] if row["num_requests"]} == {"w0", "w1", "w2", "w3"}
    assert on["by_class"]["hit"]["num_requests"] >= 10
    assert "hit" not in off["by_class"]
    assert document["rate"] > 0
    for arm in ("off", "on"):
        assert sorted(path.name for path in (tmp_path / "rows" / arm).iterdir()) == ["1", "2", "3"]
        assert list((tmp_path / "rows" / arm / "1").glob("*/kind=step/*.parquet"))
    text = render_founding({"full_size": document, "live": document, "folder": "rows"})
    assert text.count("TTFT: mean") == 2
    assert all(len(line) <= 130 for line in text.splitlines())


@pytest.mark.parametrize(("rate", "expected"), [(12.0, 60), (4.0, 40), (0.8, 12), (0.1, 12)])
def test_a_slow_machine_is_asked_less(rate: float, expected: int) -> None:
    """Six runs within 60 s: 4 calls a second are 40 a run; never more than 60, nor less than 12."""
    assert founding.requests_within(60.0, rate, 6) == expected


def test_demo_without_torch_says_what_it_leaves_out(
    kvscope: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--live where torch is absent is misuse with the command that helps."""
    monkeypatch.setattr(founding, "is_possible", lambda: False)
    ended = kvscope("demo", "--live", "--dir", tmp_path / "out")  # type: ignore[operator]
    assert ended.code == 2
    assert "service,engine" in ended.err
