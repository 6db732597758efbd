"""Test replicas that die, hang, fail or misreport, on real Ray: the batch is complete and unchanged, or the
error names the replica."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import last_page
from megarl.config.schema import PPOConfig, SamplingConfig
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.group import RoleGroup
from megarl.machine.errors import RunError
from megarl.rollout.driver.replicas import RestartLimitError
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.interface import EngineFaultError, GenerationRequest, SamplingParameters
from megarl.rollout.router import RequestRoutingError
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.checksum import checksum
from tests.failure_pages import check_documented
from tests.fake_engine import (
    LAST_WORDS,
    MANIFEST,
    FakeEngine,
    FakeSpec,
    Misdeed,
    What,
    random_weights,
    recorded_calls,
)
from tests.rollout_replicas import Push, started_rollout

WEIGHTS = random_weights(MANIFEST, seed=1)
SAMPLING = SamplingConfig(n=3)
StartFake = Callable[..., Rollout]


def prompts() -> DataProto:
    rows = [[number + 1] * (1 + number % 5) for number in range(12)]
    prompts = RaggedTensor.of_rows(rows, torch.int32, on_left=True)
    return DataProto.from_dict({"prompts": prompts}, {"uid": [str(row) for row in range(12)]})


@pytest.fixture
def start(ray_cluster: None, tmp_path: Path) -> Iterator[StartFake]:
    with ExitStack() as stack:

        def start_fake(
            *script: Misdeed, num_replicas: int = 2, num_processes: int = 0, **options: Any
        ) -> Rollout:
            spec = FakeSpec(folder=tmp_path, manifest=MANIFEST, script=script, num_processes=num_processes)
            rollout = stack.enter_context(started_rollout(partial(FakeEngine, spec), num_replicas, **options))
            rollout.send(WEIGHTS, 5)
            return rollout

        yield start_fake


def tokens_of(batch: DataProto) -> list[list[int]]:
    return [
        row[mask].tolist()
        for row, mask in zip(batch.tensors["responses"], batch.tensors["response_mask"], strict=True)
    ]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Return what one replica writes undisturbed."""
    spec = FakeSpec(folder=tmp_path_factory.mktemp("undisturbed"), manifest=MANIFEST)
    with started_rollout(partial(FakeEngine, spec), 1) as rollout:
        rollout.send(WEIGHTS, 5)
        batch = rollout.generate(prompts(), SAMPLING, step=1)
        assert set(batch.non_tensor_batch["weight_version"]) == {5}
        assert set(batch.non_tensor_batch["finish_reason"]) == {"stop", "length"}
        assert batch.non_tensor_batch["uid"].tolist() == [str(row) for row in range(12) for _ in range(3)]
        return tokens_of(batch)


def test_samples_do_not_depend_on_the_number_of_replicas(
    start: StartFake, undisturbed: list[list[int]], tmp_path: Path
) -> None:
    rollout = start(max_concurrency=3)
    assert tokens_of(rollout.generate(prompts(), SAMPLING, step=1)) == undisturbed
    others = tokens_of(rollout.generate(prompts(), SAMPLING, step=2))
    assert others != undisturbed
    check_metrics_and_calls(rollout, tmp_path, [len(row) for row in undisturbed + others])

    with pytest.raises(RunError, match=r"sent the weights of version 6, but report that they have \{1: 5\}"):
        rollout.update_weights(lambda replicas: Push(WEIGHTS, 6)({0: replicas[0]}), 6)


