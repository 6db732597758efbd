"""The tables of versions, the requirement files and the Dockerfiles say the same, and what they say goes
together."""

from __future__ import annotations

import importlib.metadata
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl import __version__
from megarl.config.tested_versions import tested_versions
from megarl.config.versions import COUPLED

ROOT = Path(__file__).parents[3]
TABLE_HEAD = "| | CPU | CUDA |"
# Not the same on both, for the reason in requirements/cuda.txt.
DIFFERENT = {"numpy"}
LINUX_312 = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "extra": "",
}


class Row(NamedTuple):
    """Versions; None where a column has none."""

    cpu: str | None
    cuda: str | None


def version_table(file: str) -> dict[str, Row]:
    _, _, below = (ROOT / file).read_text().partition(f"{TABLE_HEAD}\n")
    table = {}

    for line in below.splitlines()[1:]:
        if not line.startswith("|"):
            break
        name, *versions = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = Row(*(None if version == "-" else version for version in versions))

    return table


def pins(*files: str) -> dict[str, str]:
    """Distribution -> exact version. Raises where a line has none."""
    found = {}
    for file in files:
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if text := line.split("#")[0].strip():
                requirement = Requirement(text)
                (exact,) = requirement.specifier
                assert exact.operator == "==", f"{file}: {line}"
                found[canonicalize_name(requirement.name)] = exact.version

    return found


CPU = pins("cpu.txt", "sglang.txt")
CUDA = pins("cuda.txt")
LOCK = pins("cuda.lock")


def dockerfile(name: str) -> DockerfileParser:
    return DockerfileParser(fileobj=io.BytesIO((ROOT / "docker" / name).read_bytes()), build_args={})


def arguments(name: str) -> dict[str, str]:
    """Of a Dockerfile: its ARGs with their defaults."""
    steps = [step["value"] for step in dockerfile(name).structure if step["instruction"] == "ARG"]
    return {key: value.strip('"') for key, _, value in (step.partition("=") for step in steps)}


def expected_table() -> dict[str, Row]:
    """As the requirement files and the Dockerfiles have it."""
    cuda = arguments("Dockerfile")
    python_cpu = re.match(r"python:(\d+\.\d+)-", arguments("Dockerfile.cpu")["BASE_IMAGE"])
    python_cuda = re.search(r"python(\d+\.\d+) -m venv", (ROOT / "docker/Dockerfile").read_text())
    toolkit = re.match(r"nvidia/cuda:(\d+\.\d+\.\d+)-", cuda["BASE_IMAGE"])
    assert python_cpu
    assert python_cuda
    assert toolkit
    both = ("torch", "megatron-core", "sglang", "ray", "transformers", "tokenizers", "numpy")

    return {name: Row(CPU[name], CUDA[name]) for name in both} | {
        "Python": Row(python_cpu[1], python_cuda[1]),
        "CUDA": Row(None, toolkit[1]),
        "transformer-engine": Row(None, cuda["TRANSFORMER_ENGINE_VERSION"]),
        "apex": Row(None, cuda["APEX_COMMIT"][:12]),
    }


def test_every_table_of_versions_says_what_is_installed() -> None:
    """On whichever page it is."""
    pages = [
        str(page.relative_to(ROOT))
        for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
        if TABLE_HEAD in page.read_text()
    ]
    assert "docs/versions.md" in pages
    for page in pages:
        assert version_table(page) == expected_table(), page


def test_both_columns_have_the_same_version_but_where_there_is_a_reason() -> None:
    shared = set(CPU) & set(CUDA)
    assert {"torch", "megatron-core", "sglang", "ray", "transformers", "tensordict", "omegaconf"} <= shared
    assert {name for name in shared if CPU[name] != CUDA[name]} == DIFFERENT


def test_the_lock_has_what_cuda_txt_asks_for() -> None:
    assert {name: LOCK.get(name) for name in CUDA} == CUDA
    assert len(LOCK) > 200


def test_the_lock_has_what_the_libraries_declare() -> None:
    """By the metadata of what is installed here in the lock's version: all that SGLang, Megatron-Core, Ray
    and the others ask for."""
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
        (ROOT / "docs" / "versions.md").read_text().partition("| | oldest | newest |\n|---|---|---|\n")
    )
    shown = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in below.partition("\n\n")[0].splitlines()
    ]
    names = ["python", "torch", "megatron-core", "transformers", "sglang", "ray", "numpy"]
    assert shown == [(name, *tested_versions()[name]) for name in names]


def test_megatrons_range_for_transformer_engine() -> None:
    """It is an extra of Megatron-Core's, and the image installs it otherwise."""
    declared = [Requirement(line) for line in importlib.metadata.requires("megatron-core") or ()]
    (engine,) = {each.specifier for each in declared if each.name == "transformer-engine"}
    assert engine.contains(CUDA["transformer-engine"])
    versions = {
        CUDA["transformer-engine"],
        CUDA["transformer-engine-cu13"],
        arguments("Dockerfile")["TRANSFORMER_ENGINE_VERSION"],
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
