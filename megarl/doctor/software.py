"""Checks that the libraries are installed in versions that work together and were tested."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megarl import __version__
from megarl.config.finding import Finding, doubtful, first_case, good, wrong
from megarl.config.layers import (
    choose_layers,
    has_transformer_engine,
    missing_flash_attention,
    trains_adapters,
)
from megarl.config.schema import CPCommType, Layers, RolloutEngineKind
from megarl.config.versions import COUPLED, CUDA, PYTHON, REQUIRED
from megarl.doctor.run_inputs import ExaminedRun
from megarl.models.layers import kinds_of

CHECK = "versions"
# The versions that megarl was run with: for each environment, the version of each distribution, and the minor
# version of "python". "lock" has the versions that all tests run on. The other environments are those of
# `make test-wheel`, which runs from the quickstart to a converted checkpoint with both engines.
RECORD = Path(__file__).parents[1] / "config" / "tested_versions.json"
_OF_ENGINES = tuple(name for engine in RolloutEngineKind for name in engine.needs.packages)
# Compiled for one version of torch. Without it (on CPU), SGLang works with other versions than it declares.
_IS_CUDA = "sglang-kernel"
_SHOWN = ("torch", "megatron-core", "transformers", "ray", "sglang")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The installed versions.

    Attributes:
        versions: The version of each distribution in the tables; None if it is not installed.
        requires: The versions of other distributions that each coupled one requires.
    """

    python: str
    versions: Mapping[str, str | None]
    requires: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def probe() -> Installed:
    coupled = [name for names in COUPLED.values() for name in names]
    names = [
        *(Requirement(name).name for name in REQUIRED),
        *_OF_ENGINES,
        *(Requirement(name).name for name in CUDA),
        *coupled,
        _IS_CUDA,
    ]
    versions = {name: _version(name) for name in names}

    return Installed(
        python=platform.python_version(),
        versions=versions,
        requires={
            name: _required_versions(name, others) for name, others in COUPLED.items() if versions.get(name)
        },
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _required_versions(name: str, others: tuple[str, ...]) -> dict[str, str]:
    required = [Requirement(line) for line in metadata.requires(name) or ()]
    return {
        each.name: str(each.specifier)
        for each in required
        if each.name in others and (each.marker is None or each.marker.evaluate())
    }


def judge(installed: Installed, of_engine: Mapping[str, str]) -> Iterator[Finding]:
    """Check the versions. `of_engine` are the additional requirements of the run's rollout engine."""
    faults = list(_faults(installed, of_engine))
    yield from faults

    # Versions within the allowed range may still be untested together.
    if not faults:
        shown = ", ".join(
            f"{name} {installed.versions[name]}" for name in _SHOWN if installed.versions.get(name)
        )
        message = f"megarl {__version__} on Python {installed.python} with {shown}"
        facts = {"python": installed.python, "versions": dict(installed.versions)}
        if untested := _untested(installed, of_engine):
            what = ", ".join(
                f"{name} {found} (tested {oldest} to {newest})" for name, found, (oldest, newest) in untested
            )
            yield doubtful(
                CHECK,
                f"{message}: untested with {what}",
                "requirements/lock.txt contains versions that are tested together",
                untested=[name for name, _, _ in untested],
                **facts,
            )
        else:
            yield good(CHECK, f"{message}: tested", **facts)


def _untested(installed: Installed, of_engine: Mapping[str, str]) -> list[tuple[str, str, tuple[str, str]]]:
    """Return the distributions outside the tested versions: name, version and tested range."""
    python = ".".join(installed.python.split(".")[:2])
    found = {"python": python} | {
        name: installed.versions[name]
        for name in (Requirement(key).name for key in {**REQUIRED, **of_engine})
    }
    return [
        (name, version, tested)
        for name, version in found.items()
        if version is not None and not _is_between(version, *(tested := tested_versions()[name]))
    ]


def _faults(installed: Installed, of_engine: Mapping[str, str]) -> Iterator[Finding]:
    if not _within(installed.python, PYTHON):
        yield wrong(
            CHECK,
            f"Python {installed.python} is not {PYTHON}",
            "create the virtual environment with another Python, such as 3.12",
            python=installed.python,
        )

    for required, versions in {**REQUIRED, **of_engine}.items():
        name = Requirement(required).name
        found = installed.versions.get(name)
        if found is None:
            yield wrong(CHECK, f"{name} is not installed", f"pip install '{required}{versions}'", name=name)
        elif not _within(found, versions):
            yield wrong(
                CHECK,
                f"{name} {found} is outside {versions}, the versions that megarl supports",
                f"pip install '{required}{versions}' (the exact versions are in requirements/)",
                name=name,
                found=found,
            )

    # Kernel packages are optional: torch's own kernels are used without them.
    for name, versions in {Requirement(key).name: value for key, value in CUDA.items()}.items():
        found = installed.versions.get(name)
        if found is not None and not _within(found, versions):
            yield doubtful(
                CHECK,
                f"{name} {found} is outside {versions}",
                f"pip install '{name}{versions}', or uninstall it, so that torch's own kernels are used",
                name=name,
            )

    # Some packages are built against exact versions of others.
    for name, requires in installed.requires.items():
        if name == "sglang" and installed.versions.get(_IS_CUDA) is None:
            continue
        for other, versions in requires.items():
            found = installed.versions.get(other)
            if found is not None and not _within(found, versions):
                yield wrong(
                    CHECK,
                    f"{name} {installed.versions[name]} is built for {other}{versions}, but {other} "
                    f"{found} is installed",
                    f"pip install '{other}{versions}', or another version of {name}",
                    name=other,
                    found=found,
                )


def _within(version: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def check(subject: ExaminedRun) -> Iterator[Finding]:
    engine = None if subject.config is None else subject.config.rollout_engine
    return judge(probe(), {} if engine is None else engine.needs.packages)


def layers(subject: ExaminedRun) -> Iterator[Finding]:
    """Report the layer implementation of the run's models, and kernels that are not installed here."""
    config = subject.config
    installed = has_transformer_engine()
    assert config is not None
    choice = choose_layers(
        config.engine.layers,
        config.model.dtype,
        on_cuda=subject.use_gpu,
        has_transformer_engine=installed,
        has_adapters=trains_adapters(config),
    )

    # Dry runs have the modules in a folder of their own, where no import finds them.
    if subject.use_gpu and find_spec("transformer_engine") is not None and not installed:
        yield doubtful(
            "layers",
            "Transformer Engine is installed without its compiled extension transformer_engine_torch, so a "
            f"run cannot use it; engine.layers={config.engine.layers.value}",
            "pip install --no-build-isolation 'transformer-engine[pytorch]', which compiles it "
            "(docs/install.md), or uninstall transformer-engine",
        )

    kinds = dict.fromkeys(kind for each in subject.architectures.values() for kind in kinds_of(each))
    for kind in kinds if subject.use_gpu else ():
        missing_kernels = [package for name, package in kind.kernels.items() if find_spec(name) is None]
        verb = "is" if len(missing_kernels) == 1 else "are"
        if missing_kernels:
            yield doubtful(
                "layers",
                f"{' and '.join(missing_kernels)} {verb} not installed, so {kind.name} are a loop of small "
                "kernels, and a training step takes several times longer",
                f"pip install {' '.join(missing_kernels)}",
            )

    asked = config.engine.flash_attention
    missing = missing_flash_attention(asked) if subject.use_gpu else None
    package, hint = missing or ("", "")
    yield first_case(
        "layers",
        {"layers": choice.layers.value},
        (
            choice.layers is Layers.transformer_engine and not installed,
            wrong,
            "engine.layers=transformer_engine, but Transformer Engine is not installed",
            "pip install 'transformer-engine[pytorch]' (docs/install.md), or set engine.layers=auto",
        ),
        (
            missing is not None,
            wrong,
            f"engine.flash_attention={asked.value}, but the package {package} is not installed",
            hint,
        ),
        (
            subject.use_gpu and config.engine.cp_comm_type is CPCommType.p2p and not installed,
            wrong,
            "engine.cp_comm_type=p2p, but Transformer Engine is not installed",
            "pip install 'transformer-engine[pytorch]' (docs/install.md), or set engine.cp_comm_type=auto",
        ),
        (True, good, f"{choice.layers.value}: {choice.why}"),
    )


def _is_between(version: str, oldest: str, newest: str) -> bool:
    """Whether a version is in the tested range. Local parts are ignored: 2.13.0+cpu is 2.13.0."""
    return Version(oldest).release <= Version(version).release <= Version(newest).release


@cache
def tested_versions() -> Mapping[str, tuple[str, str]]:
    """Return the oldest and the newest tested version of each distribution, and of "python"."""
    environments = json.loads(RECORD.read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}

    for versions in environments.values():
        for name, version in versions.items():
            found.setdefault(name, []).append(version)

    return {
        name: (min(versions, key=Version), max(versions, key=Version)) for name, versions in found.items()
    }
