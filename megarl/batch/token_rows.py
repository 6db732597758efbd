"""The two documented forms of a batch's tokens, rows without padding and padded tensors (B, R) and (B, S),
and the way from each to the
other: batches hold rows, whichever form their maker gave, and padded views are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.batch.ragged import Column, RaggedTensor

RAGGED_KEYS = ("prompts", "responses", "response_mask")
_IDS = ("prompts", "responses")
PADDED_KEYS = ("input_ids", "attention_mask", "response_mask")
# rows of the numbers of experts, of a row's tokens but the last: see engine/router_replay.py
ROUTED_EXPERTS = "routed_experts"
RESPONSE_KEYS = (
    *(
        "response_mask",
        "token_level_scores",
        "token_level_rewards",
        "advantages",
        "returns",
        "values",
        "rollout_log_probs",
        "old_log_probs",
        "ref_log_prob",
    ),
    *("entropys", "sum_pi_squared", "token_versions", "rollout_weights", "loss_mask"),
)


def route_dtype(num_experts: int) -> torch.dtype:
    """Of ROUTED_EXPERTS: the smallest that counts so many."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def model_keys(columns: Mapping[str, Column]) -> tuple[str, str, str]:
    """What a model reads of the batch."""
    return RAGGED_KEYS if isinstance(columns.get("responses"), RaggedTensor) else PADDED_KEYS


def token_rows(columns: Mapping[str, Column], keys: Iterable[str] = ()) -> dict[str, RaggedTensor]:
    """`prompts`, `responses`, `response_mask`, and what else of the responses' tokens is named, as rows of
    tokens.

    Columns: rows of tokens already, beside which others may be (B, R), as a function of the user gives them;
    or `input_ids`, `attention_mask` (B, S), `response_mask` and whatever else (B, R). Raises ValueError for a
    row without a prompt or whose tokens are not one run around the prompt's end, and for a tensor that does
    not hold a row's tokens.
    """
    # Convert padded tensors; columns that are rows of tokens already stay as they are.
    if model_keys(columns) == PADDED_KEYS:
        ragged = {key: column for key, column in columns.items() if isinstance(column, RaggedTensor)}
        columns = {
            **ragged,
            **_unpadded({key: column for key, column in columns.items() if isinstance(column, Tensor)}),
        }

    responses = columns["responses"]
    assert isinstance(responses, RaggedTensor)
    others = [key for key in keys if key not in (*RAGGED_KEYS, *PADDED_KEYS)]

    return {key: _like(responses, key, columns[key]) for key in (*RAGGED_KEYS, *others)}


def with_prompt_rows(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The columns, with `prompts` as rows of tokens: as they are, or made of `prompts` and
    `prompt_attention_mask` (B, P), as a padded view has them. Raises ValueError for a batch without them, or
    where a prompt has no token or its tokens do not end its row."""
    prompts = columns.get("prompts")
    mask = columns.get("prompt_attention_mask")
    if isinstance(prompts, RaggedTensor):
        return dict(columns)

    if (
        not isinstance(prompts, Tensor)
        or not isinstance(mask, Tensor)
        or prompts.shape != mask.shape
        or prompts.ndim != 2
    ):
        raise ValueError(
            "a batch of prompts needs `prompts` as rows of tokens (RaggedTensor.of_rows), or `prompts` and "
            f"`prompt_attention_mask`, (B, P) and padded on the left; it has {sorted(columns)}"
        )

    # With padding on the left only, the lengths determine the whole mask.
    lengths = mask.bool().sum(1)
    expected = torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - lengths[:, None]

    if wrong := ((mask.bool() != expected).any(1) | (lengths == 0)).nonzero().flatten().tolist():
        raise ValueError(
            f"row {wrong[0]} of the prompts: prompt_attention_mask has {int(lengths[wrong[0]])} tokens that "
            f"are not one run at the row's "
            "end; a prompt needs at least one token and is padded on the left"
        )

    others = {key: column for key, column in columns.items() if key != "prompt_attention_mask"}
    return {**others, "prompts": RaggedTensor.from_padded(prompts.int(), lengths, on_left=True)}


def of_one_form(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The columns; where the responses, or `response_mask`, are rows of tokens, so is what else is of their
    tokens (RESPONSE_KEYS), as a user may give it padded. Raises ValueError for a tensor that does not hold a
    row's tokens."""
    responses = columns.get("responses", columns["response_mask"])
    if isinstance(responses, Tensor):
        return dict(columns)
    return {
        key: _like(responses, key, column) if key in RESPONSE_KEYS else column
        for key, column in columns.items()
    }


def _unpadded(tensors: Mapping[str, Tensor]) -> dict[str, Column]:
    ids = tensors["input_ids"]
    mask = tensors["attention_mask"].bool()
    # response_mask is as wide as the response part, so the prompt part is what lies before it.
    prompt_width = mask.shape[1] - tensors["response_mask"].shape[1]
    prompts = mask[:, :prompt_width].sum(1)
    responses = mask[:, prompt_width:].sum(1)
    # Valid tokens are one run around the boundary between prompt and response.
    column = torch.arange(mask.shape[1], device=mask.device)
    expected = (column >= prompt_width - prompts[:, None]) & (column < prompt_width + responses[:, None])

    if wrong := ((mask != expected).any(1) | (prompts == 0)).nonzero().flatten().tolist():
        raise ValueError(
            f"row {wrong[0]} of the batch: attention_mask has {int(prompts[wrong[0]])} prompt and "
            f"{int(responses[wrong[0]])} response "
            "tokens that are not one run; a prompt needs at least one token and is padded on the left, a "
            "response on the right"
        )

    return {
        **tensors,
        "prompts": RaggedTensor.from_padded(ids[:, :prompt_width].int(), prompts, on_left=True),
        "responses": RaggedTensor.from_padded(ids[:, prompt_width:].int(), responses),
    }


def _like(responses: RaggedTensor, key: str, column: Column) -> RaggedTensor:
    if isinstance(column, RaggedTensor):
        return column
    try:
        return RaggedTensor.from_padded(column, responses.lengths)
    except ValueError as error:
        raise ValueError(f"{key!r} is not of the batch's responses: {error}") from error


def padded_rows(columns: Mapping[str, Column], rows: Sequence[int]) -> PaddedView:
    """Of the rows `rows`, padded to the longest of these."""
    index = torch.as_tensor(rows)
    return PaddedView(
        {
            key: column[index] if isinstance(column, Tensor) else column.select(index)
            for key, column in columns.items()
        }
    )


class PaddedView(Mapping[str, Tensor]):
    """By key, the tensors of a batch as they are, and rows of tokens padded: P, R are the longest prompt and
    response, ids are int64.

    Beside the columns that are kept it answers to those that follow from `prompts` and `responses`:
    `input_ids`, `attention_mask`, `position_ids` (B, P + R) and `prompt_attention_mask` (B, P).

    What is padded is a copy that torch refuses to write into (an inference tensor): a change to it would be
    lost. `clone()` it, take the column out of the batch (`pop`), and `union` yours.
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


def first_with_prompt(prompts: Iterable[Tensor]) -> list[int]:
    """For each row the first row whose prompt has the same tokens. prompts: of each row (its length,), of one
    type, on the host.

    Tokens are compared, and nothing else: rows that are said to be of one prompt may have been cut, or
    answered, differently.
    """
    firsts: dict[bytes, int] = {}
    return [firsts.setdefault(tokens.numpy().tobytes(), row) for row, tokens in enumerate(prompts)]
