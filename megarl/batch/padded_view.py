"""The tensors of a batch as they are documented, (B, R) and (B, S), made when they are asked for of rows that are kept without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.batch.ragged import Column, RaggedTensor


def padded_rows(columns: Mapping[str, Column], rows: Sequence[int]) -> PaddedView:
    """Of the rows `rows`, padded to the longest of these."""
    index = torch.as_tensor(rows)
    return PaddedView({key: column[index] if isinstance(column, Tensor) else column.select(index) for key, column in columns.items()})


_IDS = ("prompts", "responses")


class PaddedView(Mapping[str, Tensor]):
    """By key, the tensors of a batch as they are, and rows of tokens padded: P, R are the longest prompt and response, ids are int64.

    Beside the columns that are kept it answers to those that follow from `prompts` and `responses`: `input_ids`, `attention_mask`,
    `position_ids` (B, P + R) and `prompt_attention_mask` (B, P).

    What is padded is a copy that torch refuses to write into (an inference tensor): a change to it would be lost. `clone()` it, take
    the column out of the batch (`pop`), and `union` yours.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = columns

    def __getitem__(self, key: str) -> Tensor:
        column = self._columns.get(key)
        if isinstance(column, Tensor):
            return column
        with torch.inference_mode():
            if column is not None:
                return column.padded().long() if key in _IDS else column.padded()
            return self._following(key)

    def _following(self, key: str) -> Tensor:
        match key:
            case "prompt_attention_mask":
                return self._mask("prompts")
            case "attention_mask":
                return torch.cat([self._mask("prompts"), self._mask("responses")], dim=1)
            case "position_ids":  # the number of tokens before each token; 0 on the padding to the left
                return (self._following("attention_mask").cumsum(dim=1) - 1).clamp(min=0)
            case "input_ids":
                return torch.cat([self["prompts"], self["responses"]], dim=1)
        raise KeyError(key)

    def _mask(self, key: str) -> Tensor:
        """Int64, 1 where there is a token."""
        column = self._columns.get(key)
        if not isinstance(column, RaggedTensor):
            raise KeyError(key)
        return replace(RaggedTensor.constant(1, column.lengths, torch.int64), on_left=column.on_left).padded()

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
