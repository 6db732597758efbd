"""The system calls that a confined process may make, enforced by the kernel (seccomp).

Sandboxed programs have an allowlist. Python, its standard library, threads and numerical libraries work. All
other calls are refused: starting programs and processes, signals to others, sockets, shared memory, message
queues, locks, and everything that mounts, loads or traces. Some calls are allowed with certain arguments
only, see `CHECKED_CALLS`.

Agents run any program in namespaces of their own, so they have a denylist, see `REFUSED_CALLS`.

This module runs at the start of every sandboxed program, so it imports only modules that load quickly, which
excludes typing and collections.

Sources: seccomp(2), seccomp_unotify(2), bpf(4), include/uapi/linux/{seccomp,filter,audit,prctl,sched}.h and
include/uapi/asm-generic/ of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Each call with its number on x86_64 and on aarch64; "-" if the architecture does not have it.
ALLOWED_CALLS = {
    "files, restricted by Landlock": """
        read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
        pwritev 296 70, preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, openat2 437 437,
        creat 85 -, close 3 57, close_range 436 436, lseek 8 62, stat 4 -, fstat 5 80, lstat 6 -,
        newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48,
        faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17,
        chdir 80 49, fchdir 81 50, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35,
        rename 82 -, renameat 264 38, renameat2 316 276, truncate 76 45, ftruncate 77 46, fallocate 285 47,
        fsync 74 82, fdatasync 75 83, fadvise64 221 223, sendfile 40 71, copy_file_range 326 285, umask 95 166
    """,
    "descriptors, and waiting for them": """
        dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -,
        pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
        epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, recvfrom 45 207,
        shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209
    """,
    "memory": """
        mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, msync 26 227, brk 12 214
    """,
    "threads": """
        exit 60 93, exit_group 231 94, futex 202 98, set_robust_list 273 99, set_tid_address 218 96,
        rseq 334 293, sched_yield 24 124, getcpu 309 168, restart_syscall 219 128
    """,
    "signals that the process receives": """
        rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136,
        rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -,
        getitimer 36 102, setitimer 38 103
    """,
    "time": """
        clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
        gettimeofday 96 169, time 201 -, times 100 153
    """,
    "information about the process and the machine": """
        getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176,
        getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -, uname 63 160,
        sysinfo 99 179, getrandom 318 278, getrlimit 97 163, setrlimit 160 164, getrusage 98 165
    """,
}
# Calls whose arguments `_rules` checks.
CHECKED_CALLS = """
    clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, getpgid 121 155, getsid 124 156,
    sched_getaffinity 204 123, fcntl 72 25, ioctl 16 29, prctl 157 167, socketpair 53 199,
    sendto 44 206, mmap 9 222
