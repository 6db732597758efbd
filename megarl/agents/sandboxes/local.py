"""Sandboxes of this machine: namespaces and a file system in memory, by bubblewrap.

bubblewrap holds the namespaces for as long as a program inside reads from a pipe of this process. Commands
join them. If this process ends, however it ends, the kernel ends everything inside, and the files are gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.agents.sandboxes.protocol import (
    FILE_BYTES,
    NO_VARIABLES,
    SEARCH_PATH,
    Executed,
    Sandbox,
    SandboxEndedError,
    SandboxStartError,
    archive_of,
    end_of_output,
    own_environment,
    start_order,
    write_input,
)
from megarl.config.rules.agent import image_problem
from megarl.config.schema import SandboxConfig, SandboxProvider
from megarl.machine.reaper import has_ended
from megarl.machine.sandbox_levels import PYTHONS, namespace_obstacles

FOLDER = "/sandbox"  # the working folder
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
_OF_ETC = (
    "alternatives",
    "ca-certificates",
    "group",
    "hosts",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "passwd",
    "protocols",
    "resolv.conf",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",  # ssl/private has keys, which programs of root could read
)
_OWN_FOLDERS = {"dev", "proc", "tmp", FOLDER[1:]}  # of a sandbox, also if an image has them
_IN_MEMORY = ("/tmp", FOLDER, "/dev")
_WATCH_S = 0.5
# Fields of /proc/<pid>/stat (proc(5)), counted after the name of the program.
_NUM_THREADS = 17
_RESIDENT_PAGES = 21
_MEGABYTE = 1 << 20


class LocalSandbox(Sandbox):
    """A sandbox of this machine."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._creating: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._pidfd: int | None = None
        self._root = ""
        self._watching: asyncio.Task[None] | None = None
        self._exceeded = ""  # the limit, if one was exceeded
        own_python = f"{sys.prefix}/bin:" if config.image is None else ""
        self._variables = {"PATH": own_python + SEARCH_PATH, "HOME": FOLDER, "LANG": "C.UTF-8"}

    async def begin(self, endpoint_url: str) -> None:
        # bubblewrap writes the number of the first process to this file.
        with open(os.memfd_create("information"), "w+b") as information:
            # If it were killed by a canceled start, processes that it has just started might remain.
            self._creating = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *_command(self._config, information.fileno()),
                    pass_fds=[information.fileno()],
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=own_environment(),
                    cwd="/",
                    start_new_session=True,
                )
            )
            holder = await asyncio.shield(self._creating)
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stderr is not None

            # `cat` inside the sandbox returns this byte as soon as the sandbox runs. If bubblewrap fails, the
            # pipe closes.
            with suppress(ConnectionError):
                holder.stdin.write(b"\n")
                await holder.stdin.drain()
            if not await holder.stdout.read(1):
                why = " ".join((await holder.stderr.read()).decode(errors="replace").split())
                raise SandboxStartError(f"bubblewrap cannot start a sandbox here: {why}")
            information.seek(0)
            pid = json.load(information)["child-pid"]

        self._pidfd = os.pidfd_open(pid)
        self._root = f"/proc/{pid}/root"
        self._watching = asyncio.ensure_future(self._watch())
        self.endpoint_url = endpoint_url
        if endpoint_url and not self._config.network:
            await self._relay_to(endpoint_url, self._pidfd)

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] = NO_VARIABLES,
        time_limit_s: float | None = None,
    ) -> Executed:
        process = await self._order(
            "execute",
            stderr=asyncio.subprocess.STDOUT,
            command=list(command),
            environment={**self._variables, **environment},
            folder=FOLDER,
            max_processes=self._config.max_processes,
        )

        try:
            async with asyncio.timeout(time_limit_s):
                _, output = await asyncio.gather(write_input(process, stdin), end_of_output(process))
                status = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)  # it kills the group of the command
                await process.wait()

        if why := self._why_ended():
            raise SandboxEndedError(why)
        return Executed(status, output.decode(errors="replace"))

    async def upload(self, source: bytes | Path, target: str) -> None:
        folder = "/" if target.startswith("/") else FOLDER
        archive = archive_of(source, target)  # before the order starts, because the source may be missing
        await self._finished(await self._order("unpack", folder=folder), archive)

    async def download(self, path: str) -> bytes:
        process = await self._order("read", path=os.path.join(FOLDER, path), max_bytes=FILE_BYTES)
        content = await self._finished(process)
        if len(content) > FILE_BYTES:
            raise ValueError(f"{path} is larger than {FILE_BYTES // _MEGABYTE} MiB")
        return content

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super().close()

        if self._creating is not None:
            await asyncio.wait({self._creating})
        if self._creating is None or self._creating.exception() is not None:
            return

        # The program inside ends with its input, and everything with it.
        holder = self._creating.result()
        assert holder.stdin is not None
        holder.stdin.close()
        if self._pidfd is not None:
            self._kill()

        await holder.wait()
        if self._pidfd is not None:
            await _end_of(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _kill(self) -> None:
        """Kill the first process of the sandbox. The kernel then kills all others."""
        assert self._pidfd is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _order(
        self, name: str, stderr: int = asyncio.subprocess.PIPE, **arguments: Any
    ) -> asyncio.subprocess.Process:
        if why := self._why_ended():
            raise SandboxEndedError(why)
        assert self._pidfd is not None
        return await start_order(self._pidfd, name, stderr=stderr, **arguments)

    async def _finished(self, process: asyncio.subprocess.Process, content: bytes = b"") -> bytes:
        """Return the output of an order, or raise ValueError with its errors."""
        output, errors = await process.communicate(content)
        if why := self._why_ended():
            raise SandboxEndedError(why)
        if process.returncode:
            raise ValueError(errors.decode(errors="replace").strip())
        return output

    def _why_ended(self) -> str:
        """Return why the sandbox has ended; empty while it runs."""
        if self._exceeded:
            return self._exceeded
        if self._pidfd is None:
            return "the sandbox has ended: it was closed"
        if has_ended(self._pidfd):
            return "the sandbox has ended: its first process was killed, such as by one of its programs"
        return ""

    async def _watch(self) -> None:
        """End the sandbox when its programs exceed the limits of memory or processes.

        Kernel limits would need a control group, which a process in a container may not make.
        """
        while not self._exceeded:
            await asyncio.sleep(_WATCH_S)
            self._exceeded = self._exceeded_limit()
        self._kill()

    def _exceeded_limit(self) -> str:
        """Return the limit that the programs exceed; empty if there is none."""
        most, memory_mb = self._config.max_processes, self._config.memory_mb
        try:
            num_threads, num_bytes = _usage(self._root)
        except OSError as error:
            # It ends by itself, or this process has no descriptor left. It must not run without limits.
            return self._why_ended() or f"its programs cannot be measured ({error})"
        if num_threads > most:
            return f"{num_threads} processes and threads: max_processes is {most}"
        if num_bytes > memory_mb * _MEGABYTE:
            return f"{num_bytes // _MEGABYTE} MiB of memory and files: memory_mb is {memory_mb}"
        return ""


def _command(config: SandboxConfig, information: int) -> list[str]:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise SandboxStartError(
            "provider local needs bubblewrap 0.8 or newer; install it (apt-get install bubblewrap)"
        )
    # A new user namespace in which no further one can be made has the fewest ways into the kernel.
    command = [bubblewrap, "--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc"]
    command += ["--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    command += [] if config.network else ["--unshare-net"]
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    # Root outside could change settings of the kernel, also without capabilities.
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    for folder in ("/tmp", FOLDER):
        command += ["--perms", "1777", "--size", str(config.memory_mb * _MEGABYTE), "--tmpfs", folder]

    for place, file in _shown(config.image):
        command += (
            ["--symlink", os.readlink(file), place] if os.path.islink(file) else ["--ro-bind", file, place]
        )
    command += ["--remount-ro", "/", "--chdir", FOLDER, "--info-fd", str(information)]
    return [*command, "--", "cat"]


def _shown(image: str | None) -> list[tuple[str, str]]:
    """Return the paths of a sandbox, and those of this machine that are shown there."""
    if image is not None:
        if problem := image_problem(SandboxProvider.local, image):
            raise SandboxStartError(f"image {problem}")
        if not os.path.isdir(image):
            raise SandboxStartError(f"image {image!r} is no folder of this machine")
        return [(f"/{name}", f"{image}/{name}") for name in sorted(set(os.listdir(image)) - _OWN_FOLDERS)]
    found = [*_SYSTEM, *(f"/etc/{name}" for name in _OF_ETC), *PYTHONS]
    return [(path, path) for path in found if os.path.exists(path)]


def _usage(root: str) -> tuple[int, int]:
    """Return the number of threads in a sandbox, and the bytes of their memory and of its files."""
    num_threads = num_bytes = 0
    for entry in os.listdir(f"{root}/proc"):
        if entry.isdigit():
            with suppress(OSError):  # the process has ended
                # The fields after the name of the program, which may be any bytes.
                status = Path(f"{root}/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()
                num_threads += max(1, int(status[_NUM_THREADS]))
                num_bytes += int(status[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE")

    for folder in _IN_MEMORY:
        files = os.statvfs(root + folder)
        num_bytes += (files.f_blocks - files.f_bfree) * files.f_frsize

    return num_threads, num_bytes


async def _end_of(pidfd: int) -> None:
    """Wait until a process has ended."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    # The descriptor becomes readable when the process ends.
    loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(pidfd)


def why_not() -> str:
    """Return why no sandbox can be started here, in one line; empty if one can."""
    # `true` ends at once, where `cat` would wait for its input.
    try:
        ended = subprocess.run(
            [part if part != "cat" else "true" for part in _command(SandboxConfig(), 1)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=own_environment(),
            text=True,
            check=False,
        )
    except SandboxStartError as error:
        return str(error)

    if not ended.returncode:
        return ""
    why = "; ".join([" ".join(ended.stderr.split()), *namespace_obstacles()])
    return f"bubblewrap cannot start a sandbox here: {why}"
