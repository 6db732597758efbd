"""The workers of the policy: the actor, which is trained, and the reference, which is not."""

from __future__ import annotations

from megarl.algorithms.losses import ActorLoss, MiniBatchCounts, SFTLoss
from megarl.batch.data_proto import DataProto
from megarl.config.roles import needs_sum_pi_squared
from megarl.config.schema import AlgorithmConfig
from megarl.controller.dispatch import Dispatch
from megarl.controller.register import register
from megarl.workers.megatron import MegatronWorker, ModelSpec


class ReferenceWorker(MegatronWorker):
    """Frozen policy: reads `input_ids`, `attention_mask`, `response_mask`."""

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def ref_log_prob(self, part: DataProto) -> DataProto:
        """`ref_log_prob` (b, R)."""
        return self._forward(part, {"log_probs": "ref_log_prob"})


class ActorWorker(MegatronWorker):
    """The policy that is trained."""

    def __init__(self, spec: ModelSpec, algorithm: AlgorithmConfig | None = None) -> None:
        """algorithm None: supervised fine-tuning only."""
        super().__init__(spec)
        self._algorithm = algorithm
        self._needs_sum_pi_squared = algorithm is not None and needs_sum_pi_squared(algorithm)

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def old_log_prob(self, part: DataProto) -> DataProto:
        """`old_log_probs` and `entropys` (b, R), and `sum_pi_squared` where the advantages are made of it."""
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "sum_pi_squared": "sum_pi_squared"}
        return self._forward(part, names, ("entropy", "sum_pi_squared") if self._needs_sum_pi_squared else ("entropy",))

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update_actor(self, part: DataProto, counts: MiniBatchCounts) -> dict[str, float]:
        """One optimizer step on a mini-batch; this replica's shares of its metrics, see ActorLoss."""
        assert self._algorithm is not None
        loss = ActorLoss(algorithm=self._algorithm, counts=counts)
        return self._train(part, loss, "actor", ("entropy",) if loss.needs_entropy else ())

    @register(dispatch_mode=Dispatch.MEGATRON_MESH, blocking=False)
    def update_sft(self, part: DataProto, counts: MiniBatchCounts) -> dict[str, float]:
        """One optimizer step on the negative log-likelihood of the responses."""
        return self._train(part, SFTLoss(counts=counts), "sft")
