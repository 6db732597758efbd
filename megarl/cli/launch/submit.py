"""`megarl train CONFIG --submit URL`: submits a run to an existing Ray cluster.

It follows the run's log, and returns the job's exit code.

The configuration is first checked on this machine, with the inputs that are here. The job receives the
resolved configuration and the code that checked it. Data, models and the output folder are not uploaded: they
must be on a disk that all nodes mount at the same path, or be names on the Hugging Face hub.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import OmegaConf
from ray.job_submission import JobInfo, JobStatus, JobSubmissionClient

import megarl
from megarl.config.load import read_config, with_paths
from megarl.config.rules.machine import code_files
from megarl.config.schema import RESUME_AUTO, RESUME_DISABLE, PPOConfig, RunConfig
from megarl.config.schema.keys import PathKind, split_code
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import is_hub_name, is_url
from megarl.config.values import contents_of, escaped
from megarl.controller.environment import users_settings
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import ConfigError, counted

FAILED = 1
INTERRUPTED = 130
TERMINATED = 143
LOG_COLUMNS = "140"  # width of tables in a log
STOP_LIMIT_S = 900  # limit for a stopped job to finish its step and save before it is killed
_LOOK_S = 1.0
_RECONNECT_S = 3.0
# The message of Ray's job server until an agent has registered.
_NO_AGENT = "No available agent"
_AGENT_LIMIT_S = 60.0
_AGENT_REMEDY = (
    "see dashboard_agent.log of the head for the reason; two Ray nodes on one machine each need a "
    "--dashboard-agent-listen-port"
)
RUN_FILE = "run.yaml"
AUTO = "auto"  # the address of the environment
LIMIT_MB = 100  # limited because Ray keeps the package in the head's memory
_IGNORE_FILES = (".gitignore", ".rayignore")  # already applied; Ray would apply them again


class SubmissionError(ValueError):
    """Raised when the cluster cannot take the job. The message says why."""


def run(config_path: str, overrides: Sequence[str], address: str) -> int:
    """Submit `megarl train` with this configuration and follow the job until it ends.

    Args:
        address: URL of the cluster's job server; AUTO reads RAY_API_SERVER_ADDRESS.

    Returns:
        The exit code of the job's command.

    Raises:
        ConfigError: The configuration has errors. Nothing has been sent.
        SubmissionError: The cluster cannot be reached or refuses the job.
    """
    # Silence progress messages about uploads and connections.
    logging.getLogger("ray").setLevel(logging.WARNING)
    # Paths may exist only on the cluster, so missing ones are only listed.
    absent = load_for_plan(RunConfig, config_path, overrides, starts_elsewhere=True).absent

    # Hub names and a dtype that depends on the device stay unresolved until the job runs on the cluster.
    loaded = read_config(RunConfig, config_path, overrides)
    config = loaded.required(code_files(loaded.config))  # code is uploaded
    for line in absent:
        print(f"not on this machine: {line}", flush=True)
    for line in absent_secrets(config):
        print(f"not sent with the job: {line}", flush=True)
    url = os.environ.get("RAY_API_SERVER_ADDRESS") if address == AUTO else address
    client = _connect(url)

    with tempfile.TemporaryDirectory(prefix="megarl-job-") as folder:
        num_files, nbytes = pack(config, Path(folder), Path.cwd())
        print(
            f"{config_path}: OK; uploading {counted(num_files, 'file')}, {nbytes / 2**20:.1f} MiB",
            flush=True,
        )
        job = Job(client, folder)

    print(f"job {job.name} at {url}", flush=True)
    return job.stay()


def _connect(address: str | None) -> JobSubmissionClient:
    if not address or "://" not in address:
        raise SubmissionError(
            f"the job server's address is {address!r}; give --submit http://HEAD:8265, or set "
            f"RAY_API_SERVER_ADDRESS"
        )
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SubmissionError(
            f"no job server responds at {address} ({reason}); check that the cluster is running with "
            f"`ray[default]` and its dashboard, and that RAY_AUTH_TOKEN contains its key"
        ) from error


def _submit(client: JobSubmissionClient, **job: Any) -> str:
    """Submit a job and return its name, after waiting for an agent of a cluster that has just started.

    Raises:
        SubmissionError: The cluster refuses the job, or has no agent for it after a minute.
    """
    end_s = time.monotonic() + _AGENT_LIMIT_S
    while True:
        try:
            return client.submit_job(**job)
        except RuntimeError as error:
            # Only a missing agent is temporary; any other refusal is final.
            has_no_agent = _NO_AGENT in str(error)
            if not has_no_agent or time.monotonic() > end_s:
                reason = f"the cluster has refused the job: {str(error).strip()}"
                raise SubmissionError(f"{reason} {_AGENT_REMEDY}" if has_no_agent else reason) from error
            time.sleep(1)


class Job:
    """A job, which is submitted by the constructor with the files in `folder`."""

    def __init__(self, client: JobSubmissionClient, folder: str) -> None:
        self._client = client
        self._shown = 0  # characters of the log
        environment = {
            "COLUMNS": LOG_COLUMNS,
            **users_settings(),
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_LIMIT_S),
        }

        self.name = _submit(
            client,
            entrypoint=f"exec python -m megarl.cli.launch.job train {RUN_FILE}",
            runtime_env={"working_dir": folder, "env_vars": environment},
        )

    def stay(self) -> int:
        """Print the log until the job has ended, and return its exit code.

        Ctrl-C asks whether to stop the job.
        """
        stopped = False
        while True:
            try:
                info = asyncio.run(self._follow())
                return INTERRUPTED if stopped else _status(info)
            except KeyboardInterrupt:
                # The second interrupt detaches from the job without asking.
                if stopped or not self._is_to_stop():
                    print(
                        f"\ndetached from the job: ray job status {self.name}; ray job logs --follow "
                        f"{self.name}",
                        file=sys.stderr,
                    )
                    return INTERRUPTED
                stopped = True
                print(
                    f"\nstopping the job: it finishes its step and saves, for at most {STOP_LIMIT_S} s; "
                    "press Ctrl-C to detach",
                    file=sys.stderr,
                )
                self._client.stop_job(self.name)

    def _is_to_stop(self) -> bool:
        """Ask whether to stop the job.

        Without a terminal it is stopped, so that it does not continue unnoticed.
        """
        if not sys.stdin.isatty():
            return True
        return not input("\nstop the job? [Y/n: leave it running] ").strip().lower().startswith("n")

    async def _follow(self) -> JobInfo:
        """Print the log until its last line, and reconnect after a broken connection.

        The server may close the stream before the end of the log.
        """
        while True:
            seen = 0
            try:
                async for text in self._client.tail_job_logs(self.name):
                    seen += len(text)
                    self._show(text, seen)
            except (RuntimeError, aiohttp.ClientError) as error:
                print(f"megarl train: lost the log ({error}); reconnecting", file=sys.stderr)
                await asyncio.sleep(_RECONNECT_S)
            info: Any = self._client.get_job_info(self.name)  # declared as None without pydantic
            if info.status.is_terminal():
                # The stream may have ended early, so fetch the rest of the log.
                log = self._client.get_job_logs(self.name)
                self._show(log[self._shown :], len(log))
                return info
            await asyncio.sleep(_LOOK_S)

    def _show(self, text: str, end: int) -> None:
        """Print text that ends at position `end` of the log, without the part that was printed before."""
        new = end - self._shown
        if new > 0:
            print(text[-new:], end="", flush=True)
            self._shown = end


def _status(info: JobInfo) -> int:
    if info.status is JobStatus.SUCCEEDED:
        return 0
    if info.status is JobStatus.STOPPED:
        print("megarl train: the job was stopped", file=sys.stderr)
        return TERMINATED

    if info.driver_exit_code is None:  # the job ended without running its command to the end
        print(f"megarl train: the job failed: {info.message}", file=sys.stderr)
        return FAILED

    # A negative code is the number of a signal, reported as a shell does.
    return info.driver_exit_code if info.driver_exit_code > 0 else 128 - info.driver_exit_code


# ---- the files of a job: the checked, resolved configuration and the code that checked it


def pack(config: RunConfig, folder: Path, here: Path) -> tuple[int, int]:
    """Fill the job's current directory, the empty `folder`, and return how many files and bytes it gets.

    It receives the files of `here` that git does not ignore, the megarl of this process, and `run.yaml`.
    Outside a git work tree, only the code that the configuration names is taken from `here`.

    Raises:
        ConfigError: The files exceed LIMIT_MB.
    """
    files = {folder / name: here / name for name in _work_tree(here)}
    files |= {folder / "megarl" / name: file for name, file in _own_files()}
    config = _moved(config, here, lambda path: _take_along(path, folder, here, files))
    # Check sizes before anything is copied.
    sizes = {source: source.stat().st_size for source in files.values()}

    if sum(sizes.values()) > LIMIT_MB * 2**20:
        largest = sorted(sizes, key=lambda source: sizes[source], reverse=True)[:3]
        raise ConfigError(
            str(here),
            [
                f"the job's files have {sum(sizes.values()) / 2**20:,.0f} MiB, more than {LIMIT_MB}; add "
                "files that the job does not need to .gitignore; the largest are "
                + ", ".join(f"{source} ({sizes[source] / 2**20:,.0f} MiB)" for source in largest)
            ],
        )

    for target, source in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    OmegaConf.save(OmegaConf.create(escaped(contents_of(config))), folder / RUN_FILE)
    return len(files) + 1, sum(sizes.values())


def absent_secrets(config: RunConfig) -> list[str]:
    """Return a line for each API key that the job needs and does not receive.

    The variables of a job are shown to everyone who can see the cluster's dashboard, so it gets no keys.
    """
    if not isinstance(config, PPOConfig):
        return []
    return [
        f"reward.judges[{index}].api_key_env: {judge.api_key_env}; export it on the cluster's nodes before "
        "`ray start`"
        for index, judge in enumerate(config.reward.judges)
        if judge.api_key_env is not None
    ]


def _own_files() -> Iterator[tuple[Path, Path]]:
    """Yield the files of megarl that a wheel contains.

    Each item is the path in the package, and the file on this machine.
    """
    for root, place in ((Path(megarl.__file__).parent, Path()), (CONFIGS_DIR, Path("configs"))):
        for file in root.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                yield place / file.relative_to(root), file


def _work_tree(here: Path) -> list[str]:
    """Return the tracked files in `here`, and new ones that are not ignored."""
    command = [
        "git",
        "-C",
        str(here),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        ".",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):  # git is missing, or this is not a work tree
        return []

    return [
        name
        for name in dict.fromkeys(listed)
        if name and (here / name).is_file() and Path(name).name not in _IGNORE_FILES
    ]


def _moved[Run: RunConfig](config: Run, here: Path, take_along: Callable[[str], str]) -> Run:
    """Return the configuration with paths that are valid in the job.

    Code is uploaded. Data, models and output folders are on a disk that the cluster shares with this machine:
    their paths become absolute, to be valid on all nodes.
    """

    def moved(kind: PathKind, path: str) -> str:
        if is_url(path):
            return path
        if kind in (PathKind.code, PathKind.function):
            file, _ = split_code(path)
            return take_along(file) + path.removeprefix(file)
        return path if kind is PathKind.data and _is_on_hub(path, here) else str(here / path)

    checkpoint = config.checkpoint
    if checkpoint.resume not in (RESUME_AUTO, RESUME_DISABLE):
        config = config.with_sections(
            checkpoint=replace(checkpoint, resume=moved(PathKind.output, checkpoint.resume))
        )
    return with_paths(config, moved)


def _is_on_hub(value: str, here: Path) -> bool:
    """Whether a value is a name on the hub.

    `models/Qwen3-8B` has its form, but is a path if there is a folder `models`.
    """
    return is_hub_name(value) and not (here / value.partition("/")[0]).is_dir()


def _take_along(path: str, folder: Path, here: Path, files: dict[Path, Path]) -> str:
    """Add a file, or a folder with its files, to the job.

    Returns the path relative to the job's current directory.
    """
    source = (here / path).resolve()
    # A file outside of the current folder keeps its whole path, in a folder of its own.
    inside = (
        source.relative_to(here.resolve())
        if source.is_relative_to(here.resolve())
        else Path("outside", *source.parts[1:])
    )
    if source.is_dir():
        inner = (file for file in source.rglob("*") if file.is_file() and file.suffix != ".pyc")
        files.update((folder / inside / file.relative_to(source), file) for file in inner)
    else:
        files[folder / inside] = source

    return str(inside)
