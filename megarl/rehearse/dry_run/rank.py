"""Simulate one rank of a role on a fake device: build its engine, score, train, step, offload, restore, push.

The process must have loaded the guard (processes.py) and activated the fake device (`prepare`) before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.batch_arithmetic import (
    fullest_micro_batch,
    fullest_with_shared_prompt,
    micro_batch_tokens,
)
from megarl.config.layers import has_transformer_engine_modules
from megarl.config.load import with_dtype
from megarl.config.roles import ModelRole, RoleKind, model_roles, needs_sum_pi_squared
from megarl.config.schema import Device, PPOConfig, RoutingReplay, RunConfig
from megarl.config.validate import read_architectures
from megarl.engine import platform
from megarl.engine.offload import StatePart
from megarl.engine.spec import spec_of
from megarl.engine.top_tokens import TopK
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens
from megarl.models.mapping import AXES, Cut
from megarl.models.tensor_table import dimension_sizes
from megarl.plan.placement.activations import sharing_is_another_way
from megarl.rehearse.dry_run.device import FakeDevice
from megarl.rehearse.dry_run.ledger import Ledger, place, place_of
from megarl.rehearse.dry_run.record import (
    SHARED,
    UNEVEN,
    Collective,
    PhaseRecord,
    RankRecord,
    RankRequest,
    RehearsalError,
)
from megarl.rehearse.dry_run.rows import RehearsedBatch, even_routes, make_rows, uneven_routes, with_loss
from megarl.rehearse.dry_run.stand_ins import (
    flash_linear_attention,
    mamba_ssm,
    te_signature,
    transformer_engine_torch,
)
from megarl.weights.block_scaling import QuantizedShards, maximum_over_ranks
from megarl.weights.load import check_parameters
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.shard_layout import held_weights, shard_shapes
from megarl.weights.shards import merged_shards
from megarl.weights.tensors import Part, PeerTransfers, WeightTransferError
from megarl.weights.transfer import Channel, PipelinedTransfer

if TYPE_CHECKING:  # imports Megatron, which requires an active platform
    from megarl.engine.engine import MegatronEngine
    from megarl.engine.vocab_parallel import Extra

_LISTED_FAULTS = 4
_ledger = Ledger(None)  # of this process; a rank has its own


def prepare() -> None:
    """Activate the fake device, once per process and before any other use of the engine.

    Takes as long as importing Megatron.
    """
    te_signature.count_flops_with(lambda flops: _ledger.computes(flops))
    platform.activate_fake_cuda(
        lambda: _ledger.synchronizes("synchronize"),
        transformer_engine_torch.compiled_module() if has_transformer_engine_modules() else None,
    )
    # Import the engine here, so that the processes of ranks, which are forked from this one, have it.
    importlib.import_module("megarl.engine.engine")
    flash_linear_attention.install()
    mamba_ssm.install()
    with FakeTensorMode():  # the same for what torch imports for its first fake tensor
        torch.ones(2, 2) @ torch.ones(2, 2)


def rehearse(request: RankRequest, report: Callable[[str], None] = lambda phase: None) -> RankRecord:
    """Run all phases, or those up to the one that fails.

    Args:
        report: Called with the name of each finished phase.
    """
    global _ledger
    config = with_dtype(request.config, is_on_cuda=True)
    role = next(role for role in model_roles(config) if role.name == request.role)
    architecture = read_architectures(config)[0][role.name]
    limit_gb = config.placement.device_memory_gb
    _ledger = Ledger(None if limit_gb is None else int(limit_gb * 2**30))
    place = role.parallel.coordinate(request.rank)
    error = None
    # Phases are kept one by one, so that those before a failure are reported.
    phases = []
    rehearsal = _Rehearsal(config, role, architecture, request, _ledger)
    torch.autograd.set_multithreading_enabled(False)  # dispatch modes are per thread

    try:
        for phase in rehearsal.phases():
            phases.append(phase)
            report(phase.name)
    except Exception as failure:  # noqa: BLE001  (the engine's failure is the result)
        error = _described(failure)

    return RankRecord(
        rank=request.rank,
        tensor_rank=place.tp,
        context_rank=place.cp,
        data_rank=place.dp,
        pipeline_rank=place.pp,
        num_parameters=rehearsal.num_parameters,
        phases=tuple(phases),
        error=error,
    )


class _Rehearsal:
    def __init__(
        self,
        config: RunConfig,
        role: ModelRole,
        architecture: Architecture,
        request: RankRequest,
        ledger: Ledger,
    ) -> None:
        self.num_parameters = 0
        self._config = config
        self._role = role
        self._architecture = architecture
        self._request = request
        self._ledger = ledger
        self._shares_prompts = False
        self._device = FakeDevice(ledger)
        sizes = dimension_sizes(architecture)
        self._routing = {"num_experts": sizes["E"], "chosen": sizes["e"]}
        if routes_tokens(architecture):
            self._device.routes = partial(even_routes, **self._routing)
            self._device.num_experts = architecture.num_experts

    def _worst_cases(self) -> dict[str, Callable[[], None]]:
        """Return what makes passes as expensive as they can become, by suffixes of the phases' names."""
        cases = {}
        if sharing_is_another_way(self._config, self._role, self._architecture):
            cases[SHARED] = partial(self._take, shares_prompts=True, routes=self._device.routes)
        if routes_tokens(self._architecture):
            uneven = partial(uneven_routes, **self._routing)
            cases[UNEVEN] = partial(self._take, shares_prompts=False, routes=uneven)
        return cases

    def _take(self, *, shares_prompts: bool, routes: Callable[[int], Tensor] | None) -> None:
        self._shares_prompts = shares_prompts
        self._device.routes = routes

    def phases(self) -> Iterator[PhaseRecord]:
        with self._device, _world(self._request.rank, self._role.parallel.world_size):
            yield from self._run()

    def _batch(self, trains: bool) -> RehearsedBatch:
        """Return the batch of the next pass, and announce its shape to the fake device.

        Pipeline stages then receive the shape of its micro-batches.
        """
        of_role = self._config, self._role, self._architecture
        rows = fullest_micro_batch(*of_role, trains=trains)
        if self._shares_prompts:
            rows = fullest_with_shared_prompt(*of_role, trains=trains) or rows
        parallel = self._role.parallel
        ranks = parallel.context_parallel_size
        packing = self._config.engine.packing
        shards = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
        length = micro_batch_tokens(rows, ranks) // ranks if packing else max(row.tokens for row in rows)
        # The shape of activations that pipeline stages send to each other: length, rows and hidden size.
        self._device.received_integers = (
            -(-length // shards),
            1 if packing else len(rows),
            self._architecture.hidden_size,
        )

        return make_rows(rows, self._request.num_micro_batches, self._architecture.vision)

    def _run(self) -> Iterator[PhaseRecord]:
        from megarl.engine import groups
        from megarl.engine.engine import MegatronEngine

        class RehearsedEngine(MegatronEngine):
            def _load(self, folder: str) -> None:
                """Check the parameters against the layout. No weights are read."""
                check_parameters(
                    self.parameters(), shard_shapes(self.spec.architecture, self.layout, self.spec.head)
                )

        end = self._ledger.end_phase

        # Replayed routes would need the values of a batch, which do not exist here.
        own_routes = replace(self._config.engine, routing_replay=RoutingReplay.off)
        spec = spec_of(
            self._config.with_sections(engine=own_routes), self._role, self._architecture, Device.cuda
        )
        engine = RehearsedEngine(spec, groups.initialize(spec.parallel, spec.seed))
        check_engine(engine, with_transformer_engine=has_transformer_engine_modules())
        self.num_parameters = sum(parameter.numel() for parameter in engine.parameters().values())
        yield end("build")
        sends = self._request.sends
        push = None if sends is None else partial(push_weights, engine, sends, self._request, self._ledger)
        yield from run_phases(engine, self._config, self._role, self._batch, end, push, self._worst_cases())


def run_phases(
    engine: MegatronEngine,
    config: RunConfig,
    role: ModelRole,
    batch_of: Callable[[bool], RehearsedBatch],
    end: Callable[[str], PhaseRecord],
    push: Callable[[], None] | None = None,
    worst_cases: Mapping[str, Callable[[], None]] = MappingProxyType({}),
) -> Iterator[PhaseRecord]:
    """Run the phases of a step on a built engine, and yield `end` of each phase.

    Runs on any device: tests compare fake with real ones. Training is repeated if gradient reduction overlaps
    with the computation: in the first pass Megatron learns when gradients are ready, and reduces at the end.

    Args:
        batch_of: Returns the batch of a pass, given whether it trains.
        end: Ends a phase of the given name and returns its record.
        push: Runs a weight sync.
        worst_cases: Functions after which the passes are repeated, by suffixes of their names.
    """
    from megarl.engine import data_parallel

    extras: set[Extra] = {"entropy"}
    if isinstance(config, PPOConfig) and needs_sum_pi_squared(config.algorithm) and role.name == "actor":
        extras.add("sum_pi_squared")

    top = None
    if isinstance(config, PPOConfig) and role.kind is RoleKind.teacher:
        k = config.algorithm.teacher_top_k
        top = None if k is None else TopK(k, engine.spec.architecture.vocab_size)

    def score() -> None:
        columns, micro_batches = batch_of(False)
        engine.forward(columns, micro_batches, extras, top)

    def train() -> None:
        columns, micro_batches = batch_of(True)
        rows, loss = with_loss(config, role, columns)
        engine.forward_backward(rows, micro_batches, loss, loss.extras)

    trains = engine.spec.optim is not None
    score()
    yield end("score")

    if trains:
        train()
        yield end("train")
        engine.step()
        yield end("step")
        if data_parallel.overlaps(engine.spec.parallel, platform.current().is_cuda):
            train()
            yield end("train again")

    for suffix, worst_case in worst_cases.items():
        worst_case()
        score()
        yield end(f"score{suffix}")
        if trains:
            train()
            yield end(f"train{suffix}")

    yield from _offload_phases(engine, end, push)


def _offload_phases(
    engine: MegatronEngine, end: Callable[[str], PhaseRecord], push: Callable[[], None] | None
) -> Iterator[PhaseRecord]:
    """Run what an engine does around generation: offload its state and restore it."""
    parts: tuple[StatePart, ...] = (StatePart.parameters,) if engine.spec.optim is None else tuple(StatePart)
    engine.offload(*parts)
    yield end("offload")

    # If engines share the device, only the model's weights are on it during a weight sync.
    if push is not None:
        engine.restore(StatePart.parameters)
        push()
        yield end("push")

    engine.restore(*parts)
    yield end("restore")


@contextmanager
def _world(rank: int, size: int) -> Generator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _described(error: Exception) -> str:
    """Describe an error and its source line outside torch."""
    if isinstance(error, RehearsalError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip()}, at {place_of(error)}"


class _RecordedGroup(P2PGroup):
    """Records what is sent. Engine ranks are numbered after those of the actor."""

    def __init__(self, ledger: Ledger, rank: int, num_ranks: int) -> None:
        self._ledger = ledger
        self._rank = rank
        self._num_ranks = num_ranks

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> PendingMessages:
        for target, tensor in sends:
            ranks = (self._rank, self._num_ranks + target)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._ledger.communicates(
                Collective("send", "weights", ranks, dtype, tensor.numel(), tensor.nbytes, place())
            )
        return lambda patience_s: True


def push_weights(engine: MegatronEngine, sends: PeerTransfers, request: RankRequest, ledger: Ledger) -> None:
    """Run the sends of a weight sync.

    Raises:
        RehearsalError: The rank does not hold what the plan requires, or in another dtype. The message names
            the tensor.
    """
    spec = engine.spec
    plain = merged_shards(
        engine.parameters(),
        spec.architecture,
        engine.layout,
        spec.head,
        keeps_adapters=spec.pushes_adapters,
    )
    ledger.look_again()  # the weights have just been restored
    shards = QuantizedShards(plain, maximum_over_ranks) if spec.pushes_fp8 else plain
    dtype = QuantizedShards.dtype if spec.pushes_fp8 else getattr(torch, spec.dtype.value)

    # Check each part against the plan as it enters the send buffer.
    def regions(part: Part) -> Iterator[Tensor]:
        sent = f"a weight sync sends {part.tensor_slice.volume:,} elements of {part.name} as {dtype}"
        held = 0
        try:
            for region in shards.regions(part):
                held += region.numel()
                if region.dtype != dtype:
                    raise RehearsalError(f"{sent}, but this rank holds them as {region.dtype}")
                yield region
        except WeightTransferError as error:
            raise RehearsalError(f"{sent}, but {error}") from error

        if held != part.tensor_slice.volume:
            raise RehearsalError(f"{sent}, but this rank holds {held:,} of them")

    # Run the transfer's own code with a group that records the sends.
    buffers = torch.empty(2, sends.largest, dtype=dtype, device=shards.device)
    ipc_buffers = torch.empty(request.buffer_bytes, dtype=torch.uint8, device=shards.device)
    channel = Channel(_RecordedGroup(ledger, request.rank, spec.parallel.world_size), sends)
    is_done = PipelinedTransfer([channel], buffers, regions, are_computed=shards.are_computed).run()
    assert is_done, "there are no peers to wait for"
    # Keep the buffers until here, as in a run, so that the peak of the phase includes them.
    del ipc_buffers


def check_engine(engine: MegatronEngine, *, with_transformer_engine: bool) -> None:
    """Check the marks of sharded parameters, the accumulation of weight gradients, and the optimizer.

    Args:
        engine: The engine, whose parameters have the names and shapes of its layout.
        with_transformer_engine: Whether Transformer Engine is installed, whose optimizer Megatron then uses.

    Raises:
        RehearsalError: Something is missing. The message lists it.
    """
    parameters = dict(pair for model in engine.models for pair in model.canonical_parameters())
    faults = list(_wrong_marks(engine, parameters))
    for model in engine.models:
        faults += _separate_gradients(model)
    if with_transformer_engine and engine.spec.optim is not None:
        faults += _other_optimizers(engine)

    if faults:
        more = f"; and {len(faults) - _LISTED_FAULTS} more" if len(faults) > _LISTED_FAULTS else ""
        raise RehearsalError("the built engine is wrong: " + "; ".join(faults[:_LISTED_FAULTS]) + more)


def _wrong_marks(engine: MegatronEngine, parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[str]:
    """Yield parameters whose marks differ from the layout, by which Megatron sums the gradient norm."""
    for weight in held_weights(engine.spec.architecture, engine.layout, engine.spec.head):
        shards, _ = engine.layout.cut_of(weight)
        if shards == 1:
            continue
        parameter = parameters[weight.megatron_name]
        # The axes of these views split or stack the first dimension of the parameter.
        expected = 0 if weight.cut in (Cut.qkv, Cut.gated) else AXES[weight.cut].cut
        is_marked = getattr(parameter, "tensor_model_parallel", False)
        marked = getattr(parameter, "partition_dim", None)

        if expected is None and is_marked:
            ranks = counted(shards, "rank")
            yield f"{weight.megatron_name} is replicated, but marked as sharded over {ranks}"
        elif expected is not None and not is_marked:
            yield f"{weight.megatron_name} is sharded over {counted(shards, 'rank')}, but not marked"
        elif expected is not None and marked != expected:
            yield f"{weight.megatron_name} is sharded along dimension {expected}, but marked for {marked}"


def _separate_gradients(model: torch.nn.Module) -> Iterator[str]:
    """Yield layers of Transformer Engine that do not add weight gradients to Megatron's buffer themselves."""
    for name, module in model.named_modules():
        if not getattr(module, "fuse_wgrad_accumulation", True):
            yield f"{name} computes weight gradients separately from the gradient buffer"


def _other_optimizers(engine: MegatronEngine) -> Iterator[str]:
    whole = engine.optimizer.megatron_optimizer
    for part in getattr(whole, "chained_optimizers", [whole]):
        made_by = type(part.optimizer)
        if made_by.__module__.partition(".")[0] != "transformer_engine":
            yield f"the optimizer is {made_by.__module__}.{made_by.__qualname__}, not Transformer Engine's"