"""
# Calls that an agent's sandbox refuses: parts of the kernel with many known ways to gain privileges.
REFUSED_CALLS = {
    "keys, which namespaces do not separate": "add_key 248 217, request_key 249 218, keyctl 250 219",
    "programs in the kernel": """
        bpf 321 280, init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104,
        kexec_file_load 320 294
    """,
    "measurements, page faults and asynchronous calls": """
        perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
        io_uring_register 427 427
    """,
    "namespaces and file systems": """
        unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
        open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432,
        fspick 433 433, mount_setattr 442 442, open_by_handle_at 304 265
    """,
}
_CLONE3 = 435
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NAMESPACES = 0x7E020000
_FIRST_X32_NUMBER = 0x40000000
_SECCOMP = (317, 277)
_COLUMNS = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)
_FIRST_COMMON_NUMBER = 424  # every call since Linux 5.1 has the same number on all architectures
# What pthread_create passes: VM, FS, FILES, SYSVSEM, SIGHAND, THREAD, SETTLS, PARENT_SETTID, CHILD_CLEARTID;
# musl adds DETACHED.
_CLONE_THREAD = 0x10000
_FLAGS_OF_THREADS = 0x7D0F00
_O_ASYNC = 0o20000
_MAP_HUGETLB = 0x40000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETFL without O_ASYNC.
_FCNTL = (0, 1, 2, 3, 1030)
_F_SETFL = 4
# TCGETS(2), TIOCGWINSZ, FIONREAD, FIONBIO, FIO(N)CLEX
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_PRCTL = (15, 16)  # PR_SET_NAME, PR_GET_NAME
_PR_SET_NO_NEW_PRIVS = 38
_AF_UNIX = 1
_SOCK_STREAM = 1
_SOCK_TYPE = 0xF
_WHOLE = 0xFFFFFFFF

# Instructions of the filter: code, instructions to skip if the comparison is true, if it is false, operand.
Instruction = tuple[int, int, int, int]
_LOAD = 0x20
_AND = 0x54
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
# Offsets in struct seccomp_data. An argument has 8 bytes, the lower half first.
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)
_REFUSE: Instruction = (_RETURN, 0, 0, 0x00050000 | errno.EPERM)
_ABSENT: Instruction = (_RETURN, 0, 0, 0x00050000 | errno.ENOSYS)
_NOTIFY: Instruction = (_RETURN, 0, 0, 0x7FC00000)
_KILL: Instruction = (_RETURN, 0, 0, 0x80000000)
# A condition: 32 bits at an offset, after a mask, must have one of these values.
Condition = tuple[int, int, tuple[int, ...]]

_libc = ctypes.CDLL(None, use_errno=True)


def numbers_of(calls: str, column: int) -> dict[str, int]:
    """Parse a table of calls into {name: number} for the architecture in `column`."""
    rows = (call.split() for call in calls.split(","))
    return {name: int(numbers[column]) for name, *numbers in rows if numbers[column] != "-"}


def allow_only_harmless_calls() -> None:
    """Install the allowlist in this process permanently. Raises OSError."""
    _install(_program(_own_column(), os.getpid()), flags=0)


def refuse_dangerous_calls() -> None:
    """Install the denylist in this process permanently. It must not be able to gain privileges.

    Raises OSError.
    """
    column = _own_column()
    program = _load_number(column)
    for calls in REFUSED_CALLS.values():
        for number in numbers_of(calls, column).values():
            program += [(_EQUAL, 0, 1, number), _REFUSE]
    # A filter cannot read the flags of clone3; libraries fall back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3), _ABSENT]
    makes_no_namespace = _one_of([(_ARGUMENTS, _NAMESPACES, (0,))])
    clone = numbers_of(CHECKED_CALLS, column)["clone"]
    program += [(_EQUAL, 0, len(makes_no_namespace), clone), *makes_no_namespace]
    # x86_64's x32 calls are the same ones with other numbers.
    _install([*program, (_AT_LEAST, 0, 1, _FIRST_X32_NUMBER), _REFUSE, _ALLOW], flags=0)


def notify_of_threads() -> int:
    """Suspend every call that starts a thread until it is answered (supervisor.py).

    Returns:
        The descriptor on which the calls are answered. Pass it to another process and close it before
        untrusted code runs.

    Raises:
        OSError: EBUSY if a process above this one already answers its calls.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # otherwise, only root may install a filter
    column = _own_column()
    # Only `clone` is suspended: the allowlist reports `clone3` as absent, so that libraries fall back to
    # `clone`.
    clone = numbers_of(CHECKED_CALLS, column)["clone"]
    program = [*_load_number(column), (_EQUAL, 0, 1, clone), _NOTIFY, _ALLOW]
    return _install(program, flags=1 << 3)  # SECCOMP_FILTER_FLAG_NEW_LISTENER


def _own_column() -> int:
    machine = os.uname().machine
    if machine not in _COLUMNS:
        known = " and ".join(_COLUMNS)
        raise OSError(
            errno.ENOSYS, f"there is no table of system calls for the processor {machine!r}, only for {known}"
        )

    return _COLUMNS[machine]


