"""Weight sync to the engines. A sync is one call per rank, in which the rank executes its part of a plan.

The driver makes the plan and connects the ranks (session.py). It never holds a weight, and takes part in no
round.

    driver                     trainer ranks                       engine ranks
    make, for new replicas
      needed_slices     -----------------------------------------> slices that they need
      plan_in_words
      publish_...       -----> Sender.listen
      join_weights      -----> Sender.join                 ------> WeightReceiver.join
    push
      send_weights      -----> Sender.open, Transfer.run
      receive_weights   -----------------------------------------> WeightReceiver.begin, receive
      continue_weights  -----> Transfer.run, as long as peers are silent
      checksums         -----> of shards                   ------> of the engine's parameters
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from megarl.config.schema import Transport, Verify
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import WorkerFuture, gather, wait_for_any
from megarl.controller.group import RoleGroup, results_of
from megarl.machine.errors import RunError
from megarl.weights.checksum import WeightMismatchError, add_checksums, compare_checksums
from megarl.weights.plan import RankLocation
from megarl.weights.sync.session import TransferSession, is_lost
from megarl.weights.sync.source import LIMITS_S, WeightSource, check_limits
from megarl.weights.sync.worker import WeightExport, WeightImport
from megarl.weights.transfer import SendReport

PUSHED_FOLDERS = ".weights-*"  # the transport `folder` creates one while it works
_LOOK_S = 10.0  # interval for asking every call
_GLANCE_S = 0.01
_GRACE_S = 2.0  # waiting time for the error of a replica that a trainer rank has lost


class PushReport(NamedTuple):
    """Report of one weight sync.

    Attributes:
        packing_s: Time for copying into messages, of the slowest trainer rank; part of `seconds`.
        waiting_s: Time waiting for peers, of the slowest trainer rank; part of `seconds`.
        load_s: Time until the last engine had everything.
        verify_s: Time for comparing checksums.
        nbytes: Bytes sent by all trainer ranks together.
        extra_bytes: Maximum memory that a trainer rank used for the sync, planned or measured.
        sent_share: Bytes sent relative to those of all weights. None if all weights are sent in each sync.
    """

    seconds: float
    packing_s: float
    waiting_s: float
    load_s: float
    verify_s: float
    nbytes: int
    extra_bytes: int
    sent_share: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return `resharding/<field>`, and `resharding/gb_per_s` of the sync without verification."""
        speed = self.nbytes / 1e9 / max(self.seconds - self.verify_s, 1e-9)
        known = {name: value for name, value in self._asdict().items() if value is not None}
        return {
            **{f"resharding/{name}": float(value) for name, value in known.items()},
            "resharding/gb_per_s": speed,
        }


def load_folder(
    replicas: Mapping[int, RoleGroup], folder: Path, version: int
) -> dict[int, WorkerFuture[None]]:
    """Let replicas load a Hugging Face folder, and return their calls by number."""
    path = str(folder.absolute())
    return {
        number: replica.call_rank(0, WeightImport.load_folder, path, version)
        for number, replica in replicas.items()
    }


