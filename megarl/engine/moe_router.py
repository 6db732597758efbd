"""Routers of experts: which tokens of a micro-batch count, what is counted of where they go, and the losses
that routers add.

Both losses are of a mini-batch: sums over its tokens, divided by their number, so that no way of cutting it
changes them. The share of tokens that an expert gets, which the load-balancing loss multiplies with, is a
constant of its gradient, and is of the whole mini-batch: it must be known before the first micro-batch's
backward pass (see `MegatronEngine.forward_backward`). Megatron's own losses take the shares of each
micro-batch, and count what pads it.

Letters: T tokens of a rank, E experts, L layers of the whole model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.batch.metrics import Metric
from megarl.config.schema import ExpertsConfig
from megarl.engine.groups import ParallelGroups
from megarl.engine.micro_batch import MicroBatch, MicroBatchRoutes
from megarl.models.architecture import Architecture


class RoutedTokens(NamedTuple):
    """What routers are told of the tokens of a micro-batch that are on this rank.

    counts: (T,) how often each counts (see MicroBatch). tally: what they are counted in, or None. routes: see
    router_replay.py.
    """

    counts: Tensor
    tally: RouterStatistics | None
    routes: MicroBatchRoutes | None

    @classmethod
    def of(
        cls, micro_batch: MicroBatch, tally: RouterStatistics | None, groups: ParallelGroups
    ) -> RoutedTokens:
        """Of tokens of which ranks that are sequence-parallel have each a part."""
        flat = micro_batch.counts.t().flatten()  # hidden states are (S, b, H)
        if groups.parallel.sequence_parallel:
            flat = flat.chunk(groups.parallel.tensor_parallel_size)[groups.tensor_rank]
        return cls(flat, tally, micro_batch.routes)


class RouterStatistics:
    """Where the tokens of a mini-batch go, and what is added to its loss.

    tokens: (L, E) how many go to each expert. probabilities: (L, E) the mean of their probabilities, with a
    load-balancing loss.
    squares: (L,) the mean of the squared log-sum-exp of their logits, with a z loss. num_tokens: of the
    mini-batch, which both losses need. Until `reduce` each rank has its own tokens' part. losses None: the
    pass only counts.
    """

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device,
        losses: ExpertsConfig | None,
        shares: Tensor | None = None,
    ) -> None:
        """shares: (L, E) of the mini-batch's tokens, which a load-balancing loss needs."""
        num_layers = architecture.num_hidden_layers
        self._num_experts = architecture.num_experts
        self.losses = losses
        self._shares = shares
        self.tokens = torch.zeros(num_layers, self._num_experts, dtype=torch.float64, device=device)
        self.probabilities = torch.zeros_like(self.tokens)
        self.squares = self.tokens.new_zeros(num_layers)
        self.num_tokens = self.tokens.new_zeros(())

    def begin(self, num_counted: int, groups: ParallelGroups) -> None:
        """num_counted: of all micro-batches' tokens that are on this rank."""
        if self.losses is not None and (self.losses.aux_loss_coefficient or self.losses.z_loss_coefficient):
            self.num_tokens.fill_(num_counted)
            dist.all_reduce(self.num_tokens, group=groups.data_context)

    def add(self, layer: int, logits: Tensor, routing_map: Tensor, counts: Tensor) -> Tensor | None:
        """The tokens of one micro-batch in one layer: logits (T, E), routing_map (T, E) of bool. Returns what
        they add to the loss."""
        # Padding counts zero times, and a token that rows share once for each row.
        self.tokens[layer] += (routing_map * counts[:, None]).sum(0)
        if self.losses is None:
            return None
        loss = None
        logits = logits.float()

        # Divided by the tokens of the mini-batch, the sums over micro-batches and ranks become means.
        weights = counts.float() / self.num_tokens.clamp(min=1).float()

        if coefficient := self.losses.aux_loss_coefficient:
            assert self._shares is not None
            mean = weights @ logits.softmax(-1)
            self.probabilities[layer] += mean.detach()
            loss = coefficient * self._num_experts * (mean @ self._shares[layer].float())

        if coefficient := self.losses.z_loss_coefficient:
            square = weights @ logits.logsumexp(-1).square()
            self.squares[layer] += square.detach()
            loss = coefficient * square + (0 if loss is None else loss)

        return loss

    def reduce(self, groups: ParallelGroups) -> None:
        """Of all ranks, each of which has tokens or layers that the others have not."""
        parts = (self.tokens, self.probabilities, self.squares)

        # One tensor, so that each group needs a single collective.
        whole = torch.cat([part.flatten() for part in parts])

        # Ranks of a stage have different tokens of the same layers, and stages have different layers.
        for group in (groups.stage, groups.pipeline):
            dist.all_reduce(whole, group=group)
        for part, reduced in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(reduced.view(part.shape))

    @property
    def shares(self) -> Tensor:
        """(L, E) of the tokens of each layer that has experts, in all 1; elsewhere 0."""
        return self.tokens / self.tokens.sum(1, keepdim=True).clamp(min=1)

    def metrics(self) -> dict[str, Metric]:
        """After `reduce`: the largest share of a layer's tokens that went to one expert, and each loss
        without its coefficient, as the mean over the layers."""
        num_layers = (self.tokens.sum(1) > 0).sum().clamp(min=1)
        found = {"expert_share/max": self.shares.max()}
        if self.losses is not None and self.losses.aux_loss_coefficient:
            found["aux_loss"] = self._num_experts * (self.shares * self.probabilities).sum() / num_layers
        if self.losses is not None and self.losses.z_loss_coefficient:
            found["z_loss"] = self.squares.sum() / num_layers

        return {name: Metric.same(value) for name, value in found.items()}


