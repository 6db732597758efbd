"""Test weights that every engine receives while they are sent: repeated syncs, a trainer that stops, and one
that is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import pytest

from megarl.rollout.interface import EngineStateError
from megarl.weights.checksum import checksum
from megarl.weights.tensors import Part, PeerTransfers, TransferSchedule, WeightTransferError
from megarl.weights.transports.interface import EngineLink
from tests.plain_trainer import PlainTrainer, joined
from tests.unit.rollout.subjects import PROMPTS, Subject, greedy


def tenth(subject: Subject) -> int:
    """Return the number of elements per message, for about ten rounds."""
    return sum(prod(meta.shape) for meta in subject.manifest.values()) // 10


def assert_holds(subject: Subject, seed: int, version: int) -> None:
    assert subject.engine.checksums() == {
        name: checksum(tensor) for name, tensor in subject.weights(seed).items()
    }
    assert {sample.weight_versions for sample in subject.engine.generate(PROMPTS, greedy())} == {(version,)}


@pytest.mark.parametrize("transport", ["device", "group"])
def test_push_after_push(subject: Subject, transport: str) -> None:
    """Includes syncs after the trainer has freed its memory, and after the engine has."""
    with joined(subject.engine, subject.weights(0), transport, tenth(subject)) as trainer:
        trainer.push(subject.weights(1), version=1)
        assert_holds(subject, seed=1, version=1)
        for end in trainer.ends:
            end.release()
        trainer.push(subject.weights(2), version=2)
        assert_holds(subject, seed=2, version=2)
        subject.engine.sleep()
        subject.engine.wake()
        trainer.push(subject.weights(3), version=3)
        subject.engine.wake_cache()
        assert_holds(subject, seed=3, version=3)
        subject.engine.leave_weights()


@pytest.mark.parametrize("transport", ["device", "group"])
def test_a_trainer_that_is_gone_in_the_middle(ready: Subject, transport: str) -> None:
    engine = ready.engine
    with joined(engine, ready.weights(0), transport, tenth(ready)) as trainer:
        engine.begin_weight_update(ready.manifest)
        trainer.begin(ready.weights(1))
        assert not trainer.go_on()  # no engine receives it
        for end in trainer.ends:
            end.leave(0)
        with pytest.raises(WeightTransferError, match="gone|a peer was lost"):
            engine.receive_weights()

    with pytest.raises(EngineStateError, match="cannot generate while updating"):
        engine.generate(PROMPTS, greedy())
    with pytest.raises(WeightTransferError, match=r"missing from element 0"):
        engine.end_weight_update(2)
    engine.begin_weight_update(ready.manifest)

    with pytest.raises(
        WeightTransferError, match="aborted halfway: join the trainers again|gone|a peer was lost"
    ):
        engine.receive_weights()

    engine.leave_weights()
    with pytest.raises(WeightTransferError, match="has joined no trainer"):
        engine.receive_weights()
    ready.push(seed=3, version=3)
    assert_holds(ready, seed=3, version=3)


def with_parts(
    trainer: PlainTrainer, change: Callable[[tuple[Part, ...]], Sequence[Part]]
) -> list[EngineLink]:
    return [
        replace(
            link,
            peers=PeerTransfers(
                {
                    source: TransferSchedule(change(schedule.parts))
                    for source, schedule in link.peers.schedules.items()
                }
            ),
        )
        for link in trainer.links
    ]


def without_the_first_part(trainer: PlainTrainer) -> list[EngineLink]:
    return with_parts(trainer, lambda parts: parts[1:])


def with_a_part_twice(trainer: PlainTrainer) -> list[EngineLink]:
    return with_parts(trainer, lambda parts: (parts[0], *parts))


def with_another_name(trainer: PlainTrainer) -> list[EngineLink]:
    return with_parts(trainer, lambda parts: [part._replace(name="other") for part in parts])


def on_another_device(trainer: PlainTrainer) -> list[EngineLink]:
    return [replace(link, device="device-9") for link in trainer.links]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (without_the_first_part, "would not arrive complete: .* elements are missing"),
        (with_a_part_twice, "would not arrive complete: .* covered twice"),
        (with_another_name, "other is not needed here"),
        (on_another_device, "on device device-0, .*on device-9"),
    ],
)
def test_a_link_that_cannot_be_right_is_refused(
    ready: Subject, changed: Callable[[PlainTrainer], list[EngineLink]], message: str
) -> None:
    with joined(ready.engine, ready.weights(0)) as trainer, pytest.raises(WeightTransferError, match=message):
        ready.engine.join_weights(changed(trainer))
    assert_holds(ready, seed=0, version=1)

    with joined(ready.engine, ready.weights(0)) as trainer:
        trainer.close()
        with pytest.raises(
            WeightTransferError, match=r"(are gone|is not the trainer's memory).*transport=folder"
        ):
            ready.engine.join_weights(trainer.links)
        trainer.ends.clear()
