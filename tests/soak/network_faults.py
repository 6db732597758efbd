"""Faults of the network and of nodes in a training run over several nodes, each printed as a row of a table.

    python -m tests.soak.network_faults                    # all faults, about a minute each
    python -m tests.soak.network_faults --recovery partition_20s ...
    python -m tests.soak.network_faults --no-spare power_off    # continues with one replica, equal up to rounding

The driver is on node 0, two replicas of the actor are on two of the other three nodes, and one is spare. With
--recovery the run recovers in place (`recovery.enabled`). A run that a fault ends is started again with the
same command. In each case the trained weights must be bitwise identical to those of the undisturbed run.
tests/soak/recovery.py has random faults of reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import safetensors.torch

from tests.integration.launched_run import save_sft_run
from tests.multinode.nodes import Link, Network, Node, network, own_environment
from tests.multinode.ray_nodes import RayNodes, ray_nodes
from tests.soak import out_of_memory

_STEPS = 80
_EVERY = 10
_SETTINGS = (
    f"trainer.total_steps={_STEPS}",
    f"checkpoint.every_steps={_EVERY}",
    "placement.num_nodes=2",
    "placement.devices_per_node=1",
    "trainer.phase_time_limit_s=60",
)
_BEFORE = 12  # steps before the fault
_LIMIT_S = 300.0
_RANK_BYTES = 300 * 2**20
_RANK_START_S = 5.0
_START_LIMIT_S = 60.0
_ROUNDING = 1e-3  # the rounding errors of another number of replicas, which Adam amplifies in each step
_NUM_CPUS = (0, 2, 2, 2)  # none on the node of the driver, so that the ranks are on others


class Scene(NamedTuple):
    """A run in progress. `trainers`: the numbers of the nodes that train, in the order of their ranks."""

    net: Network
    trainers: tuple[int, int]


Fault = Callable[[Scene], None]


def _for_seconds(seconds: float) -> Fault:
    def fault(scene: Scene) -> None:
        scene.net.cut(scene.trainers[1])
        time.sleep(seconds)
        scene.net.heal()

    return fault


def _cut(scene: Scene) -> None:
    scene.net.cut(scene.trainers[1])


def _link_down(scene: Scene) -> None:
    scene.net.nodes[scene.trainers[1]].link_down()


def _power_off(scene: Scene) -> None:
    scene.net.nodes[scene.trainers[1]].power_off()


def _deaf(scene: Scene) -> None:
    """The node sends, but receives nothing."""
    lost = scene.trainers[1]
    scene.net.set_links([Link(number, lost, loss=1.0) for number in range(4) if number != lost])


def _dumb(scene: Scene) -> None:
    """The node receives, but nothing that it sends arrives."""
    lost = scene.trainers[1]
    scene.net.set_links([Link(lost, number, loss=1.0) for number in range(4) if number != lost])


def _between_trainers(scene: Scene) -> None:
    one, other = scene.trainers
    scene.net.set_links([Link(one, other, loss=1.0), Link(other, one, loss=1.0)])


def _all_links(loss: float, delay_s: float) -> Fault:
    def fault(scene: Scene) -> None:
        numbers = range(4)
        scene.net.set_links([Link(one, other, loss, delay_s) for one in numbers for other in numbers])

    return fault


def _kill_raylet(scene: Scene) -> None:
    scene.net.nodes[scene.trainers[1]].kill_all("raylet")


def _kill_rank_twice(scene: Scene) -> None:
    """Kill the rank on a node, and the next one that starts there, unless the first loss has ended the run."""
    _rank_on(scene).kill()
    with suppress(TimeoutError):
        time.sleep(_RANK_START_S)
        _rank_on(scene).kill()


def _kill_rank(scene: Scene) -> None:
    _rank_on(scene).kill()


def _exhaust_memory(scene: Scene) -> None:
    assert out_of_memory.exhaust(_rank_on(scene).pid)


def _rank_on(scene: Scene) -> psutil.Process:
    """Wait for the rank on the second node, which has more memory than other processes of Ray.

    Raises:
        TimeoutError: None has started.
    """
    end_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end_s:
        sizes = _sizes_of_workers(scene.net.nodes[scene.trainers[1]])
        if sizes and max(sizes.values()) > _RANK_BYTES:
            return max(sizes, key=lambda process: sizes[process])
        time.sleep(0.05)
    raise TimeoutError


def _sizes_of_workers(node: Node) -> dict[psutil.Process, int]:
    """Return the resident memory of Ray's workers on a node, in bytes."""
    sizes = {}
    for process in node.processes():
        with suppress(psutil.NoSuchProcess):
            if "ray::" in " ".join(process.cmdline()):
                sizes[process] = process.memory_info().rss
    return sizes


