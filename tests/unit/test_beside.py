"""Test that the packages which users of this field have beside megarl can be imported where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megarl.config.layers import has_transformer_engine

# Import name -> what is used of it. Those of requirements/ must be there; the others are tested where they are.
REQUIRED = {
    "peft": "LoraConfig",
    "transformers": "Trainer AutoModelForCausalLM pipeline",
    "accelerate": "Accelerator",
    "torch": "nn",
    "tensordict": "TensorDict",
    "ray": "init",
    "safetensors": "safe_open",
    "tokenizers": "Tokenizer",
    "huggingface_hub": "HfApi",
    "pyarrow": "Table",
    "torch.utils.tensorboard": "SummaryWriter",
    "wandb": "init",
    "mlflow": "log_metric",
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "math_verify": "verify",
    "reasoning_gym": "create_dataset",
    "mcp": "ClientSession",
    "s3fs": "S3FileSystem",
    "einops": "rearrange",
}
OPTIONAL = {
    "trl": "GRPOTrainer SFTTrainer DPOTrainer",
    "datasets": "load_dataset",
    "deepspeed": "initialize",
    "lightning": "Trainer",
    "sentence_transformers": "SentenceTransformer",
    "torchao": "quantize_",
}
_IN_A_RANK = """
from megarl.config.schema import Device
from megarl.engine import platform
platform.activate(Device.cpu)
import megarl.engine.engine
"""
_PROGRAM = """
import importlib, importlib.metadata, importlib.util, json, sys
failures = {}
required, optional = json.loads(sys.argv[1])
for name, used in [*required.items(), *optional.items()]:
    if name in optional and importlib.util.find_spec(name) is None:
        continue
    try:
        module = importlib.import_module(name)
        for each in used.split():
            getattr(module, each)
    except Exception as error:
        failures[name] = repr(error)
known = [each.metadata["Name"] for each in importlib.metadata.distributions()]
print(json.dumps({
    "failures": failures,
    "transformer_engine": [name for name in known if name.startswith("transformer")],
    "is_found": importlib.util.find_spec("transformer_engine") is not None,
}))
"""


@pytest.mark.parametrize(
    ("first", "required"),
    [("", REQUIRED), (_IN_A_RANK, {name: REQUIRED[name] for name in ("peft", "transformers", "accelerate")})],
    ids=["alone", "in a rank"],
)
def test_packages_of_the_field_can_be_imported(first: str, required: dict[str, str]) -> None:
    """Each process is fresh, as a user's is."""
    optional = {} if first else OPTIONAL
    command = [sys.executable, "-c", first + _PROGRAM, json.dumps([required, optional])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["failures"] == {}

    # On a machine without a GPU, only dry runs can import what they use of Transformer Engine.
    if not has_transformer_engine():
        assert not found["is_found"]
        assert found["transformer_engine"] == ["transformers"]
