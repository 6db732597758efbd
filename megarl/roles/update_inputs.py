"""What an update of the actor is given of a mini-batch: the tensors that its loss reads, chosen before the rows are cut. Pure."""

from __future__ import annotations

from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.batch.data_proto import DataProto
from megarl.config.schema import AlgorithmConfig, KLWhere

MODEL_KEYS = ("input_ids", "attention_mask", "response_mask")
LOSS_MASK = "loss_mask"


def actor_rows(mini_batch: DataProto, algorithm: AlgorithmConfig, *, one_update: bool, seed: int) -> DataProto:
    """seed: of what the policy loss draws.

    one_update: the step has no other. Then there are no `old_log_probs`: they would be the update's own log-probs but for rounding,
    and the loss takes those, detached, so that each ratio is exactly 1. Unless they are the rollout engine's (bypass).

    Where a correction has left tokens out (`loss_mask`), those are what the loss takes for the response.
    """
    tensors = mini_batch.tensors
    keys = [*MODEL_KEYS, "advantages"]
    if not one_update or algorithm.rollout_correction.bypass:
        keys.append("old_log_probs")
    if algorithm.kl.where is KLWhere.loss:
        keys.append("ref_log_prob")
    if "rollout_weights" in tensors:
        keys.append("rollout_weights")
    rows = {key: tensors[key] for key in keys}
    if LOSS_MASK in tensors:
        rows["response_mask"] = tensors[LOSS_MASK]
    prepare = POLICY_LOSSES[algorithm.policy_loss.kind].prepare
    if prepare is not None:  # it reads the stored old log-probs, whether or not the loss does
        rows |= prepare(tensors, rows["response_mask"], algorithm.policy_loss, seed)
    named = mini_batch.non_tensor_batch
    return DataProto.from_dict(rows, {"uid": named["uid"]} if "uid" in named else {})  # not for the loss: an error names rows by it
