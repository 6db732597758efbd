"""The files under `docs/` that nobody writes by hand, and what makes each."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate.configuration import reference

PAGES: dict[str, Callable[[], str]] = {
    "docs/configuration.md": reference,
}
