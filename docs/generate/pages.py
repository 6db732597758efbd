"""List the generated files and the function that generates each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.generate import drawings, packages
from docs.generate.class_defaults import class_defaults
from docs.generate.command_line import commands
from docs.generate.configuration import reference
from docs.generate.learning_curves import learning_curves, pictures
from docs.generate.metrics import metric_tables
from docs.generate.models import models_page
from docs.generate.schedule import schedules
from docs.generate.shipped_runs import shipped_runs, where_time_goes
from docs.generate.trl import migration_from_trl
from docs.generate.verl import migration

_DOCS = Path(__file__).parents[1]
_GENERATED = re.compile(
    r"(?<=<!-- begin of the generated part -->\n\n).*(?=\n<!-- end of the generated part -->)", re.DOTALL
)


def _within(page: str, generate: Callable[[], str]) -> Callable[[], str]:
    """Return a function that generates the part of a page between two markers, and keeps the written text around it."""

    def whole_page() -> str:
        written = (_DOCS / page).read_text(encoding="utf-8")
        part = generate().strip("\n") + "\n"
        text, found = _GENERATED.subn(lambda _: part, written)
        assert found == 1, f"docs/{page} must have the two markers of the generated part once"
        return text

    return whole_page


PAGES: dict[str, Callable[[], str]] = {
    "megarl/models/class_defaults.py": class_defaults,
    "docs/configuration.md": _within("configuration.md", reference),
    "docs/cli.md": _within("cli.md", commands),
    "docs/launch.md": _within("launch.md", shipped_runs),
    "docs/tuning.md": _within("tuning.md", where_time_goes),
    "docs/tracking.md": _within("tracking.md", metric_tables),
    "docs/learning_curves.md": _within("learning_curves.md", learning_curves),
    "docs/models.md": models_page,
    "docs/verl.md": migration,
    "docs/trl.md": migration_from_trl,
    "docs/drawings/packages.svg": packages.packages,
    "docs/drawings/step.svg": drawings.step,
    "docs/drawings/placements.svg": drawings.placements,
    "docs/drawings/resharding.svg": drawings.resharding,
    "docs/drawings/push.svg": drawings.push,
    "docs/drawings/schedules.svg": schedules,
    **pictures(),
}
