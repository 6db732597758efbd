"""Generate `docs/verl.md` from the handwritten verl.md in this folder and `megarl/config/verl_names.yaml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate.configuration import cell, reference
from megarl.config.verl_names import VerlKey, verl_keys

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
    headings = {
        heading: heading.replace(".", "").replace(" ", "-")
        for heading in re.findall(r"^### (.+)$", reference(), re.MULTILINE)
    }
    left = dict(verl_keys())

    for section in (*_SECTIONS, ""):
        keys = {
            name: left.pop(name) for name in list(left) if not section or f"{name}.".startswith(f"{section}.")
        }
        yield f"### verl: {section or 'other keys'}\n"
        yield "| verl | megarl | |\n|---|---|---|"
        yield from (f"| `{name}` | {_ours(key, headings)} | {cell(key.note)} |" for name, key in keys.items())
        yield ""


def _ours(key: VerlKey, headings: dict[str, str]) -> str:
    """Return the megarl key as a link to its section of the configuration reference."""
    if key.ours is None:
        return "-"
    parts = key.ours.split(".")

    for end in range(len(parts), 0, -1):
        if (section := ".".join(parts[:end])) in headings:
            return f"[`{key.ours}`](configuration.md#{headings[section]})"

    if len(parts) > 1:
        raise ValueError(
            f"megarl/config/verl_names.yaml names {key.ours}, which has no section in the reference"
        )

    return f"[`{key.ours}`](configuration.md#top-level-keys)"
