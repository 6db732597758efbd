"""The results of `megarl doctor` for given facts, and probes that find real faults."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console
from safetensors.torch import save_file

from megarl.cli.inspect.doctor import table
from megarl.config.finding import Finding, Status, doubtful, good, worst, wrong
from megarl.config.roles import model_roles
from megarl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    DType,
    EngineConfig,
    Layers,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PolicyLossConfig,
    PPOConfig,
    SFTConfig,
)
from megarl.config.versions import REQUIRED, SGLANG, SGLANG_CPU
from megarl.controller.node_resources import ClusterReport, NodeReport, NodeResources, here, inspect_cluster
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.doctor import agents_and_judges, devices, inputs, machine, network, software, storage, texts
from megarl.doctor import ray_cluster as ray_checks
from megarl.doctor.checks import read_subject
from megarl.doctor.run_inputs import ExaminedRun
from megarl.doctor.software import tested_versions
from megarl.models.families import read_architecture
from megarl.plan.placement.plan import plan_placement
from megarl.weights.manifest import manifest_of
from tests.unit.config.folders import model_folder, ppo_values, write_yaml
from tests.unit.data.chats import character_tokenizer
from tests.unit.plan.placement.test_memory import EVERY_ROLE, SIZE, config

GIB = 2**30
H100 = (
    "0, GPU-5d3a6c1e-0b7f, NVIDIA H100 80GB HBM3, 580.65.06, 81559, {used}\n"
    "1, GPU-5d3af9c2-77aa, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4\n"
)
L4 = "2, GPU-90b1c2d3-1111, NVIDIA L4, 580.65.06, 23034, 4\n"
OVERVIEW = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |"


def only(results: object) -> Finding:
    (finding,) = results  # type: ignore[misc]
    return finding


# Versions


def test_a_library_of_a_wrong_version_is_named_with_the_command_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(software.judge(software.probe(), SGLANG)).status is Status.ok
    info = tmp_path / "ray-1.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 1.13.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fault = only(software.judge(software.probe(), SGLANG))
    assert fault.status is Status.error
    assert fault.message.startswith("ray 1.13.0 is outside >=2.60,<3")
    assert "pip install 'ray[default]>=2.60,<3'" in (fault.hint or "")


def test_versions_beyond_those_that_were_tested_are_a_warning() -> None:
    found = software.probe()
    tested = tested_versions()
    assert only(software.judge(found, SGLANG)).message.endswith(": tested")

    # the second is the same release
    newer = {"numpy": "2.999.1", "transformers": f"{tested['transformers'][1]}.post1"}
    warning = only(
        software.judge(replace(found, python="3.13.2", versions={**found.versions, **newer}), SGLANG)
    )
    assert warning.status is Status.warning
    of_python, of_numpy = ("(tested {} to {})".format(*tested[name]) for name in ("python", "numpy"))
    assert warning.message.endswith(f": untested with python 3.13 {of_python}, numpy 2.999.1 {of_numpy}")
    assert set(newer) <= set(tested)
    ours = {Requirement(name).name for name in REQUIRED | SGLANG | SGLANG_CPU}
    assert set(tested) == {*ours, "python"}  # of all that the wheel installs, both ends


def test_libraries_that_are_built_for_each_other() -> None:
    found = software.probe()
    on_cpu = replace(
        found,
        versions={**found.versions, "torch": "2.14.1.post1"},
        requires={"sglang": {"torch": "==2.14.1"}},
    )
    assert only(software.judge(on_cpu, SGLANG)).status is Status.ok  # make test-wheel runs such environments
    other_torch = replace(on_cpu, versions={**on_cpu.versions, "sglang-kernel": "0.4.7"})
    fault = only(software.judge(other_torch, SGLANG))
    assert "is built for torch==2.14.1, but torch 2.14.1.post1 is installed" in fault.message
    absent = software.Installed(python="3.10.1", versions={**found.versions, "sglang": None})
    python, sglang = software.judge(absent, SGLANG)
    assert python.message == "Python 3.10.1 is not >=3.12"
    assert sglang.message == "sglang is not installed"
    assert not [each for each in software.judge(absent, {}) if "sglang" in each.message]


# GPUs


def test_gpus_of_a_good_node() -> None:
    found = devices.parse(H100.format(used=4), OVERVIEW, "13.0")
    assert only(devices.judge(found, needed=2, wanted=True, peak=70 * GIB)).status is Status.ok
    assert devices.visible(found, "1").gpus == found.gpus[1:]
    assert devices.visible(found, "").gpus == ()
    assert only(devices.judge(devices.Gpus(), needed=8, wanted=False)).status is Status.ok


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", [0]),
        ("2,0", [2, 0]),
        ("7", []),
        ("0,7,1", [0]),
        ("1,1", []),
        (" 1, 02", [1, 2]),
        ("GPU-90b1c2d3-1111", [2]),
        ("GPU-9,GPU-5d3a6", [2, 0]),
        ("GPU-9,GPU-5d3a,GPU-5d3a6", [2]),  # the second is the beginning of two
        ("GPU-9,0", [2]),
        ("GPU-9,GPU-90b1", []),
        ("GPU-ffff", []),
    ],
)
def test_visible_gpus_are_those_of_cuda(setting: str | None, indices: list[int]) -> None:
    found = devices.visible(devices.parse(H100.format(used=4) + L4, OVERVIEW, "13.0"), setting)
    assert [gpu.index for gpu in found.gpus] == indices


def test_a_mig_instance_does_not_have_the_memory_of_its_gpu() -> None:
    two = devices.parse(H100.format(used=4), OVERVIEW, "13.0")
    one = replace(two, gpus=two.gpus[:1])
    for found, setting, name in (
        (two, "MIG-GPU-5d3af9c2-77aa/1/0", "MIG instance of NVIDIA H100 80GB HBM3"),
        (one, "MIG-c6d4f1ef-42e4", "MIG instance of NVIDIA H100 80GB HBM3"),
        (two, "MIG-c6d4f1ef-42e4", "MIG instance of a GPU"),
    ):
        seen = devices.visible(found, setting)
        assert [(gpu.name, gpu.memory) for gpu in seen.gpus] == [(name, 0)]
        # Whether the plan fits is not known.
        assert only(devices.judge(seen, needed=1, wanted=True, peak=90 * GIB)).status is Status.ok


def test_memory_that_is_not_known_hides_no_memory_that_is_too_small() -> None:
    found = devices.parse(H100.format(used=4) + L4, OVERVIEW, "13.0")
    gpus = (replace(found.gpus[0], memory=0), found.gpus[2])
    kinds, fault = devices.judge(replace(found, gpus=gpus), needed=2, wanted=True, peak=70 * GIB)
    assert fault.message == "the plan needs 70.0 GiB on one GPU, which has 22.5 GiB"
    assert "different kinds" in kinds.message


@pytest.mark.parametrize(
    ("used", "cuda", "needed", "peak", "status", "said"),
    [
        (4, "13.0", 8, 0, Status.error, "this machine has 2 GPUs, but the placement needs 8 per node"),
        (
            4,
            "14.1",
            2,
            0,
            Status.error,
            "torch is built for CUDA 14.1, but driver 580.65.06 supports CUDA 13.0 at most",
        ),
        (4, None, 2, 0, Status.error, "torch is built without CUDA"),
        (9000, "13.0", 2, 0, Status.warning, "GPU 0 has 8.8 GiB of 79.6 GiB in use"),
        (4, "13.0", 2, 90 * GIB, Status.error, "the plan needs 90.0 GiB on one GPU, which has 79.6 GiB"),
    ],
)
def test_faults_of_gpus(
    used: int, cuda: str | None, needed: int, peak: int, status: Status, said: str
) -> None:
    fault = only(
        devices.judge(
            devices.parse(H100.format(used=used), OVERVIEW, cuda), needed=needed, wanted=True, peak=peak
        )
    )
    assert (fault.status, fault.message) == (status, said)


def test_a_driver_of_a_cluster_needs_no_gpu() -> None:
    found = only(devices.check(ExaminedRun(ray_address="10.0.0.1:6379"), devices.Gpus()))
    assert (found.status, found.message) == (
        Status.ok,
        "none on this machine: the run uses those of the cluster's nodes",
    )


def test_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho \"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA "
        'driver."\nexit 9\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fault = only(devices.judge(devices.probe(), needed=1, wanted=True))
    assert fault.status is Status.error
    assert "couldn't communicate with the NVIDIA driver" in fault.message


# The machine


def test_shared_memory_of_a_container() -> None:
    needed = 512 * 2**20
    fault = machine.judge_shared_memory("/dev/shm", total=64 * 2**20, free=64 * 2**20, needed=needed)
    assert fault.status is Status.error
    assert "--shm-size=1g" in (fault.hint or "")
    assert (
        machine.judge_shared_memory("/dev/shm", total=GIB, free=needed - 1, needed=needed).status
        is Status.warning
    )
    assert machine.judge_shared_memory("/dev/shm", total=GIB, free=needed, needed=needed).status is Status.ok


def test_a_low_limit_of_open_files_is_seen() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        too_few = only(machine.open_files(ExaminedRun()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert (too_few.status, too_few.facts["soft"]) == (Status.error, 512)
    assert "ulimit -n 65536" in (too_few.hint or "")
    assert machine.judge_open_files(2048, 4096).status is Status.warning
    assert machine.judge_open_files(65536, 65536).status is Status.ok


def test_memory_against_the_plan() -> None:
    assert machine.judge_memory(total=100, available=90, planned=80).status is Status.ok
    assert machine.judge_memory(total=100, available=70, planned=80).status is Status.warning
    assert machine.judge_memory(total=100, available=70, planned=101).status is Status.error


def test_memory_of_the_host_for_what_leaves_its_gpus() -> None:
    """The actor and the critic have 14 bytes per element, the reference has 2."""
    run = config(PlacementStrategy.fully_collocate)
    subject = ExaminedRun(config=run, plan=plan_placement(run), architectures=EVERY_ROLE, num_gpus=4)
    planned = only(machine.memory(subject)).facts["planned"]

    # the critic's head
    assert planned - subject.processes_here * machine.PROCESS_BYTES == pytest.approx(
        (14 + 14 + 2) * SIZE, rel=0.08
    )


def test_threads_against_cores() -> None:
    assert machine.judge_threads(None, cores=2, processes=5, use_gpu=False).status is Status.ok
    shared = machine.judge_threads(None, cores=4, processes=5, use_gpu=False, side_by_side=[1, 2, 8])
    assert (shared.status, shared.message.split(",")[0]) == (Status.ok, "1 to 4 per process")
    fault = machine.judge_threads("8", cores=16, processes=4, use_gpu=False)
    assert (fault.status, fault.message) == (
        Status.warning,
        "OMP_NUM_THREADS=8 in 4 processes is 32 threads on 16 cores",
    )
    assert "OMP_NUM_THREADS=4" in (fault.hint or "")
    assert machine.judge_threads("many", cores=2, processes=1, use_gpu=False).status is Status.error


def test_a_clock_that_nothing_keeps_right_matters_between_nodes() -> None:
    synchronized, max_error_s = machine.probe_clock()

    # a container may forbid to ask
    assert (synchronized, max_error_s) == (None, None) or (max_error_s is not None and max_error_s >= 0)
    assert machine.judge_clock(False, 16.0, num_nodes=1).status is Status.ok
    assert machine.judge_clock(False, 16.0, num_nodes=2).status is Status.warning
    assert machine.judge_clock(True, 0.004, num_nodes=2).message == "synchronized by NTP within 4 ms"


def test_variables_left_over_from_a_search_for_a_fault() -> None:
    assert only(machine.judge_environment({"NCCL_P2P_DISABLE": "0"})).status is Status.ok
    fault = only(machine.judge_environment({"CUDA_LAUNCH_BLOCKING": "1"}))
    assert (fault.status, fault.hint) == (
        Status.warning,
        "unset CUDA_LAUNCH_BLOCKING, unless you are debugging",
    )
    assert (
        "SGLang"
        in only(machine.judge_environment({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})).message
    )


# The checkpoint folder


def test_the_disk_is_written_and_nothing_is_left(tmp_path: Path) -> None:
    disk = storage.probe(tmp_path / "not" / "there" / "yet", sample_bytes=2**20)
    assert (disk.folder, disk.error, disk.renames) == (str(tmp_path), None, True)
    assert disk.speed > 0
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fault = only(
        storage.judge(storage.probe(tmp_path / "file" / "checkpoints", 2**20), num_nodes=1, one=0, most=0)
    )
    assert fault.status is Status.error
    assert "cannot be written: Not a directory" in fault.message
    assert "checkpoint.dir" in (fault.hint or "")


@pytest.mark.parametrize(
    ("kind", "free", "num_nodes", "speed", "status", "said"),
    [
        ("ext4", 30 * GIB, 1, GIB, Status.ok, "3 checkpoints of 10.0 GiB"),
        ("ext4", 29 * GIB, 1, GIB, Status.warning, "contain up to 3 checkpoints of 10.0 GiB"),
        ("ext4", 9 * GIB, 1, GIB, Status.error, "has 9.0 GiB free, but one checkpoint needs 10.0 GiB"),
        ("nfs4", 30 * GIB, 1, GIB, Status.warning, "slow for many writers"),
        ("ext4", 30 * GIB, 4, GIB, Status.warning, "local to this node, but 4 nodes write to it"),
        ("lustre", 30 * GIB, 4, GIB, Status.ok, "lustre"),
        ("overlay", 30 * GIB, 1, GIB, Status.warning, "lost with the container"),
        ("ext4", 30 * GIB, 1, 2**20, Status.warning, "171 minutes"),
    ],
)
def test_room_and_speed_for_three_checkpoints(
    kind: str, free: int, num_nodes: int, speed: int, status: Status, said: str
) -> None:
    disk = storage.Disk(folder="/runs", kind=kind, total=100 * GIB, free=free, speed=speed)
    found = only(storage.judge(disk, num_nodes=num_nodes, one=10 * GIB, most=3))
    assert found.status is status
    assert said in found.message


# The network


def test_a_port_in_use_is_named_with_its_user() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        subject = ExaminedRun()
        purpose = network.needed_ports(subject, {"MASTER_PORT": str(number)})[number]
        fault = network.judge_port(number, purpose, network.user_of(number))

    assert fault.status is Status.error
    assert f"(pid {os.getpid()}, user " in fault.message
    assert network.judge_port(number, purpose, network.user_of(number)).status is Status.ok
    assert network.needed_ports(subject, {"MASTER_PORT": "29500", "RANK": "3"}) == {}


def test_a_rank_whose_peer_never_comes_is_not_waited_for_and_the_interface_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    alone = network.start_rank(
        "gloo", 0, ["2", "127.0.0.1", str(port), "0.5"], {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, tmp_path
    )
    error = network.wait_for_ranks([alone], tmp_path, limit_s=120)
    assert error is not None
    assert error.startswith("rank 0: ")
    assert "imed out" in error
    fault = network.judge_loopback("gloo", 2, "lo", ("eth0", "lo"), 0.0, error)
    assert fault.status is Status.error
    assert fault.message.startswith(
        "gloo all-reduce between 2 ranks over lo (GLOO_SOCKET_IFNAME) failed: rank 0: "
    )
    assert (
        "set GLOO_SOCKET_IFNAME on every node to the interface of the cluster's network, one of eth0, lo"
        in (fault.hint or "")
    )


def test_ranks_that_hang_are_given_up(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as hung:
        assert network.wait_for_ranks([hung], tmp_path, limit_s=0.2) == "no answer within 0.2 s"
        hung.kill()


def test_interfaces_as_nccl_reads_them() -> None:
    there = ("eth0", "ib0", "lo")
    assert not [
        name
        for name in (None, "ib0", "ib", "=ib0", "^docker", "bond0,ib0")
        if network.judge_interface("nccl", name, there)
    ]
    fault = network.judge_interface("gloo", "bond0", there)
    assert fault is not None
    assert "eth0, ib0, lo" in (fault.hint or "")


# Ray


@pytest.fixture
def wide() -> PPOConfig:
    """A run of more processes than the tests' Ray has CPUs."""
    return PPOConfig(
        placement=PlacementConfig(strategy=PlacementStrategy.stand_alone),
        critic=CriticConfig(parallel=ParallelConfig(data_parallel_size=64)),
    )


