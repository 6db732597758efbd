"""The failure page for each kind of failure, with the numbers of the run.

docs/troubleshooting.md shows complete pages of real failures.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

import megarl
from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import FACTS, FOREIGN_FAILURES, Cause, hint_for, last_page, print_failure
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
from megarl.controller import hints
from megarl.controller.errors import PhaseTimeoutError, RankFailure, RankReport, RayEndedError, WorkerError
from megarl.controller.messages import CallFailure, FailureKind, qualified_name
from megarl.controller.resource_pool import InsufficientResourcesError
from megarl.controller.restarts import NodeLostError
from megarl.engine.platform import UNUSED, without_modules
from megarl.machine.errors import UNWRITTEN, CheckpointError, EngineDeadError, HintedError, RunError, hint_of
from megarl.machine.tensor_pickles import pickle_as_torch
from megarl.rewards.process import RewardFunctionError
from megarl.rewards.scorer import RewardError
from megarl.rollout.driver.replicas import RestartLimitError
from megarl.trainers.monitor import Position

# On a machine without a GPU, Transformer Engine has no compiled part, which Megatron does not expect.
with without_modules(*UNUSED):
    from megarl.engine.optimizer import TrainingDivergedError
pickle_as_torch()  # the tests of this process send tensors to others

CONFIG = PPOConfig(
    actor=ActorConfig(micro_batch=MicroBatchConfig(max_tokens=12_345)),
    critic=CriticConfig(micro_batch=MicroBatchConfig(sequences=7)),
    rollout=RolloutConfig(
        engine=RolloutEngineKind.sglang,
        max_concurrency=99,
        sglang=SGLangConfig(server_args={"mem_fraction_static": 0.83}),
    ),
)
SILENT = RankReport("actor", 0, "10.0.0.7", None)


def raised(
    error: Exception, role: str = "actor", method: str = "update", kind: FailureKind = FailureKind.exception
) -> WorkerError:
    """Return an error raised in a worker, as the driver receives it."""
    name = qualified_name(type(error))
    first, *_ = f"{name}: {error}".splitlines()
    trace = f"Traceback (most recent call last):\n  ...\n{name}: {error}\n"
    failure = CallFailure(kind, first, trace, 0.0, name, tuple(hint_of(error)))
    rows = "uid 0-1, 0-2 and 4 more (12 rows)"

    return WorkerError(RankFailure(role, 3, "10.0.0.7", 4242, method, failure, rows, "/logs/worker.err"))


def page_of(error: Exception, config: PPOConfig | SFTConfig = CONFIG, **context: object) -> str:
    return last_page(error, "train", RunContext(config, **context))  # type: ignore[arg-type]


def test_where_when_and_which_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    config = replace(CONFIG, trainer=TrainerConfig(output_dir=str(tmp_path)))
    position = Position(step=17, phases=["step"])
    page = page_of(
        raised(KeyError("x")),
        config,
        output_dir=tmp_path,
        log_folder="/logs",
        nodes=["10.0.0.7", "10.0.0.8"],
        position=position,
    )

    for line in (
        "what    builtins.KeyError: 'x'",
        "where   actor rank 3, node 10.0.0.7, pid 4242, in update",
        "when    step 17, phase update_actor",
        "rows    uid 0-1, 0-2 and 4 more (12 rows)",
        "logs    /logs/worker.err: log of this process and its engine, on node 10.0.0.7",
        "        /logs: logs of Ray and all workers, on each node (10.0.0.7, 10.0.0.8)",
        f"        {tmp_path}: metrics.jsonl",
    ):
        assert line in page.splitlines()

    assert "try" not in page  # nothing is known to help


@pytest.mark.parametrize(
    ("role", "known", "not_known"),
    [
        (
            "actor+reference",
            [
                "actor.micro_batch.max_tokens (now 12345)",
                "actor.recompute (now none)",
                "engine.log_prob_chunk_tokens is 1024",
            ],
            "critic",
        ),
        (
            "critic",
            ["critic.micro_batch.sequences (now 7)", "critic.parallel.tensor_parallel_size (now 1)"],
            "actor.micro_batch",
        ),
        (
            "rollout",
            [
                "rollout.max_concurrency (now 99)",
                "mem_fraction_static (now 0.83)",
                "rollout.tensor_parallel_size (now 1)",
            ],
            "micro_batch",
        ),
    ],
)
def test_a_full_gpu_names_the_knobs_of_the_role_with_their_numbers(
    role: str, known: list[str], not_known: str
) -> None:
    page = page_of(
        raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ..."), role)
    )
    assert all(knob in page for knob in known), page
    assert not_known not in page.partition("\ntry")[2]


def test_a_full_gpu_while_weights_are_sent(tmp_path: Path) -> None:
    error = raised(torch.OutOfMemoryError("CUDA out of memory."), method="push_weights")
    assert "resharding.bucket_mb (now 512); try half" in page_of(error)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            raised(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
            "256 samples per step",
        ),
        (raised(MemoryError()), "checkpoint.asynchronous (now true)"),
        (OSError(28, "No space left on device"), "/dev/shm"),
        (
            raised(RuntimeError("bind: [Errno 98] Address already in use 10.0.0.7:29500")),
            "ss -ltnp | grep 29500",
        ),
        (CheckpointError("x/metadata: its content is not what was written"), "checkpoint.resume=PATH"),
        (CheckpointError("x: cannot be written", hint=UNWRITTEN), "fix the folder and run the same command"),
        (
            raised(TrainingDivergedError("the gradient norm is nan"), role="critic"),
            "smaller updates: critic.optim.lr (now ",
        ),
        (raised(RewardError("scoring failed")), "reward.max_error_rate (now 0)"),
        (raised(RewardFunctionError("no such function")), "megarl eval CONFIG --rows"),
        (
            RestartLimitError("rollout replica 1 ended: ..."),
            "allow more restarts: rollout.restart_limit (now ",
        ),
        (
            RestartLimitError("its last words: CUDA out of memory"),
            "sequences at a time: rollout.max_concurrency (now 99)",
        ),
        (
            raised(EngineDeadError("last words"), role="rollout"),
            "  sequences at a time: rollout.max_concurrency (now 99); try half",
        ),
        (RayEndedError("raylet"), "gcs_server.out, raylet.out"),
        (NodeLostError("node 10.0.0.7 is lost"), "`ray list nodes`, and `ping`"),
        (InsufficientResourcesError("more than the cluster has"), "`ray status` what is free"),
        (
            PhaseTimeoutError("actor", "finish_save", 60.0, [SILENT]),
            "if all are computing, the call is slow, not stuck",
        ),
        (
            PhaseTimeoutError("actor", "update", 60.0, [SILENT]),
            "raise the limit: trainer.phase_time_limit_s (now 1800)",
        ),
        (
            PhaseTimeoutError("actor", "__init__", 60.0, [SILENT]),
            "raise trainer.phase_time_limit_s (now 1800)",
        ),
        (Exception("The current node timed out during startup. This could"), "RAY_TMPDIR=FOLDER"),
        (
            Exception("The current node timed out during startup. This could"),
            "`ray start --head`, then run the same command with RAY_ADDRESS=auto",
        ),
    ],
)
def test_advice_by_what_is_said(error: Exception, advice: str) -> None:
    assert advice in page_of(error).partition("\ntry")[2]


def test_an_error_raised_from_a_workers_is_placed_by_it() -> None:
    try:
        raise CheckpointError("step_4/actor/a.distcp: differs") from raised(
            CheckpointError("differs"), method="load_checkpoint"
        )
    except CheckpointError as error:
        page = page_of(error)

    assert "where   actor rank 3, node 10.0.0.7, pid 4242, in load_checkpoint" in page
    assert "what    CheckpointError: step_4/actor/a.distcp: differs" in page


def test_a_page_has_thirty_lines_however_much_there_is_to_say() -> None:
    many = "\n".join(f"line {number} {'x' * 1000}" for number in range(500))
    page = page_of(raised(RuntimeError(f"CUDA out of memory\n{many}")))
    assert len(page.splitlines()) <= 30
    assert max(map(len, page.splitlines())) <= 450


@pytest.mark.parametrize(
    ("text", "role", "hint"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory",
            "rollout.generate",
            "rollout.max_concurrency (now 99)",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory", "actor.push_weights", "resharding.bucket_mb (now "),
        (
            "torch.OutOfMemoryError: CUDA out of memory",
            "actor.update",
            "reduce the micro-batch: actor.micro_batch.max_tokens (now 12345)",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory", ".", "use a device with more memory"),
        ("1 worker(s) were killed due to the node running low on memory", ".", "RAY_memory_usage_threshold"),
        ("DefaultCPUAllocator: can't allocate memory", ".", "the node's memory, not a GPU's"),
        ("OSError: [Errno 28] No space left on device", ".", "checkpoint.keep (now "),
        ("DistNetworkError: port: 29500, code: -98, name: EADDRINUSE", ".", "ss -ltnp | grep 29500`"),
        ("OSError: [Errno 98] Address already in use: 10.0.0.7:41234", ".", "ss -ltnp | grep 41234`"),
        ("OSError: [Errno 98] Address already in use", ".", "ss -ltnp | grep PORT`"),
        ("ray.exceptions.ActorUnschedulableError: no node", ".", "does not have the resources"),
        (
            "Exception: The current node timed out during startup. This could happen because some",
            ".",
            "RAY_TMPDIR=FOLDER",
        ),
    ],
)
def test_messages_of_other_programs_are_known(text: str, role: str, hint: str) -> None:
    own = ("the hint of the error that it caused",)
    role, _, method = role.partition(".")
    said = f"what was said before\n{text}\n"
    assert any(hint in line for line in hint_for(Cause([], said, own, role, method), CONFIG))


def test_the_own_hint_of_an_error_is_used_where_no_other_program_said_anything() -> None:
    assert hint_for(Cause([], "anything", ("try {trainer.total_steps}",)), CONFIG) == [
        "try trainer.total_steps (now 100)"
    ]
    assert hint_for(Cause([], "anything", ("always", "try {trainer.total_steps}")), None) == ["always"]
    assert hint_for(Cause([], "anything", ("{role.recompute}",), role="critic"), CONFIG) == [
        "critic.recompute (now none)"
    ]


def test_a_hint_leaves_out_a_value_that_is_set_already() -> None:
    hint = (
        "try {role.recompute unless none, trainer.total_steps unless 99}",
        "or {role.recompute unless none}",
    )
    assert hint_for(Cause([], "anything", hint, role="critic"), CONFIG) == [
        "try trainer.total_steps (now 100)"
    ]


def all_hints() -> dict[str, Sequence[str]]:
    """Return the hints of all errors, of ended processes, and of other programs' messages, by source."""
    for module in pkgutil.walk_packages(megarl.__path__, "megarl."):
        if not module.name.startswith(("megarl.__main__", "megarl.configs")):
            source = Path(importlib.util.find_spec(module.name).origin or "").read_text()  # type: ignore[union-attr]
            if re.search(r"\((Run|Hinted)Error|Error\(.*hint=", source):
                with without_modules(*UNUSED):
                    importlib.import_module(module.name)

    found: dict[str, Sequence[str]] = {}
    classes = [HintedError]

    for each in classes:
        found[each.__name__] = each.hint
        classes += each.__subclasses__()

    found |= {name: value for name, value in vars(hints).items() if name.isupper()}
    found |= {foreign.text: foreign.hint for foreign in FOREIGN_FAILURES}
    return found | {"UNWRITTEN": UNWRITTEN}


