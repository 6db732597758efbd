"""The last page: what it says of each kind of failure, with the numbers of the run. docs/troubleshooting.md shows real ones whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.cli.failure_report import last_page, print_failure
from megarl.cli.remedies import REMEDIES, Cause
from megarl.cli.run_context import RunContext
from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    MicroBatchConfig,
    PPOConfig,
    RolloutConfig,
    RolloutEngineKind,
    SFTConfig,
    SGLangConfig,
    TrainerConfig,
)
from megarl.controller.errors import PhaseTimeoutError, RankFailure, RankReport, WorkerError
from megarl.controller.messages import CallFailure, FailureKind, Rows, qualified_name
from megarl.machine.errors import CheckpointError, RunError
from megarl.trainers.monitor import Position

CONFIG = PPOConfig(
    actor=ActorConfig(micro_batch=MicroBatchConfig(max_tokens=12_345)),
    critic=CriticConfig(micro_batch=MicroBatchConfig(sequences=7)),
    rollout=RolloutConfig(
        engine=RolloutEngineKind.sglang, max_concurrency=99, sglang=SGLangConfig(server_args={"mem_fraction_static": 0.83})
    ),
)
SILENT = RankReport("actor", 0, "10.0.0.7", None)


def raised(error: Exception, role: str = "actor", method: str = "update", kind: FailureKind = FailureKind.exception) -> WorkerError:
    """In a worker, as it comes to the driver."""
    name = qualified_name(type(error))
    first, *_ = f"{name}: {error}".splitlines()
    failure = CallFailure(kind, first, f"Traceback (most recent call last):\n  ...\n{name}: {error}\n", 0.0, name)
    rows = Rows(("0-1", "0-2"), 6, 12)
    return WorkerError(RankFailure(role, 3, "10.0.0.7", 4242, method, failure, rows, "/logs/worker.err"))


def page_of(error: Exception, config: PPOConfig | SFTConfig = CONFIG, **context: object) -> str:
    return last_page(error, "train", RunContext(config, **context))  # type: ignore[arg-type]


def test_where_when_and_which_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    config = replace(CONFIG, trainer=TrainerConfig(output_dir=str(tmp_path)))
    position = Position(step=17, phases=["step"])
    page = page_of(
        raised(KeyError("x")), config, output_dir=tmp_path, log_folder="/logs", nodes=["10.0.0.7", "10.0.0.8"], position=position
    )
    for line in (
        "what    builtins.KeyError: 'x'",
        "where   actor rank 3, node 10.0.0.7, pid 4242, in update",
        "when    step 17, phase update_actor",
        "rows    uid 0-1, 0-2 and 4 more (12 rows)",
        "logs    /logs/worker.err: that process and the engine in it, on node 10.0.0.7",
        "        /logs: Ray and all workers, on each node (10.0.0.7, 10.0.0.8)",
        f"        {tmp_path}: metrics.jsonl",
    ):
        assert line in page.splitlines()
    assert "try" not in page  # nothing is known to help


@pytest.mark.parametrize(
    ("role", "known", "not_known"),
    [
        (
            "actor+reference",
            ["actor.micro_batch.max_tokens=12345", "actor.recompute=none", "engine.log_prob_chunk_tokens is 1024"],
            "critic",
        ),
        ("critic", ["critic.micro_batch.sequences=7", "critic.parallel.tensor_parallel_size=1"], "actor.micro_batch"),
        ("rollout", ["rollout.max_concurrency=99", "mem_fraction_static=0.83", "rollout.tensor_parallel_size=1"], "micro_batch"),
    ],
)
def test_a_full_gpu_names_the_knobs_of_the_role_with_their_numbers(role: str, known: list[str], not_known: str) -> None:
    page = page_of(raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ..."), role))
    assert all(knob in page for knob in known), page
    assert not_known not in page.partition("\ntry")[2]


def test_a_full_gpu_while_weights_are_sent(tmp_path: Path) -> None:
    error = raised(torch.OutOfMemoryError("CUDA out of memory."), method="push_weights")
    assert "sending weights: resharding.bucket_mb=512.0" in page_of(error)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (raised(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")), "256 samples a step"),
        (raised(MemoryError()), "checkpoint.asynchronous=True"),
        (OSError(28, "No space left on device"), "/dev/shm"),
        (raised(RuntimeError("bind: [Errno 98] Address already in use 10.0.0.7:29500")), "ss -ltnp | grep 29500"),
        (CheckpointError("x/metadata: its content is not what was written"), "checkpoint.resume=PATH"),
        (
            CheckpointError("x: the checkpoint of step 3 cannot be written (Read-only file system); ..."),
            "fix the folder and run the same command",
        ),
        (CheckpointError("x/__0_0.distcp: cannot be written: Read-only file system"), "fix the folder and run the same command"),
        (PhaseTimeoutError("actor", "finish_save", 60.0, [SILENT]), "all of them at work: it is slow, not stuck"),
        (PhaseTimeoutError("actor", "update", 60.0, [SILENT]), "raise the limit: trainer.phase_time_limit_s=1800"),
        (PhaseTimeoutError("actor", "__init__", 60.0, [SILENT]), "raise trainer.phase_time_limit_s=1800"),
        (Exception("The current node timed out during startup. This could"), "RAY_TMPDIR=FOLDER"),
        (Exception("The current node timed out during startup. This could"), "`ray start --head`, then RAY_ADDRESS=auto"),
    ],
)
def test_advice_by_what_is_said(error: Exception, advice: str) -> None:
    assert advice in page_of(error).partition("\ntry")[2]


def test_an_error_raised_from_a_workers_is_placed_by_it() -> None:
    try:
        raise CheckpointError("step_4/actor/a.distcp: differs") from raised(CheckpointError("differs"), method="load_checkpoint")
    except CheckpointError as error:
        page = page_of(error)
    assert "where   actor rank 3, node 10.0.0.7, pid 4242, in load_checkpoint" in page
    assert "what    CheckpointError: step_4/actor/a.distcp: differs" in page


def test_a_page_has_thirty_lines_however_much_there_is_to_say() -> None:
    many = "\n".join(f"line {number} {'x' * 1000}" for number in range(500))
    page = page_of(raised(RuntimeError(f"CUDA out of memory\n{many}")))
    assert len(page.splitlines()) <= 30
    assert max(map(len, page.splitlines())) <= 450


def test_every_remedy_is_for_something_else() -> None:
    """None is hidden behind another."""
    shown = (
        "torch.OutOfMemoryError: CUDA out of memory",
        "1 worker(s) were killed due to the node running low on memory",
        "node 10.0.0.7 is lost: health check failed due to missing too many heartbeats",
        "the process ended; the kernel's OOM killer has ended 1 process of its node during this run",
        "the process crashed (SIGSEGV)",
        "DefaultCPUAllocator: can't allocate memory",
        "OSError: [Errno 28] No space left on device",
        "DistNetworkError: port: 29500, code: -98, name: EADDRINUSE",
        "megarl.machine.errors.CheckpointError: a/b: the checkpoint of step 3 cannot be written (Permission denied)",
        "megarl.machine.errors.CheckpointError: it is damaged",
        "megarl.rewards.scorer.RewardError: scoring failed",
        "megarl.engine.optimizer.TrainingDivergedError: the gradient norm is nan",
        "megarl.controller.errors.PhaseTimeoutError: too long",
        "megarl.controller.errors.RayEndedError: Ray's raylet has ended",
        "megarl.rollout.interface.EngineDeadError: last words",
        "ray.exceptions.ActorUnschedulableError: no node",
        "Exception: The current node timed out during startup. This could happen because some of the raylet failed to startup",
        "the process ended (killed, out of memory, or crashed)",
    )
    first = [next(number for number, remedy in enumerate(REMEDIES) if remedy.applies(Cause("", [], text))) for text in shown]
    assert first == list(range(len(REMEDIES)))


def test_a_command_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    print_failure(RunError("what went wrong"), "convert", None)
    said = capsys.readouterr().err
    assert said.count("what went wrong") == 2
    assert "==== megarl convert failed ====" in said
    assert "logs" not in said


def test_it_is_kept_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_failure(raised(KeyError("x")), "train", RunContext(CONFIG, output_dir=tmp_path))
    assert (tmp_path / "failure.txt").read_text() == capsys.readouterr().err