class WeightSync:
    """Syncs a model's weights to rollout replicas (weights/sync/worker.py).

    Each replica is a worker group of one process.

    Args:
        trainer_places: Locations of the source's ranks.
        replica_places: Locations of the ranks of each replica.
        transport: The transport; not `auto`.
        verify: When to compare the checksum of every tensor between trainer and engine: never, when a replica
            gets its first weights, or always.
        scratch_dir: Parent of the folder of the transport `folder`, visible to all nodes.
        config_dir: Hugging Face folder of the model, whose configuration accompanies the weights.
        limit_s: Time limit of a message.
        sends_changes: Whether replicas are sent only what changed since their last weights, with the
            transports `group` and `folder`.
    """

    def __init__(
        self,
        source: WeightSource,
        trainer_places: Sequence[RankLocation],
        replica_places: Sequence[Sequence[RankLocation]],
        *,
        transport: Transport,
        verify: Verify,
        scratch_dir: str | Path,
        config_dir: str | Path,
        limit_s: float,
        sends_changes: bool = False,
    ) -> None:
        assert transport is not Transport.auto
        assert transport.needs.sends_changes or not sends_changes
        self._source = source
        self._transport = transport
        self._verify = verify
        self._scratch_dir = Path(scratch_dir)
        self._config_dir = Path(config_dir)
        self._sends_changes = sends_changes

        self._new_session = partial(
            TransferSession,
            source,
            trainer_places,
            transport=transport,
            limit_s=limit_s,
            sends_changes=sends_changes,
        )
        self._session = self._new_session(replica_places)
        self._verified = WeakSet[RoleGroup]()  # with Verify.first

    def push(
        self, replicas: Mapping[int, RoleGroup], version: int
    ) -> tuple[PushReport | None, dict[int, Exception]]:
        """Send all weights, stamped `version`, to every replica (by number).

        A replica with complete weights is sent only what changes: with adapters not the model, and with
        `sends_changes` only elements whose bits changed. A replica refuses to generate from the first message
        to the last.

        Returns:
            The report (None if no replica is left), and the lost replicas with the reason: they died or hang,
            or do not have the weights that they were sent, and must be restarted.

        Raises:
            WorkerError: A trainer rank failed or died, or an engine failed in a way that a replacement would
                not avoid.
            WeightMismatchError: The checksums of all replicas differ; the message names tensors.
        """
        lost: dict[int, Exception] = {}
        start_s = time.perf_counter()

        if self._transport.needs.through_files and not self._sends_changes:
            reports = self._through_folder(replicas, version, lost)
        else:
            # Join the replicas that are new since the last sync; the others stay joined.
            lost |= self._session.make(replicas)
            to = {number: replica for number, replica in replicas.items() if number not in lost}
            if not to:  # no replica is left to receive, and trainers may have joined none
                self._session.forget(lost)
                return None, lost
            reports = []
            for first_round, part in self._passes(to, lost):
                through_files = self._transport.needs.through_files
                with self._scratch_folder(version) if through_files else nullcontext() as folder:
                    reports += self._send(part, version, lost, first_round, folder)

        # The replicas have all weights. Compare checksums if configured.
        load_s = time.perf_counter() - start_s
        verify_s = self._check(
            {number: replica for number, replica in replicas.items() if number not in lost}, lost
        )
        self._session.forget(lost)
        self._session.acknowledge(replicas.keys() - lost.keys(), version)
        if len(lost) == len(replicas):
            return None, lost
        return self._report(reports, time.perf_counter() - start_s, load_s, verify_s), lost

    def _report(
        self, reports: Sequence[SendReport], seconds: float, load_s: float, verify_s: float
    ) -> PushReport:
        """Return the report of a sync, given those of the trainer ranks. The slowest determines its time."""
        nbytes = sum(report.nbytes for report in reports)
        full_bytes = sum(report.full_bytes for report in reports)
        return PushReport(
            seconds=seconds,
            packing_s=max(report.packing_s for report in reports),
            waiting_s=max(report.waiting_s for report in reports),
            load_s=load_s,
            verify_s=verify_s,
            nbytes=nbytes,
            extra_bytes=max(
                max(report.planned_extra_bytes, report.measured_extra_bytes) for report in reports
            ),
            sent_share=nbytes / full_bytes if self._sends_changes else None,
        )

    def send_to(self, replica_places: Sequence[Sequence[RankLocation]]) -> None:
        """Register new replicas. The next sync makes a new plan and joins all of them again."""
        self._session.close()
        self._session = self._new_session(replica_places)

    def reconnect(self) -> None:
        """Join all replicas again in the next sync, because the source's ranks are new processes."""
        self._session.forget_source()

    def close(self) -> None:
        """Disconnect all replicas and free the message buffers. The next sync joins them again."""
        self._session.close()

    def _passes(
        self, replicas: Mapping[int, RoleGroup], lost: dict[int, Exception]
    ) -> list[tuple[int, dict[int, RoleGroup]]]:
        """Return the passes of a sync: the first round that is sent, and the replicas that receive.

        Adds lost replicas to `lost`. An engine that slept or was restarted has no complete weights.
        """
        if self._sends_changes:
            return [(0, part) for part in self._session.split_by_needs(replicas, lost)]
        if not self._session.first_adapter_round:
            return [(0, dict(replicas))]

        asking = {
            number: replica.call_rank(0, WeightImport.weight_version) for number, replica in replicas.items()
        }
        parts: dict[int, dict[int, RoleGroup]] = {}
        for number, version in results_of(asking, lost, is_lost).items():
            first_round = 0 if version is None else self._session.first_adapter_round
            parts.setdefault(first_round, {})[number] = replicas[number]
        return list(parts.items())

    def _send(
        self,
        replicas: Mapping[int, RoleGroup],
        version: int,
        lost: dict[int, Exception],
        first_round: int,
        folder: Path | None,
    ) -> list[SendReport]:
        """Send the weights from the trainer ranks to joined replicas, or through files in `folder`.

        Adds lost replicas to `lost`. Raises the errors of `push`.
        """
        trainers = self._source.group
        path = None if folder is None else str(folder)
        sending = {
            rank: trainers.call_rank(rank, WeightExport.send_weights, list(replicas), first_round, path)
            for rank in range(len(trainers.mesh))
        }
        reports: list[SendReport] = []

        # Files are complete before they are read. Otherwise, start both sides before waiting for either: each
        # waits for the other.
        if folder is not None:
            for report in gather(*sending.values()):
                assert report is not None, "with files, there are no peers to wait for"
                reports.append(report)
            sending = {}
        receiving = {
            number: replica.call_rank(
                0, WeightImport.receive_weights, version, self._session.names[number], first_round, path
            )
            for number, replica in replicas.items()
        }
        calls = _Push(trainers, sending, receiving, lost)
        reports += calls.finish()

        # All calls have ended by now, so that no rank is left in the middle of a message.
        if calls.failure is not None:
            self._session.forget(lost)
            raise calls.failure

        return reports

    @contextmanager
    def _scratch_folder(self, version: int) -> Generator[Path]:
        """Make an empty folder for the files of one version, and remove it afterwards."""
        self._scratch_dir.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".weights-{version}-", dir=self._scratch_dir))
        try:
            yield folder
        except BaseException:
            # After the failure of one rank, others may still add files, which must not hide that failure.
            # What remains is removed when the run is started again.
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder)

    def _through_folder(
        self, replicas: Mapping[int, RoleGroup], version: int, lost: dict[int, Exception]
    ) -> list[SendReport]:
        with self._scratch_folder(version) as scratch:
            # The trainers write a complete folder before any replica reads it.
            folder = scratch / "model"
            reports = self._source.write_hf(folder, self._config_dir)
            results_of(load_folder(replicas, folder, version), lost, is_lost)
            return reports

    # ---- verification

    def _check(self, replicas: Mapping[int, RoleGroup], lost: dict[int, Exception]) -> float:
        """Verify the checksums if necessary. Returns the seconds it took."""
        start_s = time.perf_counter()
        to_check = {
            number: replica
            for number, replica in replicas.items()
            if self._verify is not Verify.off and replica not in self._verified
        }

        if to_check:
            # Trainers and engines compute their checksums concurrently.
            parts = self._source.checksums()
            asking = {
                number: replica.call_rank(0, WeightImport.checksums) for number, replica in to_check.items()
            }
            trainer = add_checksums(gather(*parts))
            differing: dict[int, Exception] = {}
            for number, engine in results_of(asking, lost, is_lost).items():
                try:
                    name = f"the rollout replica with pid {to_check[number].pids[0]}"
                    compare_checksums(self._source.manifest, trainer, engine, name)
                except WeightMismatchError as error:
                    differing[number] = error
            if differing and len(differing) == len(replicas):
                raise next(iter(differing.values()))  # the sync is wrong, not one of the engines
            lost |= differing
            # Remember the groups, since a restarted replica is another group and has to be verified.
            if self._verify is Verify.first:
                self._verified.update(each for number, each in to_check.items() if number not in lost)

        return time.perf_counter() - start_s


