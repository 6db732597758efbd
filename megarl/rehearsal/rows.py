"""The batch of a dry run, which consists of equal micro-batches, and the loss of the role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts, SFTLoss
from megarl.algorithms.policy_losses.covariance import SELECTED_TOKENS
from megarl.algorithms.user_functions import policy_loss_of
from megarl.batch.ragged import RaggedTensor
from megarl.config.batch_arithmetic import Row, micro_batch_tokens
from megarl.config.roles import ModelRole, scores_in_update
from megarl.config.schema import PPOConfig, RunConfig

Loss = ActorLoss | CriticLoss | SFTLoss


class RehearsedBatch(NamedTuple):
    """The batch of one pass.

    Attributes:
        columns: Rows of tokens on the host, as a worker receives them.
        micro_batches: The row numbers of each micro-batch.
        tokens: The tokens of one micro-batch on all ranks that share it, including padding. All have equal
            numbers.
    """

    columns: Mapping[str, RaggedTensor]
    micro_batches: list[list[int]]
    tokens: int


def make_rows(rows: list[Row], num_micro_batches: int, context_parallel_size: int = 1) -> RehearsedBatch:
    """Return micro-batches of these rows. The token ids of a row are the number of its prompt."""
    prompts, responses, ids = (
        torch.tensor(column * num_micro_batches) for column in map(list, zip(*rows, strict=True))
    )
    columns = {
        "prompts": RaggedTensor.packed_rows(ids.repeat_interleave(prompts), prompts, on_left=True),
        "responses": RaggedTensor.packed_rows(ids.repeat_interleave(responses), responses),
        "response_mask": RaggedTensor.constant(True, responses, torch.bool),
    }
    micro_batches = [
        [number * len(rows) + row for row in range(len(rows))] for number in range(num_micro_batches)
    ]

    return RehearsedBatch(columns, micro_batches, micro_batch_tokens(rows, context_parallel_size))


def with_loss(
    config: RunConfig, role: ModelRole, columns: Mapping[str, RaggedTensor]
) -> tuple[dict[str, RaggedTensor], Loss]:
    """Return the rows with the columns that the role's loss reads, all 0, and the loss."""
    mask = columns["response_mask"]
    zeros = RaggedTensor.constant(0.0, mask.lengths, torch.float32)
    counts = MiniBatchCounts.of(mask)
    if not isinstance(config, PPOConfig):
        return dict(columns), SFTLoss(counts=counts)

    if role.with_value_head:
        return {**columns, "values": zeros, "returns": zeros}, CriticLoss(
            value_loss=config.algorithm.value_loss, counts=counts
        )

    algorithm = config.algorithm
    rows = {**columns, "advantages": zeros}
    if not config.trainer.one_update or algorithm.rollout_correction.bypass:
        rows["old_log_probs"] = zeros
    if algorithm.kl.in_loss:
        rows["ref_log_prob"] = zeros
    if policy_loss_of(algorithm.policy_loss).prepare is not None:
        rows[SELECTED_TOKENS] = RaggedTensor.constant(False, mask.lengths, torch.bool)
    with_entropy = scores_in_update(algorithm, one_update=config.trainer.one_update)

    return rows, ActorLoss(algorithm=algorithm, counts=counts, with_entropy=with_entropy)
