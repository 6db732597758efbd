"""Test the failures of docs/troubleshooting.md that no other test produces. The others are compared where
they are produced."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.batch.data_proto import DataProto
from megarl.cli.main import main
from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import last_page
from megarl.config.load import dump_config
from megarl.config.schema import (
    ActorConfig,
    Device,
    DType,
    ModelConfig,
    OptimConfig,
    PPOConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
)
from megarl.controller.dispatch import Dispatch
from megarl.controller.errors import WorkerError
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import InsufficientResourcesError, RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, Worker, register
from megarl.tracking.run_files import FAILURE_FILE
from tests import fork_server
from tests.failure_pages import check_documented, documented_pages, last_page_of
from tests.integration.tiny_run import save_inputs

ROOM = 256 * 2**20
BATCH = DataProto.from_dict({"x": torch.zeros(12)}, {"uid": [f"0-{row // 2}" for row in range(12)]})


class UnluckyWorker(Worker):
    @register(Dispatch.MEGATRON_MESH)
    def update(self, batch: DataProto) -> DataProto:
        """Allocate a GiB when the process may allocate only another quarter of one."""
        used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024  # type: ignore[union-attr]
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))

        try:
            return DataProto.from_dict({"x": torch.zeros(4 * ROOM, dtype=torch.uint8)})
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    @register(Dispatch.MEGATRON_MESH)
    def log_probs(self, batch: DataProto) -> DataProto:
        os.kill(os.getpid(), signal.SIGKILL)
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def listen(self, port: int) -> None:
        torch.distributed.TCPStore("127.0.0.1", port, is_master=True)


@pytest.fixture(scope="module")
def unlucky(ray_cluster: None) -> Iterator[RayWorkerGroup]:
    pool = RayResourcePool([1], use_gpu=False, name="actor")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(UnluckyWorker), role="actor")
    yield group
    group.shutdown()
    pool.release()


def test_memory_of_the_node(unlucky: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        unlucky.call(UnluckyWorker.update, BATCH)
    check_documented("host-memory", last_page(caught.value, "train", RunContext(PPOConfig())))


def test_a_port_that_is_taken(unlucky: RayWorkerGroup) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(WorkerError) as caught:
            unlucky.call(UnluckyWorker.listen, taken.getsockname()[1])
    check_documented("port-taken", last_page(caught.value, "train", RunContext(PPOConfig())))


def test_a_process_that_is_killed(unlucky: RayWorkerGroup) -> None:
    """Must be the last test of the group, which has no process afterwards."""
    unlucky.call(UnluckyWorker.listen, 0)  # the driver learns the worker's location
    with pytest.raises(WorkerError) as caught:
        unlucky.call(UnluckyWorker.log_probs, BATCH)
    check_documented("worker-killed", last_page(caught.value, "train", RunContext(PPOConfig())))


def test_rays_memory_monitor(forked_processes: None) -> None:
    command = [*fork_server.PYTHON, "-m", "tests.integration.memory_monitor"]
    check_documented(
        "memory-monitor", subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )


def test_devices_that_are_not_there(ray_cluster: None) -> None:
    with pytest.raises(InsufficientResourcesError) as caught:
        RayResourcePool([8, 8], name="actor").bundles()
    check_documented("too-few-devices", f"megarl train: {caught.value}")


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    save_inputs(tmp_path)
    weights = load_file(file := tmp_path / "policy" / "model.safetensors")

    # So large that the products of queries and keys overflow float32.
    grown = {
        name: weight * 1e24 if name.endswith(("q_proj.weight", "k_proj.weight")) else weight
        for name, weight in weights.items()
    }
    save_file(grown, file, {"format": "pt"})
    config = SFTConfig(
        model=ModelConfig(path=str(tmp_path / "policy"), dtype=DType.float32),
        data=SFTDataConfig(train_files=[str(tmp_path / "sft.parquet")], max_length=16),
        actor=ActorConfig(optim=OptimConfig(lr=1.0)),
        trainer=SFTTrainerConfig(total_steps=3, samples_per_step=8, output_dir=str(tmp_path / "run")),
        device=Device.cpu,
    )
    dump_config(config, tmp_path / "run.yaml")

    return tmp_path / "run.yaml"


def test_a_loss_that_is_not_a_number(forked_processes: None, sft: Path) -> None:
    """Run the whole command to its exit status; the file has the printed page, and the next start removes
    it."""
    ended = subprocess.run(
        [*fork_server.PYTHON, "-m", "megarl", "train", str(sft)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stderr
    page = last_page_of(ended.stderr)
    assert len(page.splitlines()) <= 30
    check_documented("diverged", page)
    written = (sft.parent / "run" / FAILURE_FILE).read_text()
    assert "Traceback (most recent call last)" in written
    assert written.endswith(f"{page}\n")


def test_a_disk_that_is_full(sft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """/dev/full returns the kernel's own error to every writer."""
    (output_dir := sft.parent / "run").mkdir()
    (output_dir / ".config.yaml.partial").symlink_to("/dev/full")
    (output_dir / f".{FAILURE_FILE}.partial").symlink_to("/dev/full")
    assert main(["train", str(sft)]) == 1
    said = capsys.readouterr().err
    assert f"{FAILURE_FILE} could not be written: [Errno 28] No space left on device" in said
    check_documented("disk-full", last_page_of(said))


def test_every_page_of_the_document_is_made_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    made = set(re.findall(r'check_documented\(\s*"([\w-]+)"', tests))
    assert made == documented_pages()
