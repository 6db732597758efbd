"""What a process gives up, for good, before it runs what a model wrote: files, the network, other processes, memory and time.

It needs no privilege and nothing installed: limits of the kernel (setrlimit), Landlock (Linux 5.13) for files, and a filter of system calls
(seccomp) for all else. Standard library only: it also runs as a script, as the first thing inside of a sandbox (megarl/machine/sandbox.py).

- Files: only `readable` folders can be read, and only `writable` ones written; elsewhere not even a file's mode can be changed.
- Processes: none can be started, nor signalled, traced or read; threads can. So a fork bomb is stopped for root too, whom RLIMIT_NPROC
  does not bind.
- Network: no socket can be made, of any kind; a pair of connected ones can, which asyncio needs.
- The kernel: what mounts, loads, traces or keeps something beyond the process's end is refused.

Sources: landlock(7), seccomp(2), bpf(4), include/uapi/linux/{landlock,seccomp,filter,audit}.h of Linux.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import json
import linecache
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_libc = ctypes.CDLL(None, use_errno=True)


class ProcessLimits(NamedTuple):
    """memory_mb: of address space, beyond what the process has when it is confined. cpu_s: of processor time. file_mb: of one file that it
    writes."""

    memory_mb: int
    cpu_s: int
    file_mb: int = 16


class ConfinementError(OSError):
    """The kernel cannot confine a process; the message says what it lacks."""


def confine(limits: ProcessLimits, readable: Iterable[str], writable: Iterable[str] = ()) -> None:
    """Of this process, which must have one thread, and its later ones. Folders and files that are not there are left out.

    Raises ConfinementError, after which the process may be confined in part: end it.
    """
    limit(limits)
    _checked("PR_SET_NO_NEW_PRIVS", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _allow_files(readable, writable)
    _give_up_capabilities()
    _filter_calls()


def limit(limits: ProcessLimits) -> None:
    """The part that every system has: memory, processor time, sizes; and this process ends with the thread that started it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    megabyte = 2**20
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, now + limits.memory_mb * megabyte),
        (resource.RLIMIT_CPU, int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + limits.cpu_s + 1),
        (resource.RLIMIT_FSIZE, limits.file_mb * megabyte),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _checked(what: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise ConfinementError(code, f"{what}: {os.strerror(code)}")
    return result


# ---- files: Landlock

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, the same on every architecture
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL_DEV = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_ALL_OF_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_abi() -> int:
    """0 where the kernel has no Landlock, or it is switched off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))


def _allow_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    abi = landlock_abi()
    if not abi:
        raise ConfinementError(errno.ENOSYS, "the kernel has no Landlock (Linux 5.13), or it is switched off (lsm=)")
    every = _ALL_OF_ABI[min(abi, max(_ALL_OF_ABI))]
    attributes = ctypes.create_string_buffer(struct.pack("Q", every), 8)
    ruleset = _checked("landlock_create_ruleset", _libc.syscall(_CREATE_RULESET, attributes, 8, 0))
    for path, rights in [
        *((path, _EXECUTE | _READ_FILE | _READ_DIR) for path in readable),
        *((path, every & ~_EXECUTE) for path in writable),
    ]:
        if not os.path.exists(path):
            continue
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = rights if os.path.isdir(path) else rights & _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed & every, beneath), 12)
        _checked(f"landlock_add_rule of {path}", _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0))
        os.close(beneath)
    _checked("landlock_restrict_self", _libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


# ---- privileges of root


def _give_up_capabilities() -> None:
    """Root's privileges; with PR_SET_NO_NEW_PRIVS no program that it executes gets them back."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)  # version 3; this process
    _checked("capset", _libc.capset(header, ctypes.create_string_buffer(24)))


# ---- system calls: seccomp

# Of each call its name, and its number on x86_64 and on aarch64; -: not there.
_REFUSED = {
    "other processes": """
        fork 57 -, vfork 58 -, tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434,
        pidfd_send_signal 424 424, pidfd_getfd 438 438, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
        process_madvise 440 440, kcmp 312 272, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
        sched_setattr 314 274, setpriority 141 140, ioprio_set 251 30, move_pages 279 239, migrate_pages 256 238
    """,
    "the network": """
        socket 41 198
    """,
    "what Landlock does not hold: marks of files, and ways around their names": """
        chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
        setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16,
        setxattrat 463 463, removexattrat 466 466, utime 132 -, utimes 235 -, utimensat 280 88, futimesat 261 -,
        name_to_handle_at 303 264, open_by_handle_at 304 265, inotify_init 253 -, inotify_init1 294 26, fanotify_init 300 262
    """,
    "memory that RLIMIT_AS does not count, or that stays when the process has ended": """
        memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190, mq_open 240 180
    """,
    "the kernel": """
        mount 165 40, umount2 166 39, move_mount 429 429, open_tree 428 428, fsopen 430 430, fsconfig 431 431, fsmount 432 432,
        fspick 433 433, mount_setattr 442 442, pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, bpf 321 280,
        perf_event_open 298 241, keyctl 250 219, add_key 248 217, request_key 249 218, userfaultfd 323 282, io_uring_setup 425
        425, personality 135 92, quotactl 179 60, quotactl_fd 443 443, acct 163 89, swapon 167 224, swapoff 168 225, reboot 169
        142, syslog 103 116, init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104,
        kexec_file_load 320 294
    """,
}
_TO_ITSELF = ((62, 129), (234, 131))  # kill, tgkill: the first argument must be this process
_OF_ITSELF = (302, 261)  # prlimit64: this process, or 0, which means it
_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), 435, 0x10000
_NEWEST = 466  # what is newer is unknown here, so it is not there
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_LOAD, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # where they stand in struct seccomp_data


