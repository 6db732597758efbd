"""Routers of experts: which tokens of a micro-batch count, statistics of their routes, and router losses.

The loss of the indexers of sparse attention, which sparse_attention.py computes, is averaged in the same way.

Both losses refer to a mini-batch: they are sums over its tokens divided by their number, so that splitting it
into micro-batches does not change them. The load-balancing loss multiplies by the fraction of tokens that
each expert receives. This fraction is a constant for the gradient and covers the whole mini-batch, so it must
be known before the backward pass of the first micro-batch (see `MegatronEngine.forward_backward`). Megatron's
own losses use the fractions of each micro-batch, and include padding.

The probability of an expert is its softmax over all experts. A router with sigmoid scores has no
probabilities; the loss takes each score divided by the sum of all scores of the token (DeepSeek-AI 2024,
arXiv 2412.19437, equations 17 to 20; Megatron does the same). DeepSeek counts the experts that would be
selected without the selection bias, megarl those that receive the token.

Letters: T tokens of a rank, E experts, L layers of the whole model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.batch.metrics import Metric
from megarl.config.schema import ExpertsConfig
from megarl.engine.groups import ParallelGroups
from megarl.engine.micro_batch import MicroBatchRoutes
from megarl.models.architecture import Architecture, Experts, RouterScore

_SMALLEST_SUM = 1e-20  # keeps a division finite if every sigmoid of a token is zero


class RoutedTokens(NamedTuple):
    """The tokens of a micro-batch on this rank, as its routers need them.

    Attributes:
        counts: (T,) int64, how often each token counts (see ModelInputs).
        all_counts: The same of the tokens of all sequence-parallel ranks.
        tally: Where they are counted, or None.
        routes: See router_replay.py.
    """

    counts: Tensor
    all_counts: Tensor
    tally: RouterStatistics | None
    routes: MicroBatchRoutes | None


class RouterStatistics:
    """Statistics of the routes of a mini-batch, and the losses of its routers.

    Until `reduce`, each rank has the statistics of its own tokens. If `losses` is None, the pass only counts.

    Attributes:
        tokens: (L, E) float64, the number of tokens that go to each expert.
        probabilities: (L, E) float64, the mean of the tokens' probabilities, for a load-balancing loss.
        squares: (L,) float64, the mean of the squared log-sum-exp of the tokens' logits, for a z loss.
        divergences: (L,) float64, the mean of the tokens' divergences; empty without a loss of indexers.
        num_tokens: The number of tokens in the mini-batch, which all losses need.
    """

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device,
        losses: ExpertsConfig | None,
        shares: Tensor | None = None,
        indexer_loss: float = 0.0,
    ) -> None:
        """Create empty statistics.

        Args:
            losses: The coefficients of the losses. None: the pass only counts.
            shares: (L, E) fractions of the mini-batch's tokens, for a load-balancing loss.
            indexer_loss: The coefficient of the loss of indexers.
        """
        num_layers = architecture.num_hidden_layers
        self._num_experts = architecture.num_experts
        self._score = architecture.sizes_of(Experts).score
        self.losses = losses
        self.indexer_loss = indexer_loss
        self._num_indexers = len(architecture.indexer.layers) if architecture.indexer else 0
        self._shares = shares
        self.tokens = torch.zeros(num_layers, self._num_experts, dtype=torch.float64, device=device)
        self.probabilities = torch.zeros_like(self.tokens)
        self.squares = self.tokens.new_zeros(num_layers)
        self.divergences = self.tokens.new_zeros(num_layers if indexer_loss else 0)
        self.num_tokens = self.tokens.new_zeros(())

    def begin(self, num_counted: int, groups: ParallelGroups) -> None:
        """Sum the number of tokens over the ranks.

        Args:
            num_counted: The number of counted tokens of all micro-batches on this rank.
        """
        if self.losses is not None and (
            self.losses.aux_loss_coefficient or self.losses.z_loss_coefficient or self.indexer_loss
        ):
            self.num_tokens.fill_(num_counted)
            dist.all_reduce(self.num_tokens, group=groups.data_context)

    def add(self, layer: int, logits: Tensor, routing_map: Tensor, counts: Tensor) -> Tensor | None:
        """Add the tokens of one micro-batch in one layer.

        Args:
            logits: (T, E).
            routing_map: (T, E) bool.
            counts: (T,).

        Returns:
            The contribution of the tokens to the loss, if there is one.
        """
        # Padding counts zero times, and a token shared by several rows once for each row.
        self.tokens[layer] += (routing_map * counts[:, None]).sum(0)
        if self.losses is None:
            return None
        loss = None
        logits = logits.float()

        # Divided by the tokens of the mini-batch, the sums over micro-batches and ranks become means.
        weights = self.weights(counts)

        if coefficient := self.losses.aux_loss_coefficient:
            assert self._shares is not None
            mean = weights @ self._probabilities_of(logits)
            self.probabilities[layer] += mean.detach()
            loss = coefficient * self._num_experts * (mean @ self._shares[layer].float())

        if coefficient := self.losses.z_loss_coefficient:
            square = weights @ logits.logsumexp(-1).square()
            self.squares[layer] += square.detach()
            loss = coefficient * square + (0 if loss is None else loss)

        return loss

    def weights(self, counts: Tensor) -> Tensor:
        """Return the weights (T,) float32 with which a sum over tokens is a mean over the mini-batch."""
        return counts.float() / self.num_tokens.clamp(min=1).float()

    def _probabilities_of(self, logits: Tensor) -> Tensor:
        if self._score is RouterScore.softmax:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True).clamp(min=_SMALLEST_SUM)

    def reduce(self, groups: ParallelGroups) -> None:
        """Sum the statistics over all ranks, which have different tokens or layers."""
        parts = (self.tokens, self.probabilities, self.squares, self.divergences)

        # A single tensor needs only one collective per group.
        whole = torch.cat([part.flatten() for part in parts])

        # Ranks of a stage have different tokens of the same layers, and stages have different layers.
        for group in (groups.stage, groups.pipeline):
            dist.all_reduce(whole, group=group)
        for part, reduced in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.copy_(reduced.view(part.shape))

    def bias_steps(self, rate: float) -> Tensor:
        """Return the changes (L, E) of the selection biases after `reduce`.

        The bias of an expert with fewer tokens than the layer's average rises by `rate`, that of an expert
        with more falls by it (Wang et al. 2024, arXiv 2408.15664, algorithm 1, as in Megatron). Tokens are
        counted over the mini-batch of all ranks.
        """
        return rate * (self.tokens.mean(1, keepdim=True) - self.tokens).sign().float()

    @property
    def shares(self) -> Tensor:
        """The fractions (L, E) of each layer's tokens per expert; 0 in layers without experts."""
        return self.tokens / self.tokens.sum(1, keepdim=True).clamp(min=1)

    def metrics(self) -> dict[str, Metric]:
        """Return the metrics after `reduce`.

        These are the largest fraction of a layer's tokens that went to one expert, and each loss without its
        coefficient, averaged over the layers.
        """
        # Dense layers count no tokens.
        num_layers = (self.tokens.sum(1) > 0).sum().clamp(min=1)
        found = {"expert_share/max": self.shares.max()}
        if self.losses is not None and self.losses.aux_loss_coefficient:
            # The loss of Switch Transformers (arXiv:2101.03961, equation 4), here as the mean over layers.
            found["aux_loss"] = self._num_experts * (self.shares * self.probabilities).sum() / num_layers
        if self.losses is not None and self.losses.z_loss_coefficient:
            found["z_loss"] = self.squares.sum() / num_layers
        if self.losses is not None and self.indexer_loss:
            found["indexer_loss"] = self.divergences.sum() / self._num_indexers

        return {name: Metric.same(value) for name, value in found.items()}


