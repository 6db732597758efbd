"""Samples of several generations as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.batch.data_proto import DataProto
from megarl.data.padding import Padded, join

_PER_RESPONSE_TOKEN = {"response_mask": False, "rollout_log_probs": 0.0, "token_versions": -1, "token_level_scores": 0.0}  # (B, R)


def concat_samples(parts: Sequence[DataProto]) -> DataProto:
    """The rows of all parts in order; each part has the keys of a generation (Rollout.generate) and an R of its own.

    All become as wide as the widest. What stands in the new slots is never read.
    """
    width = max(part.tensors["responses"].shape[1] for part in parts)
    return DataProto.concat([_widened(part, width) for part in parts])


def _widened(part: DataProto, width: int) -> DataProto:
    tensors = part.tensors
    missing, num_prompt_tokens = width - tensors["responses"].shape[1], tensors["prompts"].shape[1]

    def widen(x: torch.Tensor, value: float = 0) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, missing), value=value)

    wide = {key: widen(tensors[key], value) for key, value in _PER_RESPONSE_TOKEN.items() if key in tensors}
    responses = Padded(widen(tensors["responses"]), widen(tensors["attention_mask"][:, num_prompt_tokens:]))
    joined = join(Padded(tensors["prompts"], tensors["prompt_attention_mask"]), responses)
    return DataProto.from_dict({**tensors, **wide, **joined}, part.non_tensor_batch, part.meta_info)
