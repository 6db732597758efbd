"""Limits the threads of a confined process, and waits for its end.

No kernel limit applies to the threads of one process for both root and other users. Therefore every call
that starts a thread waits for a decision by this side (seccomp_unotify(2)), which counts the living threads.

This module runs at the start of every sandboxed program, so it imports only modules that load quickly, which
excludes typing and collections.
"""

from __future__ import annotations

import _socket  # socket.socket without the module `socket`, which takes 5 ms to load
import errno
import fcntl
import os
import select
import struct

from megarl.machine.confined import ConfinementError
from megarl.machine.system_calls import notify_of_threads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_NOTIFICATION_BYTES = 80
_CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
_SCM_RIGHTS = _socket.SCM_RIGHTS


def send_descriptors(to: _socket.socket, message: bytes, descriptors: list[int]) -> None:
    to.sendmsg(
        [message], [(_socket.SOL_SOCKET, _SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
    )


def receive_descriptors(of: _socket.socket, limit_bytes: int = 64) -> tuple[bytes, list[int]]:
    """Return one message, and the descriptors sent with it."""
    message, ancillary, _, _ = of.recvmsg(limit_bytes, _socket.CMSG_SPACE(8 * 4), _socket.MSG_CMSG_CLOEXEC)
    data = b"".join(
        data for level, kind, data in ancillary if (level, kind) == (_socket.SOL_SOCKET, _SCM_RIGHTS)
    )
    return message, list(struct.unpack(f"{len(data) // 4}i", data))


def send_thread_calls(to_supervisor: _socket.socket) -> None:
    """Let the process at the other end of the socket decide this process's calls that start threads.

    Raises:
        ConfinementError: A process above this one already decides its calls, and only one can.
    """
    try:
        listener = notify_of_threads()
    except OSError as error:
        reason = (
            "another supervisor of system calls runs above this process"
            if error.errno == errno.EBUSY
            else error.strerror
        )
        raise ConfinementError(error.errno, f"threads cannot be limited: {reason}") from error

    send_descriptors(to_supervisor, b"threads", [listener])
    os.close(listener)


def _answer(listener: int, process: int, most: int) -> None:
    """Decide a call of a process that starts a thread, so that at most `most` of its threads exist at a time.

    The call waits at `listener`, the descriptor returned by notify_of_threads.
    """
    notification = bytearray(_NOTIFICATION_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, notification)
        number = struct.unpack_from("Q", notification)[0]
        # The link count of the task folder is the number of threads plus two.
        is_allowed = os.stat(f"/proc/{process}/task").st_nlink - 2 < most
        answer = (number, 0, 0, _CONTINUE) if is_allowed else (number, 0, -errno.EAGAIN, 0)
        fcntl.ioctl(listener, _SEND, struct.pack("QqiI", *answer))
    except OSError as error:
        # The thread or the process has ended, or the call was interrupted.
        if error.errno not in (errno.ENOENT, errno.EINTR):
            raise


def supervise(
    process: int, most_threads: int, listener_source: _socket.socket, also: Mapping[int, Callable[[], bool]]
) -> int:
    """Decide the calls of the child `process` that start threads, until it ends.

    Args:
        process: A child of this process.
        most_threads: The number of its threads that may exist at a time.
        listener_source: A socket on which the child sends the descriptor from notify_of_threads. It is closed
            here.
        also: Further descriptors, with functions that are called when one is readable or closed at its other
            end. A descriptor is no longer watched once its function returns False.

    Returns:
        The child's status, as from os.waitpid.
    """
    ended = os.pidfd_open(process)
    listeners: list[int] = []  # one, once the child has sent it
    callbacks = dict(also)
    poll = select.poll()
    for descriptor in (ended, listener_source.fileno(), *callbacks):
        poll.register(descriptor, select.POLLIN)

    try:
        while True:
            ready = dict(poll.poll())
            if listeners and ready.get(listeners[0], 0) & select.POLLIN:
                _answer(listeners[0], process, most_threads)
            if listener_source.fileno() in ready:
                _, listeners = receive_descriptors(listener_source)
                poll.unregister(listener_source.fileno())
                listener_source.close()
                # Calls that wait for an answer wake this loop from now on.
                for listener in listeners:
                    poll.register(listener, select.POLLIN)
            for descriptor in ready.keys() & callbacks.keys():
                if not callbacks[descriptor]():
                    poll.unregister(descriptor)
                    del callbacks[descriptor]
            if ended in ready:
                return os.waitpid(process, 0)[1]
    finally:
        listener_source.close()
        for descriptor in (ended, *listeners):
            os.close(descriptor)
