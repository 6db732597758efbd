"""`megarl submit`: submit a run to an existing Ray cluster, follow its log, and return the job's exit status.

The configuration is checked on this machine first, as far as its files are here. The job receives the
resolved configuration and the code that checked it. Data, models and the output folder are not uploaded: they
must be on a disk that all nodes mount at the same path, or be names on the Hugging Face hub.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from ray.job_submission import JobInfo, JobStatus, JobSubmissionClient

from megarl.config.load import read_config, schema_of
from megarl.config.rules.machine import code_files
from megarl.controller.environment import users_settings
from megarl.doctor.checked_config import load_checked_anywhere, refuse
from megarl.launch.job_files import RUN_FILE, pack

FAILED = 1
INTERRUPTED = 130
TERMINATED = 143
LOG_COLUMNS = "140"  # of the tables in a log, which no window limits
STOP_LIMIT_S = 900  # a job that is told to stop finishes its step and saves; then it is killed
_LOOK_S = 1.0
_RECONNECT_S = 3.0
# what Ray's job server says until an agent has registered
_NO_AGENT = "No available agent"
_AGENT_LIMIT_S = 60.0
_AGENT_REMEDY = (
    "dashboard_agent.log of the head says why its agent takes none; two Ray nodes on one machine need a "
    "--dashboard-agent-listen-port each"
)


class SubmissionError(ValueError):
    """Raised when the cluster cannot take the job. The message says why."""


def run(config_path: str, overrides: Sequence[str], address: str | None) -> int:
    """Submit `megarl train` with this configuration and follow the job until it ends.

    Args:
        address: URL of the cluster's job server. None reads RAY_API_SERVER_ADDRESS.

    Returns:
        The exit status of the job's own command.

    Raises:
        ConfigError: The configuration is wrong. Nothing has been sent.
        SubmissionError: The cluster cannot be reached or refuses the job.
    """
    # silence progress messages about uploads and connections
    logging.getLogger("ray").setLevel(logging.WARNING)
    schema = schema_of(config_path, overrides)
    # Paths may exist on the cluster only, so a missing one is a notice here.
    absent = load_checked_anywhere(schema, config_path, overrides, starts_elsewhere=True).absent

    # As it is written: names on the hub, and a dtype that depends on the device, are resolved on the cluster.
    config = read_config(schema, config_path, overrides).required()
    refuse(config_path, [str(violation) for violation in code_files(config)])  # the job takes the code along
    for line in absent:
        print(f"not on this machine: {line}", flush=True)
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    client = _connect(address)

    with tempfile.TemporaryDirectory(prefix="megarl-job-") as folder:
        package = pack(config, Path(folder), Path.cwd())
        print(
            f"{config_path}: good; sending {package.num_files} files, {package.nbytes / 2**20:.1f} MiB",
            flush=True,
        )
        job = Job(client, folder)

    print(f"job {job.name} at {address}", flush=True)
    return job.stay()


def _connect(address: str | None) -> JobSubmissionClient:
    if not address or "://" not in address:
        raise SubmissionError(
            f"the job server's address is {address!r}; give --address http://HEAD:8265, or set "
            f"RAY_API_SERVER_ADDRESS"
        )
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SubmissionError(
            f"no job server answers at {address} ({reason}): is the cluster up, with `ray[default]` and its "
            f"dashboard, and is its "
            "key in RAY_AUTH_TOKEN?"
        ) from error


def _submit(client: JobSubmissionClient, **job: Any) -> str:
    """Submit a job and return its name. The agents of a cluster that has just started need a while until one
    can take it.

    Raises:
        SubmissionError: The cluster refuses the job, or has no agent for it after a minute.
    """
    end_s = time.monotonic() + _AGENT_LIMIT_S
    while True:
        try:
            return str(client.submit_job(**job))
        except RuntimeError as error:
            # Only a missing agent passes by itself; any other refusal is final.
            has_no_agent = _NO_AGENT in str(error)
            if not has_no_agent or time.monotonic() > end_s:
                reason = f"the cluster has refused the job: {str(error).strip()}"
                raise SubmissionError(f"{reason} {_AGENT_REMEDY}" if has_no_agent else reason) from error
            time.sleep(1)


class Job:
    """Submitted when it is made. `folder`: its files."""

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
            entrypoint=f"exec python -m megarl.launch.job train {RUN_FILE}",
            runtime_env={"working_dir": folder, "env_vars": environment},
        )

    def stay(self) -> int:
        """Shows the log until the job has ended; its exit status. Ctrl-C asks whether to stop it."""
        stopped = False
        while True:
            try:
                info = asyncio.run(self._follow())
                return INTERRUPTED if stopped else _status(info)
            except KeyboardInterrupt:
                # The second interrupt leaves the job without asking.
                if stopped or not self._is_to_stop():
                    print(
                        f"\nleft the job: ray job status {self.name}; ray job logs --follow {self.name}",
                        file=sys.stderr,
                    )
                    return INTERRUPTED
                stopped = True
                print(
                    f"\nstopping the job: it finishes its step and saves, for {STOP_LIMIT_S} s at most; "
                    f"Ctrl-C to leave it",
                    file=sys.stderr,
                )
                self._client.stop_job(self.name)

    def _is_to_stop(self) -> bool:
        """Ask whether to stop the job. Without a terminal it is stopped, lest it continue unnoticed."""
        if not sys.stdin.isatty():
            return True
        return not input("\nstop the job? [Y/n: leave it running] ").strip().lower().startswith("n")

    async def _follow(self) -> JobInfo:
        """Also across a connection that breaks, and to the last line: the server may close before the log's
        end is sent."""
        while True:
            seen = 0
            try:
                async for text in self._client.tail_job_logs(self.name):
                    seen += len(text)
                    self._show(text, seen)
            except (RuntimeError, aiohttp.ClientError) as error:
                print(f"megarl submit: lost the log ({error}); asking again", file=sys.stderr)
                await asyncio.sleep(_RECONNECT_S)
            info = self._client.get_job_info(self.name)
            if info.status.is_terminal():
                # The stream may have ended early, so what was not shown is read in one piece.
                log = self._client.get_job_logs(self.name)
                self._show(log[self._shown :], len(log))
                return info
            await asyncio.sleep(_LOOK_S)

    def _show(self, text: str, end: int) -> None:
        """`end`: where the text ends in the log; what has been shown is not shown again."""
        new = end - self._shown
        if new > 0:
            print(text[-new:], end="", flush=True)
            self._shown = end


def _status(info: JobInfo) -> int:
    if info.status is JobStatus.SUCCEEDED:
        return 0
    if info.status is JobStatus.STOPPED:
        print("megarl submit: somebody has stopped the job", file=sys.stderr)
        return TERMINATED

    if info.driver_exit_code is None:  # it ended before, or beside, its command
        print(f"megarl submit: the job failed: {info.message}", file=sys.stderr)
        return FAILED

    # A negative code is the number of a signal, reported as a shell does.
    return info.driver_exit_code if info.driver_exit_code > 0 else 128 - info.driver_exit_code
