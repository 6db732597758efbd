"""Compare the counts of megarl.plan.step_time with those of dry runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from megarl.config.batch_arithmetic import fullest_micro_batch
from megarl.config.load import with_dtype
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import ParallelConfig
from megarl.config.validate import read_architectures
from megarl.plan.step_time.counts import AXES, Counts, total
from megarl.plan.step_time.packed_batch import pack
from megarl.plan.step_time.role_time import (
    gradient_counts,
    optimizer_counts,
    scoring_counts,
    training_counts,
)
from megarl.rehearse.dry_run.record import POINT_TO_POINT, PhaseRecord, RankRecord, RankRequest

# How far a count may be from the dry run's.
TOLERANCE = 0.01
EXACT = 1e-9

# The axes of Megatron's groups.
AXIS_OF_GROUP = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tensor",
    "CONTEXT_PARALLEL_GROUP": "context",
    "DATA_PARALLEL_GROUP_WITH_CP": "data",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pipeline",
    "default_pg": "pipeline",  # one of the directions between virtual stages
    "EMBEDDING_GROUP": "embedding",
    "EXPERT_MODEL_PARALLEL_GROUP": "expert",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expert_tensor",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "expert_stage",
    "EXPERT_DATA_PARALLEL_GROUP": "expert_data",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "stage",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "all",
}


class Calls(NamedTuple):
    """Calls of a phase that are compared: one kind, over one axis, of one dtype."""

    kind: str
    axis: str
    num_ranks: int
    stride: int
    dtype: str


class Compared(NamedTuple):
    """A number of a phase: operations, or the calls or bytes of `what`."""

    phase: str
    what: str
    counted: float
    rehearsed: float

    @property
    def ratio(self) -> float:
        """What the model counts, relative to the dry run."""
        if not self.rehearsed:
            return 1.0 if not self.counted else float("inf")
        return self.counted / self.rehearsed


def counts_of_phases(request: RankRequest, stage: int) -> dict[str, Counts]:
    """Return the counts of the phases of a dry run, by name."""
    config = with_dtype(request.config, is_on_cuda=True)
    role = role_of(request)
    architecture = read_architectures(config)[0][role.name]
    number = request.num_micro_batches
    scored = fullest_micro_batch(config, role, architecture, trains=False)
    phases = {
        "score": scoring_counts(
            config, role, architecture, stage, pack(config, role, architecture, scored)
        ).times(number)
    }

    if role.optim is not None:
        rows = fullest_micro_batch(config, role, architecture, trains=True)
        passes = training_counts(
            config, role, architecture, stage, pack(config, role, architecture, rows)
        ).times(number)
        phases["train"] = total((passes, gradient_counts(config, role, architecture, stage)))
        phases["step"] = optimizer_counts(config, role, architecture, stage)
        phases["train again"] = phases["train"]

    return phases


def role_of(request: RankRequest) -> ModelRole:
    return next(role for role in model_roles(request.config) if role.name == request.role)


def compare(request: RankRequest, record: RankRecord) -> Iterator[Compared]:
    """Yield the numbers of each phase. Calls of a single rank, which move nothing, are left out."""
    assert record.error is None, record.error
    counted = counts_of_phases(request, record.pipeline_rank)
    for phase in record.phases:
        if phase.name not in counted:
            continue
        counts = counted[phase.name]
        yield Compared(phase.name, "flops", counts.flops, phase.flops)

        rehearsed = rehearsed_calls(phase, role_of(request).parallel)
        expected = {
            Calls(each.kind, each.axis, each.num_ranks, each.stride, each.dtype): (each.calls, each.nbytes)
            for each in counts.collectives
        }
        for calls in sorted(rehearsed.keys() | expected.keys()):
            for what, mine, theirs in zip(
                ("calls", "bytes"), expected.get(calls, (0, 0)), rehearsed.get(calls, (0, 0)), strict=True
            ):
                name = f"{what} of {calls.kind}, {calls.axis} {calls.num_ranks}, {calls.dtype}"
                yield Compared(phase.name, name, mine, theirs)


def differences(request: RankRequest, record: RankRecord, tolerance: float = TOLERANCE) -> list[str]:
    """Return the numbers whose ratio is further from 1 than the tolerance."""
    return [
        f"{request.role}, stage {record.pipeline_rank}, {each}"
        for each in compare(request, record)
        if abs(each.ratio - 1) > tolerance
    ]


def rehearsed_calls(phase: PhaseRecord, parallel: ParallelConfig) -> dict[Calls, tuple[int, int]]:
    """Return the number of calls and their bytes."""
    found: dict[Calls, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for call in phase.collectives:
        if len(call.ranks) == 1:
            continue
        axis = AXIS_OF_GROUP.get(call.group, call.group)
        if axis == "pipeline" and call.kind not in POINT_TO_POINT:
            axis = "stages"
        num_ranks = len(call.ranks)
        stride = abs(call.ranks[1] - call.ranks[0])
        # In a ring of ranks or of virtual stages, the last one sends to the first.
        if call.kind in POINT_TO_POINT:
            num_ranks, stride = AXES[axis](parallel)
        key = Calls(call.kind, axis, num_ranks, stride, call.dtype)
        number, nbytes = found[key]
        found[key] = number + 1, nbytes + call.nbytes
    return found
