"""Published model families that megarl cannot train, and what is missing for each.

A family that is added to `families.py` leaves this table. Other families are refused without a reason.
"""

from __future__ import annotations

from collections.abc import Mapping

_DELTA_NET = "gated delta net layers"
_VISION = "image inputs and the vision tower"
_SPARSE = "sparse attention (DSA), which selects the keys of each token by an indexer"
_GEMMA = "norms after each block with a weight of one plus the parameter, and sliding windows"
_OLMO = "norms after each block, norms of queries and keys over all heads"
_MAMBA = "Mamba layers"

UNSUPPORTED: Mapping[str, str] = {
    "qwen3_5": f"{_DELTA_NET}, {_VISION}",
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe": f"{_DELTA_NET}, {_VISION}",
    "qwen3_5_moe_text": _DELTA_NET,
    "kimi_linear": "delta attention layers",
    "olmo_hybrid": _DELTA_NET,
    "glm_moe_dsa": _SPARSE,
    "deepseek_v32": _SPARSE,
    "deepseek_v2": "group-limited softmax routers",
    "deepseek_v4": "compressed sparse attention and hyper-connections",
    "gemma": "a norm weight of one plus the parameter, and a scaled embedding",
    "gemma2": f"{_GEMMA}, capped logits",
    "gemma3": f"{_GEMMA}, {_VISION}",
    "gemma3_text": _GEMMA,
    "ministral": "sliding windows (Ministral 8B is published as mistral, without any)",
    "olmo2": _OLMO,
    "olmo3": f"{_OLMO}, and sliding windows",
    "olmoe": "norms of queries and keys over all heads",
    "minimax_m2": "norms of queries and keys over all heads",
    "llama4": f"chunked attention, {_VISION}",
    "llama4_text": "chunked attention",
    "phi3": "fused projections in the folder, and longrope",
    "nemotron_h": _MAMBA,
    "falcon_h1": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "jamba": _MAMBA,
    "smollm3": "layers without rotary embedding",
    "qwen2_vl": _VISION,
    "qwen3_vl_moe": _VISION,
    "glm4v": _VISION,
    "glm4v_moe": _VISION,
    "mistral3": _VISION,
    "kimi_k25": _VISION,
    "internvl": _VISION,
}
