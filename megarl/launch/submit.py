"""`megarl submit`: submits a run to an existing Ray cluster.

It follows the run's log, and returns the job's exit code.

The configuration is first checked on this machine, with the inputs that are here. The job receives the
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

from megarl.config.load import read_config
from megarl.config.rules.machine import code_files
from megarl.config.schema import RunConfig
from megarl.controller.environment import users_settings
from megarl.doctor.checks import load_for_plan, refuse
from megarl.launch.job_files import RUN_FILE, absent_secrets, pack
from megarl.machine.wording import counted

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


class SubmissionError(ValueError):
    """Raised when the cluster cannot take the job. The message says why."""


def run(config_path: str, overrides: Sequence[str], address: str | None) -> int:
    """Submit `megarl train` with this configuration and follow the job until it ends.

    Args:
        address: URL of the cluster's job server. None reads RAY_API_SERVER_ADDRESS.

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
    config = read_config(RunConfig, config_path, overrides).required()
    refuse(config_path, [str(violation) for violation in code_files(config)])  # code is uploaded
    for line in absent:
        print(f"not on this machine: {line}", flush=True)
    for line in absent_secrets(config):
        print(f"not sent with the job: {line}", flush=True)
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS")
    client = _connect(address)

    with tempfile.TemporaryDirectory(prefix="megarl-job-") as folder:
        num_files, nbytes = pack(config, Path(folder), Path.cwd())
        print(
            f"{config_path}: OK; uploading {counted(num_files, 'file')}, {nbytes / 2**20:.1f} MiB",
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
            entrypoint=f"exec python -m megarl.launch.job train {RUN_FILE}",
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
                print(f"megarl submit: lost the log ({error}); reconnecting", file=sys.stderr)
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
        print("megarl submit: the job was stopped", file=sys.stderr)
        return TERMINATED

    if info.driver_exit_code is None:  # the job ended without running its command to the end
        print(f"megarl submit: the job failed: {info.message}", file=sys.stderr)
        return FAILED

    # A negative code is the number of a signal, reported as a shell does.
    return info.driver_exit_code if info.driver_exit_code > 0 else 128 - info.driver_exit_code
