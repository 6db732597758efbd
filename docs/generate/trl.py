"""Generate `docs/trl.md` from the handwritten trl.md in this folder and `megarl/config/trl_names.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.generate.configuration import cell
from docs.generate.verl import key_link
from megarl.config.migration import trl_names
from megarl.config.schema import RunKind

_WRITTEN = Path(__file__).with_suffix(".md")
_KINDS = {
    "SFTConfig": RunKind.sft,
    "RewardConfig": RunKind.reward_model,
    **dict.fromkeys(("DPOConfig", "CPOConfig", "ORPOConfig"), RunKind.dpo),
}


def migration_from_trl() -> str:
    """Return the page.

    Raises:
        ValueError: A megarl key has no section in the configuration reference.
    """
    return _WRITTEN.read_text(encoding="utf-8") + "\n".join(_tables())


def _tables() -> Iterator[str]:
    for of_class, entries in trl_names().items():
        kind = _KINDS[of_class].value if of_class in _KINDS else ""
        yield f"### TRL: {of_class}\n"
        yield "| TRL | megarl | |\n|---|---|---|"
        yield from (
            f"| `{name}` | {key_link(entry, kind)} | {cell(entry.note)} |" for name, entry in entries.items()
        )
        yield ""
