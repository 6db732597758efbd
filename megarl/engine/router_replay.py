"""Router replay: tokens go to the experts that an earlier pass selected, weighted by current router scores.

A router's selection can change even if its scores hardly do. Without replay, the training pass may send
tokens to other experts than the engine or the scoring pass did, so that their log-probs belong to different
functions. See Ma et al. 2025 (arXiv 2510.11370) for replaying the engine's selection and Zheng et al. 2025
(arXiv 2507.18071, section 5.3) for that of the scoring pass. Gradients reach the router through the weights
of the selected experts.

Each router has its own replay. The routes of the current micro-batch, also during recomputation, arrive with
the tokens (moe_router.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS, route_dtype
from megarl.engine.groups import ParallelGroups
from megarl.engine.micro_batch import MicroBatch, MicroBatchRoutes
from megarl.engine.micro_batch_layout import TokenPositions
from megarl.engine.moe_router import ExpertRouter
from megarl.engine.platform import to_device
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture, Experts
from megarl.models.layers import routing_layers


class RouterReplay:
    """Replaces Megatron's replay of one router.

    Args:
        layer: The number of the router's layer among those with experts.
        dtype: The dtype in which expert indices are stored.
    """

    def __init__(self, layer: int, router: ExpertRouter, dtype: torch.dtype) -> None:
        self._layer = layer
        self._router = router
        self._dtype = dtype

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the K experts of each token and their scores, (T, K) each. The name is Megatron's.

        Args:
            scores: (T, E).
            topk: K.
            num_groups: Passed on.
            group_topk: Passed on.
            default_compute_topk: Megatron's selection.
        """
        assert default_compute_topk is not None
        assert self._router.tokens is not None, "each layer passes tokens to its router"
        assert (routes := self._router.tokens.routes) is not None, "each micro-batch has routes"

        routes.asked.add(self._layer)
        # Computed even if routes are given, because tokens without a route use the router's selection.
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        if routes.given is None or routes.is_given is None:
            routes.chosen[self._layer] = experts.to(self._dtype)
            return values, experts

        experts = torch.where(routes.is_given[:, None], routes.given[self._layer].to(experts.dtype), experts)

        # The current scores weight the given experts, so that the router receives a gradient.
        return scores.gather(1, experts), experts


