"""Token columns of a batch: stored as ragged rows of tokens, presented to users as padded tensors.

A batch converts padded columns when it is created (`token_rows`), so that all internal code works on rows of
tokens. Its `tensors` are a padded view (`PaddedView`), computed on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.batch.ragged import Column, RaggedTensor
from megarl.machine.errors import counted

MODEL_KEYS = ("prompts", "responses", "response_mask")  # the columns that a model reads
_IDS = ("prompts", "responses")
_PADDED_BATCH = ("input_ids", "attention_mask", "response_mask")
# Columns of a padded batch that are determined by the prompts and responses.
_FOLLOWING = ("input_ids", "attention_mask", "position_ids", "prompt_attention_mask", *_IDS)
# Rows of expert indices for all tokens of a row except the last: see engine/router_replay.py.
ROUTED_EXPERTS = "routed_experts"
# The images of a row, in the order of their tokens: the bytes of all image files, and the size of each file.
# Rows with the same images, such as samples of a prompt, share them.
IMAGE_BYTES = "image_bytes"
IMAGE_SIZES = "image_sizes"
# The same as a model reads them: the values of all patches, and three numbers of patches (time, height,
# width) per image.
PIXEL_VALUES = "pixel_values"
IMAGE_GRIDS = "image_grids"
# The columns of pairs of answers that losses read, with a value at each token of the response: log-probs of
# the reference, and the margin of the pair.
REFERENCE_LOG_PROBS = "ref_log_prob"
MARGINS = "margins"
# Prompts of which a teacher continues the samples, if they differ from the policy's.
TEACHER_PROMPTS = "teacher_prompts"
# The log-probs of the samples' tokens by a teacher.
TEACHER_LOG_PROB = "teacher_log_prob"
# The teacher's k most likely tokens at each response token: k ids for each token of the response, and k + 1
# log-probs, the last of which is that of all other tokens together.
TEACHER_TOP_IDS = "teacher_top_ids"
TEACHER_TOP_LOG_PROBS = "teacher_top_log_probs"
RESPONSE_KEYS = (  # columns with a value for each token of the response
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
    TEACHER_LOG_PROB,
    "rollout_weights",
    "entropys",
    "sum_pi_squared",
    "token_versions",
)


def model_keys(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the columns of a batch that a model reads: MODEL_KEYS, and images if there are any."""
    there = set(columns)
    return (*MODEL_KEYS, *(key for key in (IMAGE_BYTES, IMAGE_SIZES) if key in there))


