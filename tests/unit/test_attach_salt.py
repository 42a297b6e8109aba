"""The salt is made once, kept private, and never silently another one."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from engine_probe.attach.salt import default_path, read_salt
from engine_probe.errors import UsageError


def test_it_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    """64 hexadecimal digits, mode 0600, the same at every call, no file left over."""
    path = tmp_path / "deep" / "salt"
    salt = read_salt(path)
    assert len(bytes.fromhex(salt.decode())) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_salt(path) == salt
    assert [p.name for p in path.parent.iterdir()] == ["salt"]
    assert read_salt(tmp_path / "other") != salt


def test_a_salt_of_ones_own_is_taken_without_its_newline(tmp_path: Path) -> None:
    """As an editor or a secret store leaves it."""
    (tmp_path / "salt").write_bytes(b"kvscope-recordings\n")
    assert read_salt(tmp_path / "salt") == b"kvscope-recordings"


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 65])
def test_a_salt_of_wrong_size_is_refused(tmp_path: Path, content: bytes) -> None:
    """BLAKE2b takes a key of 1 to 64 bytes."""
    (tmp_path / "salt").write_bytes(content)
    with pytest.raises(UsageError, match="expected 1 to 64"):
        read_salt(tmp_path / "salt")


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    """The message names the option."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--salt-file"):
        read_salt(tmp_path / "file" / "salt")


def test_the_default_follows_xdg() -> None:
    """Data, not cache: losing it would cut the history in two."""
    assert default_path({"XDG_DATA_HOME": "/d"}) == Path("/d/kvscope/salt")
    assert default_path({}) == Path.home() / ".local/share/kvscope/salt"