def _install(program: list[Instruction], flags: int) -> int:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    result = _libc.syscall(_SECCOMP[_own_column()], 1, flags, header)  # SECCOMP_SET_MODE_FILTER

    if result < 0:
        code_of_error = ctypes.get_errno()
        raise OSError(code_of_error, f"seccomp: {os.strerror(code_of_error)}")

    return result


def _program(column: int, process: int) -> list[Instruction]:
    program = _load_number(column)

    # Calls that libraries try first and replace by older ones, such as clone3, whose flags a filter cannot
    # read, are answered with "does not exist". x86_64's x32 calls have large numbers too.
    for number in sorted(
        number for calls in ALLOWED_CALLS.values() for number in numbers_of(calls, column).values()
    ):
        program += [(_EQUAL, 0, 1, number), _ALLOW]

    # Add the calls that are harmless with certain arguments only.
    for number, block in _rules(numbers_of(CHECKED_CALLS, column), process):
        assert len(block) < 256, "a jump of the filter is a byte"
        program += [(_EQUAL, 0, len(block), number), *block]

    return [*program, (_AT_LEAST, 0, 1, _FIRST_COMMON_NUMBER), _ABSENT, _REFUSE]


def _load_number(column: int) -> list[Instruction]:
    """Return instructions that load the call's number.

    They kill the process if the call is of another architecture.
    """
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[column]),
        _KILL,
        (_LOAD, 0, 0, _NUMBER),
    ]


def _rules(numbers: dict[str, int], process: int) -> Iterator[tuple[int, list[Instruction]]]:
    """Yield the calls whose arguments are checked, each with the instructions that allow or refuse it."""

    def argument(position: int, *values: int, mask: int = _WHOLE, upper_half: bool = False) -> Condition:
        return _ARGUMENTS + 8 * position + 4 * upper_half, mask, values

    for name in ("kill", "tgkill"):
        yield numbers[name], _one_of([argument(0, process)])
    for name in ("prlimit64", "getpgid", "getsid", "sched_getaffinity"):
        yield numbers[name], _one_of([argument(0, 0, process)])
    is_thread = argument(0, _CLONE_THREAD, mask=_CLONE_THREAD)
    yield numbers["clone"], _one_of([is_thread, argument(0, 0, mask=_WHOLE ^ _FLAGS_OF_THREADS)])
    sets_flags = [argument(1, _F_SETFL), argument(2, 0, mask=_O_ASYNC)]
    yield numbers["fcntl"], _one_of([argument(1, *_FCNTL)], sets_flags)
    yield numbers["ioctl"], _one_of([argument(1, *_IOCTL)])
    yield numbers["prctl"], _one_of([argument(0, *_PRCTL)])
    yield numbers["socketpair"], _one_of([argument(0, _AF_UNIX), argument(1, _SOCK_STREAM, mask=_SOCK_TYPE)])
    yield numbers["sendto"], _one_of([argument(4, 0), argument(4, 0, upper_half=True)])  # to no address
    yield numbers["mmap"], _one_of([argument(3, 0, mask=_MAP_HUGETLB)])


def _one_of(*alternatives: list[Condition]) -> list[Instruction]:
    """Return instructions that allow a call if it meets all conditions of one of the alternatives.

    They refuse it otherwise.
    """
    block: list[Instruction] = []
    for conditions in alternatives:
        tail: list[Instruction] = [_ALLOW]
        # Build from the last condition, because a mismatch jumps over all that follow it.
        for offset, mask, values in reversed(conditions):
            compare = [(_EQUAL, len(values) - 1 - place, 0, value) for place, value in enumerate(values)]
            compare[-1] = (_EQUAL, 0, len(tail), values[-1])
            tail = [(_LOAD, 0, 0, offset), (_AND, 0, 0, mask), *compare, *tail]
        block += tail

    return [*block, _REFUSE]
