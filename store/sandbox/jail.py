"""What the kernel takes away from the process that runs a person's SQL, before it has seen a byte of data.

Idea: DuckDB's own settings (`enable_external_access` and the rest) are one wall; the kernel is a second one that does
not depend on DuckDB being right. Files: Landlock lets the process read below the given paths and nothing else, and
seccomp refuses every way to open a file for writing. Network, new processes, tracing: seccomp refuses the calls.
Time, memory, file size: resource limits, and an alarm that the kernel delivers even when the parent is gone.

Invariant: `Jail.enter` runs while the process has one thread: Landlock binds the calling thread and those it starts.
Each wall that the system does not have (another kernel, another architecture) is left out and said in the answer.

Source: Linux `Documentation/userspace-api/landlock.rst` (ABI 1 to 7) and `seccomp_filter.rst`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

MIB = 1024 * 1024
ADDRESS_SLACK = 256 * MIB
"""Address space beyond the query's memory: malloc reserves 64 MiB heaps of which it uses little."""

_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2


class Jail:
    """The walls around this process. Made early, entered while it has one thread, and never left."""

    def __init__(self) -> None:
        try:  # kept open: once inside, /proc cannot be opened any more
            self._statm: int | None = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._statm = None

    def enter(self, readable: Sequence[Path], cpu_s: float, wall_s: float, max_files: int = 256) -> tuple[str, ...]:
        """Shut this process in; answers the walls that stand: `rlimits`, `landlock`, `seccomp`.

        readable   directories and files that may still be opened for reading
        cpu_s      CPU seconds of all threads together, then SIGXCPU
        wall_s     seconds from now, then SIGALRM, whose default action ends the process
        """
        walls = []
        if _limit_resources(cpu_s, wall_s, max_files):
            walls.append("rlimits")
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
                if _landlock(libc, readable):
                    walls.append("landlock")
                if _seccomp(libc):
                    walls.append("seccomp")
        return tuple(walls)

    def limit_memory(self, memory_bytes: int) -> bool:
        """Allow `memory_bytes` (and a slack for malloc) of address space beyond what is mapped now."""
        import resource

        if self._statm is None:
            return False
        try:
            pages = int(os.pread(self._statm, 256, 0).split()[0])
            ceiling = pages * resource.getpagesize() + memory_bytes + ADDRESS_SLACK
            resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
        except (OSError, ValueError):
            return False
        return True


def _limit_resources(cpu_s: float, wall_s: float, max_files: int) -> bool:
    import resource

    cpu = max(1, round(cpu_s + 0.5))
    limits = [
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, max_files, max_files),
    ]
    try:
        for which, soft, hard in limits:
            ceiling = resource.getrlimit(which)[1]
            if ceiling != resource.RLIM_INFINITY:
                soft, hard = min(soft, ceiling), min(hard, ceiling)
            resource.setrlimit(which, (soft, hard))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        with contextlib.suppress(OSError):
            os.nice(10)  # people's SQL yields to ingest
    except (OSError, ValueError):
        return False
    return True


# --- Landlock: which files -------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> number of file rights it knows
_NET_RIGHTS = 0b11  # bind and connect TCP, ABI 4
_SCOPES = 0b11  # abstract Unix sockets and signals of others, ABI 6


def _landlock(libc: ctypes.CDLL, readable: Sequence[Path]) -> bool:
    libc.syscall.restype = ctypes.c_long
    abi = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if abi < 1:
        return False
    rights = (1 << _FS_RIGHTS[min(abi, 5)]) - 1
    attr = struct.pack("=QQQ", rights, _NET_RIGHTS if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    attr = attr[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = libc.syscall(_CREATE_RULESET, attr, ctypes.c_size_t(len(attr)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            allowed = _READ_FILE | (_READ_DIR if path.is_dir() else 0)
            parent = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", allowed, parent)
                if libc.syscall(_ADD_RULE, ruleset, 1, rule, ctypes.c_uint(0)) != 0:
                    return False
            finally:
                os.close(parent)
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)) == 0)
    finally:
        os.close(ruleset)


# --- seccomp: which system calls -------------------------------------------------------------------------------

_DENIED = {
    # name: (x86_64, aarch64); 0 where the architecture lacks it
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "fork": (57, 0),
    "vfork": (58, 0),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "io_uring_setup": (425, 425),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "creat": (85, 0),
    "truncate": (76, 45),
    "rename": (82, 0),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, 0),
    "mkdirat": (258, 34),
    "rmdir": (84, 0),
    "unlink": (87, 0),
    "unlinkat": (263, 35),
    "link": (86, 0),
    "linkat": (265, 37),
    "symlink": (88, 0),
    "symlinkat": (266, 36),
    "chmod": (90, 0),
    "fchmodat": (268, 53),
    "mknod": (133, 0),
    "mknodat": (259, 33),
}
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # answered ENOSYS: libc falls back to clone and openat
_CLONE, _OPEN, _OPENAT = (56, 220), (2, 0), (257, 56)
_AUDIT_ARCH = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CLONE_THREAD = 0x00010000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_LOAD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_EPERM, _EACCES, _ENOSYS = 1, 13, 38


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _seccomp(libc: ctypes.CDLL) -> bool:
    arch = _AUDIT_ARCH.get(platform.machine())
    if arch is None or sys.byteorder != "little":
        return False
    code = b"".join(_instructions(*arch))
    program = _Program(len(code) // 8, code)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _instructions(audit_arch: int, column: int) -> list[bytes]:
    """The filter: refuse what is listed, allow threads but no processes and reading but no writing, allow the rest."""

    def op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, k)

    def when(number: int, *body: bytes) -> list[bytes]:
        return [op(_JEQ, number, 0, len(body)), *body] if number else []

    def flags_refused(number: int, argument: int, bits: int, error: int, refused_if_set: bool) -> list[bytes]:
        refuse, allow = op(_RET, _ERRNO | error), op(_RET, _ALLOW)
        first, second = (refuse, allow) if refused_if_set else (allow, refuse)
        return when(number, op(_LOAD, _ARGUMENTS + 8 * argument), op(_JSET, bits, 0, 1), first, second)

    code = [op(_LOAD, _ARCH), op(_JEQ, audit_arch, 1, 0), op(_RET, _KILL), op(_LOAD, _NUMBER)]
    if column == 0:  # the x32 calls of x86_64 would be a second, unlisted table
        code += [op(_JGE, 0x40000000, 0, 1), op(_RET, _ERRNO | _EPERM)]
    for numbers in _DENIED.values():
        code += when(numbers[column], op(_RET, _ERRNO | _EPERM))
    for numbers in _ABSENT.values():
        code += when(numbers[column], op(_RET, _ERRNO | _ENOSYS))
    code += flags_refused(_CLONE[column], 0, _CLONE_THREAD, _EPERM, False)
    code += flags_refused(_OPEN[column], 1, _WRITING, _EACCES, True)
    code += flags_refused(_OPENAT[column], 2, _WRITING, _EACCES, True)
    code.append(op(_RET, _ALLOW))
    return code
