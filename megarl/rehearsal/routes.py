"""Choose the experts of tokens in a dry run, in which routers have no values."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.architecture import Experts


def even_routes(num_tokens: int, experts: Experts) -> Tensor:
    """Return the K experts of each token, (T, K) int64. The loads of experts differ by at most one token."""
    chosen = experts.num_experts_per_tok
    return torch.arange(num_tokens * chosen).view(num_tokens, chosen) % experts.num_experts


def uneven_routes(num_tokens: int, experts: Experts) -> Tensor:
    """Return the K experts of each token, (T, K) int64. Expert 0 has twice its share, or all tokens."""
    chosen = experts.num_experts_per_tok
    # Expert 0 is the crowded one; the remaining choices cycle through the others.
    others = experts.num_experts - 1
    crowd = min(num_tokens, 2 * num_tokens * chosen // experts.num_experts)
    rest = 1 + torch.arange(num_tokens * chosen - crowd) % others
    first, second = rest.split([crowd * (chosen - 1), (num_tokens - crowd) * chosen])
    with_crowded = torch.cat([torch.zeros(crowd, 1, dtype=torch.int64), first.view(crowd, chosen - 1)], dim=1)

    return torch.cat([with_crowded, second.view(num_tokens - crowd, chosen)])
