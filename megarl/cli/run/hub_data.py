"""`megarl data HUB/NAME`: write rows of an environment of a hub for `data.train_files`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import yaml

from megarl.config.kinds import Hub
from megarl.config.schema import EnvironmentConfig
from megarl.endpoint.hubs.process import HubPlayer
from megarl.machine.errors import counted


def run(
    environment: str,
    arguments: Sequence[str],
    output: str,
    size: int = 1000,
    seed: int = 0,
    python: str | None = None,
) -> None:
    """Write the rows as JSON lines.

    Raises:
        ValueError: There is no such hub or environment, or the file exists.
    """
    hub, _, name = environment.partition("/")
    if hub not in set(Hub) or not name:
        raise ValueError(f"{environment!r} is not HUB/NAME, where HUB is one of {', '.join(Hub)}")
    if not output.endswith(".jsonl"):
        raise ValueError(f"--output is {output!r}, but the rows are JSON lines; give a name in .jsonl")

    given = EnvironmentConfig(
        hub=Hub(hub), name=name, arguments=dict(map(_argument, arguments)), python=python
    )
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            count = asyncio.run(_write(HubPlayer(given), size, seed, file))
    except FileExistsError:
        raise ValueError(f"--output: there is a file {output} already; give another name") from None
    except ValueError:
        Path(output).unlink()  # it has not all rows
        raise
    print(f"{output}: {counted(count, 'row')} of {environment}")


async def _write(player: HubPlayer, size: int, seed: int, file: TextIO) -> int:
    await player.start()
    count = 0
    try:
        async for row in player.rows(size, seed):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    finally:
        await player.close()
    return count


def _argument(text: str) -> tuple[str, object]:
    key, is_given, value = text.partition("=")
    if not is_given:
        raise ValueError(f"{text!r} is no argument; write key=value")
    return key, yaml.safe_load(value)
