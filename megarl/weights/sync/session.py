"""Session of weight transfers: the plan, and the connections between ranks.

Ranks are connected once per replica, for all later syncs.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from megarl.config.schema import Transport
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.group import RoleGroup, is_dead_or_failed_start, results_of
from megarl.controller.messages import qualified_name
from megarl.machine.errors import counted
from megarl.models.tensor_table import trained_tensors
from megarl.weights.message_words import plan_in_words
from megarl.weights.plan import RankLocation, TensorSlices, TransferPlan, message_bytes
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.worker import WeightExport, WeightImport
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transports.interface import EngineLink, sides_of


class TransferSession:
    """Connections of one source with all replicas that it may send to.

        lost = session.make(replicas)             # before each sync; joins those that are new
        session.split_by_needs(replicas, lost)    # if only what changed is sent
        session.forget(lost)                      # after each sync
        session.acknowledge(others, version)
        session.close()

    Args:
        trainer_places: Locations of the source's ranks.
        replica_places: Locations of the ranks of each replica.
        transport: The transport.
        limit_s: Time limit of a message.
        sends_changes: Whether replicas are sent only what changed since their last weights.
    """

    def __init__(
        self,
        source: WeightSource,
        trainer_places: Sequence[RankLocation],
        replica_places: Sequence[Sequence[RankLocation]],
        transport: Transport,
        limit_s: float,
        sends_changes: bool = False,
    ) -> None:
        self._source = source
        self._trainer_places = trainer_places
        self._replica_places = replica_places
        self._transport = transport
        self._limit_s = limit_s
        self._sends_changes = sends_changes
        ends = list(accumulate(map(len, replica_places), initial=0))
        self._targets = [list(range(start, stop)) for start, stop in zip(ends, ends[1:], strict=False)]
        self._needed: list[TensorSlices] = []  # by the ranks of a replica
        self._plan: TransferPlan | None = None
        self._joined: dict[int, RoleGroup] = {}
        self.names: dict[int, str] = {}  # of each replica's connection
        self._acknowledged: dict[int, int] = {}  # the version of each replica's weights

    def make(self, replicas: Mapping[int, RoleGroup]) -> dict[int, Exception]:
        """Join all of `replicas`.

        Returns:
            The lost replicas, with the reason. All others are joined.

        Raises:
            WorkerError: The tensors do not match an engine's model, or a trainer rank failed.
        """
        lost: dict[int, Exception] = {}

        # Compare the groups, not the numbers: a restarted replica has a new group under its old number.
        new = {
            number: replica for number, replica in replicas.items() if self._joined.get(number) is not replica
        }
        asking = {
            number: replica.call_rank(0, WeightImport.needed_slices, self._source.manifest)
            for number, replica in new.items()
        }
        for number, needed in results_of(asking, lost, is_lost).items():
            self._expect(needed, number)
        new = {number: replica for number, replica in new.items() if number not in lost}

        # A name is used once, so that a replica that joined another session in the meantime is recognized.
        self.names |= {number: f"weights-{number}-{uuid.uuid4().hex}" for number in new}
        joining: dict[int, WorkerFuture[None]] = {}
        meeting: dict[int, Sequence[WorkerFuture[None]]] = {}

        # Engines and trainers meet concurrently; trainers meet one engine after the other.
        for number, replica in new.items():
            assert self._plan is not None
            links, meeting[number] = self._connect(self._plan, number)
            joining[number] = replica.call_rank(0, WeightImport.join_weights, links, self.names[number])

        # Collect the engines' results first: a dead engine is the reason why its trainers report a failure.
        results_of(joining, lost, is_lost)

        # Wait for all trainer ranks at once first: those that meet wait for one that has died.
        try:
            gather(*(future for futures in meeting.values() for future in futures))
        except WorkerError as error:
            if error.error_type != qualified_name(WeightTransferError):
                raise

        for number, future in ((number, future) for number, futures in meeting.items() for future in futures):
            try:
                future.get()
            except WorkerError as error:
                if error.error_type != qualified_name(WeightTransferError):
                    raise
                lost.setdefault(number, error)  # did not join

        self._joined |= {number: replica for number, replica in new.items() if number not in lost}
        for number in new:
            self._acknowledged.pop(number, None)

        return lost

    @property
    def first_adapter_round(self) -> int:
        """The first round after those of a frozen model; 0 if all tensors change."""
        return 0 if self._plan is None else self._plan.first_repeated_round

    def acknowledge(self, replicas: Collection[int], version: int) -> None:
        """Record that these replicas have the weights of a version."""
        self._acknowledged |= dict.fromkeys(replicas, version)

    def split_by_needs(
        self, replicas: Mapping[int, RoleGroup], lost: dict[int, Exception]
    ) -> list[dict[int, RoleGroup]]:
        """Split joined replicas into those that need what changed, and those that need everything.

        A replica that slept, or got weights from elsewhere, no longer has the weights that it acknowledged.
        Adds lost replicas to `lost`.
        """
        asking = {
            number: replica.call_rank(0, WeightImport.acknowledged_version, self.names[number])
            for number, replica in replicas.items()
        }
        up_to_date: dict[int, RoleGroup] = {}
        others: dict[int, RoleGroup] = {}

        for number, version in results_of(asking, lost, is_lost).items():
            known = self._acknowledged.get(number)
            is_known = known is not None and version == known
            (up_to_date if is_known else others)[number] = replicas[number]

        gather(
            *(
                self._source.group.call_rank(rank, WeightExport.forget_acknowledged_weights, number)
                for rank in self._ranks
                for number in others.keys() & self._acknowledged.keys()
            )
        )
        # What changed comes first: sending everything updates the copy that changes refer to.
        return [part for part in (up_to_date, others) if part]

    def forget(self, lost: Collection[int]) -> None:
        """Remove dead replicas. A replacement has to join again; the others are not affected."""
        for number in lost:
            self._joined.pop(number, None)
            self._acknowledged.pop(number, None)

        # The trainer ranks release their resources for the dead replicas.
        if lost and not self._source.group.has_ended:
            gather(
                *(
                    self._source.group.call_rank(rank, WeightExport.leave_weights, number)
                    for rank in self._ranks
                    for number in lost
                )
            )

    def forget_source(self) -> None:
        """Forget all connections, because the source's ranks are new processes. All replicas join again."""
        self._joined = {}

    def close(self) -> None:
        """Disconnect all replicas."""
        joined = self._joined
        self._joined = {}
        self._acknowledged = {}
        leaving = [
            replica.call_rank(0, WeightImport.leave_weights)
            for replica in joined.values()
            if not replica.has_ended
        ]

        if joined:
            gather(
                *leaving,
                *(self._source.group.call_rank(rank, WeightExport.end_weights) for rank in self._ranks),
            )

    @property
    def _ranks(self) -> range:
        return range(len(self._source.group.mesh))

    # ---- planning

    def _expect(self, needed: list[TensorSlices], number: int) -> None:
        """Check the needs of a replica.

        All replicas are built in the same way, so the first one's plan applies to all others and to their
        replacements.
        """
        if self._plan is None:
            if len(needed) != len(self._targets[number]):
                raise WeightTransferError(
                    f"an engine of {counted(len(self._targets[number]), 'rank')} reports needs of "
                    f"{counted(len(needed), 'rank')}"
                )
            self._needed = needed
            self._plan = self.plan(needed)
        if needed != self._needed:
            raise WeightTransferError(
                f"rollout replica {number} needs other tensor slices than the first one; restart the run"
            )

    def plan(self, needed: Sequence[TensorSlices]) -> TransferPlan:
        """Plan the transfer. Raises the errors of `plan_transfer`.

        If engines have adapters, those are sent last, and again in every sync.

        Args:
            needed: Slices needed by the ranks of each replica.
        """
        source = self._source
        # All replicas read the same files, so those of one are planned.
        is_folder = self._transport.needs.through_files
        wanted = [
            (place, slices)
            for places in (self._replica_places[:1] if is_folder else self._replica_places)
            for place, slices in zip(places, needed, strict=True)
        ]
        nbytes = message_bytes(self._transport, source.bucket_bytes, source.is_on_cuda)
        # Engines that apply the adapters themselves get the frozen tensors once.
        architecture = source.architecture
        repeated = () if architecture.lora is None else trained_tensors(architecture, "lm")

        return plan_in_words(
            {name: meta.shape for name, meta in source.manifest.items()},
            source.words,
            list(zip(self._trainer_places, source.slices, strict=True)),
            wanted,
            nbytes // source.message_dtype.itemsize,
            repeated,
        )

    def _connect(
        self, plan: TransferPlan, number: int
    ) -> tuple[list[EngineLink], Sequence[WorkerFuture[None]]]:
        """Return the links of an engine's ranks, and the calls in which the trainer ranks join."""
        call = self._source.group.call_rank
        # All replicas read the same files, so the plan has the ranks of the first one.
        planned = 0 if self._transport.needs.through_files else number
        devices = [place.device for place in self._replica_places[planned]]
        routes = sides_of(self._transport).route(
            plan,
            [place.device for place in self._trainer_places],
            dict(zip(self._targets[planned], devices, strict=True)),
            EngineLink(
                self._transport,
                self.names[number],
                self._source.message_dtype,
                self._limit_s,
                self._sends_changes,
            ),
        )

        addresses = gather(
            *(
                call(rank, WeightExport.publish_weight_address, number, link)
                for rank, link in routes.listeners.items()
            )
        )
        # Trainer ranks need no numbers of words, which may be tens of thousands.
        links = [replace(link, addresses=addresses, words=self._source.words) for link in routes.receivers]
        # Do not wait here: joining blocks until all members have been called.
        calls = [
            call(rank, WeightExport.join_weights, number, replace(link, addresses=addresses))
            for rank, link in routes.senders.items()
        ]
        return links, calls


def is_lost(error: WorkerError | PhaseTimeoutError) -> bool:
    """Return whether a replica is lost in a sync.

    It died, or it lost the trainers, so that a replacement may succeed.
    """
    return is_dead_or_failed_start(error) or (
        isinstance(error, WorkerError) and error.error_type == qualified_name(WeightTransferError)
    )
