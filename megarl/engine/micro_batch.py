"""Micro-batches: rows of a batch as one packed sequence without padding, or padded on the right.

Either way, a sequence starts at its first real token. Packed rows with the same prompt may share its tokens:
they occur once, as a sequence that the responses continue, each as a sequence of its own (shared_prompts.py).
With context parallelism, ranks have some tokens of each sequence (context.py), and score the response tokens
whose predictors they have. The logits that predict response token j of a row with p prompt tokens are at
position p + j - 1. Values are read at the same position, since V(s_t) is the value before token t is written.
In packed rows, only these tokens continue after the attention of a dense model's last layer.

A row's images are its columns `pixel_values` and `image_grids`, in the order of their tokens in its prompt.
Rows with the same images, such as the samples of a prompt, share features. All indices are computed on the
host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import (
    IMAGE_GRIDS,
    MODEL_KEYS,
    PIXEL_VALUES,
    ROUTED_EXPERTS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
    image_places,
    token_positions,
    values_per_token,
)
from megarl.engine.context import ALONE, RankSlice
from megarl.engine.micro_batch_layout import (
    ConcatenatedRows,
    ModelInputs,
    logit_positions,
    packed_inputs,
    padded_inputs,
)
from megarl.engine.platform import to_device
from megarl.engine.rotary import set_positions
from megarl.engine.vision import ImageInputs
from megarl.machine.errors import counted
from megarl.models.vision import Vision

_NOT_FOR_THE_LOSS = (
    "prompts",
    "responses",
    ROUTED_EXPERTS,
    PIXEL_VALUES,
    IMAGE_GRIDS,
    # with several values per token:
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOG_PROBS,
)


class MicroBatchRoutes:
    """The routes of a rank's tokens in one micro-batch, (T, K) on the device, by layer number.

    Layers are numbered among those with experts. Tokens are in the order in which the routers see them.

    Attributes:
        given: The experts to use for the tokens of `is_given` (T,). Without them, routers select experts.
        is_given: (T,) bool, the tokens with a given route.
        chosen: What the routers selected, if it is kept.
        asked: The layers whose routers have asked for experts.
    """

    def __init__(self, given: Mapping[int, Tensor] | None, is_given: Tensor | None) -> None:
        self.given = given
        self.is_given = is_given
        self.chosen: dict[int, Tensor] = {}
        self.asked: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Model inputs for b rows, and the indices of their response tokens.

    With context parallelism, `inputs`, `predictors` and `targets` cover the rank's own tokens, and N may be
    0; `cells` and `rows` are complete.

    Attributes:
        inputs: The inputs, on the device.
        num_counted: The sum of their `counts`.
        predictors: (N,) indices into the model's flattened (sequence-major) output that predict the N
            response tokens. They are those of `inputs` unless the last layer keeps only some tokens.
        targets: (N,) the ids of those tokens.
        top_ids: (N, k) the ids of the teacher's most likely tokens there, if the batch has them.
        cells: (M,) indices of all response tokens in a flattened (b, R) tensor.
        rows: The columns of response tokens for the loss, (b, R), padded with 0. TEACHER_TOP_LOG_PROBS is
            (b, R, k + 1).
        shape: (b, R).
        routes: The routes, if they are replayed.
        images: The images, on ranks that have the tower.
    """

    inputs: ModelInputs
    num_counted: int
    predictors: Tensor
    targets: Tensor
    cells: Tensor
    rows: Mapping[str, Tensor]
    shape: tuple[int, int]
    row_numbers: tuple[int, ...]
    routes: MicroBatchRoutes | None = None
    images: ImageInputs | None = None
    top_ids: Tensor | None = None

    def of_all_tokens(self, values: Tensor) -> Tensor:
        """Scatter values (N, ...) of this rank's response tokens into (M, ...) of all, 0 elsewhere.

        Differentiable.
        """
        # `scored` is ascending, so a rank that has all tokens has them in order.
        scored = self.inputs.scored
        if len(scored) == len(self.cells):
            return values
        return values.new_zeros((len(self.cells), *values.shape[1:])).index_copy(0, scored, values)

    def padded(self, values: Tensor) -> Tensor:
        """Scatter values (M, ...) of all response tokens into (b, R, ...), 0 elsewhere. Differentiable."""
        slots = values.new_zeros((prod(self.shape), *values.shape[1:]))
        return slots.index_copy(0, self.cells, values).view(*self.shape, *values.shape[1:])


