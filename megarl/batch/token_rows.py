"""Token columns of a batch: rows of tokens inside, padded tensors for the user, and the way from each to the
other.

A batch converts padded columns when it is made (`token_rows`), so that everything inside works on rows of
tokens. Its `tensors` are a padded view (`PaddedView`), made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megarl.batch.ragged import Column, RaggedTensor

MODEL_KEYS = ("prompts", "responses", "response_mask")  # what a model reads of a batch
_IDS = ("prompts", "responses")
_PADDED_BATCH = ("input_ids", "attention_mask", "response_mask")
# of a padded batch: what follows from the prompts and responses
_FOLLOWING = ("input_ids", "attention_mask", "position_ids", "prompt_attention_mask", *_IDS)
# rows of the numbers of experts, of a row's tokens but the last: see engine/router_replay.py
ROUTED_EXPERTS = "routed_experts"
RESPONSE_KEYS = (  # columns that have a value for each token of the response
    "response_mask",
    "loss_mask",
    "answer_mask",
    "token_level_scores",
    "token_level_rewards",
    "environment_rewards",
    "advantages",
    "returns",
    "values",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "rollout_weights",
    "entropys",
    "sum_pi_squared",
    "token_versions",
)


def route_dtype(num_experts: int) -> torch.dtype:
    """Of ROUTED_EXPERTS: the smallest that counts so many."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def token_rows(columns: Mapping[str, Column]) -> Mapping[str, Column]:
    """Convert padded token columns to rows of tokens.

    Two kinds of columns may come padded. A padded batch has `input_ids`, `attention_mask` (B, S) and
    `response_mask` (B, R), which become `prompts`, `responses` and `response_mask`; what else follows from
    these (`position_ids`, padded `prompts` and `responses`) is left out. And a batch whose `responses` or
    `response_mask` are rows of tokens may have tensors (B, R) under the names of RESPONSE_KEYS.

    Args:
        columns: The tensors and rows of tokens of a batch.

    Returns:
        The columns, those of tokens as rows; the same object where nothing had to be converted.

    Raises:
        ValueError: A row has no prompt, or its tokens are not one run around the prompt's end, or a tensor
            does not have a value for each token of a row.
    """
    padded = {key: column for key in _PADDED_BATCH if isinstance(column := columns.get(key), Tensor)}
    if len(padded) == len(_PADDED_BATCH) and not isinstance(columns.get("responses"), RaggedTensor):
        others = {key: column for key, column in columns.items() if key not in _FOLLOWING}
        columns = {**others, **_prompts_and_responses(padded)}

    tokens = columns.get("responses", columns.get("response_mask"))
    padded = {key: column for key in RESPONSE_KEYS if isinstance(column := columns.get(key), Tensor)}
    if not isinstance(tokens, RaggedTensor) or not padded:
        return columns

    return {**columns, **{key: _unpadded(key, column, tokens) for key, column in padded.items()}}


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


def _prompts_and_responses(tensors: Mapping[str, Tensor]) -> dict[str, RaggedTensor]:
    """Return `prompts` and `responses` of a padded batch."""
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
        "prompts": RaggedTensor.from_padded(ids[:, :prompt_width].int(), prompts, on_left=True),
        "responses": RaggedTensor.from_padded(ids[:, prompt_width:].int(), responses),
    }


def _unpadded(key: str, column: Tensor, tokens: RaggedTensor) -> RaggedTensor:
    """Return the values of `tokens`' tokens. key: the column's name, for the error."""
    try:
        return RaggedTensor.from_padded(column, tokens.lengths)
    except ValueError as error:
        raise ValueError(f"{key!r} is not of the batch's responses: {error}") from error


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
