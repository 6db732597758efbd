"""The version ranges of megarl's dependencies, which setup.py declares and `megarl doctor` checks.

Exact versions for development are in requirements/lock.txt. This module imports nothing, so that setup.py can
execute it directly.
"""

PYTHON = ">=3.12"

# Requirements of every run: distribution (with extras) -> range. A range has no upper limit until a release
# breaks megarl.
REQUIRED = {
    "torch": ">=2.14.1,<2.15",
    "megatron-core": ">=0.19.2,<0.20",  # minor releases change signatures of functions that megarl patches
    # Megatron-Core imports it but does not declare it, and only CUDA builds of torch do.
    "triton": ">=3.8",
    "transformers": ">=5.19,<5.20",
    "safetensors": ">=0.5",
    "jinja2": ">=3.1.4",
    "huggingface-hub": ">=1.5",
    "ray[default]": ">=2.60,<3",  # default: the job server of a cluster, and the client of `train --submit`
    "tensordict": ">=0.15",
    "numpy": ">=2.1",
    "omegaconf": ">=2.4",
    "pyyaml": ">=6.0.2",
    "pyarrow": ">=18",
    "pillow": ">=11",
    "packaging": ">=24",
    "pebble": ">=5.2",
    "psutil": ">=6",
    "rich": ">=13.9",
    "markdown-it-py": ">=3",
    "xxhash": ">=3.4",
    "tensorboard": ">=2.18",
    "matplotlib": ">=3.9",
    "argcomplete": ">=3.5",
    "jsonschema": ">=4.18",
    "httpx": ">=0.27,<1",
    "fastapi": ">=0.115.6",
    "pydantic": ">=2.10",
    "uvicorn": ">=0.34",
}

# Additional requirements of `rollout.engine=sglang`.
SGLANG = {"sglang": ">=0.5.23,<0.5.24", "aiohttp": ">=3.11"}
# Packages that SGLang imports on CPU. There it is installed with --no-deps, because most of its declared
# dependencies are for CUDA.
SGLANG_CPU = {
    "apache-tvm-ffi": ">=0.1.11",
    "compressed-tensors": ">=0.17",
    "dill": ">=0.3.8",
    "einops": ">=0.8",
    "gguf": ">=0.17",
    "msgspec": ">=0.19",
    "openai": ">=2.8",
    "orjson": ">=3.10.12",
    "partial-json-parser": ">=0.2.1.1.post3",
    "prometheus-client": ">=0.20",
    "pybase64": ">=1.4",
    "python-multipart": ">=0.0.20",
    "pyzmq": ">=26.2",
    "requests": ">=2.32",
    "sentencepiece": ">=0.2",
    "setproctitle": ">=1.3.4",
    "uvloop": ">=0.21",
    "xgrammar": ">=0.2.1,<0.3",
}
# Optional layers for CUDA.
CUDA = {"transformer-engine[pytorch]": ">=2.20,<2.21"}

# Libraries that are built for exact versions of others. The installed versions must match their metadata.
COUPLED = {"sglang": ("torch", "transformers"), "transformers": ("tokenizers",)}