def _disk_full(scene: Scene) -> None:
    fill = ["sh", "-c", "cat /dev/zero > /tmp/full || true"]
    scene.net.nodes[scene.trainers[1]].run(fill, own_environment())


FAULTS: Mapping[str, tuple[str, Fault]] = {
    "nothing": ("none", lambda scene: None),
    "partition_5s": ("a node is cut off for 5 s", _for_seconds(5)),
    "partition_20s": ("a node is cut off for 20 s", _for_seconds(20)),
    "cut": ("a node is cut off for good", _cut),
    "link_down": ("the interface of a node goes down", _link_down),
    "power_off": ("a node loses power", _power_off),
    "deaf": ("a node sends, but receives nothing", _deaf),
    "dumb": ("a node receives, but sends nothing", _dumb),
    "between_trainers": (
        "two nodes no longer reach each other, but the head reaches both",
        _between_trainers,
    ),
    "loss": ("5 % of all frames are lost", _all_links(0.05, 0.0)),
    "delay": ("every frame takes 100 ms", _all_links(0.0, 0.1)),
    "raylet": ("the raylet of a node is killed", _kill_raylet),
    "rank": ("a rank is killed", _kill_rank),
    "memory": ("the kernel kills a rank, because memory is exhausted", _exhaust_memory),
    "bad_node": ("a rank on the same node dies twice", _kill_rank_twice),
    "disk_full": ("the disk of a node is full", _disk_full),
}


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        status: The exit code of the first command.
        next_s: Seconds from the fault to the next completed step; None if there was none.
        end_s: Seconds from the fault to the end of the first command; None if it completed all steps.
        page: The first line of the failure page, if any.
        repeated: The steps that were repeated after the restart.
        recoveries: The number of recoveries in place.
        is_equal: Whether the trained weights are those of the undisturbed run.
    """

    status: int
    next_s: float | None
    end_s: float | None
    page: str
    repeated: int
    recoveries: int
    is_equal: bool


@contextmanager
def _train(
    net: Network, ray: RayNodes, config: Path, log: Path, settings: Sequence[str]
) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as output:
        process = net.nodes[0].start(
            [sys.executable, "-m", "megarl", "train", str(config), *_SETTINGS, *settings],
            ray.environment,
            output,
            stdin=subprocess.DEVNULL,
            stdout=output,
        )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()


def _num_steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _num_recoveries(run: Path) -> int:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return round(sum(json.loads(line).get("recovery/num_recoveries", 0.0) for line in lines))


def _trainers(net: Network) -> tuple[int, int]:
    """Find the nodes that have a worker of the actor, by their largest processes."""
    sizes = {node.number: max(_sizes_of_workers(node).values(), default=0) for node in net.nodes[1:]}
    one, other = sorted(sizes, key=lambda number: sizes[number])[-2:]
    return one, other


def _are_equal(weights: bytes, wanted: bytes, tolerance: float) -> bool:
    """Return whether two files of weights are equal bitwise or within a relative tolerance per tensor."""
    if weights == wanted or not tolerance:
        return weights == wanted
    of_run, undisturbed = safetensors.torch.load(weights), safetensors.torch.load(wanted)
    return all(
        float((of_run[name] - tensor).norm() / tensor.norm()) < tolerance
        for name, tensor in undisturbed.items()
    )


def run(
    fault: Fault,
    folder: Path,
    wanted: bytes | None,
    settings: Sequence[str],
    has_spare: bool = True,
) -> tuple[Outcome, bytes]:
    """Train with one fault after some steps, and start the run again if it ends before its last one."""
    config = save_sft_run(folder)
    log = folder / "driver.log"
    num_cpus = _NUM_CPUS if has_spare else _NUM_CPUS[:-1]
    with network(len(num_cpus), [folder]) as net, ray_nodes(net, num_cpus, folder) as ray:
        with _train(net, ray, config, log, settings) as process:
            while _num_steps(folder / "run") < _BEFORE:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            begin_s = time.monotonic()
            fault(Scene(net, _trainers(net)))
            completed = _num_steps(folder / "run")
            next_s = None
            while process.poll() is None and time.monotonic() < begin_s + _LIMIT_S:
                if next_s is None and _num_steps(folder / "run") > completed:
                    next_s = time.monotonic() - begin_s
                time.sleep(0.05)
            status = process.poll()
            assert status is not None, f"no end within {_LIMIT_S:g} s\n{log.read_text()}"
            end_s = None if status == 0 else time.monotonic() - begin_s
        repeated = 0
        if status != 0:
            saved = [int(path.name.split("_")[1]) for path in (folder / "run" / "checkpoints").glob("step_*")]
            repeated = _num_steps(folder / "run") - max(saved, default=0)
            net.heal()
            with _train(net, ray, config, folder / "again.log", settings) as process:
                assert process.wait() == 0, (folder / "again.log").read_text()
            assert 0 <= repeated < _EVERY
    weights = (folder / "run" / "huggingface" / "model.safetensors").read_bytes()
    page = next((line for line in log.read_text().splitlines() if line.startswith("what")), "")
    is_equal = wanted is None or _are_equal(weights, wanted, 0.0 if has_spare else _ROUNDING)
    recoveries = _num_recoveries(folder / "run")
    page = page.removeprefix("what").strip()
    return Outcome(status, next_s, end_s, page, repeated, recoveries, is_equal), weights


def main(faults: Sequence[str], settings: Sequence[str], has_spare: bool) -> int:
    undisturbed: bytes | None = None
    unequal = []
    print(
        "| fault | outcome | next step after s | end after s | steps repeated | recoveries | weights equal |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in ["nothing", *faults]:
        description, fault = FAULTS[name]
        with tempfile.TemporaryDirectory() as folder:
            outcome, weights = run(fault, Path(folder), undisturbed, settings, has_spare)
        undisturbed = undisturbed or weights
        ended = "completes" if outcome.status == 0 else f"ends: {outcome.page}"
        times = [f"{each:.0f}" if each is not None else "" for each in (outcome.next_s, outcome.end_s)]
        equal = "yes" if outcome.is_equal else "NO"
        row = [
            description,
            ended,
            *times,
            str(outcome.repeated) if outcome.status else "",
            str(outcome.recoveries),
            equal,
        ]
        print("|", " | ".join(row), "|", flush=True)
        unequal += [] if outcome.is_equal else [name]
    return 1 if unequal else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.soak.network_faults")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--no-spare", action="store_true", help="two nodes only, and fewer replicas")
    parser.add_argument("--recovery", action="store_true", help="recover in place")
    parsed = parser.parse_args()
    of_recovery = ["recovery.enabled=true"] if parsed.recovery or parsed.no_spare else []
    of_recovery += ["recovery.allow_fewer_replicas=true"] if parsed.no_spare else []
    named = parsed.faults or [name for name in FAULTS if name != "nothing"]
    sys.exit(main(named, of_recovery, not parsed.no_spare))
