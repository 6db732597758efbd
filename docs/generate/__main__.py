"""Write every page and drawing that is generated from the code: `make reference`."""

from __future__ import annotations

from pathlib import Path

from docs.generate.pages import PAGES

for path, make in PAGES.items():
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(make(), encoding="utf-8")
    print(path)
