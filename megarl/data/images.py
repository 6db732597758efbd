"""Images of prompts: read from a column, checked, counted in tokens, and turned into patches.

An image stays an encoded file (PNG, JPEG, ...) until a rank or an engine needs its patches. Files are decoded
by Pillow, in a few formats and up to a number of pixels, and are never unpickled. Resizing, normalization and
patches are those of transformers' image processor of the model's folder, in its Pillow version.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import IMAGE_BYTES, IMAGE_GRIDS, IMAGE_SIZES, PIXEL_VALUES, image_places
from megarl.config.schema import DataConfig, PromptColumnsConfig
from megarl.data.files import DataError, open_file
from megarl.data.tables import DataRow
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.layers import reads_images
from megarl.models.vision import Vision

PLACEHOLDER = "<image>"  # in the text of a prompt
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_MAX_BYTES = 2**25  # of a file, unless more pixels are allowed
_EXAMPLE = "a path, the bytes of an image file, or {'bytes': ..., 'path': ...}, as written by `datasets`"


def read_images(row: DataRow, column: str, config: DataConfig) -> tuple[bytes, ...]:
    """Return the image files of a row: one, a list of several, or none.

    Relative paths are relative to the folder of the data file.

    Raises:
        DataError: An image is missing, damaged, of another format or too large.
    """
    value = row.values.get(column)
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    return tuple(_read_image(row, column, number, each, config) for number, each in enumerate(values))


def _read_image(row: DataRow, column: str, number: int, value: Any, config: DataConfig) -> bytes:
    name = f"image {number}"
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        path = Path(row.file).parent / value
        name = f"image {number} ({path})"
        if not path.is_file():
            raise row.error(
                column,
                f"{name} does not exist; copy the file there, or write its bytes into the column",
            )
        # Compare the size first, so that a huge file is not read.
        _check_bytes(row, column, name, path.stat().st_size, config)
        value = path.read_bytes()
    if not isinstance(value, bytes | bytearray):
        raise row.error(column, f"{name} is a {type(value).__name__}, expected {_EXAMPLE}")

    data = bytes(value)
    _check_bytes(row, column, name, len(data), config)
    _check_image(row, column, name, data, config)
    return data


def _check_bytes(row: DataRow, column: str, name: str, num_bytes: int, config: DataConfig) -> None:
    max_bytes = max(_MAX_BYTES, config.max_image_pixels)
    if num_bytes > max_bytes:
        raise row.error(
            column,
            f"{name} has {num_bytes:,} bytes, more than the {max_bytes:,} that are allowed; scale it down, "
            "or raise data.max_image_pixels, which allows as many bytes",
        )


def _check_image(row: DataRow, column: str, name: str, data: bytes, config: DataConfig) -> None:
    """Decode an image, because a damaged one would otherwise fail in the middle of a run."""
    try:
        with _open(data) as image:
            # The size is in the header, so a decompression bomb is refused before it is decoded.
            if (num_pixels := image.width * image.height) > config.max_image_pixels:
                raise row.error(
                    column,
                    f"{name} has {image.width} x {image.height} = {num_pixels:,} pixels, more than the "
                    f"{config.max_image_pixels:,} of data.max_image_pixels; scale it down, or raise the "
                    f"limit",
                )
            image.load()
    except Image.DecompressionBombError as error:
        raise row.error(
            column, f"{name} has more pixels than Pillow decodes ({error}); scale it down"
        ) from error
    except UnidentifiedImageError as error:
        begin = data[:8]
        raise row.error(
            column,
            f"{name} is not an image in one of the formats {', '.join(FORMATS)} (it begins with {begin!r}); "
            "convert it",
        ) from error
    except (OSError, SyntaxError, EOFError, IndexError, OverflowError, TypeError) as error:
        # Pillow has no common exception for damaged files. ValueError, which DataError is, is not one.
        raise row.error(
            column, f"{name} is damaged ({type(error).__name__}: {error}); copy it again"
        ) from error


def _open(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        # The limit on pixels is the caller's.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(data), formats=FORMATS)


def decode(data: bytes) -> Image.Image:
    """Decode an image that was checked, in RGB."""
    with _open(data) as image:
        return image.convert("RGB")


class ImageProcessor:
    """transformers' image processor of a model's folder."""

    def __init__(self, folder: str, tower: Vision) -> None:
        self.tower = tower
        self._folder = folder

    @classmethod
    def of_folder(cls, folder: str, trust_remote_code: bool = False) -> ImageProcessor | None:
        """Return the processor of a folder's model, None if it reads no images."""
        return cls.of_model(folder, read_architecture(folder, trust_remote_code))

    @classmethod
    def of_model(cls, folder: str, architecture: Architecture) -> ImageProcessor | None:
        """Return the processor of a model in a folder, None if it reads no images."""
        return cls(folder, architecture.sizes_of(Vision)) if reads_images(architecture) else None

    @cached_property
    def _processor(self) -> Any:
        """The processor. It is loaded on first use, since a run without images needs none.

        Raises:
            ValueError: The folder has no processor, or one for towers of other sizes.
        """
        from transformers import AutoImageProcessor

        name = f"model.path={self._folder!r}"
        try:
            processor = AutoImageProcessor.from_pretrained(self._folder, backend="pil", local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name}: the folder's image processor cannot be loaded; copy the model's "
                f"preprocessor_config.json into it: {str(error).splitlines()[0]}"
            ) from error

        for field, expected in (
            ("patch_size", self.tower.patch_size),
            ("merge_size", self.tower.spatial_merge_size),
            ("temporal_patch_size", self.tower.temporal_patch_size),
        ):
            if (found := getattr(processor, field, None)) != expected:
                raise ValueError(
                    f"{name}: preprocessor_config.json has {field} {found}, but config.json implies "
                    f"{expected}; copy both files of one model"
                )
        return processor

    def num_tokens(self, data: bytes) -> int:
        """Return the number of image tokens of an image, of which only the header is read."""
        with _open(data) as image:
            num_patches: int = self._processor.get_number_of_image_patches(image.height, image.width)
        return num_patches // self.tower.patches_per_token

    def patches(self, data: bytes) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Return the patches of an image, and how many it has in time, height and width.

        The patches are (P, patch elements) float32.
        """
        made = self._processor(images=[decode(data)], return_tensors="np")
        time, height, width = made["image_grid_thw"][0].tolist()
        return torch.from_numpy(made["pixel_values"]), (time, height, width)

    def expanded(self, token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Replace the placeholder token of each image by as many as the image has.

        Raises:
            ValueError: There are not as many placeholders as images.
        """
        placeholder = self.tower.image_token_id
        if (found := token_ids.count(placeholder)) != len(images):
            raise ValueError(
                f"the rendered prompt has {counted(found, 'image token')} (id {placeholder}) for "
                f"{counted(len(images), 'image')}; use the model's own chat template"
            )

        counts = map(self.num_tokens, images)
        return [
            token
            for each in token_ids
            for token in ([placeholder] * next(counts) if each == placeholder else [each])
        ]


