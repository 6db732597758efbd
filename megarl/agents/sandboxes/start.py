"""Starts sandboxes by their provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from megarl.agents.sandboxes import container, local
from megarl.agents.sandboxes.container import ContainerSandbox
from megarl.agents.sandboxes.local import LocalSandbox
from megarl.agents.sandboxes.protocol import Sandbox, SandboxStartError
from megarl.config.schema import SandboxConfig, SandboxProvider

_KINDS: Mapping[SandboxProvider, Callable[[SandboxConfig], Sandbox]] = {
    SandboxProvider.local: LocalSandbox,
    SandboxProvider.container: ContainerSandbox,
}


async def start_sandbox(config: SandboxConfig, image: str | None = None, endpoint_url: str = "") -> Sandbox:
    """Start a sandbox with the files of the configuration. Close it after use.

    Args:
        image: The image of the episode, instead of that of the configuration.
        endpoint_url: The endpoint that its programs can reach.

    Raises:
        SandboxStartError: It cannot be started, or takes longer than `config.start_limit_s`.
    """
    config = config if image is None else replace(config, image=image)
    if config.provider is None:
        raise SandboxStartError("no provider is set; use provider: local or container")
    if config.provider is SandboxProvider.container and config.image is None:
        raise SandboxStartError("there is no image: set `image`, or extra_info.sandbox_image of each row")

    sandbox = _KINDS[config.provider](config)
    try:
        try:
            async with asyncio.timeout(config.start_limit_s):
                await sandbox.begin(endpoint_url)
        except TimeoutError as error:
            raise SandboxStartError(f"start_limit_s={config.start_limit_s:g} is over") from error
        for file in config.files:
            await sandbox.upload(Path(file), Path(file).name)
    except BaseException:
        # This includes a canceled start: only the caller of a finished start closes the sandbox.
        await sandbox.close()
        raise
    return sandbox


@asynccontextmanager
async def open_sandbox(
    config: SandboxConfig, image: str | None = None, endpoint_url: str = ""
) -> AsyncGenerator[Sandbox]:
    """Start a sandbox for a block, see `start_sandbox`."""
    sandbox = await start_sandbox(config, image, endpoint_url)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def check_provider(config: SandboxConfig) -> None:
    """Check that sandboxes can be started here, without starting one of an image.

    Raises:
        ValueError: They cannot, or a file is missing.
    """
    missing = [file for file in config.files if not Path(file).exists()]
    if missing:
        raise ValueError(f"agent.harness.sandbox.files has {missing[0]!r}, which does not exist")
    why = local.why_not() if config.provider is SandboxProvider.local else container.prepare()
    if why:
        raise ValueError(f"agent.harness.sandbox.provider: {why}")
