"""Which rows of a batch have the same prompt, token by token."""

from __future__ import annotations

from torch import Tensor


def first_with_prompt(input_ids: Tensor, attention_mask: Tensor, response_length: int) -> list[int]:
    """(B,) for each row the first row whose prompt has the same tokens. input_ids, attention_mask: (B, P + R), R = response_length.

    Tokens are compared, and nothing else: rows that are said to be of one prompt may have been cut, or answered, differently.
    """
    prompt_length = input_ids.shape[1] - response_length
    ids, mask = input_ids[:, :prompt_length].numpy(), attention_mask[:, :prompt_length].bool().numpy()
    firsts: dict[bytes, int] = {}
    return [firsts.setdefault(row_ids[row_mask].tobytes(), row) for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True))]
