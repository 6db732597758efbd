"""Test the command `megarl doctor`: it passes for the quickstart on this machine, and finds twelve
simultaneous faults, each with its hint."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import fork_server
from tests.integration.tiny_run import save_inputs

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "megarl", "doctor"]


class Answer(NamedTuple):
    status: int
    document: dict[str, Any]

    def of(self, check: str, status: str) -> list[dict[str, Any]]:
        return [
            each for each in self.document["findings"] if (each["check"], each["status"]) == (check, status)
        ]


def quickstart(inputs: Path, output: Path) -> list[str]:
    """Return the quickstart's configuration with the tests' model, data and reward, so that it need not be
    run first."""
    return [
        "configs/quickstart.yaml",
        f"model.path={inputs / 'policy'}",
        f"data.train_files=[{inputs / 'train.parquet'}]",
        f"data.val_files=[{inputs / 'validation.parquet'}]",
        f"reward.functions=[{{path: {inputs / 'reward.py'}}}]",
        "trainer.prompts_per_step=32",  # as many as there are rows
        f"trainer.output_dir={output}",
    ]


def test_the_quickstart_is_good_on_this_machine(tmp_path: Path, forked_processes: None) -> None:
    save_inputs(tmp_path)
    command = [*fork_server.PYTHON, *DOCTOR[1:], *quickstart(tmp_path, tmp_path / "run"), "--json"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "MASTER_PORT")
    }
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["counts"]["error"] == 0
    found = {each["check"]: each for each in answer["findings"]}
    assert set(found) == {
        *(
            "configuration",
            "versions",
            "layers",
            "gpus",
            "shared memory",
            "open files",
            "memory",
            "threads",
            "clock",
            "environment",
        ),
        *(
            "sandbox",
            "ports",
            "checkpoints",
            "models",
            "tokenizers",
            "data",
            "reward functions",
            "ranks",
            "ray",
            "nodes",
            "resources",
        ),
    }
    assert found["ranks"]["facts"]["ranks"] == 2  # as in the quickstart's actor
    assert found["resources"]["facts"]["needed"] == [{"CPU": 5.0}]
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def small_mounts() -> list[str]:
    """Return the prefix of a command that gives it, without privileges, a /dev/shm of 64 MiB as in a
    container, and a disk of 8 MiB at $DISK."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mounts = "mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o size=8m tmpfs $DISK"
    if shutil.which("unshare") is None:
        pytest.skip("no unshare: a small disk cannot be made")
    tried = subprocess.run(
        [*command, mounts], env={**os.environ, "DISK": "/mnt"}, capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no mounts in a user's namespace: {tried.stderr.strip()}")

    return [*command, f'{mounts} && exec "$@"', "sh"]


def damage(folder: Path) -> None:
    """Damage the inputs: a truncated model, data without a column, a reward function that is not Python, and
    an old Ray on the path."""
    save_inputs(folder)
    weights = folder / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    pq.write_table(
        pa.table({"prompt": [[{"role": "user", "content": "1+1="}]], "data_source": ["count"]}),
        folder / "train.parquet",
    )
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info)\n    return 0\n"
    )
    old = folder / "site" / "ray-1.13.0.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.13.0\n")
    (folder / "disk").mkdir()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, small_mounts: list[str]) -> Answer:
    folder = tmp_path_factory.mktemp("faulty")
    damage(folder)

    with socket.socket() as taken, socket.socket() as dead:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dead.bind(("127.0.0.1", 0))  # bound, but not listening
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'site'}:{ROOT}",
            "DISK": str(folder / "disk"),
            "MASTER_PORT": str(taken.getsockname()[1]),
            "RAY_ADDRESS": f"127.0.0.1:{dead.getsockname()[1]}",
            "GLOO_SOCKET_IFNAME": "bond7",
            "OMP_NUM_THREADS": "64",
        }
        command = [
            *small_mounts,
            *DOCTOR,
            *quickstart(folder, folder / "disk" / "run"),
            "trainer.updates_per_step=3",
            "--json",
        ]
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=_few_files,
        )

    return Answer(ended.returncode, json.loads(ended.stdout or "{}"))


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_any_error_is_the_users_to_mend(faulty: Answer) -> None:
    assert faulty.status == 2
    assert faulty.document["status"] == "error"


FAULTS = {
    "a batch that does not divide": (
        "configuration",
        "error",
        "cannot be divided into updates_per_step 3",
        "megarl check",
    ),
    "a wrong version": ("versions", "error", "ray 1.13.0 is outside", "pip install 'ray[default]>=2.60,<3'"),
    "tiny shared memory": ("shared memory", "error", "/dev/shm has 64.0 MiB", "--shm-size"),
    "few open files": ("open files", "error", "may open 512 files", "ulimit -n 65536"),
    "too many threads": ("threads", "warning", "OMP_NUM_THREADS=64 in 5 processes", "OMP_NUM_THREADS=1"),
    "a port that is taken": (
        "ports",
        "error",
        "is needed for torchrun's rendezvous (MASTER_PORT), but",
        "choose another port",
    ),
    "a full disk": ("checkpoints", "error", "cannot be written: No space left on device", "checkpoint.dir"),
    "a model that is cut off": (
        "models",
        "error",
        "truncated or not a safetensors file",
        "download it again",
    ),
    "a column that is missing": ("data", "error", "column 'reward_model' is missing", "rewrite the file"),
    "a reward file that is no Python": ("reward functions", "error", "SyntaxError", "fix "),
    "an interface that is not there": ("ranks", "error", "GLOO_SOCKET_IFNAME=bond7", "lo"),
    "a cluster that does not answer": ("ray", "error", "cannot be joined", "start the cluster"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_with_its_hint(faulty: Answer, fault: str) -> None:
    check, status, said, hint = FAULTS[fault]
    found = faulty.of(check, status)
    assert any(said in each["message"] and hint in each["remedy"] for each in found), found
