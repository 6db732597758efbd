"""One model on Megatron-Core: forward passes and training steps over micro-batches, in any parallel layout.

The engine is independent of the algorithm. It scores response tokens (log-probs and entropy, or values).
Batches and scores are rows of tokens; a loss function receives those of a micro-batch as (b, R) tensors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megarl.batch.metrics import Metric, merge_metrics
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS
from megarl.config.megatron_options import token_multiple
from megarl.config.memory_sizes import logit_chunk_tokens
from megarl.config.schema import OptimConfig, RoutingReplay
from megarl.engine import platform
from megarl.engine.context import RankSlice
from megarl.engine.data_parallel import await_parameters, expect_no_gather, start_gather, wrap_models
from megarl.engine.groups import ParallelGroups
from megarl.engine.layer_specs import drop_quantized_weights, ends_with_predictors, layers_for
from megarl.engine.lora import AdapterSwitch, freeze_untrained
from megarl.engine.megatron_options import require_supported
from megarl.engine.micro_batch import MicroBatch, make_micro_batch
from megarl.engine.model import build_chunks, keep_hidden
from megarl.engine.moe_router import (
    RoutedTokens,
    RouterStatistics,
    freeze_routers,
    selection_biases,
)
from megarl.engine.offload import MovableState, OffloadableState, StatePart
from megarl.engine.optimizer import Optimizer, StepStatistics
from megarl.engine.phase_ranges import name_phases
from megarl.engine.router_replay import RouterReplayBuffer
from megarl.engine.spec import ModelSpec
from megarl.engine.top_tokens import TopK
from megarl.engine.vocab_parallel import ENTROPY, Extra, token_scores
from megarl.models.layers import reads_images, routes_tokens
from megarl.models.tensor_table import OUTPUT_LAYER
from megarl.weights.checkpoint_index import read_checkpoint_index
from megarl.weights.load import (
    fill_trained,
    load_into_shards,
    split_adapters,
)
from megarl.weights.manifest import value_head_of
from megarl.weights.shard_layout import layouts_of

Rows = Mapping[str, RaggedTensor]
MicroBatches = Sequence[Sequence[int]]  # row numbers of this replica's batch
# float32 (M,): `log_probs` and extras, or `values`, of the M response tokens of a micro-batch. With top
# tokens, `top_ids` (M, k) int32 and `top_log_probs` (M, k + 1) float32
Outputs = Mapping[str, Tensor]
# Receives outputs and columns of a micro-batch as (b, R), 0 where a row has no response token.
LossFunction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Metric]]]


_LOSS = "loss of the engine"  # no metric of a loss has this name


# The loss of a micro-batch, its metrics, and the detached outputs, which do not keep activations alive.
_LossShare = tuple[Tensor, Mapping[str, Metric], Outputs]


class MegatronEngine:
    """One model with weights from the spec's folder. A trained value head that is missing starts at zero.

    Attributes:
        adapters: Turns the adapters of the model off.
        known_base_checksum: The checksums of the base, once they have been computed.
        models: This rank's stages of the model, one per virtual pipeline stage.
        chunks: The same, wrapped in Megatron's data parallelism if the model trains.
        router_metrics: The router statistics of the last mini-batch, summed over all ranks; see
            RouterStatistics.metrics. Empty for a model without experts.
        trace: A StepTrace, which records training passes, if set.
    """

    def __init__(self, spec: ModelSpec, groups: ParallelGroups) -> None:
        self.spec = spec
        self.groups = groups
        self._device = platform.current().device
        dtype = getattr(torch, spec.dtype.value)
        self.layers = layers_for(
            spec.engine.layers,
            spec.dtype,
            on_cuda=platform.current().is_cuda,
            has_adapters=spec.architecture.lora is not None,
        )
        require_supported(spec.megatron, self.layers.layers, on_cuda=platform.current().is_cuda)
        self.adapters = AdapterSwitch()
        self.known_base_checksum: Mapping[str, int] | None = None
        self.trace: Any = None
        self.models = build_chunks(
            spec.architecture,
            groups,
            head=spec.head,
            dtype=dtype,
            layers=self.layers.layers,
            recomputation=spec.recomputation,
            cp_comm_type=spec.engine.cp_comm_type,
            device=self._device,
            options=spec.megatron.transformer,
            switch=self.adapters,
        )
        self.layout = layouts_of(spec.architecture, groups.parallel)[groups.rank]
        trainable = spec.optim is not None
        multiple = token_multiple(spec.megatron)
        self._slice = (
            RankSlice(groups.parallel.tensor_parallel_size, groups.tensor_rank, multiple)
            if groups.parallel.sequence_parallel
            else RankSlice(1, 0, multiple)
        )

        # Set before the wrapping, because Megatron allocates gradients only for parameters that require them.
        for model in self.models:
            model.train(trainable).requires_grad_(trainable)
            freeze_routers(model, biases_only=not spec.routers.freeze_router)
            freeze_untrained(model, spec.architecture, spec.head)
            if spec.freeze_vision and model.visual is not None:
                model.visual.requires_grad_(False)

        self._routes = self._route_keeper()

        # Wrapped before loading: Megatron moves parameters into its own contiguous buffers.
        self._wrapped = wrap_models(self.models, groups.parallel, spec.megatron.ddp) if trainable else []
        self.chunks: list[Any] = list(self._wrapped or self.models)
        self._places = OffloadableState(self._offloadable_parts())
        self._gradients_are_made = False
        self._loss_is_finite = True
        self.router_metrics: dict[str, Metric] = {}
        self._bias_steps: Tensor | None = None  # (L, E), of the last mini-batch
        self._load(spec.path)
        expect_no_gather(self._wrapped)

        # Created after loading, because the optimizer copies the weights into its float32 masters.
        self._optimizer = self._build_optimizer(spec.optim, dtype) if spec.optim else None
        name_phases(self.chunks, self._optimizer.megatron_configs if self._optimizer is not None else ())

    def _route_keeper(self) -> RouterReplayBuffer | None:
        """Set up router replay for a policy that trains. Other models need no replay."""
        architecture = self.spec.architecture

        if (
            self.spec.engine.routing_replay is RoutingReplay.off
            or not routes_tokens(architecture)
            or self.spec.optim is None
            or self.spec.head != "lm"
        ):
            return None

        layers = [layer for model in self.models for layer in model.decoder.layers]
        return RouterReplayBuffer(architecture, self.groups, layers, self._device)

    def _build_optimizer(self, optim: OptimConfig, dtype: torch.dtype) -> Optimizer:
        """Return the optimizer. The benchmark of passes (benchmarks/gpu/engine.py) has one without state."""
        return Optimizer(
            optim,
            self.chunks,
            {parameter: name for name, parameter in self._named_parameters()},
            dtype,
            self.spec.total_optimizer_steps,
            self.spec.megatron.optimizer,
        )

    def _offloadable_parts(self) -> dict[StatePart, MovableState]:
        parts = {
            StatePart.parameters: MovableState(lambda: [*self._parameter_list(), *self.adapters.originals])
        }
        if self.spec.optim is not None:
            parts[StatePart.optimizer] = MovableState(self._optimizer_tensors)
            parts[StatePart.gradients] = MovableState(lambda: self.gradients().values(), kept=False)
        return parts

    def _parameter_list(self) -> list[torch.nn.Parameter]:
        return [parameter for model in self.models for parameter in model.parameters()]

    def _optimizer_tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer except parameters, which in float32 it steps directly."""
        assert self._optimizer is not None

        # Compare storages, since a parameter and the optimizer's shard of it are views of one storage.
        others = {parameter.untyped_storage()._cdata for parameter in self._parameter_list()}
        return [
            tensor
            for tensor in self._optimizer.state_tensors()
            if tensor.untyped_storage()._cdata not in others
        ]

    def offload(self, *parts: StatePart) -> int:
        """Offload parts of the state (see offload.py) and return the freed bytes. Gradients are lost."""
        if StatePart.gradients in parts:
            self._gradients_are_made = False
        if StatePart.parameters in parts:
            drop_quantized_weights(self.models)

        # A gather in progress would write into memory that has been released.
        await_parameters(self._wrapped)
        return self._places.offload(parts)

    def restore(self, *parts: StatePart) -> int:
        """Restore offloaded parts as they were, and return the number of allocated bytes.

        Until then, operations that need them raise OffloadedError.
        """
        return self._places.restore(parts)

    @contextmanager
    def in_memory(self, *parts: StatePart) -> Generator[None]:
        """Run a block with parts in memory, and offload again what was offloaded, if the block succeeds."""
        offloaded = self._places.offloaded.intersection(parts)
        self.restore(*offloaded)
        yield
        self.offload(*offloaded)

    @property
    def places(self) -> OffloadableState:
        """Places of the state, from which its tensors can be copied, with all updates complete."""
        await_parameters(self._wrapped)
        return self._places

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of an engine that trains. The parameters that it has updated are complete."""
        assert self._optimizer is not None, "a frozen model equals its folder and is never saved"
        await_parameters(self._wrapped)
        return self._optimizer

    def _load(self, folder: str) -> None:
        value_head = value_head_of(
            read_checkpoint_index(folder), self.spec.head, trains=self.spec.optim is not None
        )
        parameters = self.parameters()

        # A critic made from a language model starts at V = 0 everywhere.
        if value_head == "initial" and OUTPUT_LAYER in parameters:
            parameters[OUTPUT_LAYER].zero_()
        base, adapters = split_adapters(parameters, self.spec.architecture, self.spec.head)
        load_into_shards(
            folder,
            self.spec.architecture.base,
            self.layout,
            base,
            head=self.spec.head,
            value_head=value_head,
        )
        if self.spec.runs_base:
            self.adapters.keep(
                parameter
                for name, parameter in self._named_parameters()
                if parameter.requires_grad and name in base
            )
        if adapters:
            fill_trained(
                parameters,
                self.spec.architecture,
                self.layout,
                self.spec.head,
                self.spec.lora_path,
                self.spec.seed,
            )

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's shards by Megatron's names of local layers, numbered over the whole model."""
        self._places.require("return its parameters", StatePart.parameters)
        await_parameters(self._wrapped)
        return {name: parameter.detach() for name, parameter in self._named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the float32 gradients after `forward_backward`, by the names of `parameters`.

        Only the data-parallel rank's own slice of each gradient is reduced.
        """
        self._places.require("return its gradients", StatePart.gradients)
        return {
            name: parameter.main_grad  # pyrefly: ignore[missing-attribute]
            for name, parameter in self._named_parameters()
            if parameter.requires_grad
        }

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for model in self.models:
            yield from model.canonical_parameters()

    def forward(
        self,
        batch: Rows,
        micro_batches: MicroBatches,
        extras: Collection[Extra] = ENTROPY,
        top: TopK | None = None,
        *,
        base: bool = False,
    ) -> dict[str, RaggedTensor] | None:
        """Score the response tokens of all rows.

        Args:
            batch: This replica's rows, see `make_micro_batch`.
            micro_batches: Row numbers. Each row is in one micro-batch.
            extras: Outputs of a language model in addition to `log_probs`.
            top: The most likely tokens to return: `top_ids`, k int32 values per response token, and
                `top_log_probs`, k + 1 values, the last of which is of all other tokens together.
            base: Whether to score by the model without its adapters, whose routers select experts themselves.

        Returns:
            float32 rows for each output, and the routes of this pass if updates replay them. None except on
            the last pipeline stage.
        """
        self._places.require("score", StatePart.parameters)
        with torch.no_grad(), self.adapters.off() if base else nullcontext():
            results = self._run(batch, micro_batches, None, extras, selects_experts=base, top=top)

        # Collecting the routes is a collective of the whole replica, not only of its last stage. What the
        # routers of the base have selected is not what updates replay.
        chosen = {}
        if self._routes is not None and (base or ROUTED_EXPERTS not in batch):
            routes = self._routes.collect(micro_batches)
            chosen = {} if base else {ROUTED_EXPERTS: routes}

        return (
            {**_in_order_of_rows(results, batch, micro_batches), **chosen}
            if self.groups.holds_last_stage
            else None
        )

    def forward_backward(
        self,
        batch: Rows,
        micro_batches: MicroBatches,
        loss: LossFunction,
        extras: Collection[Extra] = ENTROPY,
    ) -> dict[str, Metric]:
        """Compute gradients of the sum of `loss` over all micro-batches and data-parallel ranks.

        Existing gradients are replaced.

        Args:
            micro_batches: Row numbers.
            extras: Outputs that the loss reads in addition to `log_probs`.

        Returns:
            The loss's metrics, merged over this replica's micro-batches, on the last pipeline stage; empty
            elsewhere.

        Raises:
            ValueError: A metric does not define how it is merged.
        """
        return self._forward_backward(batch, micro_batches, loss, extras)[0]

    def forward_backward_scored(
        self,
        batch: Rows,
        micro_batches: MicroBatches,
        loss: LossFunction,
        extras: Collection[Extra] = ENTROPY,
    ) -> tuple[dict[str, Metric], dict[str, RaggedTensor]]:
        """Run `forward_backward`.

        Returns:
            Its metrics, merged over this replica's micro-batches, and the scores of all rows by the weights
            before the update, as in `forward`. Both are empty except on the last pipeline stage.
        """
        merged, outputs = self._forward_backward(batch, micro_batches, loss, extras)
        return merged, _in_order_of_rows(outputs, batch, micro_batches)

    def _forward_backward(
        self, batch: Rows, micro_batches: MicroBatches, loss: LossFunction, extras: Collection[Extra]
    ) -> tuple[dict[str, Metric], list[Outputs]]:
        """Return the merged metrics, and the outputs of each micro-batch. On other stages, both are empty."""
        assert self._optimizer is not None, "a frozen model has no gradients"
        self._places.require("train", *StatePart)
        self._optimizer.zero_grad()

        # A load-balancing loss needs a counting pass before the one with gradients.
        tally = self._new_tally(batch, micro_batches)
        shares: list[_LossShare] = self._run(batch, micro_batches, loss, extras, tally)
        self._gradients_are_made = True
        expect_no_gather(self._wrapped)

        # Every rank contributes to the router statistics, whatever its pipeline stage.
        if tally is not None:
            tally.reduce(self.groups)
            self.router_metrics = merge_metrics([tally.metrics()])
            if rate := self.spec.routers.bias_update_rate:
                self._bias_steps = tally.bias_steps(rate)

        # An update whose loss is not finite on some rank is refused.
        merged = merge_metrics([{**metrics, _LOSS: Metric.sum(value)} for value, metrics, _ in shares])
        whole = merged.pop(_LOSS, None)
        self._loss_is_finite = whole is None or math.isfinite(float(whole.value))
        return merged, [outputs for _, _, outputs in shares]

    def _new_tally(self, batch: Rows, micro_batches: MicroBatches) -> RouterStatistics | None:
        """Return statistics for the routers in the next pass over these rows.

        For a load-balancing loss, an additional pass without gradients first counts where the tokens go.
        """
        architecture = self.spec.architecture
        losses = self.spec.routers
        indexer_loss = self.spec.indexer_loss
        if not routes_tokens(architecture) and not indexer_loss:
            return None
        if not losses.aux_loss_coefficient:
            return RouterStatistics(architecture, self._device, losses, indexer_loss=indexer_loss)

        # The fractions of the mini-batch are constants of the loss: they must be known before any backward
        # pass.
        counted = RouterStatistics(architecture, self._device, None)
        with torch.no_grad():
            self._run(batch, micro_batches, None, (), counted)
        counted.reduce(self.groups)

        return RouterStatistics(architecture, self._device, losses, counted.shares, indexer_loss)

    def step(self) -> StepStatistics:
        """Apply the gradients."""
        assert self._optimizer is not None, "a frozen model has no optimizer"
        self._places.require("step", *StatePart)
        assert self._gradients_are_made, "a step needs gradients computed after the last offload"
        statistics = self._optimizer.step(loss_is_finite=self._loss_is_finite)
        # The biases that select experts follow no gradient.
        if not statistics.is_skipped and self._bias_steps is not None:
            for model in self.models:
                for layer, bias in selection_biases(model).items():
                    bias.add_(self._bias_steps[layer])

        start_gather(self._wrapped)
        return statistics

    def _run(
        self,
        batch: Rows,
        micro_batches: MicroBatches,
        loss: LossFunction | None,
        extras: Collection[Extra],
        tally: RouterStatistics | None = None,
        *,
        selects_experts: bool = False,
        top: TopK | None = None,
    ) -> list[Any]:
        parallel = self.groups.parallel
        if parallel.virtual_pipeline_parallel_size and len(micro_batches) % parallel.pipeline_parallel_size:
            raise ValueError(
                f"{len(micro_batches)} micro-batches: with virtual pipeline stages their number must be a "
                f"multiple of pipeline_parallel_size {parallel.pipeline_parallel_size}"
            )

        # Create the inputs of every micro-batch, with this rank's part of the tokens.
        made = [
            make_micro_batch(
                batch,
                rows,
                packing=self.spec.engine.packing,
                share_prompts=self.spec.engine.share_prompts,
                ends_with_predictors=ends_with_predictors(self.spec.architecture),
                device=self._device,
                cut=self._slice,
                place=RankSlice(parallel.context_parallel_size, self.groups.context_rank),
                vision=self.spec.architecture.vision,
                holds_tower=self.groups.is_first_stage(0),
            )
            for rows in micro_batches
        ]
        if selects_experts and self._routes is not None:
            made = self._routes.enter(made, micro_batches, None)
        else:
            made = self._with_routes(made, micro_batches, batch.get(ROUTED_EXPERTS), trains=loss is not None)

        # Router losses are divided by the number of tokens in the mini-batch.
        if tally is not None:
            tally.begin(sum(micro_batch.num_counted for micro_batch in made), self.groups)

        # One iterator per virtual stage. With `made` deleted, a micro-batch is freed after its last use.
        iterators = [_taken(deque(made)) for _ in self.chunks]
        num_micro_batches = len(made)
        del made
        single = len(self.chunks) == 1

        # Megatron chooses the schedule by the pipeline layout.
        results = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, loss=loss, extras=extras, tally=tally, top=top),
            data_iterator=iterators[0] if single else iterators,
            model=self.chunks[0] if single else self.chunks,
            num_microbatches=num_micro_batches,
            seq_length=1,  # stages send each other the real shapes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )
        if self._routes is not None:
            self._routes.leave()
        return results

    def _with_routes(
        self,
        made: list[MicroBatch],
        micro_batches: MicroBatches,
        column: RaggedTensor | None,
        *,
        trains: bool,
    ) -> list[MicroBatch]:
        """Add routes to the micro-batches.

        Raises:
            ValueError: A batch has no routes although they are replayed, or has routes although they are not.
        """
        replay = self.spec.engine.routing_replay
        if self._routes is None:
            if column is not None:
                raise ValueError(
                    f"the batch has {ROUTED_EXPERTS}, but engine.routing_replay is {replay.value}, or this "
                    f"model does not use it"
                )
            return made

        # Only a scoring pass may let routers select experts, and only if the rollout does not provide the
        # routes.
        if column is None and (trains or replay is RoutingReplay.rollout):
            whose = (
                "the rollout's samples contain"
                if replay is RoutingReplay.rollout
                else "actor.old_log_probs(batch, step) returns"
            )
            raise ValueError(
                f"the batch has no {ROUTED_EXPERTS}, which {whose} with engine.routing_replay={replay.value}"
            )

        return self._routes.enter(made, micro_batches, column)

    def _forward_step(
        self,
        micro_batches: Iterator[MicroBatch],
        chunk: Any,
        loss: LossFunction | None,
        extras: Collection[Extra],
        tally: RouterStatistics | None,
        top: TopK | None,
    ) -> tuple[Tensor, Callable[..., Any]]:
        micro_batch = next(micro_batches)
        routed = {}
        if routes_tokens(self.spec.architecture) or self.spec.indexer_loss:
            # Megatron passes the attention bias, which megarl's models do not use, to each layer, even under
            # recomputation. Its padding mask is lost if only some layers are recomputed.
            counts = micro_batch.inputs.counts.t().flatten()  # hidden is (S, b, H)
            tokens = RoutedTokens(self.groups.own_part(counts), counts, tally, micro_batch.routes)
            routed = {"extra_block_kwargs": {"attention_bias": tokens}}

        # A recomputation in the backward pass repeats these modules, and must not be recorded again.
        traced = self.trace if self.trace is not None and loss is not None else None
        with nullcontext() if traced is None else traced.recording(micro_batch):
            hidden = chunk(
                micro_batch.inputs.tokens,
                micro_batch.inputs.positions,
                None,
                packed_seq_params=micro_batch.inputs.packed,
                output_processor=keep_hidden,
                **({"images": micro_batch.images} if reads_images(self.spec.architecture) else {}),
                **routed,
            )

        # Megatron calls this on the last pipeline stage only.
        def scores(hidden: Tensor, non_loss_data: bool = True) -> Any:
            # A pass that only counts routes needs no scores.
            if tally is not None and tally.losses is None:
                return None
            outputs = self.score(micro_batch, hidden, extras, top)
            if loss is None:
                return outputs
            value, metrics = loss(
                {key: micro_batch.padded(values) for key, values in outputs.items()}, micro_batch.rows
            )

            # Only the loss reads the log-probs of several tokens at each position.
            of_tokens = {key: values.detach() for key, values in outputs.items() if values.ndim == 1}
            if traced is not None:
                traced.record_scores(micro_batch, of_tokens)
            share = value.detach(), metrics, of_tokens

            # Megatron divides by this count only when it averages; megarl's losses already include their
            # denominator.
            return value, torch.ones((), dtype=torch.int, device=value.device), share

        return hidden, scores

    def score(
        self,
        micro_batch: MicroBatch,
        hidden: Tensor,
        extras: Collection[Extra],
        top: TopK | None = None,
    ) -> dict[str, Tensor]:
        """Compute the outputs of a micro-batch from the hidden states of the model's last stage.

        Without a request for the most likely tokens, those of the batch are scored, if it has any.

        Returns:
            The values for each output, for the M response tokens, see `Outputs`.
        """
        model = self.models[-1]

        # The head is computed outside of any module, so Megatron does not wait for its weights.
        await_parameters(self._wrapped)
        at_predictors = model.output_hidden(hidden).index_select(0, micro_batch.predictors)

        # Every tensor-parallel rank holds the whole value head: no sum over the vocabulary is needed.
        if self.spec.head == "value":
            return self._whole({"values": micro_batch.of_all_tokens(model.output_layer(at_predictors))})
        outputs = token_scores(
            at_predictors,
            model.output_weight(),
            micro_batch.targets,
            vocab_size=self.spec.architecture.vocab_size,
            temperature=self.spec.temperature,
            chunk_tokens=logit_chunk_tokens(self.spec.engine, self.spec.architecture),
            group=self.groups.tensor,
            extras=extras,
            in_float32=self.spec.engine.fp32_lm_head,
            top=micro_batch.top_ids if top is None else top,
        )

        # Tokens that the batch has need not be returned.
        if top is None:
            outputs.pop("top_ids", None)
        return self._whole({key: micro_batch.of_all_tokens(values) for key, values in outputs.items()})

    def _whole(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum outputs (M, ...), which are 0 except for a rank's tokens, over the ranks that share the rows.

        Each rank then computes the same loss, and uses the part of its gradient that belongs to its own
        tokens.
        """
        if self.groups.parallel.context_parallel_size == 1:
            return parts

        # The forward pass sums over the ranks; the backward pass passes the gradient to each rank unchanged.
        columns = [values.view(len(values), -1) for values in parts.values()]
        whole = reduce_from_tensor_model_parallel_region(
            torch.cat([column.float() for column in columns], dim=1), group=self.groups.context
        )
        sums = whole.split([column.shape[1] for column in columns], dim=1)
        return {
            key: total.reshape(values.shape).to(values.dtype)
            for (key, values), total in zip(parts.items(), sums, strict=True)
        }


def _in_order_of_rows(
    outputs: Sequence[Outputs], batch: Rows, micro_batches: MicroBatches
) -> dict[str, RaggedTensor]:
    """Return the scores of all rows of the batch; none on ranks without outputs."""
    rows = torch.tensor([row for micro_batch in micro_batches for row in micro_batch])
    places = rows.argsort()
    assert torch.equal(rows[places], torch.arange(len(batch["responses"]))), (
        "every row must be in one micro-batch"
    )

    # The outputs are in the order of micro-batches; the rows' positions in them give the order of rows.
    lengths = batch["responses"].lengths[rows]
    ordered = {}
    for key in outputs[0] if outputs else ():
        values = torch.cat([each[key] for each in outputs])
        # A token has one value, or several.
        num_values = lengths * (values[0].numel() if len(values) else 1)
        ordered[key] = RaggedTensor.packed_rows(values.flatten(), num_values).select(places)
    return ordered


def _taken(micro_batches: deque[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield micro-batches and drop them, so that the rotary angles cached on each are freed after its use."""
    while micro_batches:
        yield micro_batches.popleft()
