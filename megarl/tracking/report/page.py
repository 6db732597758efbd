"""Build the report page: one file with its style, script and data, which makes no network requests.

The data is compressed and base64-encoded, so that text written by a model cannot be parsed as HTML, and the
script inserts text as text nodes. The content security policy allows only this script to run, and allows it
to fetch nothing (or, for a live report, only from its server).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.machine.files import write_whole
from megarl.tracking.report.run_folder import RunFolder

_SCRIPTS = (
    "elements.js",
    "data.js",
    "chart.js",
    "curves.js",
    "samples.js",
    "timeline.js",
    "settings.js",
    "app.js",
)
_STYLES = ("page.css",)


def write_page(runs: Sequence[RunFolder], path: Path) -> int:
    """Write the page and return its size in bytes. Raises OSError."""
    content = page(runs, is_live=False)
    write_whole(path, content)
    return len(content)


def page(runs: Sequence[RunFolder], *, is_live: bool) -> bytes:
    """Return the page as bytes.

    Args:
        is_live: The page contains no data; it fetches its data and polls for changes.
    """
    style = _joined(_STYLES)
    script = _joined(_SCRIPTS)
    # Samples are text that a model wrote: only our own script and style may run in the page.
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            "connect-src 'self'" if is_live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = html.escape(", ".join(run.name for run in runs))
    start = manifest(runs) | {"live": is_live, "version": __version__}
    # A live page fetches its data; a static page embeds it.
    blocks = [] if is_live else list(_blocks(runs, start))
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="referrer" '
        'content="no-referrer">',
        f'<title>{title} · megarl report</title><link rel="icon" href="data:,">',
        f'<style>{style}</style></head><body><main id="app"></main>',
        f'<script type="application/json" id="manifest">{_in_script(start)}</script>',
        *blocks,
        f"<script>{script}</script></body></html>",
    ]

    return "\n".join(lines).encode(errors="xmlcharrefreplace")  # a folder's name may be invalid UTF-8


def manifest(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """List the runs, and the parts of each run with their versions."""
    return {"runs": [{"name": run.name, "parts": run.versions()} for run in runs]}


def compressed_part(run: RunFolder, name: str) -> bytes:
    """Return a part, compressed. Raises KeyError for an unknown part."""
    return gzip.compress(run.part(name), compresslevel=6, mtime=0)


def _blocks(runs: Sequence[RunFolder], start: dict[str, Any]) -> list[str]:
    blocks = []
    for number, (run, listed) in enumerate(zip(runs, start["runs"], strict=True)):
        for name in listed["parts"]:
            content = base64.b64encode(compressed_part(run, name)).decode()
            blocks.append(f'<script type="text/plain" id="part/{number}/{name}">{content}</script>')
    return blocks


def _joined(names: Sequence[str]) -> str:
    return "\n".join((files("megarl.tracking.report") / name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _in_script(value: Any) -> str:
    """Encode a value as JSON that cannot close the surrounding element, whatever text it contains."""
    return json.dumps(value).replace("<", "\\u003c")