def check_metrics_and_calls(rollout: Rollout, folder: Path, lengths: list[int]) -> None:
    metrics = rollout.drain_metrics()
    verifications = sum((length + 1) // 2 for length in lengths)
    assert metrics["rollout/spec_accept_length"] == pytest.approx(sum(lengths) / verifications)
    assert "rollout/spec_accept_length" not in rollout.drain_metrics()
    assert (metrics["rollout/num_restarts"], metrics["rollout/num_resent"]) == (0, 0)
    assert metrics["rollout/replica_0/tokens_per_s"] > 0 < metrics["rollout/replica_1/tokens_per_s"]
    submitted = [call for call in recorded_calls(folder) if call["method"] == "submit"]
    assert max(len(call["detail"]) for call in submitted) == 3
    assert len({call["pid"] for call in submitted}) == 2
    seen = {(span.rank, span.name) for span in rollout.drain_spans()}
    assert seen >= {(0, "submit_and_poll"), (1, "submit_and_poll"), (1, "load_folder")}


@pytest.mark.parametrize(
    ("misdeed", "why"),
    [
        (Misdeed("collect", 3, What.die), f"EngineDeadError: {LAST_WORDS}"),
        (Misdeed("collect", 2, What.kill_process), "the process ended"),
        (Misdeed("submit", 2, What.kill_child), LAST_WORDS),
        (Misdeed("collect", 2, What.hang), "in submit_and_poll for"),
    ],
)
def test_a_lost_replica_is_replaced_and_the_batch_is_whole(
    start: StartFake,
    undisturbed: list[list[int]],
    misdeed: Misdeed,
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = start(misdeed, num_processes=1, answer_limit_s=2.0 if misdeed.what is What.hang else 60.0)
    with caplog.at_level(logging.WARNING):
        assert tokens_of(rollout.generate(prompts(), SAMPLING, step=1)) == undisturbed
    metrics = rollout.drain_metrics()
    assert metrics["rollout/num_restarts"] == 1
    assert 1 <= metrics["rollout/num_resent"] <= 8
    (warning,) = [
        record.getMessage() for record in caplog.records if record.name == "megarl.rollout.driver.replicas"
    ]
    assert why in warning
    assert "is restarted; restarts left: 2" in warning
    rollout.settle()
    expected = {name: checksum(tensor) for name, tensor in WEIGHTS.items()}
    assert [replica.call(RolloutWorker.checksums) for replica in rollout.replicas] == [expected, expected]
    starts = [call["pid"] for call in recorded_calls(tmp_path) if call["method"] == "__init__"]
    assert len(set(starts)) == 3
    spans = rollout.drain_spans()
    assert {span.rank for span in spans if span.name == "submit_and_poll"} == {0, 1}
    assert sum(span.name == "__init__" for span in spans) == 3  # including the restarted one's


def test_too_many_restarts_end_the_run_with_the_last_words(start: StartFake) -> None:
    rollout = start(*[Misdeed("collect", 1, What.die)] * 3, restart_limit=2)
    whose = r"\d replicas have been lost with requests of prompt \d+, \d+"

    with pytest.raises(
        RestartLimitError,
        match=rf"(?s)rollout replica \d of 2 ended or hung.*{LAST_WORDS}.*{whose}.*restart_limit: 2 restarts",
    ) as caught:
        rollout.generate(prompts(), SAMPLING, step=1)

    check_documented("engine-died", last_page(caught.value, "train", RunContext(PPOConfig())))


def test_a_replica_that_dies_while_it_gets_weights(start: StartFake, undisturbed: list[list[int]]) -> None:
    """The replica dies in the first weight sync, then in the sync of its replacement."""
    rollout = start(
        Misdeed("load_folder", 1, What.kill_process),
        Misdeed("collect", 2, What.die),
        Misdeed("end_weight_update", 1, What.die),
    )
    assert rollout.drain_metrics()["rollout/num_restarts"] == 2  # two faults hit the first sync
    assert tokens_of(rollout.generate(prompts(), SAMPLING, step=1)) == undisturbed
    assert rollout.drain_metrics()["rollout/num_restarts"] == 1


def test_a_replica_that_was_ended_because_it_hung_in_a_push_is_replaced(
    start: StartFake, undisturbed: list[list[int]]
) -> None:
    rollout = start()
    good = Push(WEIGHTS, 5)
    attempts = []

    def push(replicas: Mapping[int, RoleGroup]) -> dict[int, Exception]:
        attempts.append(sorted(replicas))
        if len(attempts) > 1:
            return good(replicas)
        reports = replicas[0].reports()
        replicas[0].shutdown()
        return {0: PhaseTimeoutError("rollout", "receive_weights", 1.0, reports), **good({1: replicas[1]})}

    rollout.update_weights(push, 5)
    assert rollout.drain_metrics()["rollout/num_restarts"] == 1
    assert tokens_of(rollout.generate(prompts(), SAMPLING, step=1)) == undisturbed
    rollout.settle()
    assert attempts == [[0, 1], [0]]


def test_a_failure_that_a_restart_cannot_fix_is_raised(start: StartFake) -> None:
    rollout = start(Misdeed("collect", 2, What.raise_error))
    with pytest.raises(WorkerError, match="KeyError: 'no such layer'"):
        rollout.generate(prompts(), SAMPLING, step=1)
    with pytest.raises(WorkerError, match="exceed the model's limit of"):
        list(rollout.stream([GenerationRequest(0, [1] * 60, SamplingParameters(max_new_tokens=9, seed=0))]))
    assert rollout.drain_metrics()["rollout/num_restarts"] == 0
    assert len(rollout.generate(prompts(), SAMPLING, step=1)) == 36  # cancelled requests do not return


LIES: dict[What, tuple[type[RunError], str]] = {
    What.lie_doubled: (RequestRoutingError, r"replica 0 finished request \d+, which was finished before"),
    What.lie_unknown: (
        RequestRoutingError,
        r"replica 0 finished request 1000000000, which was not given to it",
    ),
    What.lie_version: (
        EngineFaultError,
        r"rollout replica 0 wrote a sample with the weight versions \(4, 5\); .*version 5",
    ),
    What.lie_too_long: (
        EngineFaultError,
        r"rollout replica 0 .*: \d+ tokens, but 1 to 12",
    ),
    What.lie_log_probs: (EngineFaultError, r"rollout replica 0 .*: \d+ log-probs for \d+ tokens"),
}


def test_a_lie_is_found_and_the_replica_named(start: StartFake, undisturbed: list[list[int]]) -> None:
    """Each misreport comes in the first reply of a batch; after it, the replica reports correctly."""
    rollout = start(*(Misdeed("collect", 1, lie) for lie in LIES), num_replicas=1)
    for error, message in LIES.values():
        with pytest.raises(error, match=message):
            rollout.generate(prompts(), SAMPLING, step=1)
    assert tokens_of(rollout.generate(prompts(), SAMPLING, step=1)) == undisturbed


def test_a_sample_that_never_comes_is_asked_for_again(start: StartFake, undisturbed: list[list[int]]) -> None:
    rollout = start(Misdeed("collect", 2, What.lie_lost), sample_limit_s=2.0)
    assert tokens_of(rollout.generate(prompts(), SAMPLING, step=1)) == undisturbed
    assert rollout.drain_metrics()["rollout/num_resent"] == 1


def test_a_stream_yields_samples_as_they_finish_and_can_be_closed(start: StartFake, tmp_path: Path) -> None:
    rollout = start(Misdeed("collect", 4, What.kill_process))
    requests = [
        GenerationRequest(100 + number, [number % 40], SamplingParameters(max_new_tokens=4, seed=number))
        for number in range(40)
    ]
    whole = dict(rollout.stream(requests))
    assert sorted(whole) == list(range(100, 140))
    stream = rollout.stream(requests)
    some = [next(stream) for _ in range(5)]
    stream.close()
    assert [str(whole[number]) for number, _ in some] == [str(sample) for _, sample in some]
    again = Counter(number for number, _ in rollout.stream(requests))
    assert again == Counter(range(100, 140))
    assert "abort" in {call["method"] for call in recorded_calls(tmp_path)}


def test_an_engine_that_never_starts_is_not_tried_again(ray_cluster: None, tmp_path: Path) -> None:
    spec = FakeSpec(folder=tmp_path, manifest=MANIFEST, script=(Misdeed("__init__", 1, What.die),))
    with (
        started_rollout(partial(FakeEngine, spec), 1) as rollout,
        pytest.raises(WorkerError, match=f"in __init__: .*EngineDeadError: {LAST_WORDS}"),
    ):
        rollout.send(WEIGHTS, 1)

    assert len(recorded_calls(tmp_path)) == 1
