"""JSON files of others that hold one object: read whole, with one line about what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises ValueError, with the problem but not the file, for what is no JSON, too deep, or no object; OSError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is not JSON that can be read: it is nested too deep") from error
    if not isinstance(values, dict):
        raise ValueError(f"must hold a JSON object, not {type(values).__name__}")
    return values
