"""How weights enter SGLang's scheduler processes: through its own extension point, the custom weight loader.

SGLang calls `run(model, named_tensors)` in every scheduler process. The one small tensor that is sent holds a message in JSON;
the weights themselves come as parcels, which each process opens itself. SGLang has no way back for a loader's result: each
rank writes its answer into a folder that the sender made.
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megarl.rollout.sglang.destinations import Copy, Plan, record_plan, zero_what_is_not_written
from megarl.weights.boxes import Rectangle, tiling_fault
from megarl.weights.bucket import ChunkMeta, GroupAddress, Parcel, SegmentHandle
from megarl.weights.checksum import MODULUS
from megarl.weights.receipt import Manifest, TensorMeta, WeightTransferError
from megarl.weights.receiver import ParcelReceiver
from megarl.weights.stream import StreamAddress, WeightStream

Send = Callable[[list[tuple[str, torch.Tensor]]], None]
_MAX_NAMED = 8  # faults in one message


class LoadSeconds(NamedTuple):
    """Of the slowest rank: to fetch the parcels, and to copy them into the parameters."""

    transport: float
    load: float


# ---- in the scheduler processes


class RankLoader:
    """One scheduler process; keeps its plan and its groups from message to message. Each method answers in JSON's terms."""

    def __init__(self, device: torch.device) -> None:
        self._receiver = ParcelReceiver(device)
        self._plan = Plan({}, {}, [], [])
        self._copies: list[list[Copy]] = []  # of each bucket of the streams; made when they are read first
        # What SGLang made at its start lives as long as its process. Its flush of the prefix cache collects garbage on the CPU,
        # and would look at all of it at the end of every update, for nearly half a second.
        gc.freeze()

    def answer(self, model: Any, rank: int, command: str, arguments: dict[str, Any]) -> Any:
        """Raises WeightTransferError."""
        if command == "prepare":
            return self._prepare(model, arguments["manifest"])
        if command == "zero":
            return zero_what_is_not_written(model, self._plan)
        if arguments.get("is_first") and self._follow(model):
            zero_what_is_not_written(model, self._plan)
        if command == "load":
            return self._load([_decode_parcel(parcel) for parcel in arguments["parcels"]])
        if command == "join_streams":
            self._copies = []
            return self._receiver.join_streams([_decode_stream(stream) for stream in arguments["streams"]], arguments["first_rank"] + rank)
        if command == "load_streams":
            return rank not in arguments["ranks"] or self._load_streams(arguments["is_first"])
        if command == "finish":
            return self._receiver.release()
        if command == "join":
            return self._receiver.join(GroupAddress(*arguments["address"]), arguments["first_rank"] + rank)
        if command == "leave":
            self._copies = []
            return self._receiver.leave()
        assert command == "checksums", command
        return {
            name: [[*_encode_rectangle(rectangle), part] for rectangle, part in tensor.checksums()]
            for name, tensor in self._plan.tensors.items()
        }

    def _prepare(self, model: Any, manifest: list[tuple[str, list[int], str]]) -> dict[str, Any]:
        self._plan = record_plan(model, {name: TensorMeta(tuple(shape), getattr(torch, dtype)) for name, shape, dtype in manifest})
        self._copies = []
        rectangles = {name: [_encode_rectangle(part) for part in parts] for name, parts in self._plan.rectangles.items()}
        return {"rectangles": rectangles, "not_followed": self._plan.not_followed, "unreached": self._plan.unreached}

    def _follow(self, model: Any) -> bool:
        """Whether SGLang had moved its parameters since the plan was made, as it may between two updates; then there is a new plan.

        Raises WeightTransferError where it holds other parts of the tensors now.
        """
        if self._plan.is_of(model):
            return False
        plan = record_plan(model, self._plan.manifest)
        if plan.not_followed or plan.rectangles != self._plan.rectangles:
            raise WeightTransferError("SGLang has cut its parameters anew since it was asked where its tensors go: start the engine anew")
        self._plan, self._copies = plan, []
        return True

    def _load(self, parcels: Sequence[Parcel]) -> LoadSeconds:
        start_s, fetched_before_s = time.perf_counter(), self._receiver.transport_s
        with torch.no_grad():
            for parcel in parcels:
                for chunk in self._receiver.open(parcel):
                    _make(self._plan.tensors[chunk.name].copies(chunk))
        transport_s = self._receiver.transport_s - fetched_before_s
        return LoadSeconds(transport_s, time.perf_counter() - start_s - transport_s)

    def _load_streams(self, is_first: bool) -> bool:
        stream = self._receiver.stream
        if is_first and stream.is_under_way:
            raise WeightTransferError("the stream was given up in the middle, for an update before this one: join another")
        if not self._copies:
            if unknown := {chunk.name for bucket in stream.buckets for chunk in bucket} - self._plan.tensors.keys():
                raise WeightTransferError(f"the stream has tensors that were not announced: {', '.join(sorted(unknown)[:_MAX_NAMED])}")
            self._copies = [
                [copy for chunk in bucket for copy in self._plan.tensors[chunk.name].copies(chunk)] for bucket in stream.buckets
            ]
        with torch.no_grad():
            return stream.read(lambda number: _make(self._copies[number]))


