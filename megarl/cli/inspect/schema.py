"""`megarl config --schema [KIND]`: prints the JSON Schema of a configuration file, for editors."""

from __future__ import annotations

import json

from megarl.config.json_schema import json_schema


def run(kind: str) -> int:
    """Print the schema of one of `json_schema.KINDS`."""
    print(json.dumps(json_schema(kind), indent=2))
    return 0
