"""Build a Dockerfile's image without Docker: every instruction runs in a root file system, in a chroot.

The base image is Debian with the running Python in /usr/local, instead of python:3.12-slim-bookworm. Stages
are overlays over it, as in Docker. This needs root, debootstrap and overlay mounts. Each command has a mount
namespace of its own, so that nothing stays mounted if a test is killed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from tests.integration.dockerfile_steps import FOR_THE_RECORD, FROM_OUTSIDE, is_ignored

# Libraries that Python itself loads, as in the base image.
_FOR_PYTHON = (
    "ca-certificates",
    "libbz2-1.0",
    "libexpat1",
    "libffi8",
    "liblzma5",
    "libncursesw6",
    "libnsl2",
    "libreadline8",
    "libsqlite3-0",
    "libssl3",
    "libtirpc3",
    "libuuid1",
    "netbase",
    "tzdata",
)
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
# This machine's network and certificates, visible in every command as files of the host.
_OF_THE_HOST = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/xdg/pip")


def skip_unless_possible() -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap")


def make_base(folder: Path) -> Path:
    """Make the root file system of the base image in `folder`, in some minutes: 0.6 GB."""
    subprocess.run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--include={','.join(_FOR_PYTHON)}",
            "bookworm",
            str(folder),
        ],
        check=True,
        capture_output=True,
    )
    for name in ("sources.list.d", "apt.conf.d"):
        shutil.copytree(f"/etc/apt/{name}", folder / "etc/apt" / name, dirs_exist_ok=True)

    for name in ("bin", "include", "lib"):
        shutil.copytree(
            Path(sys.base_prefix) / name,
            folder / "usr/local" / name,
            symlinks=True,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("site-packages", "__pycache__", "test"),
        )
    python = folder / "usr/local/bin/python"
    python.unlink(missing_ok=True)
    python.symlink_to(f"python{sys.version_info.major}.{sys.version_info.minor}")
    subprocess.run(["chroot", str(folder), "/sbin/ldconfig"], check=True)
    return folder


Layers = tuple[Path, ...]  # file systems, the topmost first


class ChrootImage:
    """Image of a Dockerfile, built in a folder.

    Args:
        base: Root file system of the base image (`make_base`), below folders that add files to it.
        build_args: Override the ARGs of the file, like `docker build --build-arg`.
    """

    def __init__(
        self, dockerfile: Path, context: Path, base: Layers, folder: Path, build_args: Mapping[str, str]
    ) -> None:
        self._steps = DockerfileParser(fileobj=io.BytesIO(dockerfile.read_bytes())).structure
        self._context = context
        self._base = base
        self._folder = folder
        self._build_args = dict(build_args)
        self._stages: dict[str, Layers] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._stage = base
        self._arguments: dict[str, str] = {}
        self._shell = ["/bin/sh", "-c"]
        self._workdir = "/"
        self.user = "0"
        self.environment: dict[str, str] = {"PATH": _PATH}
        self.command: list[str] = []
        self.entrypoint: list[str] = []
        self.seconds: dict[str, float] = {}

    def build(self) -> None:
        """Run all instructions in order. Raises AssertionError with the output of a step that fails."""
        name = ""
        for step in self._steps:
            kind = step["instruction"]
            value = step["value"]
            started = time.monotonic()
            if kind == "FROM":
                self._keep(name)
                source, _, name = value.partition(" AS ")
                self._begin(source, name)
            elif kind == "ARG":
                key, _, default = value.partition("=")
                self._arguments[key] = self._build_args.get(key, default.strip('"'))
            elif kind == "ENV":
                for word in shlex.split(value):
                    key, _, setting = word.partition("=")
                    self.environment[key] = self._expanded(setting)
            elif kind == "SHELL":
                self._shell = json.loads(value)
            elif kind == "USER":
                self.user = self._expanded(value)
            elif kind == "WORKDIR":
                assert self._run(["/bin/mkdir", "-p", value]).returncode == 0
                self._workdir = value
            elif kind == "COPY":
                self._copy(value)
            elif kind == "RUN":
                self._execute(value)
            elif kind == "ENTRYPOINT":
                self.entrypoint = json.loads(value)
            elif kind == "CMD":
                self.command = json.loads(value)
            else:
                assert kind in FOR_THE_RECORD, f"line {step['startline'] + 1}: {kind} is not known here"
            self.seconds[f"{step['startline'] + 1} {kind}"] = round(time.monotonic() - started, 1)

    def type(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command in the image, as its user. The output includes standard error."""
        return self._run([*self._shell, f"exec 2>&1; {text}"], self.environment, user=self.user)

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the image's CMD with more arguments, as the image's user."""
        return self._run([*self.entrypoint, *self.command, *arguments], self.environment, user=self.user)

    def _begin(self, source: str, name: str) -> None:
        known = source in self._stages
        assert known or source == "${BASE_IMAGE}", source
        below = self._stages[source] if known else self._base
        self.environment = dict(self._environments[source]) if known else {"PATH": _PATH}
        layer = self._folder / (name or "final")
        for part in ("upper", "work", "merged"):
            (layer / part).mkdir(parents=True)
        self._stage = (layer / "upper", *below)
        self._workdir = "/"
        self.user = "0"

    def _keep(self, name: str) -> None:
        if name:
            self._stages[name] = self._stage
            self._environments[name] = dict(self.environment)

    def _expanded(self, text: str) -> str:
        known = {**self._arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda found: known[found[1]], text)

    def _execute(self, command: str) -> None:
        mounts = {}
        while option := re.match(r"--mount=type=bind,from=(\w+),source=(\S+),target=(\S+)\s+", command):
            mounts[option[3]] = (option[1], option[2])
            command = command[option.end() :]
        outside = {name: value for name, value in os.environ.items() if name.startswith(FROM_OUTSIDE)}
        environment = {**outside, **self._arguments, **self.environment}
        ended = self._run([*self._shell, command], environment, user=self.user, mounts=mounts)
        assert ended.returncode == 0, f"RUN {command}\n{ended.stdout[-8000:]}\n{ended.stderr[-8000:]}"

    def _copy(self, value: str) -> None:
        words = shlex.split(value)
        owners = [word.partition("=")[2] for word in words if word.startswith("--chown=")]
        *sources, target = [word for word in words if not word.startswith("--")]
        staging = self._folder / "copied"
        for source in sources:
            if (self._context / source).is_dir():
                shutil.copytree(
                    self._context / source,
                    staging,
                    ignore=lambda folder, names: is_ignored(self._context, folder, names),
                    dirs_exist_ok=True,
                    symlinks=True,
                )
            else:
                staging.mkdir(exist_ok=True)
                shutil.copy2(self._context / source, staging)
        place = shlex.quote(str(Path(self._workdir) / target))
        owner = (
            f"chown --recursive {shlex.quote(owners[0])} /copied && "
            if owners
            else "chown -R 0:0 /copied && "
        )
        copied = f"{owner}mkdir -p {place} && cp --archive /copied/. {place}"
        ended = self._run(["/bin/sh", "-c", copied], mounts={"/copied": ("", str(staging))})
        assert ended.returncode == 0, f"COPY {value}\n{ended.stderr}"
        shutil.rmtree(staging)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        user: str = "0",
        mounts: Mapping[str, tuple[str, str]] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the stage. `mounts`: target -> stage (empty: this machine) and folder in it."""
        upper, *below = self._stage
        merged = upper.parent / "merged"
        lines = [
            "set -e",
            f"mount -t overlay overlay -o lowerdir={':'.join(map(str, below))},upperdir={upper},"
            f"workdir={upper.parent / 'work'} {merged}",
            f"mount -t proc proc {merged}/proc",
            f"mount --rbind /dev {merged}/dev",
        ]
        binds = {path: path for path in (*_OF_THE_HOST, *_folders_of_indexes()) if Path(path).exists()}
        for target, (stage, source) in (mounts or {}).items():
            binds[target] = str(_found(self._stages[stage], source)) if stage else source
        for target, source in binds.items():
            place = shlex.quote(f"{merged}{target}")
            make = (
                f"mkdir -p {place}"
                if Path(source).is_dir()
                else f"mkdir -p $(dirname {place}); touch {place}"
            )
            lines += [make, f"mount --bind {shlex.quote(source)} {place}"]
        variables = {**(environment or {"PATH": _PATH}), "HOME": self._home(user)}
        settings = [f"{name}={value}" for name, value in variables.items()]
        inner = ["env", "-i", f"--chdir={self._workdir}", *settings, *command]
        lines.append(shlex.join(["exec", "chroot", f"--userspec={user}:{user}", str(merged), *inner]))
        return subprocess.run(
            ["unshare", "--mount", "bash", "-c", "\n".join(lines)],
            check=False,
            capture_output=True,
            text=True,
        )

    def _home(self, user: str) -> str:
        """Return the home of a user id, as /etc/passwd of the stage has it."""
        users = [line.split(":") for line in _found(self._stage, "/etc/passwd").read_text().splitlines()]
        return next(fields[5] for fields in users if fields[2] == user)


def _found(stage: Layers, path: str) -> Path:
    (found, *_) = [layer / path.lstrip("/") for layer in stage if (layer / path.lstrip("/")).exists()]
    return found


@cache
def _folders_of_indexes() -> list[str]:
    """Return the local files and folders that pip's configuration names, such as indexes on this disk."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    return sorted({path for path in re.findall(r"(?:file://)?(/[\w./-]+)", listed) if Path(path).is_dir()})
