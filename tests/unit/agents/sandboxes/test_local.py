"""Test sandboxes of this machine with programs that try to get out, and at their limits."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.protocol import Reply, Task, Turn
from megarl.agents.sandboxes import local
from megarl.agents.sandboxes.protocol import Sandbox, SandboxEndedError, SandboxStartError, is_loopback
from megarl.agents.sandboxes.start import check_provider, open_sandbox, start_sandbox
from megarl.config.schema import SandboxConfig, SandboxProvider
from tests.unit.agents.sandboxes.endpoint import serving
from tests.unit.agents.sandboxes.image import write_image

LOCAL = SandboxConfig(provider=SandboxProvider.local)

# -S -E: without the packages of the environment, the interpreter starts faster.
PYTHON = ["python", "-S", "-E", "-c"]
ATTACKS = """
import os, signal, socket, sys
secret, port, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import ctypes, errno, signal
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments, refusal=errno.EPERM):
    # A refusal is an OSError. Any other answer comes from the code of the call in the kernel.
    if libc.syscall(number, *arguments) < 0 and ctypes.get_errno() == refusal:
        raise OSError(refusal, "refused")
def clone3():
    # The flags of a new user namespace, and SIGCHLD as the signal at the end.
    arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, signal.SIGCHLD)
    if libc.syscall(435, arguments, ctypes.sizeof(arguments)) == 0:
        os._exit(0)
    if ctypes.get_errno() == errno.ENOSYS:
        raise OSError(errno.ENOSYS, "absent")
numbers = dict(zip(("add_key", "keyctl", "bpf", "perf", "userfaultfd", "unshare", "setns", "mount", "kexec", "clone"),
    (248, 250, 321, 298, 323, 272, 308, 165, 246, 56) if os.uname().machine == "x86_64" else
    (217, 219, 280, 241, 282, 97, 268, 40, 104, 220)))
memory = ctypes.create_string_buffer(256)
def clone():
    if (child := libc.syscall(numbers["clone"], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)) == 0:
        os._exit(0)
    if child < 0:
        raise OSError(ctypes.get_errno(), "clone")
attempts = {
    "read a file of the run": lambda: open(secret).read(),
    "list its folder": lambda: os.listdir(os.path.dirname(secret)),
    "read through the first process": lambda: open("/proc/1/root" + secret).read(),
    "write a file of the system": lambda: open("/usr/written", "w"),
    "write next to the system": lambda: open("/written", "w"),
    "change a setting of the kernel": lambda: open("/proc/sys/kernel/core_pattern", "r+").write("core"),
    "reach a server of the machine": lambda: socket.create_connection(("127.0.0.1", port), 5),
    "reach the network": lambda: socket.create_connection(("198.51.100.1", 80), 0.2),
    "signal a process of the machine": lambda: os.kill(victim, signal.SIGKILL),
    "become another user": lambda: os.setuid(12345),
    "get privileges in a new user namespace": lambda: call(numbers["unshare"], 0x10000000),
    "make a user namespace (clone)": clone,
    "make a user namespace (clone3)": clone3,
    "join a namespace": lambda: call(numbers["setns"], os.open("/proc/self/ns/ipc", os.O_RDONLY), 0),
    "mount a file system": lambda: call(numbers["mount"], b"x", b"/tmp", b"tmpfs", 0, 0),
    "open a file system": lambda: call(430, b"tmpfs", 0),
    "keep a key in the kernel": lambda: call(numbers["add_key"], b"user", b"megarl", b"x", 1, -2),
    "read the keys of its session": lambda: call(numbers["keyctl"], 0, -3, 1),
    "load a program into the kernel (bpf)": lambda: call(numbers["bpf"], 0, memory, 256),
    "load a kernel (kexec)": lambda: call(numbers["kexec"], 0, 0, 0, 0),
    "measure programs (perf)": lambda: call(numbers["perf"], memory, 0, -1, -1, 0),
    "handle its own page faults (userfaultfd)": lambda: call(numbers["userfaultfd"], 1),
    "use io_uring": lambda: call(425, 8, memory),
    "make a device": lambda: os.mknod("/tmp/device", 0o60600, os.makedev(7, 0)),
    "read the machine's passwords": lambda: open("/etc/shadow").read(),
    "list the machine's private keys": lambda: os.listdir("/etc/ssl/private"),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print("a program could", name)
print("variables", sorted(os.environ))
"""

# Open connections and send nothing. Those that are refused are closed.
HOLD = """
import select, socket, sys
opened = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) for _ in range(140)]
closed = set()
while len(closed) < 12:
    closed.update(select.select([each for each in opened if each not in closed], [], [], 10)[0])
