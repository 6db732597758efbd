"""megarl: reinforcement learning of large language models on Megatron-Core, SGLang and Ray."""

__version__ = "0.5.0"