class ExpertRouter(TopKRouter):
    """Megatron's router, which also counts tokens and adds its losses."""

    tokens: RoutedTokens | None = None  # those of the current forward pass

    @property
    def layer_index(self) -> int:
        """The number of layers before the router's. Megatron sets its number after construction."""
        assert self.layer_number is not None
        return self.layer_number - 1

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route tokens, given logits (S, b, E).

        If activations are recomputed, statistics are taken in the recomputation, which has gradients.
        """
        assert padding_mask is None
        probs, routing_map = super().routing(logits)

        # With recomputation, a layer runs twice: the pass without gradients adds nothing.
        tally = None if self.tokens is None else self.tokens.tally
        if self.tokens is None or tally is None or not (tally.losses is None or torch.is_grad_enabled()):
            return probs, routing_map
        loss = tally.add(self.layer_index, logits.flatten(0, 1), routing_map, self.tokens.counts)

        # The loss joins the backward pass through the probabilities, whose values do not change.
        return (probs if loss is None else MoEAuxLossAutoScaler.apply(probs, loss)), routing_map


class BiasedExpertRouter(ExpertRouter):
    """A router that adds a bias to the scores when it selects experts, but not to their weights.

    In Megatron the bias is a buffer, which loading, weight sync, checksums, checkpoints and offloading would
    miss, and which Megatron changes in every step. Here it is a parameter without a gradient.

    Attributes:
        expert_bias: (E,) float32. The name is Megatron's, which reads it in `routing`.
    """

    expert_bias: torch.nn.Parameter  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert not self.enable_expert_bias, "Megatron would change the bias in every step"
        del self.expert_bias
        bias = torch.zeros(len(self.weight), device=self.weight.device)
        self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)


def router_class(architecture: Architecture) -> type[ExpertRouter]:
    """Return the class of the routers of a model."""
    return BiasedExpertRouter if architecture.sizes_of(Experts).has_selection_bias else ExpertRouter


def selection_biases(model: torch.nn.Module) -> dict[int, Tensor]:
    """Return the selection biases of a chunk by the numbers of their layers."""
    return {
        module.layer_index: module.expert_bias.detach()
        for module in model.modules()
        if isinstance(module, BiasedExpertRouter)
    }


def freeze_routers(model: torch.nn.Module, *, biases_only: bool) -> None:
    """Freeze routers, or only their selection biases. Must be called before Megatron allocates gradients."""
    for module in model.modules():
        if isinstance(module, ExpertRouter) and not biases_only:
            module.requires_grad_(False)
        elif isinstance(module, BiasedExpertRouter):
            module.expert_bias.requires_grad_(False)
