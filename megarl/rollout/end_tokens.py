"""Which tokens end a text, as the model's folder says."""

from __future__ import annotations

import json
from pathlib import Path


def end_token_ids(folder: str | Path) -> frozenset[int]:
    """generation_config.json decides where it is there: chat models end turns with another token than documents; else config.json."""
    decides = next(file for name in ("generation_config.json", "config.json") if (file := Path(folder) / name).is_file())
    found = json.loads(decides.read_text()).get("eos_token_id")
    if found is None:
        return frozenset()
    return frozenset([found] if isinstance(found, int) else found)
