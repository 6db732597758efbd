"""The launchers that no test can run for real: their syntax, commands, fields and sizes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.main import main
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from tests.requirement_files import locked

ROOT = Path(__file__).parents[4]
LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm.sbatch"

# The fields of KubeRay's RayJob (ray.io/v1) in its API reference.
SPEC_FIELDS = {
    *(
        "activeDeadlineSeconds",
        "backoffLimit",
        "clusterSelector",
        "deletionStrategy",
        "entrypoint",
        "entrypointNumCpus",
        "entrypointNumGpus",
    ),
    *(
        "entrypointResources",
        "jobId",
        "managedBy",
        "metadata",
        "preRunningDeadlineSeconds",
        "rayClusterSpec",
        "runtimeEnvYAML",
    ),
    *(
        "shutdownAfterJobFinishes",
        "submissionMode",
        "submitterConfig",
        "submitterPodTemplate",
        "suspend",
        "ttlSecondsAfterFinished",
    ),
}
CLUSTER_FIELDS = {
    *(
        "authOptions",
        "autoscalerOptions",
        "enableInTreeAutoscaling",
        "gcsFaultToleranceOptions",
        "headGroupSpec",
        "headServiceAnnotations",
    ),
    *("managedBy", "rayVersion", "suspend", "upgradeStrategy", "workerGroupSpecs"),
}
HEAD_FIELDS = {
    "enableIngress",
    "headService",
    "labels",
    "rayStartParams",
    "resources",
    "serviceType",
    "template",
}
WORKER_FIELDS = {
    *(
        "groupName",
        "idleTimeoutSeconds",
        "labels",
        "maxReplicas",
        "minReplicas",
        "numOfHosts",
        "rayStartParams",
        "replicas",
        "resources",
    ),
    *("scaleStrategy", "suspend", "template"),
}


def test_the_script_of_slurm_has_no_fault() -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False, capture_output=True).stderr == b""
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run(
        [shellcheck, "--severity=style", SLURM], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


def test_several_processes_of_torchrun_on_a_node_are_told_that_one_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message of megarl itself is tested in tests/unit/cli/test_processes.py."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "4217")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["launch", "run.yaml"]) == 2
    assert "megarl starts its own processes: use --nproc-per-node 1, not 2" in capsys.readouterr().err


def slurm(tmp_path: Path, *arguments: str, srun: str = "exit 0", **environment: str) -> tuple[int, list[str]]:
    """Run the batch script as Slurm would, with commands that only record their arguments.

    Returns its status and the arguments of srun.
    """
    for name, body in {
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol_calls; printf "node7\\nnode8\\n"',
        "srun": f'echo "$@" > {tmp_path}/asked; {srun}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    of_slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "4217",
    }
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **of_slurm, **environment}
    done = subprocess.run(
        ["bash", SLURM, *arguments], env=env, check=False, capture_output=True, text=True, timeout=30
    )
    asked = tmp_path / "asked"

    return done.returncode, shlex.split(asked.read_text()) if asked.exists() else []


def test_slurm_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    status, asked = slurm(tmp_path, "run.yaml", "trainer.total_steps=3")
    assert status == 0
    assert asked[asked.index("torchrun") + 1 :] == [
        *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0", "--shutdown-timeout", "840"),
        *("--rdzv-id", "4217", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:29717"),
        *("-m", "megarl", "launch", "run.yaml", "trainer.total_steps=3"),
    ]
    assert not [word for word in asked if word.startswith("--container")]


def test_slurm_with_a_container(tmp_path: Path) -> None:
    _, asked = slurm(tmp_path, "run.yaml", CONTAINER_IMAGE="megarl.sqsh", CONTAINER_MOUNTS="/models:/models")
    assert "--container-image=megarl.sqsh" in asked
    assert f"--container-mounts={tmp_path}:{tmp_path},/models:/models" in asked
    assert asked.index(f"--container-workdir={tmp_path}") < asked.index("torchrun")


def test_slurm_gives_the_status_of_the_run(tmp_path: Path) -> None:
    assert slurm(tmp_path, "run.yaml", srun="exit 3")[0] == 3
    assert slurm(tmp_path)[0] == 2  # no config


@pytest.mark.parametrize(
    ("srun", "environment", "requeues"),
    [
        ("exit 0", {}, False),
        ("exit 1", {}, True),
        ("exit 1", {"SLURM_RESTART_COUNT": "2"}, True),
        ("exit 1", {"SLURM_RESTART_COUNT": "3"}, False),
        ("exit 1", {"MAX_RESTARTS": "0"}, False),
        ("trap 'exit 143' TERM; kill -TERM $PPID; while true; do sleep 0.1; done", {}, False),
    ],
)
def test_slurm_queues_a_failed_job_again_within_a_budget(
    srun: str, environment: dict[str, str], requeues: bool, tmp_path: Path
) -> None:
    slurm(tmp_path, "run.yaml", srun=srun, **environment)
    calls = (tmp_path / "scontrol_calls").read_text().splitlines()
    assert ("requeue 4217" in calls) is requeues


def test_slurm_hands_sigterm_on_and_waits_for_the_run_to_save(tmp_path: Path) -> None:
    saving = (
        f"trap 'sleep 0.5; echo saved > {tmp_path}/saved; exit 143' TERM; kill -TERM $PPID; while "
        f"true; do sleep 0.1; done"
    )
    assert slurm(tmp_path, "run.yaml", srun=saving)[0] == 143
    assert (tmp_path / "saved").exists()


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())


def test_the_ray_job_has_only_fields_that_there_are(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    assert spec.keys() <= SPEC_FIELDS
    assert cluster.keys() <= CLUSTER_FIELDS
    assert cluster["headGroupSpec"].keys() <= HEAD_FIELDS
    assert all(group.keys() <= WORKER_FIELDS for group in cluster["workerGroupSpecs"])

    for pod in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert {
            mount["name"]
            for container in pod["template"]["spec"]["containers"]
            for mount in container["volumeMounts"]
        } == volumes
        assert all(isinstance(value, str) for value in pod["rayStartParams"].values())

    assert cluster["rayVersion"] == locked()["ray"]
    assert isinstance(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"], str)


def test_the_ray_job_has_the_nodes_and_devices_of_its_config(job: dict[str, Any]) -> None:
    program, command, path, *overrides = job["spec"]["entrypoint"].split()
    assert (program, command) == ("megarl", "train")
    placement = load_config(PPOConfig, path, overrides).placement
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert (workers["replicas"], int(gpus)) == (placement.num_nodes, placement.devices_per_node)