print(140 - len(closed), "of 140 connections were held")
"""


@pytest.fixture(autouse=True, scope="module")
def needs_bubblewrap() -> None:
    """Skip these tests without bubblewrap. CI has it."""
    if why := local.why_not():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_no_program_gets_out_and_each_reaches_its_endpoint(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hunter2")
    victim = subprocess.Popen(["sleep", "60"])

    async def attack() -> None:
        async with serving(b"the model") as endpoint, serving(b"another server") as other:
            url = f"http://127.0.0.1:{endpoint}"
            arguments = [str(secret), str(other), str(victim.pid)]
            program = (
                "import sys, urllib.request as r; print([r.urlopen(u).read() for u in 2 * sys.argv[1:]])"
            )
            sandbox = await start_sandbox(LOCAL, endpoint_url=url)
            attacked = await sandbox.exec([*PYTHON, ATTACKS, *arguments], environment={"KEY": "7"})
            assert attacked == (0, "variables ['HOME', 'KEY', 'LANG', 'PATH']\n")
            reached = await sandbox.exec([*PYTHON, program, sandbox.endpoint_url])
            assert reached == (0, "[b'the model', b'the model']\n")
            held = await sandbox.exec([*PYTHON, HOLD, sandbox.endpoint_url.rpartition(":")[2]])
            assert held == (0, "128 of 140 connections were held\n")
            reached = await sandbox.exec([*PYTHON, program, sandbox.endpoint_url])
            assert reached == (0, "[b'the model', b'the model']\n")
            await sandbox.close()

            # With the network of the machine, it reaches both, and nothing else is different.
            sandbox = await start_sandbox(replace(LOCAL, network=True), endpoint_url=url)
            assert sandbox.endpoint_url == url
            attacked = await sandbox.exec([*PYTHON, ATTACKS, *arguments])
            of_network = {
                f"a program could reach {what}" for what in ("a server of the machine", "the network")
            }
            found = set(attacked.output.splitlines()[:-1])
            assert "a program could reach a server of the machine" in found <= of_network
            await sandbox.close()

    run(attack())
    assert victim.poll() is None
    victim.kill()
    victim.wait()


def test_commands_share_files_and_files_go_in_and_out(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "answer.py").write_text("print(42)")
    (tmp_path / "linked.py").symlink_to(tmp_path / "package" / "answer.py")
    files = [str(tmp_path / name) for name in ("package", "linked.py")]
    config = SandboxConfig(provider=SandboxProvider.local, files=files)

    async def exchange() -> None:
        async with open_sandbox(config) as sandbox:
            await sandbox.upload(b"spam", "below/it.txt")
            program = "cat - below/it.txt > out; ln -s /etc/passwd link; mkfifo pipe; echo no >&2; exit 3"
            assert await sandbox.exec(["sh", "-c", program], stdin=b"eggs ") == (3, "no\n")
            assert await sandbox.download("out") == b"eggs spam"
            for program in ("package/answer.py", "linked.py"):
                assert await sandbox.exec(["python", program]) == (0, "42\n")
            assert (await sandbox.download("link"))[:5] == b"root:"
            for path, why in {
                "pipe": "not a file",
                "none": "No such file",
                "/dev/zero": "not a file",
            }.items():
                with pytest.raises(ValueError, match=why):
                    await sandbox.download(path)
            # A link of the sandbox does not lead out of it.
            await sandbox.exec(["ln", "-s", str(tmp_path), "outside"])
            with pytest.raises(ValueError, match="FileNotFoundError|FileExistsError"):
                await sandbox.upload(b"", "outside/written")
            assert (await sandbox.exec(["no-such-program"])).status == 127

    run(exchange())
    assert not (tmp_path / "written").exists()


def test_a_command_that_takes_too_long_is_ended_and_the_sandbox_is_not() -> None:
    async def wait() -> None:
        async with open_sandbox(LOCAL) as sandbox:
            with pytest.raises(TimeoutError):
                await sandbox.exec(["sh", "-c", "sleep 61 & sleep 62"], time_limit_s=0.5)
            program = "import os; print(b'sleep' in b''.join(open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc') if p.isdigit() and p != str(os.getpid())))"
            assert await sandbox.exec([*PYTHON, program]) == (0, "False\n")

    run(wait())


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("x = b'x' * (200 << 20); import time; time.sleep(60)", "memory_mb is 100"),
        ("x = open('/tmp/x', 'wb').write(b'x' * (60 << 20)); y = b'y' * (60 << 20); import time; time.sleep(60)", "memory_mb is 100"),
        ("import os, time\nfor _ in range(40):\n    if not os.fork(): break\ntime.sleep(60)", "max_processes is 30|status 1"),
        ("import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\ntime.sleep(60)", "max_processes is 30|status 1"),
    ],
    ids=["memory", "files", "processes", "threads"],
)  # fmt: skip
def test_limits(program: str, why: str) -> None:
    config = SandboxConfig(provider=SandboxProvider.local, memory_mb=100, max_processes=30)

    async def exceed() -> None:
        async with open_sandbox(config) as sandbox:
            # For users other than root, the kernel refuses further processes.
            ended = await sandbox.exec([*PYTHON, program])
            raise SandboxEndedError(f"status {ended.status}")

    with pytest.raises(SandboxEndedError, match=why):
        run(exceed())


def test_a_sandbox_that_a_program_has_ended() -> None:
    async def end() -> None:
        async with open_sandbox(LOCAL) as sandbox:
            # Until the kernel has ended all processes, the command may be the last of them.
            with suppress(SandboxEndedError):
                await sandbox.exec(["sh", "-c", "kill -9 -1"])
            for use in (
                lambda: sandbox.exec(["true"]),
                lambda: sandbox.upload(b"", "file"),
                lambda: sandbox.download("file"),
            ):
                with pytest.raises(SandboxEndedError, match="has ended"):
                    await use()

    run(end())


def test_programs_that_cannot_be_measured_are_ended() -> None:
    """In a process of its own, because its threads can open nothing either."""
    program = """