def test_a_hint_names_nothing_that_does_not_exist() -> None:
    """A field that is misspelled would silently drop its line."""
    groups = {name for foreign in FOREIGN_FAILURES for name in re.compile(foreign.text).groupindex}
    keys = {key for config in (CONFIG, SFTConfig()) for key in flat(config)}
    found = all_hints()
    assert {
        "RewardError",
        "TrainingDivergedError",
        "EngineDeadError",
        "RestartLimitError",
        "CheckpointError",
    } <= found.keys()

    for place, hint in found.items():
        for field in re.findall(r"\{([^{}]+)\}", "\n".join(hint)):
            if field not in FACTS and field not in groups:
                for key in (each.partition(" unless ")[0] for each in field.split(", ")):
                    names = [key.replace("role.", f"{section}.", 1) for section in ("actor", "critic")]
                    assert key in keys or key.startswith("role.") and all(name in keys for name in names), (
                        place,
                        key,
                    )


def flat(value: object, prefix: str = "") -> Iterator[str]:
    if is_dataclass(value):
        for each in fields(value):
            yield f"{prefix}{each.name}"
            yield from flat(getattr(value, each.name), f"{prefix}{each.name}.")


def test_a_command_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    print_failure(RunError("what went wrong"), "convert", None)
    said = capsys.readouterr().err
    assert said.count("what went wrong") == 2
    assert "==== megarl convert failed ====" in said
    assert "logs" not in said


def test_it_is_kept_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_failure(raised(KeyError("x")), "train", RunContext(CONFIG, output_dir=tmp_path))
    assert (tmp_path / "failure.txt").read_text() == capsys.readouterr().err
