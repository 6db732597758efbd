"""The critic's worker: values of response tokens, and its training."""

from __future__ import annotations

from megarl.algorithms.losses import CriticLoss, MiniBatchCounts
from megarl.batch.data_proto import DataProto
from megarl.config.schema import ValueLossConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.register import register
from megarl.workers.megatron import MegatronWorker, ModelSpec


class CriticWorker(MegatronWorker):
    def __init__(self, spec: ModelSpec, value_loss: ValueLossConfig) -> None:
        super().__init__(spec)
        self._value_loss = value_loss

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def values(self, part: DataProto) -> DataProto:
        """`values` (b, R): V(s_t) before response token t is written."""
        return self._forward(part, {"values": "values"})

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update_critic(self, part: DataProto, counts: MiniBatchCounts) -> dict[str, float]:
        """One optimizer step on a mini-batch; this replica's shares of its metrics, see CriticLoss."""
        return self._train(part, CriticLoss(value_loss=self._value_loss, counts=counts), "critic")
