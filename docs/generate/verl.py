"""Generate `docs/verl.md` from the handwritten verl.md in this folder and `megarl/config/verl_names.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.generate.configuration import cell, reference
from megarl.config.migration import Counterpart, keys_of

_WRITTEN = Path(__file__).with_suffix(".md")
_SECTIONS = (  # one table each; a key is listed in the first section that is its prefix
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "critic.optim",
    "critic.megatron",
    "critic",
    "data",
    "algorithm",
    "reward",
    "reward_model",
    "trainer",
)


def migration() -> str:
    """Return the page.

    Raises:
        ValueError: A megarl key has no section in the configuration reference.
    """
    return _WRITTEN.read_text(encoding="utf-8") + "\n".join(_tables())


def _tables() -> Iterator[str]:
    left = dict(keys_of("verl"))

    for section in (*_SECTIONS, ""):
        keys = {
            name: left.pop(name) for name in list(left) if not section or f"{name}.".startswith(f"{section}.")
        }
        yield f"### verl: {section or 'other keys'}\n"
        yield "| verl | megarl | |\n|---|---|---|"
        yield from (f"| `{name}` | {key_link(key)} | {cell(key.note)} |" for name, key in keys.items())
        yield ""


@cache
def _headings() -> dict[str, str]:
    """Return the sections of the configuration reference, with their anchors."""
    return {
        heading: re.sub(r"[.:]", "", heading).replace(" ", "-")
        for heading in re.findall(r"^### (.+)$", reference(), re.MULTILINE)
    }


def key_link(key: Counterpart, kind: str = "") -> str:
    """Return the megarl key as a link to its section of the configuration reference.

    Args:
        kind: The kind of run, whose sections are preferred; empty: that of RL.

    Raises:
        ValueError: The key has no section there.
    """
    if key.ours is None:
        return "-"
    headings = _headings()
    parts = key.ours.split(".")

    for end in range(len(parts), 0, -1):
        section = ".".join(parts[:end])
        for heading in (f"{kind}: {section}", section):
            if heading in headings:
                return f"[`{key.ours}`](configuration.md#{headings[heading]})"

    if len(parts) > 1:
        raise ValueError(f"a table of megarl/config names {key.ours}, which has no section in the reference")

    return f"[`{key.ours}`](configuration.md#top-level-keys)"