def _refused(column: int) -> list[int]:
    calls = [call.split() for calls in _REFUSED.values() for call in calls.split(",")]
    return [int(call[1 + column]) for call in calls if call[1 + column] != "-"]


def _program(column: int, architecture: int, process: int) -> Iterator[tuple[int, int, int, int]]:
    """Instructions: code, how many to jump over where it holds and where not, operand."""
    refuse, absent, allow = (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS), (_RETURN, 0, 0, _ALLOW)
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL_PROCESS
    yield _LOAD, 0, 0, _NUMBER
    yield _GREATER, 0, 1, _NEWEST  # x86_64's x32 calls are among them
    yield absent
    yield _EQUAL, 0, 1, _CLONE3  # its flags are in memory, where a filter cannot look: the C library then takes clone
    yield absent
    for number in _refused(column):
        yield _EQUAL, 0, 1, number
        yield refuse
    yield _EQUAL, 0, 4, _CLONE[column]
    yield _LOAD, 0, 0, _ARGUMENT
    yield _SET, 1, 0, _CLONE_THREAD
    yield refuse
    yield allow
    for numbers, own in (*((numbers, (process,)) for numbers in _TO_ITSELF), (_OF_ITSELF, (process, 0))):
        yield _EQUAL, 0, len(own) + 3, numbers[column]
        yield _LOAD, 0, 0, _ARGUMENT
        for place, value in enumerate(own):
            yield _EQUAL, len(own) - place, 0, value
        yield refuse
        yield allow
    yield allow


def _filter_calls() -> None:
    if platform.machine() not in _ARCHITECTURES:
        raise ConfinementError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}; there is one for {list(_ARCHITECTURES)}")
    instructions = list(_program(*_ARCHITECTURES[platform.machine()], os.getpid()))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    _checked("PR_SET_SECCOMP", _libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))


# ---- as a script: what stands in a file descriptor runs here


class Order(NamedTuple):
    """program: the descriptor of its text. begun: one that is written to when it begins. confined: False for limits alone."""

    program: int
    begun: int
    limits: Sequence[int]
    readable: Sequence[str]
    writable: Sequence[str]
    confined: bool


def _run(order: Order) -> None:
    with open(order.program, encoding="utf-8") as file:
        program = file.read()
    linecache.cache["<program>"] = (len(program), None, program.splitlines(keepends=True), "<program>")
    if order.confined:
        confine(ProcessLimits(*order.limits), order.readable, order.writable)
    else:
        limit(ProcessLimits(*order.limits))
    sys.excepthook = _without_this_file
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module site does, which `python -S` leaves out
    os.write(order.begun, b"1")
    os.close(order.begun)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


def _without_this_file(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__":
    try:
        _run(Order(*json.loads(sys.argv.pop())))
    except ConfinementError as failure:
        sys.exit(str(failure))
