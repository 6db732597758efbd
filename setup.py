"""The package megarl. Exact versions that go together are in requirements/; here are the ranges that can work."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megarl",
    version="0.1.0",
    description="Reinforcement learning of large language models on Megatron-Core, SGLang and Ray",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.rollout.sglang": ["stand_ins/**/*.py"]},  # folders on the path of SGLang's processes, no packages of ours
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1,<0.20",
        "transformers>=5.12,<6",
        "safetensors",
        "jinja2",
        "ray>=2.60,<3",
        "tensordict>=0.15",
        "numpy",
        "omegaconf>=2.3",
        "pyyaml",
        "pyarrow",
        "pebble>=5.2",
        "psutil",
        "rich",
        "xxhash>=3.4",
        "tensorboard",
        "matplotlib",
    ],
    extras_require={
        "quickstart": ["reasoning-gym"],
        "cuda": ["transformer-engine[pytorch]", "sglang>=0.5.17,<0.5.24"],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "sphinx", "myst-parser", "furo"],
    },
    entry_points={"console_scripts": ["megarl=megarl.cli.main:main"]},
)