def _make(copies: Iterable[Copy]) -> None:
    for target, source in copies:
        target.copy_(source)


_rank_loader: RankLoader | None = None


def run(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry. Never raises: that would end the scheduler process."""
    global _rank_loader
    message = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    rank = dist.get_rank()  # an engine is one world of as many processes as its tensor-parallel size
    try:
        _rank_loader = _rank_loader or RankLoader(next(iter(model.parameters())).device)
        answer = {"result": _rank_loader.answer(model, rank, message["command"], message["arguments"])}
    except WeightTransferError as error:
        answer = {"failure": str(error)}
    except Exception:  # noqa: BLE001  (the boundary of a process that must live: the engine's worker is told all of it)
        answer = {"failure": traceback.format_exc()}
    path = Path(message["answers"]) / f"{message['number']}.{rank}.json"
    with contextlib.suppress(OSError):  # whoever asked misses the answer, and says so
        path.with_suffix(".partial").write_text(json.dumps(answer))
        path.with_suffix(".partial").replace(path)


# ---- in the engine's worker


class LoaderClient:
    """Speaks to the loaders of all `num_ranks` scheduler processes of one engine, which run on this node.

    `send` hands the tensors to SGLang's update_weights_from_tensor with this module's `run` as load format, for every rank,
    inside an open weight-update session where SGLang has sessions, and returns when all ranks have run it.
    """

    def __init__(self, send: Send, num_ranks: int) -> None:
        self._send, self._num_ranks = send, num_ranks
        self._answers = Path(tempfile.mkdtemp(prefix="megarl-loader-"))
        self._number = 0
        self._manifest: Manifest = {}
        self._not_followed: dict[str, str] = {}
        self._is_known = False  # where the tensors go
        self._is_first = True  # no load was asked for in this update
        self._holds_parcels = False
        self._reading: set[int] = set()  # ranks that have not read the streams to the end

    def prepare(self, manifest: Manifest) -> None:
        """Finds out where the tensors go in the model as it lies in memory now; the next `load` writes there. What was found out
        for an earlier update is kept; the first load looks whether it still holds.

        Raises WeightTransferError that names tensors that are not the model's, and parameters that no tensor fills; then the
        model is unchanged. A tensor that only SGLang's own loader can load is an error when it is to be loaded.
        """
        self._is_first, self._reading = True, set()
        if manifest != self._manifest or not self._is_known:
            self._is_known = False  # until it has gone well: ranks have a new plan where it has not
            self._record(manifest)
            self._ask("zero")
            self._is_known = True

    def forget(self) -> None:
        """Memory was given back, or SGLang has loaded by itself: what no tensor fills need not be zero, and tensors may go elsewhere."""
        self._is_known = False

    def _record(self, manifest: Manifest) -> None:
        encoded = [(name, list(meta.shape), str(meta.dtype).removeprefix("torch.")) for name, meta in manifest.items()]
        answers = self._ask("prepare", manifest=encoded)
        not_followed = {name: why for answer in answers for name, why in answer["not_followed"].items()}
        faults = []
        for name, meta in manifest.items():
            if name in not_followed:
                continue
            parts = {_decode_rectangle(part) for answer in answers for part in answer["rectangles"][name]}
            if not parts:
                faults.append(f"{name} is not a tensor of the engine's model")
            elif (fault := tiling_fault(meta.shape, sorted(parts, key=lambda part: part.starts))) is not None:
                faults.append(f"{name} does not fit the engine's model: {fault}")
        unreached = set.intersection(*(set(answer["unreached"]) for answer in answers))
        if unreached and not not_followed:
            faults.append(f"no tensor goes into {', '.join(sorted(unreached)[:_MAX_NAMED])}")
        if faults:
            raise WeightTransferError(
                f"{len(faults)} faults: the tensors are not those of the engine's model: " + "; ".join(faults[:_MAX_NAMED])
            )
        self._manifest, self._not_followed = manifest, not_followed

    def load(self, parcels: Sequence[Parcel]) -> LoadSeconds:
        """Raises WeightTransferError where a sender is gone, and for tensors that cannot be loaded in pieces."""
        self._check_followed()
        if not any(parcel.chunks for parcel in parcels):
            return LoadSeconds(0.0, 0.0)
        self._holds_parcels = True
        seconds = self._ask_to_load("load", parcels=[_encode_parcel(parcel) for parcel in parcels if parcel.chunks])
        return LoadSeconds(max(transport for transport, _ in seconds), max(load for _, load in seconds))

    def load_streams(self) -> bool:
        """Whether all ranks have loaded everything. Raises as `load`."""
        self._check_followed()
        self._reading = self._reading or set(range(self._num_ranks))
        answers = self._ask_to_load("load_streams", ranks=sorted(self._reading))
        self._reading = {rank for rank, is_complete in enumerate(answers) if not is_complete}
        return not self._reading

    def join_streams(self, streams: Sequence[WeightStream], first_rank: int) -> None:
        """Raises WeightTransferError where the trainer is gone."""
        self._reading = set()
        self._ask("join_streams", streams=[_encode_stream(stream) for stream in streams], first_rank=first_rank)

    def finish(self) -> None:
        """Gives back what the processes kept for the next parcel."""
        if self._holds_parcels:
            self._ask("finish")
            self._holds_parcels = False

    def join(self, address: GroupAddress, first_rank: int) -> None:
        """Raises WeightTransferError where not all ranks of the group come in time."""
        self._ask("join", address=address, first_rank=first_rank)

    def leave(self) -> None:
        self._ask("leave")

    def checksums(self) -> dict[str, int]:
        """Of every tensor of the last manifest, read back from the parameters: the ranks' parts are added, copies must agree.

        Raises WeightTransferError that names tensors whose copies differ between ranks.
        """
        self._check_followed()
        self._record(self._manifest)  # SGLang may have moved its parameters since
        answers = self._ask("checksums")
        sums, differing = {}, []
        for name in self._manifest:
            found = defaultdict(set)
            for answer in answers:
                for *corners, part in answer[name]:
                    found[_decode_rectangle(corners)].add(part)
            differing += [name] if any(len(parts) > 1 for parts in found.values()) else []
            sums[name] = sum(next(iter(parts)) for parts in found.values()) % MODULUS
        if differing:
            raise WeightTransferError(f"the engine's ranks hold different copies of {', '.join(differing[:_MAX_NAMED])}")
        return sums

    def close(self) -> None:
        shutil.rmtree(self._answers, ignore_errors=True)

    def _check_followed(self) -> None:
        if self._not_followed:
            name, why = next(iter(self._not_followed.items()))
            raise WeightTransferError(
                f"{len(self._not_followed)} tensors cannot be loaded in pieces, because SGLang does more than to copy them: "
                f"{name} ({why}), ...; set resharding.transport=disk and resharding.verify=off, which leave the loading to SGLang"
            )

    def _ask_to_load(self, command: str, **arguments: Any) -> list[Any]:
        answers = self._ask(command, is_first=self._is_first, **arguments)
        self._is_first = False
        return answers

    def _ask(self, command: str, **arguments: Any) -> list[Any]:
        """The results of all ranks. Raises WeightTransferError with the failures of any."""
        self._number += 1
        message = {"number": self._number, "answers": str(self._answers), "command": command, "arguments": arguments}
        self._send([("message", torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8))])
        paths = [self._answers / f"{self._number}.{rank}.json" for rank in range(self._num_ranks)]
        if missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            raise WeightTransferError(f"SGLang's ranks {missing} did not run megarl's weight loader ({command}); its log says why")
        answers = [json.loads(path.read_bytes()) for path in paths]
        for path in paths:
            path.unlink()
        if failures := [f"rank {rank}: {answer['failure']}" for rank, answer in enumerate(answers) if "failure" in answer]:
            raise WeightTransferError("; ".join(failures))
        return [answer["result"] for answer in answers]


# ---- as JSON


def _encode_rectangle(rectangle: Rectangle) -> list[list[int]]:
    return [list(rectangle.starts), list(rectangle.stops)]


def _decode_rectangle(corners: Sequence[Sequence[int]]) -> Rectangle:
    starts, stops = corners
    return Rectangle(tuple(starts), tuple(stops))


def _encode_parcel(parcel: Parcel) -> dict[str, Any]:
    return {"chunks": parcel.chunks, "dtype": str(parcel.dtype).removeprefix("torch."), "where": parcel.where}


def _decode_parcel(encoded: dict[str, Any]) -> Parcel:
    where = encoded["where"]
    chunks = tuple(ChunkMeta(*chunk) for chunk in encoded["chunks"])
    return Parcel(chunks, getattr(torch, encoded["dtype"]), where if isinstance(where, str) else SegmentHandle(*where))


def _encode_stream(stream: WeightStream) -> dict[str, Any]:
    dtype = str(stream.dtype).removeprefix("torch.")
    return {"address": stream.address, "dtype": dtype, "slot_numel": stream.slot_numel, "buckets": stream.buckets}


def _decode_stream(encoded: dict[str, Any]) -> WeightStream:
    name, segment, writers, readers = encoded["address"]
    address = StreamAddress(name, SegmentHandle(*segment), tuple(writers), tuple(readers))
    buckets = tuple(tuple(ChunkMeta(*chunk) for chunk in bucket) for bucket in encoded["buckets"])
    return WeightStream(address, getattr(torch, encoded["dtype"]), encoded["slot_numel"], buckets)