def refuse_image_columns(files: Sequence[str]) -> None:
    """Refuse files of conversations with images, which supervised runs do not read.

    Raises:
        DataError: A file has a column of images.
    """
    column = PromptColumnsConfig().images
    for file in files:
        if column in open_file(file, ()).columns:
            raise DataError(
                f"{file}: column {column!r}: supervised runs read no images, so the model would learn "
                "answers without them; remove the column and the conversations about images, or train by RL"
            )


def message_parts(messages: Sequence[Mapping[str, Any]], num_images: int) -> list[dict[str, Any]]:
    """Split the texts of messages at the placeholders of images, as chat templates expect.

    Raises:
        ValueError: There are not as many placeholders as images.
    """
    found = sum(str(message.get("content") or "").count(PLACEHOLDER) for message in messages)
    if found != num_images:
        raise ValueError(
            f"the prompt has {found} placeholders {PLACEHOLDER!r} for {num_images} images; write one where "
            "each image belongs"
        )

    parts = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str) or PLACEHOLDER not in content:
            parts.append(dict(message))
            continue
        pieces: list[dict[str, str]] = []
        for number, text in enumerate(content.split(PLACEHOLDER)):
            pieces += [{"type": "image"}] * (number > 0)
            pieces += [{"type": "text", "text": text}] * bool(text)
        parts.append({**message, "content": pieces})
    return parts


