"""Names that SGLang imports for images."""

from enum import Enum
from typing import NoReturn


class ImageReadMode(Enum):
    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


def _refuse(*arguments: object, **keywords: object) -> NoReturn:
    raise NotImplementedError(
        "torchvision.io was called: megarl generates text, install torchvision for images"
    )


decode_image = decode_jpeg = read_video = _refuse