class _Push:
    """Calls of one weight sync: of the trainer ranks, by rank, and of the replicas, by number.

    Attributes:
        failure: Failure of an engine that a replacement would not avoid. It is raised when all calls are
            done, so that none is left in the middle.
    """

    def __init__(
        self,
        trainers: RoleGroup,
        sending: dict[int, WorkerFuture[SendReport | None]],
        receiving: dict[int, WorkerFuture[None]],
        lost: dict[int, Exception],
    ) -> None:
        self._trainers = trainers
        self._sending = sending
        self._receiving = receiving
        self._replicas = list(receiving)
        self._lost = lost
        self.failure: WorkerError | PhaseTimeoutError | None = None
        self._reports: list[SendReport] = []
        self._next_check_s = time.monotonic() + LIMITS_S
        self._next_look_s = time.monotonic() + _LOOK_S

    def finish(self) -> list[SendReport]:
        """Wait for all calls.

        A rank that waits for peers returns without a report and is called again, without the lost replicas.
        Raises the error of a trainer rank.
        """
        while self._sending or self._receiving:
            if not self._sending and self._receiving.keys() <= self._lost.keys():
                for number, received in list(self._receiving.items()):
                    self._hear_replica(number, received, _GRACE_S)  # its own error is more informative
                break  # a silent replica waits for trainers that have dropped it
            ended = wait_for_any([*self._sending.values(), *self._receiving.values()], LIMITS_S)
            # Without a trainer rank that hangs, the sync cannot end, so all of them are checked at once.
            if time.monotonic() >= self._next_check_s:
                self._next_check_s = time.monotonic() + LIMITS_S
                check_limits(self._sending.values())
            # Asking for the result of any other call raises if that has exceeded its limit.
            looks_for_hangs = time.monotonic() > self._next_look_s
            if looks_for_hangs:
                self._next_look_s = time.monotonic() + _LOOK_S
            for rank, sent in list(self._sending.items()):
                if sent in ended or looks_for_hangs:
                    self._hear_trainer(rank, sent)
            for number, received in list(self._receiving.items()):
                if received in ended or looks_for_hangs:
                    self._hear_replica(number, received, _GLANCE_S)
        return self._reports

    def _hear_trainer(self, rank: int, sent: WorkerFuture[SendReport | None]) -> None:
        try:
            report = sent.get(_GLANCE_S)
        except WorkerError as error:
            raise self._cause(error) from None
        except PhaseTimeoutError:
            raise
        except TimeoutError:
            return

        if report is None:
            # It waits for a peer: report the lost replicas, so that it stops waiting for them.
            dropped = [number for number in self._replicas if number in self._lost]
            self._sending[rank] = self._trainers.call_rank(rank, WeightExport.continue_weights, dropped)
            return

        del self._sending[rank]
        self._reports.append(report)

        # A rank may detect the loss of a replica before the replica's own call fails.
        for number, why in report.lost.items():
            self._lost.setdefault(
                number,
                RunError(f"rollout replica {number} was lost to trainer rank {rank} in a weight sync: {why}"),
            )

    def _cause(self, error: WorkerError) -> WorkerError:
        """Return the cause of a trainer rank's failure.

        If another rank is lost, those that waited for it report first.
        """
        # Wait briefly for the others: the death of a rank is often reported after its peers' failures.
        deadline_s = time.monotonic() + _GRACE_S
        for sent in self._sending.values():
            try:
                sent.get(max(0.0, deadline_s - time.monotonic()))
            except WorkerError as other:
                if other.kind.is_loss:
                    return other
            except TimeoutError:
                pass

        return error

    def _hear_replica(self, number: int, received: WorkerFuture[None], patience_s: float) -> None:
        try:
            received.get(patience_s)
        except (WorkerError, PhaseTimeoutError) as error:
            self._lost[number] = error
            if not is_lost(error):
                self.failure = self.failure or error
        except TimeoutError:
            return
        del self._receiving[number]
