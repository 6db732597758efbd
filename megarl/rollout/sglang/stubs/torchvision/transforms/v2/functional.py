"""Same names as in the first generation."""

from ..functional import InterpolationMode as InterpolationMode
from ..functional import __getattr__ as __getattr__
