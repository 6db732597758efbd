"""`megarl data HUB/NAME`: write rows of an environment of a hub for `data.train_files`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from megarl.config.kinds import Hub
from megarl.config.schema import EnvironmentConfig
from megarl.endpoint.hubs.process import HubPlayer
from megarl.machine.errors import counted
from megarl.machine.files import write_whole


def run(
    environment: str,
    arguments: Sequence[str],
    output: str,
    size: int = 1000,
    seed: int = 0,
    python: str | None = None,
) -> None:
    """Write the rows as JSON lines, all of them or no file.

    Raises:
        ValueError: There is no such hub or environment, or the file exists or cannot be written.
    """
    hub, _, name = environment.partition("/")
    if hub not in set(Hub) or not name:
        raise ValueError(f"{environment!r} is not HUB/NAME, where HUB is one of {', '.join(Hub)}")
    if not output.endswith(".jsonl"):
        raise ValueError(f"--output is {output!r}, but the rows are JSON lines; give a name in .jsonl")

    given = EnvironmentConfig(
        hub=Hub(hub), name=name, arguments=dict(map(_argument, arguments)), python=python
    )
    # The rows may take minutes, so look before.
    file = Path(output)
    if os.path.lexists(file):
        raise ValueError(f"--output: there is a file {output} already; give another name")
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"--output: {file.parent} is no folder in which you can write; give another name")

    lines = asyncio.run(_lines(HubPlayer(given), size, seed))
    write_whole(file, "".join(lines))
    print(f"{output}: {counted(len(lines), 'row')} of {environment}")


async def _lines(player: HubPlayer, size: int, seed: int) -> list[str]:
    try:
        await player.start()
        return [json.dumps(row, ensure_ascii=False) + "\n" async for row in player.rows(size, seed)]
    finally:
        await player.close()


def _argument(text: str) -> tuple[str, object]:
    key, is_given, value = text.partition("=")
    if not is_given:
        raise ValueError(f"{text!r} is no argument; write key=value")
    return key, yaml.safe_load(value)
