"""A log that grows, is cut, is replaced, is missing: facts come from its present start only."""

from __future__ import annotations

from pathlib import Path

from engine_probe.adapters.geometry import StartupLog
from engine_probe.attach.log_tail import LogTail

START = (
    "(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: dtype=torch.bfloat16, "
    "max_seq_len=1024, tensor_parallel_size=2\n"
)


def test_facts_come_as_the_log_grows(tmp_path: Path) -> None:
    """A line is understood when it is whole, and what was told stays told."""
    path = tmp_path / "engine.log"
    path.write_text("hello\n")
    tail = LogTail(path, StartupLog)
    assert tail.poll() == {}
    with path.open("a") as file:
        file.write(START[:60])
    assert tail.poll() == {}
    with path.open("a") as file:
        file.write(START[60:])
    facts = tail.poll()
    assert (facts["engine_version"], facts["tp"], facts["max_context"]) == ("0.32.0", 2, 1024)
    assert tail.poll() == facts
    assert tail.lines == 2
    tail.close()


def test_a_cut_log_is_a_new_start(tmp_path: Path) -> None:
    """A restart that truncates its log tells its own facts, not those of the former life."""
    path = tmp_path / "engine.log"
    path.write_text(START)
    tail = LogTail(path, StartupLog)
    assert tail.poll()["tp"] == 2
    path.write_text(START.replace("0.32.0", "0.33.0").replace(", tensor_parallel_size=2", ""))
    facts = tail.poll()
    assert facts["engine_version"] == "0.33.0"
    assert "tp" not in facts
    tail.close()


def test_a_replaced_log_is_a_new_start(tmp_path: Path) -> None:
    """Rotation gives the path another file, even one that is longer."""
    path = tmp_path / "engine.log"
    path.write_text(START)
    tail = LogTail(path, StartupLog)
    tail.poll()
    path.rename(tmp_path / "engine.log.1")
    path.write_text("x\n" * 500 + START.replace("0.32.0", "0.33.0"))
    assert tail.poll()["engine_version"] == "0.33.0"
    tail.close()


def test_a_missing_log_is_an_error_to_show_not_to_raise(tmp_path: Path) -> None:
    """It may come later."""
    path = tmp_path / "engine.log"
    tail = LogTail(path, StartupLog)
    assert tail.poll() == {}
    assert tail.error is not None
    assert "No such file" in tail.error
    path.write_text(START)
    assert tail.poll()["engine_version"] == "0.32.0"
    assert tail.error is None
    tail.close()


def test_binary_rubbish_and_endless_lines_are_survived(tmp_path: Path) -> None:
    """A progress bar without newline, or a core dump in the log."""
    path = tmp_path / "engine.log"
    path.write_bytes(b"\xff\x00" * 400_000 + b"\n" + START.encode())
    tail = LogTail(path, StartupLog)
    assert tail.poll()["engine_version"] == "0.32.0"
    tail.close()
