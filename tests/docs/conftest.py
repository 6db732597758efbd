"""The folder in which the pages' commands are typed, and the quickstart that was run in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.docs.clone import Clone, Ended
from tests.docs.commands import COMMANDS, QUICKSTART, Executed
from tests.integration.dockerfile_steps import cpu_image
from tests.integration.linked_wheels import lock_of, make_wheels


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Made by the steps of docker/Dockerfile.cpu, without Docker. pip and uv find wheels that lead to
    what is installed here, and a lock of these; tests/soak/test_cpu_image.py builds the image of real ones."""
    folder = tmp_path_factory.mktemp("clone")
    with pytest.MonkeyPatch.context() as patch:
        wheels = make_wheels(folder, without="megarl")
        for installer in ("PIP", "UV"):
            patch.setenv(f"{installer}_NO_INDEX", "1")
            patch.setenv(f"{installer}_FIND_LINKS", str(wheels))
        image = cpu_image(folder, {"requirements/lock.txt": lock_of(wheels)}, TORCH_INDEX="")
        image.build()

    yield Clone(image)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def quickstart(clone: Clone) -> Ended:
    entry = COMMANDS[QUICKSTART]
    assert isinstance(entry, Executed)
    return clone.type(f"{QUICKSTART} {entry.more}")