class RouterReplayBuffer:
    """Passes the routes of a batch to the routers of a rank's layers, or keeps what they select.

    The batch column contains for each row (tokens - 1, L, K) small integers, flattened: L layers with experts
    in their order, K experts each. The last token has no route: nothing depends on its output, and an engine
    has not even seen it. Its router selects experts itself.
    """

    def __init__(
        self, architecture: Architecture, groups: ParallelGroups, layers: Sequence[Any], device: torch.device
    ) -> None:
        """Set up the replay of each router.

        Args:
            layers: Megatron's layers of all virtual stages of this rank.
        """
        # Routes are stored by a layer's number among those with experts.
        numbers = {layer: number for number, layer in enumerate(routing_layers(architecture))}
        self._layers = []
        self._dtype = route_dtype(architecture.num_experts)

        for layer in layers:
            if layer.is_moe_layer:
                self._layers.append(numbers[layer.layer_number - 1])
                layer.mlp.router.router_replay = RouterReplay(self._layers[-1], layer.mlp.router, self._dtype)

        self._shape = (len(numbers), architecture.sizes_of(Experts).num_experts_per_tok)
        self._groups = groups
        self._device = device
        self._kept: list[tuple[TokenPositions, MicroBatchRoutes]] = []
        self._asked: list[set[int]] = []  # of each micro-batch; routes themselves are freed after their use

    def enter(
        self, made: Sequence[MicroBatch], micro_batches: Sequence[Sequence[int]], column: RaggedTensor | None
    ) -> list[MicroBatch]:
        """Return the micro-batches of a pass with their routes.

        Args:
            micro_batches: The row numbers of each.
            column: The routes of the batch. None: routers select experts, and `collect` returns their
                selection.

        Raises:
            ValueError: The routes of a row do not match its tokens.
        """
        self._kept = []
        self._asked = []
        entered = []

        for micro_batch, rows in zip(made, micro_batches, strict=True):
            places = micro_batch.inputs.places
            assert places is not None, "routes are replayed in packed rows"
            places = places._replace(sources=self._groups.own_part(places.sources))
            given = (
                None if column is None else self._given(column.select(torch.as_tensor(rows)), places, rows)
            )
            routes = MicroBatchRoutes(*(given or (None, None)))
            entered.append(replace(micro_batch, routes=routes))
            self._asked.append(routes.asked)
            # The routers fill in the routes during the pass, and `collect` reads them afterwards.
            if column is None:
                self._kept.append((places, routes))

        return entered

    def leave(self) -> None:
        """End a pass, in which every router of this rank must have asked for the experts of each micro-batch.

        Raises:
            RuntimeError: A router selected experts without asking. The update would differ from what the
                routes say, without any other sign.
        """
        skipped = sorted(set(self._layers) - set.intersection(*self._asked)) if self._asked else []
        self._asked = []
        if skipped:
            raise RuntimeError(
                f"the routers of {len(skipped)} of {len(self._layers)} layers with experts (first: number "
                f"{skipped[0]} of these layers) selected experts without asking for the routes to replay: an "
                "option of Megatron-Core, such as moe_router_fusion, bypasses them; remove it, or use "
                "engine.routing_replay=off"
            )

    def _given(
        self, column: RaggedTensor, places: TokenPositions, rows: Sequence[int]
    ) -> tuple[dict[int, Tensor], Tensor]:
        size = self._shape[0] * self._shape[1]
        lengths = places.lengths.tolist()

        # One row more than there are tokens, which padding reads.
        table = torch.zeros(sum(lengths) + 1, *self._shape, dtype=self._dtype)
        is_given = torch.zeros(len(table), dtype=torch.bool)
        begin = 0

        for routes, length, row in zip(column.each(), lengths, rows, strict=True):
            if len(routes) != (length - 1) * size or routes.dtype != self._dtype:
                raise ValueError(
                    f"row {row} of the batch: {ROUTED_EXPERTS} has {len(routes)} numbers of {routes.dtype}, "
                    f"but its {counted(length, 'token')} need {length - 1} x "
                    f"{counted(self._shape[0], 'layer')} x {counted(self._shape[1], 'expert')} of "
                    f"{self._dtype}"
                )
            table[begin : begin + length - 1] = routes.view(-1, *self._shape)
            is_given[begin : begin + length - 1] = True
            begin += length

        # This rank needs only the routes of its own tokens and layers.
        own = to_device(table[places.sources][:, self._layers].transpose(0, 1).contiguous(), self._device)
        return dict(zip(self._layers, own, strict=True)), to_device(is_given[places.sources], self._device)

    def collect(self, micro_batches: Sequence[Sequence[int]]) -> RaggedTensor:
        """Return the column of selected experts, on every rank, after a pass without one.

        All ranks of a replica must call this method.
        """
        parts = [self._rows(*kept) for kept in self._kept]
        self._kept = []

        # Restore the order of the batch from that of the micro-batches.
        rows = [row for micro_batch in micro_batches for row in micro_batch]
        return RaggedTensor.concat(parts).select(torch.tensor(rows).argsort())

    def _rows(self, places: TokenPositions, routes: MicroBatchRoutes) -> RaggedTensor:
        """Sum the ranks' tables, each of which is 0 except for the rank's own layers and tokens."""
        groups = self._groups
        lengths = places.lengths.tolist()

        # The last row is for padding.
        table = torch.zeros(sum(lengths) + 1, *self._shape, dtype=self._dtype, device=self._device)
        sources = to_device(places.sources, self._device)
        for layer, experts in routes.chosen.items():
            table[sources, layer] = experts

        # Without sequence parallelism, tensor-parallel ranks have the same tokens, and must not be summed.
        parts = [groups.tensor] if groups.parallel.sequence_parallel else []

        for group in (*parts, groups.context, groups.pipeline):
            if group.size() > 1:
                # Works for two-byte numbers too, since only one rank's are not 0.
                dist.all_reduce(table.view(torch.uint8), group=group)

        # A prompt shared by several rows is routed once, and each of its rows gets these routes.
        whole = table.cpu()[places.origins].split(lengths)
        lasts = places.lengths - 1
        values = torch.cat([row[:-1] for row in whole]).flatten()

        return RaggedTensor.packed_rows(values, lasts * self._shape[0] * self._shape[1])
