"""The critic's worker: values of response tokens, and its training."""

from __future__ import annotations

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.controller.dispatch import Dispatch
from megarl.controller.register import register
from megarl.workers.megatron import Loss, MegatronWorker


class CriticWorker(MegatronWorker):
    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def values(self, part: DataProto) -> DataProto:
        """`values` (b, R): V(s_t) before response token t is written."""
        return self._forward(part)

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update(self, part: DataProto, loss: Loss) -> dict[str, Metric]:
        """One optimizer step on a mini-batch, of which this replica has a part; see `_train`."""
        return self._train(part, loss)