def test_a_cluster_with_too_few_cpus(ray_cluster: None, wide: PPOConfig) -> None:
    report = inspect_cluster(limit_s=60, paths=[__file__, "/not/there"])
    assert [each.unseen for each in report.nodes] == [("/not/there",)]
    assert all(each.limits is not None and each.limits[0][0] > 0 for each in report.nodes)
    assert all(node.software == here() for node in report.nodes)
    assert [each.status for each in ray_cluster_findings(report)] == [Status.ok]
    pools = list(ResourcePoolManager.of_plan(plan_placement(wide), use_gpu=False).resource_pools.values())
    fault = ray_checks.judge_resources(report, pools)
    assert fault.status is Status.error
    assert "pool 'critic': 0 GPU, 64 CPU on node 0 of the plan" in fault.message
    assert "node 127.0.0.1: 0 GPU, 12 CPU" in fault.message
    assert "--num-cpus" in (fault.hint or "")


def ray_cluster_findings(report: ClusterReport) -> list[Finding]:
    return list(ray_checks.judge_nodes(report, here()))


def node(
    address: str, software: dict[str, str] | None = None, offset: float = 0.0, error: str | None = None
) -> NodeReport:
    return NodeReport(address, {"CPU": 8.0}, software or (None if error else here()), offset, 0.001, error)


