"""Files with patches leave every engine rank with the bits of a full transfer, and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import Transport
from megarl.weights.plan import TransferPlan
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transfer import SendReport
from megarl.weights.transports.delta import patch_file
from megarl.weights.transports.interface import EngineLink, SendingRank, sides_of
from tests.plain_trainer import no_trainers
from tests.unit.weights.models import architecture_of
from tests.unit.weights.transfers import CPU, Case, Cut, EngineRank, TrainerRank, numel_of

# From two ranks to an engine of two, which is planned for all replicas.
CASE = Case(
    architecture_of("llama", tied=False),
    "llama",
    False,
    Cut(tensor=2),
    (Cut(tensor=2, expert_tensor=2),),
    "group",
    2000,
    changed_share=0.01,
)


class Ranks:
    """All ranks of a sync in one process: they meet in files only."""

    def __init__(self, replicas: int) -> None:
        self.plan: TransferPlan = CASE.plan()
        self.trainers = [TrainerRank(CASE, self.plan, rank, None) for rank in range(2)]
        link = EngineLink(Transport.folder, "files", torch.float32, 60.0, sends_changes=True)
        sides = sides_of(Transport.folder)
        self.routes = sides.route(self.plan, ["a", "b"], {0: "c", 1: "d"}, link)
        assert self.routes.listeners == {}
        self.senders = [
            sides.sender(link, SendingRank(rank, "", "", CPU, no_trainers)) for rank in self.routes.senders
        ]
        for rank, sender in enumerate(self.senders):
            for replica in range(replicas):
                sender.join(replica, self.routes.senders[rank])
        self.engines = [[self.new_engine(rank) for rank in range(2)] for _ in range(replicas)]

    def new_engine(self, rank: int) -> EngineRank:
        engine = EngineRank(CASE, rank)
        engine.link(self.routes.receivers[rank])
        return engine

    def write(self, folder: Path, seed: int, *replicas: int) -> list[SendReport]:
        folder.mkdir()
        reports = []
        for trainer, sender in zip(self.trainers, self.senders, strict=True):
            sending = sender.open(trainer.shards(seed), replicas, folder=folder)
            assert sending.run()
            reports.append(sending.report())
        return reports

    def read(self, folder: Path, replica: int) -> int:
        """Return the bytes that the ranks of an engine have read."""
        return sum(engine.receive(folder) for engine in self.engines[replica])

    def differing(self, replica: int, seed: int) -> list[str]:
        return [name for engine in self.engines[replica] for name in engine.differing(CASE, seed)]


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    """Of two replicas, one is replaced before the third version: it gets everything, the other what changed."""
    ranks = Ranks(replicas=2)
    whole = 4 * sum(numel_of(CASE.needed(rank)) for rank in range(2))
    for version, most in ((1, 1.05), (2, 0.05)):
        folder = tmp_path / str(version)
        reports = ranks.write(folder, version, 0, 1)
        assert [ranks.read(folder, replica) for replica in (0, 1)] == [
            sum(each.nbytes for each in reports)
        ] * 2
        assert [ranks.differing(replica, version) for replica in (0, 1)] == [[], []]
        assert (most - 0.05) * whole < sum(each.nbytes for each in reports) < most * whole
        assert sum(each.full_bytes for each in reports) == whole
        assert set(folder.iterdir()) == {patch_file(folder, *pair) for pair in ranks.plan.schedules}

    ranks.engines[1] = [ranks.new_engine(rank) for rank in range(2)]
    for sender in ranks.senders:
        sender.forget_weights(1)
    changes = ranks.write(tmp_path / "changes", 3, 0)
    everything = ranks.write(tmp_path / "everything", 3, 1)
    assert ranks.read(tmp_path / "changes", 0) == sum(each.nbytes for each in changes) < 0.05 * whole
    assert ranks.read(tmp_path / "everything", 1) == sum(each.nbytes for each in everything) > whole
    assert ranks.differing(0, 3) == ranks.differing(1, 3) == []

    # Both have the third version, so that they get the same changes again.
    assert sum(each.nbytes for each in ranks.write(tmp_path / "4", 4, 0, 1)) < 0.05 * whole
    ranks.read(tmp_path / "4", 0)
    ranks.read(tmp_path / "4", 1)
    assert ranks.differing(0, 4) == ranks.differing(1, 4) == []


def test_files_that_are_absent_damaged_or_for_others_are_refused(tmp_path: Path) -> None:
    ranks = Ranks(replicas=1)
    ranks.write(tmp_path / "1", 1, 0)
    file = patch_file(tmp_path / "1", 0, 0)
    content = file.read_bytes()
    for damaged in (content[:-1], content[:40] + bytes([content[40] ^ 1]) + content[41:], content[:10]):
        file.write_bytes(damaged)
        with pytest.raises(WeightTransferError, match=r"0-to-0.patches: is damaged before byte"):
            ranks.read(tmp_path / "1", 0)
        ranks.engines = [[ranks.new_engine(rank) for rank in range(2)]]
    file.write_bytes(content + b"x")
    with pytest.raises(WeightTransferError, match=r"0-to-0.patches: has more than the patches of"):
        ranks.read(tmp_path / "1", 0)
    file.unlink()
    ranks.engines = [[ranks.new_engine(rank) for rank in range(2)]]
    with pytest.raises(WeightTransferError, match=r"0-to-0.patches: cannot be read: No such file"):
        ranks.read(tmp_path / "1", 0)

    # Changes that an engine without the weights before them cannot apply.
    ranks.write(tmp_path / "2", 2, 0)
    ranks.engines = [[ranks.new_engine(rank) for rank in range(2)]]
    with pytest.raises(WeightTransferError, match="no longer have them: restart the engine"):
        ranks.read(tmp_path / "2", 0)