class ExpertRouter(TopKRouter):
    """Megatron's, which also counts, and adds its losses."""

    tokens: RoutedTokens | None = None  # of the forward pass that goes on

    def routing(self, logits: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        """logits: (S, b, E). Where activations are computed again it counts in that pass, which has
        gradients."""
        assert padding_mask is None
        probs, routing_map = super().routing(logits)

        # With recomputation a layer runs twice: the pass without gradients adds nothing.
        tally = None if self.tokens is None else self.tokens.tally
        if self.tokens is None or tally is None or not (tally.losses is None or torch.is_grad_enabled()):
            return probs, routing_map
        loss = tally.add(self.layer_number - 1, logits.flatten(0, 1), routing_map, self.tokens.counts)

        # The loss joins the backward pass through the probabilities, whose values do not change.
        return (probs if loss is None else MoEAuxLossAutoScaler.apply(probs, loss)), routing_map


def told_to_routers(tokens: RoutedTokens) -> dict[str, Any]:
    """An argument of the model's forward pass. Megatron brings an attention's bias, which no model of ours
    has, to each layer, also where that is computed again; its own mask of padding is lost where only some
    layers are, and knows no more than yes and no."""
    return {"extra_block_kwargs": {"attention_bias": tokens}}


class RoutedLayer(TransformerLayer):
    """A layer of a model with experts, which hands to its router what that is told."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if isinstance(self.mlp, MoELayer):
            self.mlp.register_forward_pre_hook(_tell, with_kwargs=True)
            # Computed again as a whole, so that the router is told again.
            self.recompute_mlp = self.mlp.moe_layer_recompute
            self.mlp.moe_layer_recompute = False

    def forward(self, *arguments: Any, attention_bias: RoutedTokens | None = None, **options: Any) -> Any:
        return super().forward(*arguments, **{**options, "padding_mask": attention_bias})


def _tell(
    experts: MoELayer, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    experts.router.tokens = options.pop("padding_mask", None)
    return arguments, options


def freeze_routers(model: torch.nn.Module) -> None:
    """They stay as they are. Before Megatron makes room for gradients."""
    for module in model.modules():
        if isinstance(module, ExpertRouter):
            module.requires_grad_(False)
