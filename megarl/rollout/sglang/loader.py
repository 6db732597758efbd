"""Weight loading in SGLang's scheduler processes.

It uses SGLang's own extension point, the custom weight loader.

SGLang calls `run(model, named_tensors)` in every scheduler process. The single small tensor that is sent
contains a message in JSON; each process receives the weights themselves from the trainers. SGLang cannot
return a loader's result: rank 0 writes the answers of all ranks to a folder that the sender created.
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import batched
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megarl.machine.errors import counted
from megarl.rollout.derived_tensors import derived_tensors, refresh_derived
from megarl.rollout.destinations import (
    DestinationPlan,
    record_plan,
    storage_of,
    zero_what_is_not_written,
)
from megarl.rollout.sglang.adapters import with_adapters
from megarl.weights.checksum import MODULUS, checksum
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import Manifest, Part, TensorMeta, WeightTransferError, tiling_fault
from megarl.weights.transports.interface import EngineLink, WeightReceiver, decode_slice, encode_slice

EngineModel = Literal["target", "draft"]  # SGLang's names of the policy and of a draft model
# gets the tensors, whether there is a time limit, and the model whose loader runs
Send = Callable[[list[tuple[str, torch.Tensor]], bool, EngineModel], None]
_MAX_NAMED = 8  # faults in one message


# ---- in the scheduler processes


class RankLoader:
    """Executes the commands of a LoaderClient in one scheduler process.

    It keeps its plan and its transport between commands. Each public method is a command: it gets the model
    and the rank of the process, and its other arguments and its result are JSON values. It may raise
    WeightTransferError.
    """

    def __init__(self, device: torch.device) -> None:
        self._receiver = WeightReceiver(device)
        self._plan = DestinationPlan({}, {}, [], [])
        self._has_moved = False  # the plan has changed since the last update
        self._must_zero = False  # elements that no tensor fills may not be zero

        # Objects that SGLang created at startup live as long as its process. On the CPU, its flush of the
        # prefix cache collects garbage, and would scan all of them at the end of every update, which takes
        # nearly half a second.
        gc.freeze()

    def leave(self, model: Any, rank: int) -> None:
        self._receiver.leave()

    def meet(self, model: Any, rank: int) -> None:
        """Do nothing: the answers of all ranks are awaited."""

    def zero(self, model: Any, rank: int) -> None:
        self._must_zero = True
        self._follow(model)
        self._zero_padding(model)

    def join(self, model: Any, rank: int, links: Sequence[Any]) -> None:
        self._receiver.join(EngineLink.decode(links[rank]), self._plan.slices, self._places)

    def receive(
        self,
        model: Any,
        rank: int,
        ranks: Sequence[int],
        is_first: bool,
        first_round: int,
        folder: str | None,
    ) -> bool:
        """Return whether this rank has received everything. It then only takes part in the call."""
        # The first call of an update prepares the receiver; later ones continue where it stopped.
        if is_first:
            self._begin(model, first_round, folder)
        if rank not in ranks:
            return True
        is_complete = self._receiver.receive()
        if is_complete:
            refresh_derived(model)
        return is_complete

    def checksums(self, model: Any, rank: int) -> dict[str, list[list[Any]]]:
        self._follow(model)
        return {
            name: [[*encode_slice(tensor_slice), part] for tensor_slice, part in tensor.checksums()]
            for name, tensor in self._plan.tensors.items()
        }

    def _places(self, part: Part) -> Iterable[torch.Tensor]:
        return self._plan.tensors[part.name].places(part.tensor_slice)

    def prepare(self, model: Any, rank: int, manifest: list[tuple[str, list[int], str]]) -> dict[str, Any]:
        self._has_moved = True
        parameters = model.named_parameters()
        if converted := [name for name, each in parameters if getattr(each, "format_ue8m0", False)]:
            raise WeightTransferError(
                f"SGLang has converted {counted(len(converted), 'scale')} of FP8 weights for DeepGEMM on "
                f"this GPU, such as {converted[0]}, and a weight sync sends others; remove "
                "rollout.sglang.server_args.fp8_gemm_runner_backend"
            )
        metas = {name: TensorMeta(tuple(shape), getattr(torch, dtype)) for name, shape, dtype in manifest}
        with derived_tensors(model) as derived:
            self._plan = record_plan(model, metas)
        stale: list[str] = []
        # SGLang's own loader also refreshes what it derives.
        if not self._plan.not_followed:
            with derived_tensors(model) as refreshed:
                refresh_derived(model)
            stale = sorted(derived - refreshed)
        slices = {
            name: [encode_slice(tensor_slice) for tensor_slice in listed]
            for name, listed in self._plan.slices.items()
        }

        return {
            "slices": slices,
            "not_followed": self._plan.not_followed,
            "unreached": self._plan.unreached,
            "stale": stale,
        }

    def draft_checksums(self, draft: Any, rank: int) -> dict[str, int]:
        """Return the checksums of a draft model's parameters, except those that are the policy's tensors."""
        shared = {storage for storage, *_ in self._plan.places}
        return {
            name: checksum(parameter.detach().reshape(-1).view(torch.uint8))
            for name, parameter in draft.named_parameters()
            if storage_of(parameter) not in shared
        }

    def _begin(self, model: Any, first_round: int, folder: str | None) -> None:
        self._follow(model)
        if first_round and self._must_zero:
            raise WeightTransferError(
                "SGLang has moved its parameters since it received all weights: restart the engine"
            )
        self._zero_padding(model)
        self._receiver.begin(self._has_moved, first_round, folder)
        self._has_moved = False

    def _zero_padding(self, model: Any) -> None:
        if self._must_zero:
            zero_what_is_not_written(model, self._plan)
            self._must_zero = False

    def _follow(self, model: Any) -> None:
        """Record the plan again if SGLang has moved its parameters since it was recorded.

        Raises WeightTransferError if this rank now has other slices of the tensors.
        """
        # An incomplete plan is never used to receive, so it need not follow the model.
        if self._plan.not_followed or self._plan.is_of(model):
            return
        plan = record_plan(model, self._plan.manifest)

        # The trainers keep sending the slices that were agreed on.
        if plan.not_followed or plan.slices != self._plan.slices:
            raise WeightTransferError(
                "SGLang has sliced its parameters differently since it reported where its tensors go: "
                "restart the engine"
            )

        # The receiver must look up its destinations again, and the new memory's padding may contain anything.
        self._plan = plan
        self._has_moved = True
        self._must_zero = True


_rank_loader: RankLoader | None = None


def run(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Entry point for SGLang. Never raises, since that would end the scheduler process."""
    global _rank_loader
    message = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    rank = dist.get_rank()  # an engine is one world, stage by stage

    try:
        # Created with the first message, since it needs the model's device.
        _rank_loader = _rank_loader or RankLoader(next(iter(model.parameters())).device)
        model = with_adapters(model)
        answer = {"result": getattr(_rank_loader, message["command"])(model, rank, **message["arguments"])}
    except WeightTransferError as error:
        answer = {"failure": str(error)}
    except Exception:  # noqa: BLE001
        # Boundary of a process that must stay alive: all errors are reported to the engine's worker.
        answer = {"failure": traceback.format_exc()}

    # Ranks may be on other nodes, so the first one writes all answers.
    for rank, text in enumerate(_gather(json.dumps(answer))):
        path = Path(message["answers"]) / f"{message['number']}.{rank}.json"
        with contextlib.suppress(OSError):  # the sender detects and reports the missing answer
            # Rename the finished file, so that a reader never finds a partial answer.
            path.with_suffix(".partial").write_text(text)
            path.with_suffix(".partial").replace(path)


