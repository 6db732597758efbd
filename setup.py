"""Build the package megarl.

The allowed ranges of its requirements are in megarl/config/versions.py. The exact versions for development
are in requirements/.
"""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

MEGARL = Path(__file__).parent / "megarl"
VERSIONS = runpy.run_path(str(MEGARL / "config" / "versions.py"))
VERSION = runpy.run_path(str(MEGARL / "__init__.py"))["__version__"]


def _ranges(table: str) -> list[str]:
    return [f"{name}{versions}" for name, versions in VERSIONS[table].items()]


# A package index shows the README without the repository, so links into it become plain text.
README = re.sub(
    r"!?\[([^\]]*)\]\((?!https?:)[^)]*\)",
    r"\1",
    (Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
)

setup(
    name="megarl",
    version=VERSION,
    description="Reinforcement learning of large language models on Megatron-Core, SGLang and Ray",
    long_description=README,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=VERSIONS["PYTHON"],
    packages=[*find_packages(include=["megarl", "megarl.*"]), "megarl.configs"],
    package_dir={"megarl.configs": "configs"},
    package_data={
        "megarl.configs": ["**/*.yaml", "**/*.json"],
        "megarl.config": ["*.yaml", "tested_versions.json"],
        "megarl.recipes.starter": ["*.yaml", "*.jinja"],
        "megarl.rehearse.dry_run": ["guard.cpp"],
        "megarl.tracking.report": ["*.js", "*.css"],
        # Folders on the import path of SGLang's processes, which are not packages of megarl.
        "megarl.rollout.sglang": ["stubs/**/*.py"],
    },
    install_requires=_ranges("REQUIRED"),
    extras_require={
        "quickstart": ["reasoning-gym>=0.1.25"],
        # Packages that read GGUF files; see docs/quickstart.md for the source of the model.
        "tutorial": ["accelerate>=1.15", "gguf>=0.19"],
        # After this extra, run: pip install --no-deps sglang
        "sglang-cpu": [*_ranges("SGLANG_CPU"), f"aiohttp{VERSIONS['SGLANG']['aiohttp']}"],
        "cuda": [*_ranges("CUDA"), *_ranges("SGLANG")],
        "mcp": ["mcp>=2.3,<3"],  # tools from servers of the Model Context Protocol
        # Environments of hubs, with the versions whose interfaces the adapters use (docs/agents.md).
        "reasoning_gym": ["reasoning-gym==0.1.25"],
        "verifiers": ["verifiers==0.4.0"],
        "openenv": ["openenv==0.10.0"],
        "nemo_gym": ["nemo-gym==0.4.0"],
        "harbor": ["harbor==0.26.0"],
        "wandb": ["wandb>=0.30"],
        "mlflow": ["mlflow-skinny>=3"],
        "swanlab": ["swanlab>=0.10"],
        "prometheus": ["prometheus-client>=0.20"],
        "opentelemetry": ["opentelemetry-exporter-otlp-proto-http>=1.27"],
        "dev": [
            "pytest",
            "hypothesis",
            "ruff",
            "pyrefly",
            "sphinx",
            "myst-parser",
            "furo",
            "sphinx-copybutton",
            "selenium",
        ],
    },
    entry_points={"console_scripts": ["megarl=megarl.cli.main:main"]},
)
