"""The batch of a dry run: equal micro-batches, the experts of its tokens, and the loss of the role."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt

import torch
from torch import Tensor

from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts, SFTLoss
from megarl.algorithms.policy_losses import SELECTED_TOKENS
from megarl.algorithms.preferences import PairLoss, pair_loss
from megarl.algorithms.user_functions import policy_loss_of
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import (
    IMAGE_GRIDS,
    PIXEL_VALUES,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
)
from megarl.config.batch_arithmetic import Row
from megarl.config.roles import ModelRole, scores_in_update
from megarl.config.schema import PPOConfig, PreferenceConfig, RunConfig
from megarl.models.vision import Vision

Loss = ActorLoss | CriticLoss | SFTLoss | PairLoss


def even_routes(num_tokens: int, num_experts: int, chosen: int) -> Tensor:
    """Return the K experts of each token, (T, K) int64. The loads of experts differ by at most one token."""
    return torch.arange(num_tokens * chosen).view(num_tokens, chosen) % num_experts


def uneven_routes(num_tokens: int, num_experts: int, chosen: int) -> Tensor:
    """Return the K experts of each token, (T, K) int64. Expert 0 has twice its share, or all tokens."""
    # Expert 0 is the crowded one; the remaining choices cycle through the others.
    others = num_experts - 1
    crowd = min(num_tokens, 2 * num_tokens * chosen // num_experts)
    rest = 1 + torch.arange(num_tokens * chosen - crowd) % others
    first, second = rest.split([crowd * (chosen - 1), (num_tokens - crowd) * chosen])
    with_crowded = torch.cat([torch.zeros(crowd, 1, dtype=torch.int64), first.view(crowd, chosen - 1)], dim=1)

    return torch.cat([with_crowded, second.view(num_tokens - crowd, chosen)])


# The batch of one pass: rows of tokens on the host, as a worker receives them, and the row numbers of each
# micro-batch.
RehearsedBatch = tuple[dict[str, RaggedTensor], list[list[int]]]


def make_rows(rows: list[Row], num_micro_batches: int, vision: Vision | None = None) -> RehearsedBatch:
    """Return micro-batches of these rows. The token ids of a row are the number of its prompt.

    Prompts of a model that reads images consist of one, as large and square as fits.
    """
    prompts, responses, ids = (
        torch.tensor(column * num_micro_batches) for column in map(list, zip(*rows, strict=True))
    )
    columns = {
        "prompts": RaggedTensor.packed_rows(ids.repeat_interleave(prompts), prompts, on_left=True),
        "responses": RaggedTensor.packed_rows(ids.repeat_interleave(responses), responses),
        "response_mask": RaggedTensor.constant(True, responses, torch.bool),
    }
    if vision is not None:
        columns = _with_images(columns, ids, vision)
    micro_batches = [
        [number * len(rows) + row for row in range(len(rows))] for number in range(num_micro_batches)
    ]

    return columns, micro_batches


def _with_images(
    columns: dict[str, RaggedTensor], numbers: torch.Tensor, vision: Vision
) -> dict[str, RaggedTensor]:
    """Replace the tokens of prompts by an image. Rows with one prompt number have one image."""
    prompts = columns["prompts"]
    side = isqrt(prompts.shape[1])
    tokens = [
        torch.where(torch.arange(len(row)) < side**2, vision.image_token_id, row) for row in prompts.each()
    ]
    size = vision.spatial_merge_size * side
    num_values = size**2 * vision.patch_elements
    count = len(numbers)

    # The values of all images are the same, and where their sizes are tells images apart.
    grids = torch.tensor([1, size, size], dtype=torch.int32).repeat(int(numbers.max()) + 1)
    return {
        **columns,
        "prompts": RaggedTensor.packed_rows(torch.cat(tokens), prompts.lengths, on_left=True),
        PIXEL_VALUES: RaggedTensor(
            torch.zeros(num_values), torch.zeros(count, dtype=torch.int64), torch.full((count,), num_values)
        ),
        IMAGE_GRIDS: RaggedTensor(grids, 3 * numbers, torch.full((count,), 3)),
    }


def with_loss(
    config: RunConfig, role: ModelRole, columns: Mapping[str, RaggedTensor]
) -> tuple[dict[str, RaggedTensor], Loss]:
    """Return the rows with the columns that the role's loss reads, all 0, and the loss."""
    mask = columns["response_mask"]
    zeros = RaggedTensor.constant(0.0, mask.lengths, torch.float32)
    counts = MiniBatchCounts.of(mask)

    if isinstance(config, PreferenceConfig):
        loss = pair_loss(config, num_pairs=len(mask) // 2)
        return {**columns, **dict.fromkeys(loss.columns, zeros)}, loss
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
    if (k := algorithm.teacher_top_k) is not None:
        rows[TEACHER_TOP_IDS] = RaggedTensor.constant(0, k * mask.lengths, torch.int32)
        rows[TEACHER_TOP_LOG_PROBS] = RaggedTensor.constant(0.0, (k + 1) * mask.lengths, torch.float32)
    if policy_loss_of(algorithm.policy_loss).prepare is not None:
        rows[SELECTED_TOKENS] = RaggedTensor.constant(False, mask.lengths, torch.bool)

    with_entropy = scores_in_update(algorithm, one_update=config.trainer.one_update)

    return rows, ActorLoss(algorithm=algorithm, counts=counts, with_entropy=with_entropy)
