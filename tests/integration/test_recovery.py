"""Test that a run which loses a trainer process in any phase ends like a run that loses none, bit by bit."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import psutil
import pytest
from fsspec.implementations.local import LocalFileSystem

from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    CurriculumConfig,
    CurriculumKind,
    KLConfig,
    KLWhere,
    OnNonFinite,
    ParallelConfig,
    PPOConfig,
    RecoveryConfig,
)
from megarl.roles.model_snapshots import ModelSnapshots
from megarl.roles.start import PPORoles
from megarl.trainers.ppo import PPOTrainer
from megarl.trainers.recovery import RecoveryLimitError
from tests import fork_server
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 4
LIMIT_S = 20.0
NODE_LIMIT_S = 40.0


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


def grpo(inputs: Path, folder: Path, **changes: Any) -> PPOConfig:
    return tiny_config(
        inputs,
        folder,
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
        ),
        actor={"parallel": ParallelConfig(tensor_parallel_size=2)},
        recovery=RecoveryConfig(enabled=True),
        data={"curriculum": CurriculumConfig(kind=CurriculumKind.learnability)},
        checkpoint=CheckpointConfig(at_end=True, asynchronous=False),
        trainer={"total_steps": STEPS, "updates_per_step": 2, "validate_every_steps": 2},
        **changes,
    )


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(run_ppo(grpo(inputs, tmp_path_factory.mktemp("grpo"))))


def killer(phases: dict[int, str], rank: int) -> Callable[[int | None, str, PPORoles], None]:
    """Kill a rank of the actor when the phase of each of these steps begins, and remove the step."""

    def look(now: int | None, begun: str, roles: PPORoles) -> None:
        if now is not None and phases.get(now) == begun:
            del phases[now]
            os.kill(roles.actor.group.pids[rank], signal.SIGKILL)

    return look


def test_a_run_that_loses_a_rank_in_each_step_ends_like_one_that_loses_none(
    inputs: Path, undisturbed: Outcome, tmp_path: Path
) -> None:
    """Each loss is in another phase, and its peer waits for the rank in a collective."""
    phases = {1: "gen", 2: "update_actor", 3: "update_weights", STEPS: "save_checkpoint"}
    config = grpo(inputs, tmp_path)
    config = replace(config, recovery=RecoveryConfig(enabled=True, max_restarts=len(phases)))
    finished = run_ppo(config, look_at_phase=killer(phases, rank=1))
    assert phases == {}  # a rank was killed in each of them
    assert Outcome(finished).difference(undisturbed) == []

    # The first line is the validation before the first step; the last step was complete when it was saved.
    lines = finished.metrics[1:]
    assert [line["recovery/num_recoveries"] for line in lines] == [1, 1, 1, 0]
    assert all(line["recovery/lost_s"] < LIMIT_S for line in lines)


def holders_of(rank: int) -> list[psutil.Process]:
    """Return the processes that hold snapshots in the Ray cluster of a rank, not those of other clusters."""
    raylet = psutil.Process(rank).environ()["RAY_RAYLET_PID"]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = (process.info["cmdline"] or [""])[0]
        with contextlib.suppress(psutil.NoSuchProcess):
            if title.startswith("ray::SnapshotHolder") and process.environ()["RAY_RAYLET_PID"] == raylet:
                found.append(process)
    return found


def test_without_copies_in_memory_the_run_continues_from_the_checkpoint(
    inputs: Path, undisturbed: Outcome, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that holds the snapshots is killed alone in step 1, and with a rank in step 4."""
    config = grpo(inputs, tmp_path)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=2))
    left = {1, 2, 4}

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if step not in left or phase != "update_weights":
            return
        left.remove(step)
        if step in (1, 4):
            holders = holders_of(roles.actor.group.pids[0])
            assert holders
            for holder in holders:
                holder.kill()
        if step in (2, 4):
            os.kill(roles.actor.group.pids[0], signal.SIGKILL)

    finished = run_ppo(config, look_at_phase=look)
    assert Outcome(finished).difference(undisturbed) == []
    assert not left
    assert "loaded the checkpoint of step 2, and repeat 1 completed step" in caplog.text
    restarted = [line.message for line in caplog.records if "restarted actor from" in line.message]
    assert [message.partition(" in ")[0] for message in restarted] == [
        "step 2: restarted actor from the snapshot of step 1",
        "step 4: restarted actor from the checkpoint of step 2",
    ]


