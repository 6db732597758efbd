"""Which versions of the libraries go together: the one table that setup.py installs by and `megarl doctor` judges by.

Exact versions are in requirements/. This module imports nothing, so that setup.py can run it by itself.
"""

PYTHON = ">=3.11"

# Without these nothing of megarl runs. Name of the distribution -> versions that can work; empty: any.
REQUIRED = {
    "torch": ">=2.11,<2.15",
    "megatron-core": ">=0.16.1,<0.17",
    "transformers": ">=5.12,<5.25",
    "safetensors": "",
    "jinja2": "",
    "huggingface-hub": ">=1",
    "ray": ">=2.60,<3",
    "tensordict": ">=0.15",
    "numpy": "",
    "omegaconf": ">=2.3",
    "pyyaml": "",
    "pyarrow": "",
    "packaging": ">=24",
    "pebble": ">=5.2",
    "psutil": "",
    "rich": "",
    "markdown-it-py": ">=3",
    "xxhash": ">=3.4",
    "tensorboard": "",
    "matplotlib": "",
    "argcomplete": ">=3.5",
    "jsonschema": ">=4.18",
    "httpx": ">=0.27,<1",
}

# Rollouts with `rollout.engine=sglang`; layers for CUDA, used where they are installed.
SGLANG = {"sglang": ">=0.5.17,<0.5.24"}
CUDA = {"transformer-engine[pytorch]": ">=2.9"}

# Libraries that are built for exact versions of others and say so in their own metadata: what is installed must be what they say.
COUPLED = {"sglang": ("torch", "transformers"), "transformers": ("tokenizers",)}
