"""List the generated files and the function that generates each."""

from __future__ import annotations

from collections.abc import Callable

from docs.generate import drawings, packages
from docs.generate.class_defaults import class_defaults
from docs.generate.command_line import commands_page
from docs.generate.configuration import reference
from docs.generate.metrics import metrics_page
from docs.generate.models import models_page
from docs.generate.schedule import schedules
from docs.generate.trl import migration_from_trl
from docs.generate.verl import migration

PAGES: dict[str, Callable[[], str]] = {
    "megarl/models/class_defaults.py": class_defaults,
    "docs/configuration.md": reference,
    "docs/cli.md": commands_page,
    "docs/metrics.md": metrics_page,
    "docs/models.md": models_page,
    "docs/verl.md": migration,
    "docs/trl.md": migration_from_trl,
    "docs/drawings/packages.svg": packages.packages,
    "docs/drawings/step.svg": drawings.step,
    "docs/drawings/placements.svg": drawings.placements,
    "docs/drawings/resharding.svg": drawings.resharding,
    "docs/drawings/push.svg": drawings.push,
    "docs/drawings/schedules.svg": schedules,
}