def _gather(answer: str) -> list[str]:
    """Return the answers of all ranks on rank 0, and nothing on the others."""
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [answer]
    answers: list[Any] | None = [None] * group.world_size if group.rank == 0 else None
    dist.gather_object(answer, answers, dst=0, group=group.cpu_group)
    return answers or []


# ---- in the engine's worker


class LoaderClient:
    """Client of the loaders in all `num_ranks` scheduler processes of one engine.

    The first rank runs on this node.

    Args:
        send: Passes the tensors to SGLang's update_weights_from_tensor, with this module's `run` as load
            format, for every rank, inside a weight-update session. Returns when all ranks have run it, with
            or without a time limit.
        num_ranks: The number of scheduler processes.
        num_stages: The number of pipeline stages, each of which has equally many consecutive ranks.
        has_draft: Whether the engine has a draft model, which no weight sync may change.
    """

    def __init__(self, send: Send, num_ranks: int, num_stages: int = 1, *, has_draft: bool = False) -> None:
        self._send = send
        self._num_ranks = num_ranks
        self._num_stages = num_stages
        self._has_draft = has_draft
        self._draft: list[dict[str, int]] = []  # of each rank, as loaded at the start
        self._answers = Path(tempfile.mkdtemp(prefix="megarl-loader-"))
        self._number = 0
        self._manifest: Manifest = {}
        self._slices: list[TensorSlices] = []
        self._not_followed: dict[str, str] = {}
        self._is_recorded = False  # whether the ranks' plans are for `_manifest`
        self._must_zero = True  # padding may not be zero
        self._waiting: set[int] = set()  # ranks that have not received everything

    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        """Return the slices of the tensors that each rank needs.

        Raises the errors of `prepare`, and WeightTransferError for tensors that cannot be received in pieces.
        """
        self.prepare(manifest)
        self._check_followed()
        return self._slices

    def prepare(self, manifest: Manifest) -> None:
        """Prepare every rank to receive the tensors of the manifest.

        The plan of their destinations is recorded once and kept: ranks compare it with the model before they
        use it.

        Raises:
            WeightTransferError: The manifest has tensors that the model does not have, or lacks some. The
                message names them, and the model is unchanged. A tensor that only SGLang's own loader can
                load is an error when it is received.
        """
        self._waiting = set()
        if manifest != self._manifest or not self._is_recorded:
            self._is_recorded = False  # if it fails, the ranks have plans for the refused manifest
            self._record(manifest)
            self._is_recorded = True
            self._must_zero = True
            if self._has_draft and not self._draft:
                self._draft = self._ask("draft_checksums", model="draft")

        if self._must_zero:
            self._ask("zero")
            self._must_zero = False

    def forget_padding(self) -> None:
        """Record that elements that no tensor fills may not be zero.

        This is the case after memory was released, or after SGLang loaded weights itself.
        """
        self._must_zero = True

    def _record(self, manifest: Manifest) -> None:
        encoded = [
            (name, list(meta.shape), str(meta.dtype).removeprefix("torch."))
            for name, meta in manifest.items()
        ]
        answers = self._ask("prepare", manifest=encoded)
        not_followed = {name: why for answer in answers for name, why in answer["not_followed"].items()}
        faults = []

        # Together the ranks' slices must tile every tensor.
        for name, meta in manifest.items():
            if name in not_followed:
                continue
            parts = {decode_slice(part) for answer in answers for part in answer["slices"][name]}
            if not parts:
                faults.append(f"{name} is not a tensor of the engine's model")
            elif (fault := tiling_fault(meta.shape, sorted(parts, key=lambda part: part.starts))) is not None:
                faults.append(f"{name} does not fit the engine's model: {fault}")

        # The ranks of a stage have different slices, and one may zero what another one has. Parameters that
        # are unreached on all of them are a fault.
        unreached = {
            name
            for of_stage in batched(answers, len(answers) // self._num_stages)
            for name in set.intersection(*(set(answer["unreached"]) for answer in of_stage))
        }
        if unreached and not not_followed:
            faults.append(f"no tensor is loaded into {', '.join(sorted(unreached)[:_MAX_NAMED])}")

        stale = sorted({name for answer in answers for name in answer["stale"]})
        if stale and not faults:
            raise WeightTransferError(
                f"a weight sync would leave {counted(len(stale), 'tensor')} unchanged that SGLang computes "
                f"when it loads weights, so that samples would be wrong: {', '.join(stale[:_MAX_NAMED])}; "
                "unset SGLANG_* variables and remove rollout.server_args that select other kernels"
            )
        if faults:
            raise WeightTransferError(
                f"{len(faults)} faults: the tensors are not those of the engine's model: "
                + "; ".join(faults[:_MAX_NAMED])
            )

        # Keep the plan only after it has passed all checks.
        self._manifest = manifest
        self._not_followed = not_followed
        self._slices = [
            {
                name: [decode_slice(tensor_slice) for tensor_slice in slices]
                for name, slices in answer["slices"].items()
            }
            for answer in answers
        ]

    def receive(self, first_round: int = 0, folder: str | None = None) -> bool:
        """Return whether all ranks have received everything. False after a while; call again to continue.

        Args:
            first_round: The first round that is sent.
            folder: The folder with what changed, if the trainers write files.

        Raises WeightTransferError if a trainer is gone, and for tensors that cannot be received in pieces.
        """
        self._check_followed()
        is_first = not self._waiting
        waiting = self._waiting or set(range(self._num_ranks))
        self._waiting = set()  # after a failure, nothing is in progress
        answers = self._ask(
            "receive",
            time_limit=True,
            ranks=sorted(waiting),
            is_first=is_first,
            first_round=first_round,
            folder=folder,
        )
        self._waiting = {rank for rank, is_complete in enumerate(answers) if not is_complete}

        return not self._waiting

    def join(self, links: Sequence[EngineLink]) -> None:
        """Connect to the trainers. Raises WeightTransferError if they are not there."""
        self._waiting = set()
        self._ask("join", links=[link.encode() for link in links])

    def leave(self) -> None:
        self._ask("leave")

    def meet(self) -> None:
        """Return when every rank has completed SGLang's previous requests."""
        self._ask("meet")

    def checksums(self) -> dict[str, int]:
        """Return the checksum of every tensor of the last manifest.

        Checksums are read back from the parameters and summed over the ranks' slices.

        Raises WeightTransferError with the names of tensors whose copies differ between ranks, and of tensors
        of a draft model that are not as they were loaded.
        """
        self._check_followed()
        if self._has_draft:
            self._check_draft()
        answers = self._ask("checksums")
        sums = {}
        differing = []

        for name in self._manifest:
            found = defaultdict(set)
            # A slice that several ranks have counts once, and its copies must agree.
            for answer in answers:
                for *corners, part in answer[name]:
                    found[decode_slice(corners)].add(part)
            differing += [name] if any(len(parts) > 1 for parts in found.values()) else []
            sums[name] = sum(next(iter(parts)) for parts in found.values()) % MODULUS

        if differing:
            raise WeightTransferError(
                f"the engine's ranks have different copies of {', '.join(differing[:_MAX_NAMED])}"
            )

        return sums

    def _check_draft(self) -> None:
        for rank, (loaded, now) in enumerate(
            zip(self._draft, self._ask("draft_checksums", model="draft"), strict=True)
        ):
            if changed := [name for name in loaded | now if loaded.get(name) != now.get(name)]:
                raise WeightTransferError(
                    f"{counted(len(changed), 'tensor')} of the draft model no longer as loaded, or no "
                    f"longer the policy's, on rank {rank} of the engine: {', '.join(changed[:_MAX_NAMED])}"
                )

    def close(self) -> None:
        shutil.rmtree(self._answers, ignore_errors=True)

    def _check_followed(self) -> None:
        if self._not_followed:
            name, why = next(iter(self._not_followed.items()))
            raise WeightTransferError(
                f"{counted(len(self._not_followed), 'tensor')} cannot be received in pieces, because SGLang "
                f"does more than copy them: {name} ({why}), ...; set resharding.transport=folder and "
                "resharding.verify=off, which leave the loading to SGLang"
            )

    def _ask(
        self, command: str, time_limit: bool = False, model: EngineModel = "target", **arguments: Any
    ) -> list[Any]:
        """Return the results of all ranks. Raises WeightTransferError with all failures.

        Args:
            command: A method of RankLoader.
            time_limit: Whether ranks must answer soon, or are considered hung.
            model: The model that the loader gets.
            arguments: JSON values.
        """
        self._number += 1
        message = {
            "number": self._number,
            "answers": str(self._answers),
            "command": command,
            "arguments": arguments,
        }
        self._send(
            [("message", torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8))],
            time_limit,
            model,
        )
        paths = [self._answers / f"{self._number}.{rank}.json" for rank in range(self._num_ranks)]

        # SGLang does not report whether its ranks ran the loader, so look for their answers.
        if missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            raise WeightTransferError(
                f"SGLang's ranks {missing} did not run megarl's weight loader ({command}); its log says why"
            )

        answers = [json.loads(path.read_bytes()) for path in paths]
        # Remove the answers before raising a failure; otherwise they would be left over.
        for path in paths:
            path.unlink()

        if failures := [
            f"rank {rank}: {answer['failure']}" for rank, answer in enumerate(answers) if "failure" in answer
        ]:
            raise WeightTransferError("; ".join(failures))

        return [answer["result"] for answer in answers]
