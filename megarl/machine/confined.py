"""Confines a process permanently before it runs a program written by a model.

The confinement covers files, network, other processes, memory and time.

This needs neither privileges nor installed packages. It uses kernel limits (setrlimit), Landlock (Linux 5.13)
for files, and an allowlist of system calls for everything else (megarl/machine/system_calls.py).

- Files: only the paths in `readable` can be read, and only those in `writable` changed. Elsewhere, not even a
  file's mode can be changed.
- Processes: none can be started, signaled, traced or read. Threads can be started, up to the number that a
  supervisor allows (megarl/machine/supervisor.py): RLIMIT_NPROC neither applies to root nor to a single
  process.
- Network: there are no sockets, except connected pairs, which asyncio needs.

This module runs at the start of every sandboxed program, so it imports only modules that load quickly, which
excludes typing and collections.

Sources: landlock(7), capset(2), include/uapi/linux/landlock.h of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

from megarl.machine.system_calls import allow_only_harmless_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SIGKILL = 9  # without the module `signal`, which takes 5 ms to load
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLOSE_RANGE = 436  # the same on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessLimits:
    """The limits of one process.

    Args:
        memory_mb: Address space beyond that of the process when it is confined.
        cpu_s: CPU time. The kernel kills the process within one second after it is used up.
        file_mb: Maximum size of a single file that it writes.
        threads: Maximum number of simultaneous threads.
    """

    def __init__(self, memory_mb: int, cpu_s: int, file_mb: int = 16, threads: int = 128) -> None:
        self.memory_mb = memory_mb
        self.cpu_s = cpu_s
        self.file_mb = file_mb
        self.threads = threads


class ConfinementError(OSError):
    """The kernel cannot confine a process. The message says which feature is missing."""


def confine(limits: ProcessLimits, readable: Iterable[str], writable: Iterable[str] = ()) -> None:
    """Confine this process, which must have one thread. Paths that do not exist are ignored.

    Raises:
        ConfinementError: The process may be partially confined and must be ended.
    """
    limit(limits)
    # Without privileges, Landlock and seccomp both require this first.
    _checked("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _allow_files(readable, writable)
    drop_capabilities()

    # Install the filter last, because it refuses the calls of the steps above.
    try:
        allow_only_harmless_calls()
    except OSError as error:
        raise ConfinementError(error.errno, error.strerror) from error


def limit(limits: ProcessLimits) -> None:
    """Set the limits that every kernel supports: memory, CPU time and sizes.

    Raising them again requires a privilege.
    """
    megabyte = 2**20
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()

    # The limits apply in addition to what this interpreter has already used.
    for kind, value in (
        (resource.RLIMIT_AS, now + limits.memory_mb * megabyte),
        (resource.RLIMIT_CPU, int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + limits.cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.file_mb * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        # A hard limit cannot be raised, so an existing lower one stays in force.
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def end_with(parent: int) -> None:
    """Make the kernel kill this process when the thread of process `parent` that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def close_descriptors_from(first: int) -> None:
    """Close `first` and all higher descriptors, including those above RLIMIT_NOFILE."""
    _checked("close_range", _libc.syscall(_CLOSE_RANGE, first, 2**31 - 1, 0))


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise ConfinementError(code, f"{what}: {os.strerror(code)}")
    return result


# ---- files: Landlock

# System call numbers, which are the same on every architecture.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_MAKE_DEVICES = 1 << 6 | 1 << 11  # MAKE_CHAR, MAKE_BLOCK
_OF_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE
# File system accesses known to each ABI; later ones know the same as the last.
_FILE_ACCESSES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_ABI_OF_NETWORK = 4
_ABI_OF_SCOPES = 6
_ABI_OF_LOGS = 7
_BIND_AND_CONNECT_TCP = 0b11
_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
_LOG_SAME_EXEC_OFF = 1 << 0


def landlock_abi() -> int:
    """Return the ABI version of Landlock; 0 if the kernel does not have Landlock or it is disabled."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))


def _allow_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Refuse every access that this kernel's Landlock knows, except to the given paths.

    With later ABIs, Landlock also refuses what the allowlist of system calls refuses already: TCP (ABI 4),
    abstract Unix sockets and signals to processes outside (ABI 6). From ABI 7 on, refused accesses are not
    written to the audit log.
    """
    abi = landlock_abi()
    if not abi:
        raise ConfinementError(
            errno.ENOSYS, "the kernel does not have Landlock (Linux 5.13), or it is disabled (lsm=)"
        )

    # An access that the kernel does not know would make the ruleset invalid.
    every = _FILE_ACCESSES[min(abi, max(_FILE_ACCESSES))]
    attributes = struct.pack("Q", every)
    attributes += struct.pack("Q", _BIND_AND_CONNECT_TCP) if abi >= _ABI_OF_NETWORK else b""
    attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS) if abi >= _ABI_OF_SCOPES else b""
    ruleset = _checked(
        "landlock_create_ruleset", _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    )
    for path in readable:
        _add_rule(ruleset, path, every & (_READ_FILE | _READ_DIR))
    for path in writable:
        _add_rule(ruleset, path, every & ~_MAKE_DEVICES)
    flags = _LOG_SAME_EXEC_OFF if abi >= _ABI_OF_LOGS else 0
    _checked("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, ruleset, flags))
    os.close(ruleset)


def _add_rule(ruleset: int, path: str, accesses: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it does not exist here
        return

    # The kernel does not accept directory accesses in the rule of a file.
    allowed = accesses if os.path.isdir(path) else accesses & _OF_FILES
    _checked(
        f"landlock_add_rule of {path}",
        _libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, beneath), 0),
    )
    os.close(beneath)


# ---- privileges of root


def drop_capabilities() -> None:
    """Drop the effective, permitted and inheritable capabilities of this process."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)  # version 3; this process
    _checked("capset", _libc.capset(header, ctypes.create_string_buffer(24)))
