"""Run the instructions of a Dockerfile in a folder, without Docker, to check what an image would contain and
what its command does.

The folder replaces the image's WORKDIR wherever the Dockerfile names it. Instructions that would change the
whole system (users, distribution packages) are skipped. An unknown instruction is an error, so that no step
is skipped silently.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
FOR_THE_RECORD = ("LABEL", "FROM", "HEALTHCHECK", "EXPOSE", "COMMENT")
_OF_THE_SYSTEM = ("apt-get", "install", "rm", "useradd", "userdel")
# The installers' indexes and certificates on this machine, and its home, which contains their own files.
FROM_OUTSIDE = (
    "HOME",
    "LANG",
    "PIP_",
    "UV_",
    "SSL_",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)


def cpu_image(folder: Path, replaced: Mapping[str, str] | None = None, **build_args: str) -> DockerfileSteps:
    """Return docker/Dockerfile.cpu in `folder`/image. The base image's `python` is this machine's, of the
    same version.

    Args:
        replaced: Contents for files of the repository, by path.
    """
    for name in ("image", "programs"):
        (folder / name).mkdir()
    (folder / "programs" / "python").symlink_to(Path(sys.executable).resolve())
    path = f"{folder / 'programs'}:/usr/bin:/bin"

    return DockerfileSteps(
        ROOT / "docker" / "Dockerfile.cpu", ROOT, folder / "image", build_args, path, replaced
    )


class DockerfileSteps:
    """Dockerfile whose instructions run in a folder.

    Args:
        folder: Must be empty.
        build_args: Override the ARGs of the file, like `docker build --build-arg`.
        replaced: Contents for files of the context, by path.
    """

    def __init__(
        self,
        dockerfile: Path,
        context: Path,
        folder: Path,
        build_args: Mapping[str, str],
        path: str,
        replaced: Mapping[str, str] | None = None,
    ) -> None:
        self._context = context
        self.folder = folder
        self._steps = DockerfileParser(fileobj=io.BytesIO(dockerfile.read_bytes())).structure
        self._build_args = dict(build_args)
        self._replaced = dict(replaced or {})
        self._arguments: dict[str, str] = {}
        outside = {name: value for name, value in os.environ.items() if name.startswith(FROM_OUTSIDE)}

        # This machine has a C compiler; the image has one if the Dockerfile installs it.
        has_compiler = any(" gcc " in step["value"] for step in self._steps if step["instruction"] == "RUN")
        self._environment = {**outside, "PATH": path, **({} if has_compiler else {"CC": "false"})}
        self._workdir = next(step["value"] for step in self._steps if step["instruction"] == "WORKDIR")
        self.user = "root"
        self.command: list[str] = []
        self.seconds: dict[str, float] = {}

    def build(self) -> None:
        """Run all instructions in order."""
        for step in self._steps:
            kind = step["instruction"]
            value = step["value"]
            started = time.monotonic()
            if kind == "ARG":
                name, _, default = value.partition("=")
                self._arguments[name] = self._build_args.get(name, default)
            elif kind == "ENV":
                for word in shlex.split(value):
                    name, _, setting = word.partition("=")
                    self._environment[name] = self._here(Template(setting).safe_substitute(self._environment))
            elif kind == "USER":
                self.user = value
            elif kind == "WORKDIR":
                assert value == self._workdir, f"one WORKDIR is known here, {self._workdir}, not {value}"
            elif kind == "COPY":
                self._copy(value)
            elif kind == "RUN":
                self._run(value)
            elif kind == "CMD":
                self.command = json.loads(value)
            else:
                assert kind in FOR_THE_RECORD, f"line {step['startline'] + 1}: {kind} is not known here"
            self.seconds[f"{step['startline'] + 1} {kind}"] = time.monotonic() - started

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the image's CMD with more arguments, as the image's user would."""
        return self._process([*self.command, *arguments], self._environment, shell=False)

    def type(self, text: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command in the image with additional variables. The output includes standard error."""
        return self._process(f"exec 2>&1; {text}", {**self._environment, **more}, shell=True)

    def _here(self, text: str) -> str:
        return text.replace(self._workdir, str(self.folder))

    def _run(self, command: str) -> None:
        programs = {part.split()[0] for part in command.split("&&")}
        if programs & {"apt-get", "useradd", "userdel"}:
            assert programs <= set(_OF_THE_SYSTEM), (
                f"only a part of this step could be run without Docker: RUN {command}"
            )
            return

        # a build argument is a variable of RUN, not of the image's processes
        environment = {**self._arguments, **self._environment}
        ended = self._process(self._here(command), environment, shell=True)
        assert ended.returncode == 0, f"RUN {command}\n{ended.stdout}\n{ended.stderr}"

    def _process(
        self, command: str | Sequence[str], environment: Mapping[str, str], shell: bool
    ) -> subprocess.CompletedProcess[str]:
        if not shell:  # found by the image's own PATH
            program = shutil.which(command[0], path=environment["PATH"])
            assert program is not None, f"{command[0]} is not on the image's PATH"
            command = [program, *command[1:]]
        return subprocess.run(
            command,
            shell=shell,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def _copy(self, value: str) -> None:
        *sources, target = [word for word in shlex.split(value) if not word.startswith("--")]
        for source in sources:
            place = self.folder / target
            if (self._context / source).is_dir():
                shutil.copytree(
                    self._context / source,
                    place,
                    ignore=lambda folder, names: is_ignored(self._context, folder, names),
                    dirs_exist_ok=True,
                    symlinks=True,
                )
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._context / source, place)
        for name, text in self._replaced.items():
            if (self.folder / name).exists():
                (self.folder / name).write_text(text)


def is_ignored(context: Path, folder: str, names: list[str]) -> set[str]:
    """Return the names that .dockerignore excludes: top-level names, and names anywhere (`**/`)."""
    lines = (line.strip() for line in (context / ".dockerignore").read_text().splitlines())
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert not any("/" in pattern.removeprefix("**/") or pattern.startswith("!") for pattern in patterns), (
        "not known here"
    )
    is_top = Path(folder) == context
    wanted = [pattern.removeprefix("**/") for pattern in patterns if is_top or pattern.startswith("**/")]

    return set(shutil.ignore_patterns(*wanted)(folder, names))
