"""Input and output of processes whose output may be long."""

from __future__ import annotations

from asyncio.subprocess import Process
from contextlib import suppress

from megarl.agents.sandboxes.protocol import OUTPUT_BYTES


async def write_input(process: Process, content: bytes) -> None:
    """Write the standard input of a process, and close it. The process need not read it."""
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(content)
        await process.stdin.drain()
    process.stdin.close()


async def end_of_output(process: Process) -> bytes:
    """Return the end of what a process writes to standard output, however much it is."""
    assert process.stdout is not None
    kept = b""
    while block := await process.stdout.read(OUTPUT_BYTES):
        kept = (kept + block)[-OUTPUT_BYTES:]
    return kept