def test_a_loss_before_the_first_step_is_repaired(
    inputs: Path,
    undisturbed: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank is lost before the first weight sync, and another one before the first snapshot."""
    make_steps, begin = PPOTrainer.steps, ModelSnapshots.begin
    left: list[PPORoles] = []

    def steps(trainer: PPOTrainer) -> Iterator[int]:
        left.append(trainer.roles)
        trainer.roles.actor.group.processes.ready.get()
        os.kill(trainer.roles.actor.group.pids[1], signal.SIGKILL)
        return make_steps(trainer)

    def begin_snapshot(snapshots: ModelSnapshots, step: int) -> None:
        if left:
            os.kill(left.pop().actor.group.pids[0], signal.SIGKILL)
        begin(snapshots, step)

    monkeypatch.setattr(PPOTrainer, "steps", steps)
    monkeypatch.setattr(ModelSnapshots, "begin", begin_snapshot)
    finished = run_ppo(grpo(inputs, tmp_path))
    assert Outcome(finished).difference(undisturbed) == []
    assert "step 0: restarted actor from the start of the run" in caplog.text
    assert caplog.text.count("lost: step 0") == 2


class GatedStorage(LocalFileSystem):
    """Object storage that accepts nothing until it is opened."""

    protocol = "gated"
    entered = threading.Event()
    opened = threading.Event()

    def put_file(self, *arguments: Any, **named: Any) -> None:
        self.entered.set()
        assert self.opened.wait(LIMIT_S * 20)
        super().put_file(*arguments, **named)


class Loss(NamedTuple):
    """A rank that is stopped when a phase of the driver begins, and killed a second later.

    A stopped rank ends no call, so that it is lost in `method`, the first call that it gets.
    """

    phase: str
    role: str
    method: str


LOSSES = {
    3: Loss("gen", "critic", "values"),
    4: Loss("gen", "actor", "log_probs"),
    5: Loss("adv", "critic", "update"),
    6: Loss("adv", "actor", "update"),
    7: Loss("update_weights", "actor", "send_weights"),
    8: Loss("begin_snapshot", "actor", "await_snapshot"),
    9: Loss("begin_snapshot", "critic", "await_snapshot"),
    10: Loss("testing", "critic", "save_is_written"),
    11: Loss("save_checkpoint", "actor", "save_is_written"),
}


def test_a_loss_in_any_phase_drops_what_ranks_do_in_the_background(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While each of these ranks is lost, a save cannot end, because its files are pipes that nobody reads; the
    upload of an earlier checkpoint, and the file of an earlier step's samples, cannot end either. At
    `begin_snapshot`, a snapshot is incomplete, too."""
    total = max(LOSSES) + 2
    fsspec.register_implementation("gated", GatedStorage, clobber=True)
    left = dict(LOSSES)
    of_run: list[PPORoles] = []

    def config(folder: Path, upload: str | None) -> PPOConfig:
        return tiny_config(
            inputs,
            folder,
            recovery=RecoveryConfig(enabled=True, max_restarts=len(LOSSES)),
            checkpoint=CheckpointConfig(every_steps=1, keep=3, save_hf=False, upload=upload),
            trainer={
                "total_steps": total,
                "updates_per_step": 2,
                "validate_every_steps": 5,
                "phase_time_limit_s": 2 * LIMIT_S,
            },
        )

    expected = Outcome(run_ppo(config(tmp_path / "undisturbed", None)))

    begin_save, begin_snapshot = CheckpointFolder.begin, ModelSnapshots.begin

    def begin_save_into_pipes(folder: CheckpointFolder, step: int) -> Path:
        partial = begin_save(folder, step)
        for role in ("actor", "critic") if min(LOSSES) - 1 <= step < max(LOSSES) else ():
            (partial / role).mkdir()
            os.mkfifo(partial / role / "__0_0.distcp")
        return partial

    def lose(step: int | None, phase: str) -> None:
        if step is None or step not in left or left[step].phase != phase:
            return
        loss = left.pop(step)
        partials = list((tmp_path / "run" / "checkpoints").glob(".step_*.partial"))
        assert [path.name[6:14] for path in partials] == [f"{step - 1:08d}"]
        assert GatedStorage.entered.is_set()
        assert not GatedStorage.opened.is_set()
        pid = getattr(of_run[0], loss.role).group.pids[0]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()

    def begin_snapshot_of(snapshots: ModelSnapshots, step: int) -> None:
        lose(step, "begin_snapshot")
        begin_snapshot(snapshots, step)

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        of_run[:] = [roles]
        lose(step, phase)
        if step == total:
            GatedStorage.opened.set()

    monkeypatch.setattr(CheckpointFolder, "begin", begin_save_into_pipes)
    monkeypatch.setattr(ModelSnapshots, "begin", begin_snapshot_of)
    finished = run_ppo(config(tmp_path / "run", f"gated://{tmp_path}/copies"), look_at_phase=look)

    lost = re.findall(r"^lost: step (\d+), node \S+: (\w+) rank 0 \(.*?\) in (\w+)", _messages(caplog), re.M)
    assert [(int(step), *loss) for step, *loss in lost] == [
        (step, loss.role, loss.method) for step, loss in LOSSES.items()
    ]
    # In its own call, a save fails; otherwise its owner is told.
    dropped = re.findall(r"^the checkpoint of step (\d+) was being written", _messages(caplog), re.MULTILINE)
    assert [int(step) for step in dropped] == [
        step - 1 for step, loss in LOSSES.items() if loss.method != "save_is_written"
    ]
    assert Outcome(finished).difference(expected) == []
    assert [path.name for path in sorted((tmp_path / "copies").glob("*"))][-1] == f"step_{total:08d}"


def _messages(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_losses_beyond_the_budget_end_the_run_and_are_listed(inputs: Path, tmp_path: Path) -> None:
    """A rank is lost in each attempt of a step."""
    config = grpo(inputs, tmp_path)
    config = replace(config, recovery=RecoveryConfig(enabled=True, max_restarts=1))

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if (step, phase) == (2, "update_actor"):
            os.kill(roles.actor.group.pids[0], signal.SIGKILL)

    with pytest.raises(RecoveryLimitError) as failed:
        run_ppo(config, look_at_phase=look)
    first, *losses = str(failed.value).splitlines()
    assert first == (
        "trainer processes were lost 2 times within 10 steps, more than recovery.max_restarts=1 allows:"
    )
    assert len(losses) == 2
    for loss in losses:
        assert re.match(r"  step 2, node 127.0.0.1: actor rank 0 \(node 127.0.0.1, pid \d+\) in ", loss)


def test_a_lost_node_is_replaced_by_a_spare_one_or_by_fewer_replicas(forked_processes: None) -> None:
    """Its snapshot is read from the copy on another node."""
    command = [*fork_server.PYTHON, "-m", "tests.integration.recovered_node"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # Ray repeats messages of the lost node's daemon on the output.
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"num_recoveries"'))
    assert found["difference"] == []
    assert found["num_recoveries"] == 1
    assert found["step_s"] < NODE_LIMIT_S

    # The second loss, without a spare node.
    fewer = found["fewer"]
    assert (fewer["status"], fewer["num_replicas"], fewer["steps"]) == (0, 2, [1, 2, 3, 4, 5])
    assert re.search("resumed from the snapshot in memory after step [34],", done.stdout)
    assert fewer["metrics"] < 1e-5
    assert fewer["weights"] < 1e-5


_LOSS = """
import os
from pathlib import Path

import torch
from megarl.algorithms.policy_losses import TokenLosses
from megarl.engine import platform

FOLDER = Path(__file__).parent
if os.environ.get("RANK") == "1":  # not in the driver, which reads the file too
    platform.PROBE_ON_CPU = (192, 200)  # this rank does fifty times as much as its peer


def loss(inputs, config):
    value = -inputs.advantages * (inputs.log_probs - inputs.old_log_probs).exp()
    done = FOLDER / f"done_{os.environ['RANK']}"
    if (FOLDER / "armed").exists() and not done.exists():
        done.touch()
        value = value * float("nan")
    return TokenLosses(value, torch.zeros_like(inputs.mask))
"""


def test_an_update_that_is_not_finite_is_repeated_and_a_slow_rank_is_named(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "loss.py").write_text(_LOSS)
    config = grpo(inputs, tmp_path / "run")
    loss = replace(config.algorithm.policy_loss, function=f"{tmp_path / 'loss.py'}:loss")
    optim = replace(config.actor.optim, on_nonfinite=OnNonFinite.recover)
    config = replace(
        config,
        algorithm=replace(config.algorithm, policy_loss=loss),
        actor=replace(config.actor, optim=optim),
    )

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if (step, phase) == (2, "gen"):
            (tmp_path / "armed").touch()

    finished = run_ppo(config, look_at_phase=look)
    assert [line.get("recovery/num_recoveries") for line in finished.metrics] == [None, 0, 1, 0, 0]
    assert all(math.isfinite(line["actor/grad_norm"]) for line in finished.metrics[1:])

    # Eight updates in a row, of which one step is repeated in new processes.
    slow = [line.message for line in caplog.records if "is slow" in line.message]
    assert len(slow) == 1
    assert slow[0].startswith("actor rank 1 (node 127.0.0.1, on CPU) is slow: it takes ")
    assert all(line["perf/slowest_rank_ratio/actor"] > 1.5 for line in finished.metrics[1:])


def test_a_stopped_rank_is_replaced_within_its_learned_limit(inputs: Path, tmp_path: Path) -> None:
    """SIGSTOP: the process exists, but its peer waits for it in a collective."""
    config = grpo(inputs, tmp_path)
    config = replace(config, recovery=RecoveryConfig(enabled=True, hang_factor=2.0))
    stopped: list[int] = []

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if (step, phase) == (3, "update_actor") and not stopped:
            stopped.append(roles.actor.group.pids[1])
            os.kill(stopped[0], signal.SIGSTOP)

    finished = run_ppo(config, look_at_phase=look)
    line = finished.metrics[3]
    assert line["recovery/num_recoveries"] == 1
    assert line["timing_s/step"] < config.trainer.phase_time_limit_s / 4
    (stacks,) = (tmp_path / "stacks").iterdir()
    text = stacks.read_text()
    assert "actor rank 1 (node 127.0.0.1): no answer from the process" in text
    assert "actor rank 0 (node 127.0.0.1, pid" in text
    assert "all_reduce" in text or "backward" in text or "forward" in text


_FAILED_GPU = """
import os
from pathlib import Path

import torch
from megarl.algorithms.policy_losses import TokenLosses

FOLDER = Path(__file__).parent


def loss(inputs, config):
    if os.environ["RANK"] == "1" and (FOLDER / "armed").exists():
        (FOLDER / "armed").rename(FOLDER / f"failed_{os.getpid()}")
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    return TokenLosses(-inputs.advantages * ratio, torch.zeros_like(inputs.mask))
"""


def test_a_rank_whose_gpu_fails_is_replaced(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process lives on, but its peer waits for it in a collective."""
    (tmp_path / "loss.py").write_text(_FAILED_GPU)
    config = grpo(inputs, tmp_path / "run")
    loss = replace(config.algorithm.policy_loss, function=f"{tmp_path / 'loss.py'}:loss")
    config = replace(config, algorithm=replace(config.algorithm, policy_loss=loss))
    pids: list[int] = []

    def look(step: int | None, phase: str, roles: PPORoles) -> None:
        if (step, phase) == (2, "gen") and not pids:
            pids.extend(roles.actor.group.pids)
            (tmp_path / "armed").touch()

    finished = run_ppo(config, look_at_phase=look)
    (failed,) = tmp_path.glob("failed_*")
    assert failed.name == f"failed_{pids[1]}"
    assert not psutil.pid_exists(pids[1])
    assert [line.get("recovery/num_recoveries") for line in finished.metrics] == [None, 0, 1, 0, 0]
    assert "CUDA error: uncorrectable ECC error encountered" in caplog.text
    assert "step 2: restarted actor from the snapshot of step 1" in caplog.text
