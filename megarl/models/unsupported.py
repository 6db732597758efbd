"""Published model families that megarl cannot train, and what is missing for each.

A family that is added to `families.py` leaves this table. Other families are refused without a reason.
"""

from __future__ import annotations

from collections.abc import Mapping

_EXPERTS_WITH_WHOLE_NORMS = "norms of queries and keys over all heads in a model with experts"
_VISION = "image inputs and the vision tower"
_MAMBA = "Mamba layers"

UNSUPPORTED: Mapping[str, str] = {
    "kimi_linear": "delta attention layers",
    "olmo_hybrid": "gated delta net layers with negative eigenvalues",
    "deepseek_v2": "group-limited softmax routers",
    "deepseek_v4": "compressed sparse attention and hyper-connections",
    "gemma": "the activation of Gemma 1, which its folders name in two ways",
    "gemma2": "capped logits of attention and of the output layer",
    "gemma3": f"{_VISION} (Gemma 3 270M and 1B are published as gemma3_text)",
    "olmoe": _EXPERTS_WITH_WHOLE_NORMS,
    "minimax_m2": _EXPERTS_WITH_WHOLE_NORMS,
    "llama4": f"chunked attention, {_VISION}",
    "llama4_text": "chunked attention",
    "phi3": "fused projections in the folder, and longrope",
    "nemotron_h": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "jamba": _MAMBA,
    "qwen2_vl": _VISION,
    "glm4v": _VISION,
    "glm4v_moe": _VISION,
    "mistral3": _VISION,
    "kimi_k25": _VISION,
    "internvl": _VISION,
}
