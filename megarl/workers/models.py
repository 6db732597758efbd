"""The workers of models: a policy that scores samples, one that is trained besides, and a critic."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import register
from megarl.workers.megatron import Loss, MegatronWorker, ScoredUpdate

if TYPE_CHECKING:
    from megarl.engine.vocab_parallel import Extra


class PolicyWorker(MegatronWorker):
    """A language model that scores: all that a reference does."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def log_probs(self, part: DataProto, extras: Collection[Extra]) -> DataProto:
        """`log_probs`, and the extras that are asked for (`entropy`, `sum_pi_squared`), rows of tokens; reads `prompts`, `responses`,
        `response_mask`."""
        return self._forward(part, extras)


class ActorWorker(PolicyWorker):
    """The policy that is trained."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update(self, part: DataProto, loss: Loss) -> dict[str, Metric]:
        """One optimizer step on a mini-batch, of which this replica has a part; see `_train`."""
        return self._train(part, loss)

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update_scored(self, part: DataProto, loss: Loss) -> ScoredUpdate:
        """As `update`, in whose pass the rows are also scored: `log_probs`, and the extras of the loss."""
        return self._train_scored(part, loss)


class CriticWorker(MegatronWorker):
    """Values of response tokens, and their training."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def values(self, part: DataProto) -> DataProto:
        """`values`, rows of tokens: V(s_t) before response token t is written."""
        return self._forward(part)

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update(self, part: DataProto, loss: Loss) -> dict[str, Metric]:
        """One optimizer step on a mini-batch, of which this replica has a part; see `_train`."""
        return self._train(part, loss)