def values_per_token(columns: Mapping[str, RaggedTensor]) -> int:
    """Return k, the number of values of TEACHER_TOP_IDS at each response token; 1 if there is no token."""
    return max(1, columns[TEACHER_TOP_IDS].num_tokens // max(1, columns["responses"].num_tokens))


def route_dtype(num_experts: int) -> torch.dtype:
    """Return the smallest dtype of ROUTED_EXPERTS for this number of experts."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def token_rows(columns: Mapping[str, Column]) -> Mapping[str, Column]:
    """Convert padded token columns to rows of tokens.

    Two kinds of batches may have padded columns. A padded batch has `input_ids`, `attention_mask` (B, S) and
    `response_mask` (B, R), which become `prompts`, `responses` and `response_mask`; columns that follow from
    these (`position_ids`, padded `prompts` and `responses`) are dropped. A batch whose `responses` or
    `response_mask` are rows of tokens may have tensors (B, R) under the names of RESPONSE_KEYS.

    Args:
        columns: The tensors and rows of tokens of a batch.

    Returns:
        The columns, with token columns as rows; the same object if nothing had to be converted.

    Raises:
        ValueError: A row has no prompt, or its tokens are not contiguous around the end of the prompt, or a
            tensor does not have a value for each token of a row.
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
    """Return the columns with `prompts` as rows of tokens.

    They are returned unchanged, or built from `prompts` and `prompt_attention_mask` (B, P), as in a padded
    view.

    Raises:
        ValueError: The batch has no prompts, or a prompt has no token, or its tokens are not at the end of
            its row.
    """
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

    # If padding is only on the left, the lengths determine the whole mask.
    lengths = mask.bool().sum(1)
    expected = torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - lengths[:, None]

    if wrong := ((mask.bool() != expected).any(1) | (lengths == 0)).nonzero().flatten().tolist():
        raise ValueError(
            f"row {wrong[0]} of the prompts: prompt_attention_mask has "
            f"{counted(int(lengths[wrong[0]]), 'token')}, not contiguous at the end of the row; a prompt "
            "needs at least one token and is padded on the left"
        )

    others = {key: column for key, column in columns.items() if key != "prompt_attention_mask"}
    return {**others, "prompts": RaggedTensor.from_padded(prompts.int(), lengths, on_left=True)}


def _prompts_and_responses(tensors: Mapping[str, Tensor]) -> dict[str, RaggedTensor]:
    """Return `prompts` and `responses` of a padded batch."""
    ids = tensors["input_ids"]
    mask = tensors["attention_mask"].bool()
    # response_mask is as wide as the response part, and the rest of the width is the prompt part.
    prompt_width = mask.shape[1] - tensors["response_mask"].shape[1]
    prompts = mask[:, :prompt_width].sum(1)
    responses = mask[:, prompt_width:].sum(1)
    # Valid tokens are contiguous around the boundary between prompt and response.
    column = torch.arange(mask.shape[1], device=mask.device)
    expected = (column >= prompt_width - prompts[:, None]) & (column < prompt_width + responses[:, None])

    if wrong := ((mask != expected).any(1) | (prompts == 0)).nonzero().flatten().tolist():
        raise ValueError(
            f"row {wrong[0]} of the batch: attention_mask has {int(prompts[wrong[0]])} prompt and "
            f"{counted(int(responses[wrong[0]]), 'response token')}, not contiguous; a prompt needs at least "
            "one token and is padded on the left, a response on the right"
        )

    return {
        "prompts": RaggedTensor.from_padded(ids[:, :prompt_width].int(), prompts, on_left=True),
        "responses": RaggedTensor.from_padded(ids[:, prompt_width:].int(), responses),
    }


def _unpadded(key: str, column: Tensor, tokens: RaggedTensor) -> RaggedTensor:
    """Unpad a column to the lengths of `tokens`. `key` is the column's name, for the error."""
    try:
        return RaggedTensor.from_padded(column, tokens.lengths)
    except ValueError as error:
        raise ValueError(f"{key!r} does not match the batch's responses: {error}") from error


class PaddedView(Mapping[str, Tensor]):
    """The tensors of a batch by key, with rows of tokens padded.

    P and R are the longest prompt and response; ids are int64.

    In addition to the stored columns, it provides those that follow from `prompts` and `responses`:
    `input_ids`, `attention_mask`, `position_ids` (B, P + R) and `prompt_attention_mask` (B, P).

    Padded tensors are copies that torch does not allow to be written (inference tensors), because a change
    would be lost. To change a column, `clone()` it, remove it from the batch (`pop`), and add yours
    (`union`).
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
            case "position_ids":  # the number of tokens before each token; 0 in the padding on the left
                return (self._following("attention_mask").cumsum(dim=1) - 1).clamp(min=0)
            case "input_ids":
                return torch.cat([self["prompts"], self["responses"]], dim=1)
        raise KeyError(key)

    def _mask(self, key: str) -> Tensor:
        """Return a padded int64 mask with 1 at each token."""
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


ImagePlace = tuple[int, int] | None


def image_places(columns: Mapping[str, Column]) -> list[ImagePlace] | None:
    """Return for each row where its images are in their column, which identifies them; None without images.

    Returns None if the batch has no images at all.
    """
    images = columns.get(IMAGE_GRIDS, columns.get(IMAGE_BYTES))
    if not isinstance(images, RaggedTensor):
        return None
    places = zip(images.starts.tolist(), images.lengths.tolist(), strict=True)
    return [(start, length) if length else None for start, length in places]


def first_with_prompt(prompts: Iterable[Tensor], images: Sequence[ImagePlace] | None = None) -> list[int]:
    """Return for each row the first row whose prompt has the same tokens, and the same images.

    Only tokens are compared, because rows with the same uid may have been truncated or answered differently.

    Args:
        prompts: The prompt of each row, (its length,), all of one dtype, on the host.
        images: The images of each row, as in `image_places`.
    """
    firsts: dict[tuple[bytes, ImagePlace], int] = {}
    return [
        firsts.setdefault((tokens.numpy().tobytes(), None if images is None else images[row]), row)
        for row, tokens in enumerate(prompts)
    ]


def token_positions(length: int, starts: Sequence[int], grids: Tensor, merge: int) -> Tensor:
    """Return the positions of a row's tokens in time, height and width, (3, length).

    The tokens of an image are at the row and column of their squares, counted from the position after the
    text before it. Text after an image continues from its largest position.

    Args:
        length: The number of tokens.
        starts: The first token of each image.
        grids: (I, 3), the number of patches of each image in time, height and width.
        merge: The width of the square of patches that a token stands for.
    """
    parts = []
    token = 0
    position = 0

    for start, grid in zip(starts, grids.tolist(), strict=True):
        num_text = start - token
        parts.append((torch.arange(num_text) + position).expand(3, -1))
        position += num_text

        sizes = (grid[0], grid[1] // merge, grid[2] // merge)
        axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        parts.append(torch.stack(axes).flatten(1) + position)
        position += max(sizes[1:])
        token = start + sizes[0] * sizes[1] * sizes[2]

    parts.append((torch.arange(length - token) + position).expand(3, -1))
    return torch.cat(parts, 1)