def test_nodes_that_differ_are_dead_or_have_another_time() -> None:
    old = here() | {"python": "3.10.4"}
    nodes = (
        node("10.0.0.1"),
        node("10.0.0.2", old),
        node("10.0.0.3", offset=-7.0),
        node("10.0.0.4", error="No module named 'megarl'"),
    )
    whole = tuple(NodeResources(each.address, each.resources) for each in nodes)
    differs, absent, dead, skew = ray_cluster_findings(ClusterReport(nodes, whole, whole, ("10.0.0.9",)))
    assert (differs.status, differs.message) == (
        Status.error,
        f"node 10.0.0.2 has python 3.10.4, but this one has {here()['python']}",
    )
    assert (absent.status, absent.message) == (
        Status.error,
        "node 10.0.0.4 cannot start a worker: No module named 'megarl'",
    )
    assert (dead.status, dead.message) == (Status.warning, "node 10.0.0.9 of the cluster is dead")
    assert (skew.status, skew.message) == (
        Status.warning,
        "the clocks of 10.0.0.3 and 10.0.0.1 are 7.00 s apart",
    )


def test_another_nodes_limits_and_files_are_its_own() -> None:
    few = (64 * 2**20, 64 * 2**20), (512, 512)
    far = node("10.0.0.2")._replace(limits=few, unseen=("/models/policy", "/runs/.megarl-doctor-x"))
    assert list(ray_checks.judge_other_nodes([node("10.0.0.1")])) == []
    memory, files, model, checkpoints = ray_checks.judge_other_nodes([far])
    assert memory.message.startswith("node 10.0.0.2: /dev/shm has 64.0 MiB")
    assert files.message.startswith("node 10.0.0.2: a process may open 512 files")
    assert model.message == "node 10.0.0.2: /models/policy does not exist"
    assert "does not see files that this machine writes to /runs" in checkpoints.message


