"""The frequencies of the rotary position embedding (RoPE), and its factor of cosine and sine.

Both are computed as in transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.architecture import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return the rotary inverse frequencies, (rotary_dim / 2,) float32.

    Args:
        rotary_dim: The number of rotated elements of a head.
        theta: The base frequency.
        scaling: The scaling of a model whose context was extended.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (theta**exponent)

    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
        case YarnScaling():
            return _yarn(frequencies, theta, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of cosine and sine. The products of queries and keys have its square."""
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow long wavelengths by `factor`, keep short ones, and blend those between.

    A wavelength is long or short by how often it fits into the original context length.
    """
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / frequencies
    # From 0 for the longest wavelengths that are blended to 1 for the shortest.
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(
        wavelength > original / scaling.low_freq_factor, frequencies / scaling.factor, blended
    )

    return torch.where(wavelength < original / scaling.high_freq_factor, frequencies, scaled)


def _yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Keep dimensions that rotate often, slow those that rotate rarely, with a linear ramp between them."""
    rotary_dim = 2 * len(frequencies)
    original = scaling.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        """Return the dimension that rotates that many times within the original context length."""
        # Solves original / (2 pi theta ** (2 d / rotary_dim)) = rotations for d.
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.beta_fast)
    high = dimension(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)

    # The bounds may coincide in a tiny model.
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)

    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
