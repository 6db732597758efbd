"""Which rows of a batch have the same prompt, token by token."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def first_with_prompt(prompts: Iterable[Tensor]) -> list[int]:
    """For each row the first row whose prompt has the same tokens. prompts: of each row (its length,), of one type, on the host.

    Tokens are compared, and nothing else: rows that are said to be of one prompt may have been cut, or answered, differently.
    """
    firsts: dict[bytes, int] = {}
    return [firsts.setdefault(tokens.numpy().tobytes(), row) for row, tokens in enumerate(prompts)]