def make_micro_batch(
    batch: Mapping[str, RaggedTensor],
    rows: Sequence[int],
    *,
    packing: bool,
    share_prompts: bool,
    ends_with_predictors: bool,
    device: torch.device,
    cut: RankSlice = ALONE,
    place: RankSlice = ALONE,
    vision: Vision | None = None,
    holds_tower: bool = False,
) -> MicroBatch:
    """Create the model inputs for some rows of a batch.

    Args:
        batch: `prompts`, `responses`, `response_mask`, and columns of response tokens for the loss, which
            receives them padded to the longest response of these rows. TEACHER_TOP_IDS and
            TEACHER_TOP_LOG_PROBS have several values per response token.
        packing: Whether the rows are packed.
        share_prompts: Whether packed rows with the same prompt share its tokens.
        ends_with_predictors: Whether the model's last layer keeps only the tokens of packed rows that predict
            another.
        cut: This rank's slice of the sequence. The number of tokens is padded to a multiple of its size.
        place: This rank among those that share packed rows.
        vision: The vision tower of a model that reads images. Rows are then packed.
        holds_tower: Whether this rank has the tower.

    Raises:
        ValueError: A row has no prompt token, a column does not have one value per response token, ranks are
            to share rows that are not packed, or a row's images are not those of its prompt.
    """
    if place.size > 1 and not packing:
        raise ValueError(f"context_parallel_size {place.size} splits packed rows: use engine.packing=true")

    columns = {key: column.select(torch.as_tensor(rows)) for key, column in batch.items()}
    _check_rows(columns, rows)
    real = _concatenated(columns)
    row_places = image_places(columns)
    if row_places is not None and vision is None:
        raise ValueError("the batch has images, but the model has no vision tower")
    inputs = (
        packed_inputs(real, share_prompts, cut, place, device, row_places)
        if packing
        else padded_inputs(real, cut)
    )
    placed = inputs.on(device)

    # The rotary embedding would count from 0 in every sequence, which is wrong for shared or split rows.
    images = None
    if vision is not None:
        pixels, grids, features, positions = row_images(columns, rows, real.ids, vision)
        _set_positions_in_three_axes(inputs, positions, vision, device)
        if holds_tower and len(grids):
            images = _image_inputs(inputs, pixels, grids, features, cut, device)
    elif inputs.packed is not None and (inputs.packed.shares_prompts or place.size > 1):
        set_positions(inputs.packed.cu_seqlens_q, placed.positions[0])

    # Predictors are counted among the tokens that the last layer keeps.
    predictors = placed.predictors
    if inputs.packed is not None and ends_with_predictors:
        chosen, among_chosen = logit_positions(inputs.predictors, inputs.tokens.numel(), cut)
        inputs.packed.predicting = to_device(chosen, device)
        predictors = to_device(among_chosen, device)

    # Indices of the response tokens among each other, and in tensors that are padded for the loss.
    responses = columns["responses"]
    num_rows, response_length = responses.shape
    cells = real.response_row * response_length + real.response_offset

    return MicroBatch(
        inputs=placed,
        num_counted=int(inputs.counts.sum()),
        predictors=predictors,
        targets=to_device(responses.flat()[inputs.scored].long(), device),
        cells=to_device(cells, device),
        rows={key: to_device(values, device) for key, values in _loss_columns(columns, cells).items()},
        shape=(num_rows, response_length),
        row_numbers=tuple(rows),
        images=images,
        top_ids=_top_ids(columns, inputs.scored, device),
    )