import asyncio, resource
from megarl.agents.sandboxes.start import open_sandbox
from megarl.config.schema import SandboxConfig, SandboxProvider
async def measure():
    async with open_sandbox(SandboxConfig(provider=SandboxProvider.local)) as sandbox:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        await asyncio.sleep(1.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await sandbox.exec(["true"])
asyncio.run(measure())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(
        r"SandboxEndedError: its programs cannot be measured \(.*Too many open files", ended.stderr
    )


def test_an_image_is_a_folder(tmp_path: Path) -> None:
    write_image(tmp_path)

    async def look() -> None:
        async with open_sandbox(LOCAL, str(tmp_path)) as sandbox:
            program = "echo $(</etc/shop) > /tmp/it; cat /tmp/it; echo x > /etc/shop; cat /etc/passwd"
            looked = await sandbox.exec(["bash", "-c", program])
            assert looked.output.splitlines()[0] == "open"
            assert "/etc/shop: Read-only file system" in looked.output
            assert "/etc/passwd: No such file" in looked.output
        with pytest.raises(SandboxStartError, match="'/no/such/image' is no folder"):
            await start_sandbox(LOCAL, "/no/such/image")
        (tmp_path / "all").symlink_to("/")
        for machine in ("/", "//", f"{tmp_path}/all"):
            with pytest.raises(SandboxStartError, match="could read all files of this machine"):
                await start_sandbox(LOCAL, machine)
        (tmp_path / "bin" / "cat").unlink()
        with pytest.raises(SandboxStartError, match="cannot start a sandbox here: .*cat"):
            await start_sandbox(LOCAL, str(tmp_path))

    run(look())


def test_the_environment_on_the_page_decides_by_hidden_tests() -> None:
    page = (Path(__file__).parents[4] / "docs" / "harness.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall("(?ms)^```python\n(.*?)^```", page) if "class Repository" in each]
    names: dict[str, Any] = {}
    exec(block, names)
    names["SANDBOX"] = LOCAL
    tests = "from answer import answer\ndef test_answer(): assert answer == 42"

    async def play() -> None:
        environment = names["Repository"]()
        await environment.start(Task(extra_info={"tests": tests}))
        replies = [
            await environment.respond(
                Turn(0, "echo 'answer = 41' > answer.py; cat tests/*", [], is_last=False)
            ),
            await environment.respond(Turn(1, "echo 'answer = 42' > answer.py", [], is_last=True)),
        ]
        await environment.close()
        assert "No such file" in replies[0].messages[0]["content"]
        assert (replies[1].reward, replies[1].is_done) == (1.0, True)

        # What a model writes does not end the run.
        for text in ("touch tests", "kill -9 -1"):
            environment = names["Repository"]()
            await environment.start(Task(extra_info={"tests": tests}))
            assert await environment.respond(Turn(0, text, [], is_last=True)) == Reply(is_done=True)
            await environment.close()

    run(play())


def test_nothing_remains_when_the_process_is_killed() -> None:
    program = """
import asyncio, os, signal, subprocess
from megarl.agents.sandboxes.start import start_sandbox
from megarl.config.schema import SandboxConfig, SandboxProvider
async def die():
    sandbox = await start_sandbox(SandboxConfig(provider=SandboxProvider.local))
    running = asyncio.ensure_future(sandbox.exec(["sh", "-c", "setsid sleep 4321.25; true"]))
    find = ["pgrep", "-fx", "sleep 4321.25"]
    while not (found := subprocess.run(find, capture_output=True, text=True).stdout):
        await asyncio.sleep(0.05)
    print(found, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(die())
"""
    died = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    (pid,) = died.stdout.split()
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_a_missing_file_or_program_is_found_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_provider(LOCAL)
    with pytest.raises(ValueError, match=r"files has .*none.py', which does not exist"):
        check_provider(SandboxConfig(provider=SandboxProvider.local, files=[f"{tmp_path}/none.py"]))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs bubblewrap 0.8 or newer"):
        check_provider(LOCAL)


@pytest.mark.parametrize(
    ("host", "is_there"), [("127.0.0.2", True), ("localhost", True), ("10.0.0.7", False), ("node-1", False)]
)
def test_addresses_of_loopback(host: str, is_there: bool) -> None:
    assert is_loopback(f"http://{host}:8100") is is_there


def test_sandboxes_are_apart() -> None:
    async def two() -> None:
        one, other = await asyncio.gather(start_sandbox(LOCAL), start_sandbox(LOCAL))
        sandboxes: list[Sandbox] = [one, other]
        await one.upload(b"", "mine")
        listed = [await sandbox.exec(["ls"]) for sandbox in sandboxes]
        assert [each.output for each in listed] == ["mine\n", ""]
        for sandbox in (one, other, one):
            await sandbox.close()
        with pytest.raises(SandboxEndedError, match="has ended"):
            await one.exec(["ls"])

    run(two())
