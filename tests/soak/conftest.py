"""The base image of both images, built once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.chroot_image import make_base, skip_unless_possible


@pytest.fixture(scope="session")
def python_on_debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    skip_unless_possible()
    folder = tmp_path_factory.mktemp("base") / "root"
    yield make_base(folder)
    shutil.rmtree(folder)
