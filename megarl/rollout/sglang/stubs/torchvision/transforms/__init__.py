"""Names that SGLang and transformers import for images."""

from enum import Enum


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from . import functional as functional  # noqa: E402  it imports InterpolationMode from here
from . import v2 as v2  # noqa: E402