def _concatenated(columns: Mapping[str, RaggedTensor]) -> ConcatenatedRows:
    """Concatenate the rows, each of which is a prompt and its response."""
    prompts, responses, response_mask = (columns[key] for key in MODEL_KEYS)
    ids = torch.cat([part for row in zip(prompts.each(), responses.each(), strict=True) for part in row])
    is_read = torch.tensor([bool(mask.any()) for mask in response_mask.each()])
    # The model takes ids in int64.
    return ConcatenatedRows.of(prompts.lengths, responses.lengths, ids.long(), is_read)


def _loss_columns(columns: Mapping[str, RaggedTensor], cells: Tensor) -> dict[str, Tensor]:
    """Return the columns for the loss, padded to (b, R), and the teacher's log-probs to (b, R, k + 1)."""
    padded = {key: column.padded() for key, column in columns.items() if key not in _NOT_FOR_THE_LOSS}
    if TEACHER_TOP_IDS in columns:
        num_rows, length = columns["responses"].shape
        num_values = values_per_token(columns) + 1
        log_probs = columns[TEACHER_TOP_LOG_PROBS].flat().view(-1, num_values)
        slots = log_probs.new_zeros(num_rows * length, num_values).index_copy(0, cells, log_probs)
        padded[TEACHER_TOP_LOG_PROBS] = slots.view(num_rows, length, num_values)
    return padded


def _top_ids(columns: Mapping[str, RaggedTensor], scored: Tensor, device: torch.device) -> Tensor | None:
    """Return the ids (N, k) int32 of the teacher's tokens at this rank's response tokens, if it has any."""
    if TEACHER_TOP_IDS not in columns:
        return None
    return to_device(columns[TEACHER_TOP_IDS].flat().view(-1, values_per_token(columns))[scored], device)


def _set_positions_in_three_axes(
    inputs: ModelInputs, positions: Tensor, vision: Vision, device: torch.device
) -> None:
    """Set the positions of this rank's tokens, given those (3, T) of all tokens of the rows."""
    if inputs.packed is None or inputs.places is None:
        raise ValueError("a model with a vision tower reads packed rows: use engine.packing=true")

    # The source of a padding token is the element that is appended here.
    own = torch.nn.functional.pad(positions, (0, 1))[:, inputs.places.sources]
    set_positions(
        inputs.packed.cu_seqlens_q,
        to_device(own.contiguous(), device),
        to_device(torch.tensor(vision.position_axes), device),
    )


def _image_inputs(
    inputs: ModelInputs,
    pixels: Tensor,
    grids: Tensor,
    features: Tensor,
    cut: RankSlice,
    device: torch.device,
) -> ImageInputs:
    """Return the images, and the features of the tokens in this rank's slice of the sequence."""
    assert inputs.places is not None
    # A padding token has no feature.
    own = torch.nn.functional.pad(features, (0, 1), value=-1)[inputs.places.sources]
    size = len(own) // cut.size
    own = own[cut.rank * size : (cut.rank + 1) * size]
    places = (own >= 0).nonzero()[:, 0]

    return ImageInputs(
        pixels=pixels,
        grids=grids,
        places=to_device(places, device),
        features=to_device(own[places], device),
    )


def _check_rows(columns: Mapping[str, RaggedTensor], rows: Sequence[int]) -> None:
    """Check the rows. `rows` are their numbers in the batch, for error messages."""
    if empty := (columns["prompts"].lengths == 0).nonzero().flatten().tolist():
        raise ValueError(
            f"row {rows[empty[0]]} of the batch has no prompt; a prompt needs at least one token"
        )

    # A value that belongs to another token would be used without an error.
    lengths = columns["responses"].lengths
    widths = {}
    if TEACHER_TOP_IDS in columns:
        k = values_per_token(columns)
        # The last of these log-probs is that of all other tokens together.
        widths = {TEACHER_TOP_IDS: k, TEACHER_TOP_LOG_PROBS: k + 1}
    for key, column in columns.items():
        if key in _NOT_FOR_THE_LOSS and key not in widths:
            continue
        expected = lengths * widths.get(key, 1)
        if not torch.equal(column.lengths, expected):
            row = int((column.lengths != expected).nonzero()[0])
            raise ValueError(
                f"row {rows[row]} of the batch: {key!r} has {int(column.lengths[row])} values for a response "
                f"of {counted(int(lengths[row]), 'token')}"
            )


