"""The tables of versions, the requirement files and the Dockerfiles say the same, and what they say goes
together."""

from __future__ import annotations

import importlib.metadata
import io
import json
import re
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl import __version__
from megarl.config.versions import COUPLED
from megarl.doctor.software import RECORD, tested_versions
from tests.requirement_files import FOLDER, listed, lock_environment, locked

ROOT = Path(__file__).parents[3]
TABLE_HEAD = "| library | version |"
LINUX_312 = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "extra": "",
}


def version_table(file: str) -> dict[str, str]:
    _, _, below = (ROOT / file).read_text().partition(f"{TABLE_HEAD}\n")
    table = {}

    for line in below.splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, version = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = version

    return table


LOCK = locked()


def dockerfile(name: str) -> DockerfileParser:
    return DockerfileParser(fileobj=io.BytesIO((ROOT / "docker" / name).read_bytes()), build_args={})


def arguments(name: str) -> dict[str, str]:
    """Of a Dockerfile: its ARGs with their defaults."""
    steps = [step["value"] for step in dockerfile(name).structure if step["instruction"] == "ARG"]
    return {key: value.strip('"') for key, _, value in (step.partition("=") for step in steps)}


def expected_table() -> dict[str, str]:
    """Return the table that requirements/lock.txt and .python-version give."""
    libraries = (
        "torch",
        "megatron-core",
        "transformer-engine",
        "sglang",
        "ray",
        "transformers",
        "tokenizers",
        "numpy",
    )
    return {
        "Python": (ROOT / ".python-version").read_text().strip(),
        "CUDA": ".".join(LOCK["nvidia-cuda-runtime"].split(".")[:2]),
    } | {name: LOCK[name] for name in libraries}


def test_every_table_of_versions_says_what_is_installed() -> None:
    """On whichever page it is."""
    pages = [
        str(page.relative_to(ROOT))
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
        if TABLE_HEAD in page.read_text()
    ]
    assert "docs/install.md" in pages
    for page in pages:
        assert version_table(page) == expected_table(), page


def test_one_python_is_named_everywhere() -> None:
    python = (ROOT / ".python-version").read_text().strip()
    assert f"PYTHON ?= python{python}\n" in (ROOT / "Makefile").read_text()
    assert f"--python-version {python} " in (ROOT / "Makefile").read_text()
    assert re.match(r"python:(\d+\.\d+)-", arguments("Dockerfile.cpu")["BASE_IMAGE"])[1] == python


def test_the_lock_has_every_requirement_and_no_address() -> None:
    files = {path.name for path in FOLDER.glob("*.txt")} - {"lock.txt", "models.txt"}
    assert listed(*files) <= set(LOCK)
    assert len(LOCK) > 200
    assert "://" not in (FOLDER / "lock.txt").read_text()


def test_the_makefile_locks_and_watches_every_list() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (inputs,) = re.findall(r"\$\(addprefix requirements/,([^)]*)\)", makefile)
    assert {*inputs.split()} == {path.name for path in FOLDER.glob("*.txt")} - {"lock.txt", "models.txt"}


def test_the_lock_has_what_the_libraries_declare() -> None:
    """The metadata of the packages that are installed here in the lock's version name every requirement."""
    asked = 0
    problems = []

    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if LOCK.get(name) != distribution.version.partition("+")[0]:
            continue
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate(LINUX_312):
                asked += 1
                locked = LOCK.get(canonicalize_name(requirement.name))
                if locked is None or not requirement.specifier.contains(locked, prereleases=True):
                    problems.append(f"{name} asks for {requirement}, the lock has {locked}")

    assert problems == []
    assert set(COUPLED) <= set(LOCK)
    assert asked > 200


def test_the_page_shows_what_was_tested() -> None:
    _, _, below = (
        (ROOT / "docs" / "install.md").read_text().partition("| | oldest | newest |\n|---|---|---|\n")
    )
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in below.partition("\n\n")[0].splitlines()
    ]
    names = ["python", "torch", "megatron-core", "transformers", "sglang", "ray", "numpy"]
    assert shown == [(name, *tested_versions()[name]) for name in names]


def test_the_lock_is_recorded_as_tested() -> None:
    recorded = json.loads(RECORD.read_text())["lock"]
    assert recorded == lock_environment(recorded.keys() - {"python"})


def test_the_parts_of_transformer_engine_have_one_version() -> None:
    versions = {
        LOCK[name] for name in ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    }
    assert len(versions) == 1


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_names_its_base_by_digest_and_itself_by_the_packages_version(name: str) -> None:
    base = arguments(name)["BASE_IMAGE"]
    assert re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", base)
    images = [step["value"] for step in dockerfile(name).structure if step["instruction"] == "FROM"]
    assert images[0].split()[0] == "${BASE_IMAGE}"
    assert all(image.split()[0] in ("${BASE_IMAGE}", "base") for image in images)
    labels = dockerfile(name).labels
    assert labels["org.opencontainers.image.base.name"].endswith("/" + base.partition("@")[0])
    assert labels["org.opencontainers.image.version"] == __version__


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_what_runs_in_an_image_is_not_root(name: str) -> None:
    steps = dockerfile(name).structure
    users = [number for number, step in enumerate(steps) if step["instruction"] == "USER"]
    last_stage = max(number for number, step in enumerate(steps) if step["instruction"] == "FROM")
    assert users
    assert users[-1] > last_stage
    user = steps[users[-1]]["value"].strip("${}")
    assert int(arguments(name).get(user, user)) > 0


def test_the_gpu_image_has_a_health_check() -> None:
    (check,) = [
        step["value"] for step in dockerfile("Dockerfile").structure if step["instruction"] == "HEALTHCHECK"
    ]
    assert "raylet" in check
