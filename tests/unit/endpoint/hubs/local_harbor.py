"""An environment of harbor in namespaces of this machine, and an agent that runs what the model answers."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
from pathlib import Path

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

SYSTEM = [
    "--ro-bind",
    "/usr",
    "/usr",
    "--symlink",
    "usr/bin",
    "/bin",
    "--symlink",
    "usr/lib",
    "/lib",
    "--symlink",
    "usr/lib64",
    "/lib64",
    "--dev",
    "/dev",
    "--proc",
    "/proc",
    "--tmpfs",
    "/tmp",
]


class LocalEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "local"

    @property
    def capabilities(self):
        return EnvironmentCapabilities()

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp())
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        shutil.rmtree(self.root)

    def _here(self, path):
        return self.root / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path):
        self._here(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._here(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._here(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        binds = [part for each in self.root.iterdir() for part in ("--bind", str(each), f"/{each.name}")]
        settings = [part for name, value in (env or {}).items() for part in ("--setenv", name, value)]
        process = await asyncio.create_subprocess_exec(
            "bwrap",
            *SYSTEM,
            *binds,
            *settings,
            "--unshare-all",
            "--chdir",
            cwd or "/app",
            "bash",
            "-c",
            command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


class OneCommand(BaseAgent):
    @staticmethod
    def name():
        return "one-command"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            body = {"model": "policy", "messages": [{"role": "user", "content": instruction}]}
            headers = {"Authorization": f"Bearer {self.extra_env['OPENAI_API_KEY']}"}
            answer = await client.post(
                f"{self.extra_env['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers
            )
            answer.raise_for_status()
        await self.act(answer.json()["choices"][0]["message"]["content"] or "", environment)

    async def act(self, answer, environment):
        await environment.exec(answer)


class Writer(OneCommand):
    """Writes the answer to a file."""

    async def act(self, answer, environment):
        await environment.exec(f"echo {shlex.quote(answer)} > out")
