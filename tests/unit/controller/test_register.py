"""The effect of `@register`: an ordinary method on the worker, and a typed call from the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from megarl.controller.dispatch import RULES, Dispatch
from megarl.controller.worker import RemoteMethod, Worker, register, registered_methods

ROOT = Path(__file__).parents[3]

# Each line that ends with `# error: WORDS` must be reported with these words, and no other line.
CALLS = """
from megarl.batch.data_proto import DataProto
from megarl.controller.dispatch import Dispatch
from megarl.controller.futures import WorkerFuture
from megarl.controller.group import RoleGroup
from megarl.controller.worker import register
from megarl.controller.worker import Worker


class ActorWorker(Worker):
    @register(Dispatch.MEGATRON_MESH, blocking=False)
    def update(self, part: DataProto, rate: float) -> dict[str, float]:
        return {}

    @register(Dispatch.MEGATRON_MESH)
    def log_probs(self, part: DataProto) -> DataProto:
        return part

    @register(Dispatch.RANK_ZERO)
    def version(self) -> int:
        return 1

    @register(Dispatch.RANK_ZERO, blocking=False)
    def submit(self, prompts: list[str], *, wait_s: float = 1.0) -> list[str]:
        return prompts

    @register()
    def load(self, folder: str) -> None: ...

    @register(blocking=False)
    def save(self, folder: str) -> bool:
        return True

    def unregistered(self) -> int:
        return 1


def right(group: RoleGroup, worker: ActorWorker, part: DataProto) -> None:
    metrics: WorkerFuture[list[dict[str, float]]] = group.call(ActorWorker.update, [part], 0.1)
    metrics = group.call(ActorWorker.update, (part,), rate=0.1)
    batches: list[DataProto] = group.call(ActorWorker.log_probs, [part])
    version: int = group.call(ActorWorker.version)
    answers: WorkerFuture[list[str]] = group.call(ActorWorker.submit, ["a"], wait_s=2.0)
    group.call(ActorWorker.load, "folder")
    saved: WorkerFuture[list[bool]] = group.call(ActorWorker.save, "folder")
    versions: WorkerFuture[list[int]] = group.call_all(ActorWorker.version)
    of_one: WorkerFuture[dict[str, float]] = group.call_rank(1, ActorWorker.update, part, 0.1)
    own: dict[str, float] = worker.update(part, 0.1)


def wrong(group: RoleGroup, worker: ActorWorker, part: DataProto) -> None:
    group.call(ActorWorker.update, [part], "fast")  # error: `Literal['fast']` is not assignable to parameter `rate` with type `float`
    group.call(ActorWorker.update, part, 0.1)  # error: `DataProto` is not assignable to parameter with type `Sequence[DataProto]`
    group.call(ActorWorker.update, [part])  # error: Missing argument `rate`
    group.call(ActorWorker.submit, ["a"], wait=2.0)  # error: Unexpected keyword argument `wait`
    group.call_rank(1, ActorWorker.update, [part], 0.1)  # error: `list[DataProto]` is not assignable to parameter with type `DataProto`
    group.call_rank("1", ActorWorker.version)  # error: `Literal['1']` is not assignable to parameter `rank` with type `int`
    group.call_all(ActorWorker.load)  # error: Missing argument `folder`
    group.call(ActorWorker.unregistered)  # error: `(self: ActorWorker) -> int` is not assignable to parameter `method`
    group.call(ActorWorker.version).get()  # error: `int` has no attribute `get`
    at_once: bool = group.call(ActorWorker.save, "folder")  # error: `WorkerFuture[list[bool]]` is not assignable to `bool`
    group.version()  # error: `RoleGroup` has no attribute `version`
    worker.update([part], 0.1)  # error: `list[DataProto]` is not assignable to parameter with type `DataProto`
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """Return the messages of one pyrefly run by line."""
    folder = tmp_path_factory.mktemp("typed_calls")
    (folder / "snippet.py").write_text(CALLS)
    libraries = ["torch.*", "numpy.*", "ray.*", "omegaconf.*"]
    (folder / "pyrefly.toml").write_text(
        f"search-path = [{json.dumps(str(ROOT))}]\nreplace-imports-with-any = {json.dumps(libraries)}\n"
    )
    command = ["check", "--python-interpreter-path", sys.executable, "--output-format", "json", "snippet.py"]
    ended = subprocess.run(
        [sys.executable, "-m", "pyrefly", *command], cwd=folder, capture_output=True, text=True, check=False
    )
    found: dict[int, list[str]] = {}

    for error in json.loads(ended.stdout)["errors"]:
        found.setdefault(error["line"], []).append(error["description"])

    return found


def test_a_type_checker_reports_wrong_calls_and_no_others(reported: dict[int, list[str]]) -> None:
    expected = {
        number: line.partition("  # error: ")[2]
        for number, line in enumerate(CALLS.splitlines(), start=1)
        if "  # error: " in line
    }
    assert set(reported) == set(expected), reported
    for number, words in expected.items():
        assert words in " ".join(reported[number]), reported[number]


class Counter(Worker):
    def __init__(self, start: int) -> None:
        self.value = start

    @register(Dispatch.RANK_ZERO, blocking=False)
    def add(self, more: int) -> int:
        """Adds."""
        self.value += more
        return self.value


class Doubler(Counter):
    @register(Dispatch.RANK_ZERO)
    def double(self) -> int:
        return self.add(self.value)


def test_of_a_worker_it_is_an_ordinary_method() -> None:
    assert Doubler(3).double() == 6
    assert Doubler(3).add.__doc__ == "Adds."


def test_an_async_method_is_refused_where_it_is_registered() -> None:
    async def update(self: object) -> None: ...
    async def stream(self: object) -> AsyncIterator[int]:
        yield 1

    for method in (update, stream):
        with pytest.raises(ValueError, match=rf"{method.__name__} is `async def`.*make it a plain `def`"):
            register(Dispatch.RANK_ZERO)(method)


def test_a_class_knows_its_remote_methods_and_those_of_its_bases() -> None:
    found = registered_methods(Doubler)
    assert set(found) >= {"add", "double"}
    assert all(isinstance(method, RemoteMethod) for method in found.values())
    assert (found["add"].rule, found["add"].blocking, found["add"].owner) == (
        RULES[Dispatch.RANK_ZERO],
        False,
        Counter,
    )
    assert repr(found["double"]) == "Doubler.double"
    assert "__init__" not in found
