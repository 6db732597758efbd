"""Interface of sandboxes: a file system of its own for one episode, in which commands run."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

OUTPUT_BYTES = 1 << 16  # the end of a command's output that is kept
FILE_BYTES = 64 << 20  # the largest file that is downloaded
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class SandboxStartError(RuntimeError):
    """A sandbox could not be started. The message contains the reason and the fix."""


class SandboxEndedError(RuntimeError):
    """A sandbox has ended early, such as because its programs exceeded a limit."""


class Executed(NamedTuple):
    """The result of a command.

    Attributes:
        status: Its exit status; 128 and the signal's number if a signal has ended it, as in a shell.
        output: The end of what it wrote to standard output and standard error.
    """

    status: int
    output: str


class Sandbox(Protocol):
    """A sandbox. Relative paths are relative to its working folder.

    Attributes:
        endpoint_url: The address at which its programs reach the endpoint that it was started with; empty if
            there is none.
    """

    endpoint_url: str

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] = NO_VARIABLES,
        time_limit_s: float | None = None,
    ) -> Executed:
        """Run a command until it has ended and its output is closed.

        Args:
            command: A program and its arguments. No shell reads them.
            environment: Variables in addition to those of the sandbox. None are inherited from the run.

        Raises:
            TimeoutError: The time is over. The command has been killed, but the sandbox can still be used.
            SandboxEndedError: The sandbox has ended.
        """

    async def upload(self, source: bytes | Path, target: str) -> None:
        """Write a file, or a folder with everything in it. Folders above the target are created.

        Args:
            source: The content of a file, or a path of this machine.
        """

    async def download(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ValueError: It does not exist, is no file, or is larger than FILE_BYTES.
        """

    async def close(self) -> None:
        """End all processes and remove all files. May be called again."""


def archive_of(source: bytes | Path, target: str) -> bytes:
    """Return a tar archive with one file, or with everything in a folder, that belongs to root.

    Args:
        target: The name in the archive.
    """

    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        if isinstance(source, Path):
            # A link to the source would lead nowhere in the sandbox.
            archive.add(source.resolve(), target.lstrip("/"), filter=of_root)
        else:
            member = tarfile.TarInfo(target.lstrip("/"))
            member.size = len(source)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(source))

    return packed.getvalue()
