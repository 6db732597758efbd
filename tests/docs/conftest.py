"""The folder in which the pages' commands are typed, and the quickstart that was run in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.docs.clone import Clone, Ended
from tests.docs.commands import COMMANDS, QUICKSTART, Executed
from tests.integration.dockerfile_steps import cpu_image
from tests.integration.linked_wheels import make_wheels


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Made by the steps of docker/Dockerfile.cpu, without Docker. pip finds wheels that lead to what is
    installed here; of real ones the image is made by tests/soak/test_cpu_image.py."""
    folder = tmp_path_factory.mktemp("clone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(make_wheels(folder, without="megarl")))
        image = cpu_image(folder)
        image.build()

    yield Clone(image)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def quickstart(clone: Clone) -> Ended:
    entry = COMMANDS[QUICKSTART]
    assert isinstance(entry, Executed)
    return clone.type(f"{QUICKSTART} {entry.more}")