def row_images(
    columns: Mapping[str, RaggedTensor], rows: Sequence[int], ids: Tensor, vision: Vision
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the images of some rows.

    Args:
        columns: The columns of the rows. Without images, positions count tokens. Ranks without the tower need
            no pixels.
        rows: The numbers of the rows in the batch, for errors.
        ids: (T,) the tokens of all rows, prompt and response, concatenated.

    Returns:
        (P, patch elements), the patches of the distinct images; (I, 3) int64, the number of patches of each
        in time, height and width; (T,) the feature of each token, -1 for tokens without one; and (3, T), the
        positions of each token in its row.

    Raises:
        ValueError: The image tokens of a prompt do not fit its images.
    """
    prompts = columns["prompts"].lengths.tolist()
    lengths = (columns["prompts"].lengths + columns["responses"].lengths).tolist()
    places = image_places(columns) or [None] * len(rows)
    pixels = list(columns[PIXEL_VALUES].each()) if PIXEL_VALUES in columns else []
    grids = list(columns[IMAGE_GRIDS].each()) if IMAGE_GRIDS in columns else []

    # The first feature of each distinct set of images.
    first_features: dict[object, int] = {}
    found_pixels: list[Tensor] = []
    found_grids: list[Tensor] = []
    features = torch.full((len(ids),), -1)
    positions = []
    num_features = 0
    start = 0

    for row, (prompt, length, place) in enumerate(zip(prompts, lengths, places, strict=True)):
        of_row = grids[row].long().view(-1, 3) if place is not None else torch.empty(0, 3, dtype=torch.int64)
        at = (ids[start : start + prompt] == vision.image_token_id).nonzero()[:, 0]
        counts = (of_row.prod(1) // vision.patches_per_token).tolist()
        _check(f"row {rows[row]} of the batch", at, counts, vision)
        if pixels:
            _check_pixels(f"row {rows[row]} of the batch", pixels[row], of_row, vision)

        if place is not None:
            # Rows with the same images share their features.
            if place not in first_features:
                first_features[place] = num_features
                num_features += sum(counts)
                found_pixels += [pixels[row].view(-1, vision.patch_elements)] if pixels else []
                found_grids.append(of_row)
            features[start + at] = first_features[place] + torch.arange(len(at))

        starts = [int(at[sum(counts[:number])]) for number in range(len(counts))]
        positions.append(token_positions(length, starts, of_row, vision.spatial_merge_size))
        start += length

    return (
        torch.cat(found_pixels) if found_pixels else torch.empty(0, vision.patch_elements),
        torch.cat(found_grids) if found_grids else torch.empty(0, 3, dtype=torch.int64),
        features,
        torch.cat(positions, 1),
    )


def _check(name: str, at: Tensor, counts: list[int], vision: Vision) -> None:
    """Check that a prompt has one run of image tokens per image."""
    if len(at) != sum(counts):
        raise ValueError(
            f"{name}: the prompt has {counted(len(at), 'image token')} (id {vision.image_token_id}), but "
            f"{counted(sum(counts), 'feature')} of {counted(len(counts), 'image')}"
        )

    for run in at.split(counts) if counts else ():
        # Positions ascend, so a gap makes the distance from first to last larger.
        if int(run[-1]) - int(run[0]) != len(run) - 1:
            raise ValueError(f"{name}: the {len(run)} tokens of an image are not contiguous in the prompt")


def _check_pixels(name: str, pixels: Tensor, grids: Tensor, vision: Vision) -> None:
    """Check that a row has pixels for all of its patches."""
    num_patches = len(pixels) / vision.patch_elements
    if num_patches != int(grids.prod(1).sum()):
        raise ValueError(
            f"{name}: {PIXEL_VALUES!r} has {num_patches:g} patches of {vision.patch_elements} values, but "
            f"{IMAGE_GRIDS!r} has {int(grids.prod(1).sum())} patches"
        )