@pytest.mark.parametrize(
    ("asked", "statuses"),
    [(Layers.auto, [Status.warning, Status.ok]), (Layers.transformer_engine, [Status.warning, Status.error])],
)
def test_transformer_engine_without_its_compiled_part(
    asked: Layers, statuses: list[Status], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "transformer_engine").mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    run = PPOConfig(engine=EngineConfig(layers=asked), model=ModelConfig(path="m", dtype=DType.bfloat16))
    on_gpu = SimpleNamespace(config=run, architectures={}, use_gpu=True)
    found = list(software.layers(on_gpu))  # type: ignore[arg-type]
    assert [result.status for result in found] == statuses
    assert "transformer_engine_torch" in found[0].message
    on_cpu = SimpleNamespace(config=run, architectures={}, use_gpu=False)
    assert Status.warning not in [result.status for result in software.layers(on_cpu)]  # type: ignore[arg-type]


# What a run reads


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model whose tensors lie in two files."""
    folder = model_folder(tmp_path / "model", num_hidden_layers=1)
    (folder / "model.safetensors").unlink()
    tensors = {
        name: torch.zeros(meta.shape)
        for name, meta in manifest_of(read_architecture(str(folder)), torch.float32).items()
    }
    files = {name: f"{'one' if number % 2 else 'two'}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return folder


def judged(folder: Path) -> Finding:
    (role,) = model_roles(SFTConfig(model=ModelConfig(path=str(folder))))
    return inputs.judge_model(folder, "model.path", read_architecture(str(folder)), role)


def test_a_whole_model(shards: Path) -> None:
    found = judged(shards)
    assert (found.status, found.facts["files"]) == (Status.ok, 2)


def test_a_shard_cut_off_absent_a_pointer_or_of_another_shape(shards: Path) -> None:
    second = shards / "two.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-8])
    assert "two.safetensors: truncated or not a safetensors file, " in judged(shards).message
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in judged(shards).message
    save_file({"c": torch.zeros(64)}, second)
    assert (
        "two.safetensors: contains 'c', which model.safetensors.index.json maps to None"
        in judged(shards).message
    )
    second.write_bytes(whole)
    fields = json.loads((shards / "config.json").read_text()) | {"vocab_size": 102}
    (shards / "config.json").write_text(json.dumps(fields))
    assert "has shape (101, 48), but config.json implies (102, 48)" in judged(shards).message
    second.unlink()
    assert "two.safetensors: file is missing" in judged(shards).message
    assert "download it again" in (judged(shards).hint or "")


@pytest.mark.parametrize("place", ["../outside.safetensors", "/outside.safetensors", 3, None])
def test_an_index_that_names_no_file_of_its_folder(shards: Path, place: object) -> None:
    (shards / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": place}})
    )
    assert (
        f"maps model.norm.weight to {place!r}; only files in this folder are allowed"
        in judged(shards).message
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_model_that_may_not_be_read(shards: Path) -> None:
    (shards / "one.safetensors").chmod(0)
    assert "Permission denied" in judged(shards).message


def test_a_loss_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("while True: ...\n")
    loss = PolicyLossConfig(function=f"{tmp_path}/own.py:my_loss")
    (found,) = inputs.judge_functions(AlgorithmConfig(policy_loss=loss), limit_s=1.0)
    assert (found.check, found.status) == (inputs.FUNCTIONS, Status.error)
    assert f"{tmp_path}/own.py:my_loss: timed out after 1 s on two samples" in found.message
    assert list(inputs.judge_functions(AlgorithmConfig())) == []


def test_a_sampler_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Mine: sample = update = print\n")
    found = inputs.judge_sampler(f"{tmp_path}/own.py:Mine")
    assert (found.check, found.status) == (inputs.SAMPLER, Status.error)
    assert "is not a class with `state_dict`, `load_state_dict`" in found.message


def test_tools_that_do_not_end_loading_are_ended(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("while True: ...\n")
    agent = AgentConfig(tools=[f"{tmp_path / 'slow.py'}:price"])
    found, tools = agents_and_judges.judge_agent(PPOConfig(agent=agent), character_tokenizer(), limit_s=1.0)
    assert (found.check, found.status, tools) == (agents_and_judges.AGENT, Status.error, None)
    assert f"{tmp_path}/slow.py: timed out after 1 s in a first turn" in found.message


def test_rows_that_are_too_long() -> None:
    config = PPOConfig(data=DataConfig(train_files=["a.parquet"], max_prompt_length=4))
    assert texts.judge_rows(config, "data.train_files", "a.parquet", 7, [2]).status is Status.ok
    long = texts.judge_rows(config, "data.train_files", "a.parquet", 7, [2, 5])
    assert (long.status, long.facts["longer"]) == (Status.error, 1)
    assert "data.overlong=filter" in (long.hint or "")


# The whole


def test_what_is_wrong_with_a_configuration_is_found_and_the_rest_is_still_examined(tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    values["trainer"]["updates_per_step"] = 5
    subject, (fault,) = read_subject(write_yaml(tmp_path / "run.yaml", values), [], 0, None)
    assert fault.status is Status.error
    assert "cannot be divided into updates_per_step 5 mini-batches" in fault.message
    assert subject.plan is not None
    subject, (unknown, fault) = read_subject(str(tmp_path / "run.yaml"), ["trainer.nnodes=2"], 0, None)
    assert "use placement.num_nodes" in unknown.message
    assert "cannot be divided into updates_per_step 5 mini-batches" in fault.message
    assert subject.config is None


def test_the_worst_decides_and_a_hint_stands_under_its_line() -> None:
    results = [good("a", "fine"), doubtful("b", "slow", "wait"), wrong("c", "broken", "mend it")]
    assert [worst(results[:number]) for number in range(4)] == [
        Status.ok,
        Status.ok,
        Status.warning,
        Status.error,
    ]
    console = Console(width=60, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(results))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "ok       a  fine",
        "warning  b  slow",
        "            -> wait",
        "error    c  broken",
        "            -> mend it",
    ]
