"""Test sandboxes that are containers. They need podman's service or Docker, and are skipped without one:

podman system service --time=0 unix:///tmp/podman.sock & DOCKER_HOST=unix:///tmp/podman.sock python -m pytest FILE
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from megarl.agents.sandboxes import container
from megarl.agents.sandboxes.protocol import Sandbox, SandboxEndedError, SandboxStartError
from megarl.agents.sandboxes.start import check_provider, open_sandbox, start_sandbox
from megarl.config.schema import HarnessConfig, SandboxConfig, SandboxProvider
from tests.unit.agents.sandboxes.endpoint import serving
from tests.unit.agents.sandboxes.image import write_image

IMAGE = "localhost/megarl-test"
CONTAINER = SandboxConfig(provider=SandboxProvider.container, image=IMAGE, memory_mb=100, max_processes=30)
# bash has a client for TCP.
GET = 'exec 3<>/dev/tcp/${1/:/\\/} && echo "GET / HTTP/1.0" >&3 && cat <&3'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Import IMAGE, and return a client of the engine."""
    if why := container.prepare():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("image")
    write_image(folder)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, "")
    transport = httpx.HTTPTransport(uds=container.socket_path())
    with httpx.Client(transport=transport, base_url="http://engine/v1.41", timeout=60) as client:
        chosen = {"fromSrc": "-", "repo": IMAGE}
        client.post("/images/create", params=chosen, content=packed.getvalue()).raise_for_status()
        yield client
        client.delete(f"/images/{IMAGE}")


def names(engine: httpx.Client) -> list[str]:
    """Return the containers of megarl."""
    chosen = {"all": "1", "filters": '{"label": ["megarl"]}'}
    return [found["Names"][0] for found in engine.get("/containers/json", params=chosen).json()]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def reach(sandbox: Sandbox, port: str) -> str:
    return (await sandbox.exec(["bash", "-c", GET, "", f"127.0.0.1:{port}"])).output


def test_a_container_shares_files_and_reaches_its_endpoint(engine: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "it").write_text("spam")

    async def exchange() -> None:
        async with serving(b"the model") as endpoint, serving(b"another server") as other:
            sandbox = await start_sandbox(CONTAINER, endpoint_url=f"http://127.0.0.1:{endpoint}")
            assert "the model" in await reach(sandbox, sandbox.endpoint_url.rpartition(":")[2])
            assert "Connection refused" in await reach(sandbox, str(other))

            await sandbox.upload(tmp_path / "a", "/deep/folder")
            await sandbox.upload(b"eggs", "file")
            program = 'echo "$(cat) $(</deep/folder/b/it) $(<file) $KEY" > out; echo no >&2; exit 3'
            given: Any = {"stdin": b"ham", "environment": {"KEY": "7"}}
            assert await sandbox.exec(["bash", "-c", program], **given) == (3, "no\n")
            assert await sandbox.download("out") == b"ham spam eggs 7\n"
            for path in ("none", "/deep"):
                with pytest.raises(ValueError, match=path):
                    await sandbox.download(path)

            with pytest.raises(TimeoutError):
                await sandbox.exec(["sleep", "60"], time_limit_s=1)
            # A program may replace the one that ends commands.
            replace_it = "printf '#!/bin/bash\\nshift 3; exec \"$@\"' > /bin/timeout"
            assert (await sandbox.exec(["bash", "-c", replace_it])).status == 0
            with pytest.raises(TimeoutError):
                await sandbox.exec(["sleep", "60"], time_limit_s=1)
            assert len(names(engine)) == 1
            await sandbox.close()
            with pytest.raises(SandboxEndedError, match="has ended"):
                await sandbox.exec(["cat"])

    run(exchange())
    assert names(engine) == []


def test_limits_of_memory_and_processes(engine: httpx.Client) -> None:
    async def exceed() -> None:
        async with open_sandbox(CONTAINER) as sandbox:
            killed = await sandbox.exec(["bash", "-c", "printf -v text %300000000s; echo $?"])
            assert killed == (137, "")
            forks = "for i in {1..40}; do sleep 60 & done"
            refused = await sandbox.exec(["timeout", "3", "bash", "-c", forks])
            assert "Resource temporarily unavailable" in refused.output

    run(exceed())


def test_the_image_of_a_row_and_starts_that_fail(
    engine: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def start() -> None:
        own = SandboxConfig(provider=SandboxProvider.container, image="localhost/none")
        async with open_sandbox(own, IMAGE) as sandbox:
            assert await sandbox.download("/etc/shop") == b"open"
        with pytest.raises(
            SandboxStartError, match="'localhost/none' is not on this machine and cannot be pulled"
        ):
            await start_sandbox(own)
        with pytest.raises(SandboxStartError, match="there is no image"):
            await start_sandbox(SandboxConfig(provider=SandboxProvider.container))

        # A start that is canceled leaves nothing.
        starting = asyncio.ensure_future(start_sandbox(CONTAINER))
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run(start())
    assert names(engine) == []
    check_provider(CONTAINER)
    for address, why in {
        "tcp://a:1": "needs unix://PATH",
        f"unix://{tmp_path}/none": "there is no socket",
    }.items():
        monkeypatch.setenv("DOCKER_HOST", address)
        with pytest.raises(ValueError, match=why):
            check_provider(CONTAINER)


def test_an_agent_in_the_container_of_its_row_reaches_the_model(engine: httpx.Client) -> None:
    # Imported here, because it takes seconds, and without an engine nothing here needs it.
    from tests.unit.endpoint.test_session_server import TASK, played

    program = """
body='{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
address=${OPENAI_BASE_URL#http://} && address=${address%%/*} && exec 3<>/dev/tcp/${address/://} || exit 2
printf 'POST /v1/chat/completions HTTP/1.0\\r\\nAuthorization: Bearer %s\\r\\n' "$OPENAI_API_KEY" >&3
printf 'Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n%s' ${#body} "$body" >&3
answer=$(cat <&3); read -r task
[[ $task == *'"ground_truth": "42"'* && $answer == *'"content":"4"'* ]] && echo '{"reward": 2.0}'
"""
    config = HarnessConfig(command=["bash", "-c", program], sandbox=replace(CONTAINER, image=None))
    ended, _ = played(config, task=replace(TASK, extra_info={"sandbox_image": IMAGE}))
    assert ended.why == ""
    assert ended.trajectory.turn_rewards == [2.0]
    ended, _ = played(config)
    assert (ended.trajectory.failure, "there is no image" in ended.why) == ("no_sandbox", True)
    assert names(engine) == []


def test_nothing_remains_when_the_process_is_killed(engine: httpx.Client) -> None:
    program = f"""
import asyncio, os, signal
from megarl.agents.sandboxes.start import start_sandbox
from megarl.config.schema import SandboxConfig, SandboxProvider
async def die():
    sandbox = await start_sandbox(SandboxConfig(provider=SandboxProvider.container, image={IMAGE!r}))
    running = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
    print("started", flush=True)
    await running
asyncio.run(die())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    assert len(names(engine)) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline_s = time.monotonic() + 30
    while names(engine) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert names(engine) == []
