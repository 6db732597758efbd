"""Stub of torchvision, which SGLang and transformers import for image models.

Everything raises when it is called.
"""

from . import io as io
from . import transforms as transforms

__version__ = "0.28.0"  # transformers compares it