def without_placeholders(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without the placeholders of images."""
    return [
        {**message, "content": message["content"].replace(PLACEHOLDER, "")}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def digests(images: Sequence[bytes]) -> list[str]:
    """Return what identifies images."""
    return [hashlib.sha256(data).hexdigest() for data in images]


def image_columns(rows: Sequence[Sequence[bytes]]) -> dict[str, RaggedTensor]:
    """Return the columns of the images of rows: the bytes of all files, and the size of each."""
    joined = [np.frombuffer(b"".join(images), dtype=np.uint8) for images in rows]
    sizes = [np.array([len(data) for data in images], dtype=np.int64) for images in rows]
    return {
        IMAGE_BYTES: RaggedTensor.of_rows(joined, torch.uint8),
        IMAGE_SIZES: RaggedTensor.of_rows(sizes, torch.int64),
    }


def row_files(columns: Mapping[str, RaggedTensor]) -> list[tuple[bytes, ...]]:
    """Return the image files of each row, given the columns of `image_columns`."""
    files: dict[object, tuple[bytes, ...]] = {None: ()}
    found = []
    places = image_places(columns) or []
    rows = zip(places, columns[IMAGE_BYTES].each(), columns[IMAGE_SIZES].each(), strict=True)

    for place, data, sizes in rows:
        # Samples of a prompt share its files.
        if place not in files:
            files[place] = tuple(part.numpy().tobytes() for part in data.split(sizes.tolist()))
        found.append(files[place])
    return found


def with_patches(columns: Mapping[str, RaggedTensor], processor: ImageProcessor) -> dict[str, RaggedTensor]:
    """Replace image files by patches. Rows that share images share their patches.

    Args:
        columns: The columns of rows, with those of `image_columns` if they have images.
    """
    if IMAGE_BYTES not in columns:
        return dict(columns)

    # One entry for each distinct set of images.
    files = row_files(columns)
    order: dict[tuple[bytes, ...], int] = {}
    for images in files:
        order.setdefault(images, len(order))
    made = [[processor.patches(data) for data in images] for images in order]

    pixels = [torch.cat([pixels.flatten() for pixels, _ in row] or [torch.empty(0)]).numpy() for row in made]
    grids = [np.array([grid for _, grid in row], dtype=np.int32).flatten() for row in made]
    rows = torch.tensor([order[images] for images in files])
    rest = {key: column for key, column in columns.items() if key not in (IMAGE_BYTES, IMAGE_SIZES)}
    return {
        **rest,
        PIXEL_VALUES: RaggedTensor.of_rows(pixels, torch.float32).select(rows),
        IMAGE_GRIDS: RaggedTensor.of_rows(grids, torch.int32).select(rows),
    }


def grids_of_micro_batches(
    columns: Mapping[str, RaggedTensor], micro_batches: Sequence[Sequence[int]]
) -> list[tuple[int, int, int]]:
    """Return the sizes of the images that a tower reads: those that rows share once per micro-batch."""
    places = image_places(columns)
    if places is None:
        return []

    grids = list(columns[IMAGE_GRIDS].each())
    found = []
    for rows in micro_batches:
        for row in {places[row]: row for row in rows if places[row] is not None}.values():
            found += [(time, height, width) for time, height, width in grids[row].view(-1, 3).tolist()]
    return found
